"""The two kernels of attention's gradient, under Triton's interpreter, against autograd in float64."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import math, sys
import torch
from sexpgpu.backends.cuda.attention import backward
t, d, causal, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "causal", getattr(torch, sys.argv[4])
torch.manual_seed(0)
b, h = 2, 3
joint = torch.randn(b, t, 3 * h * d).to(kind)
q, k, v = (joint[..., i * h * d : (i + 1) * h * d].view(b, t, h, d).transpose(1, 2) for i in range(3))
ct = torch.randn(b, t, h, d).to(kind).transpose(1, 2)
leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
scores = leaves[0] @ leaves[1].transpose(-1, -2) / math.sqrt(d)
if causal:
    scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
out = torch.softmax(scores, -1) @ leaves[2]
want = torch.autograd.grad(out, leaves, ct.double())

def gradients():
    packed = torch.full((b, t + 2, 3 * h * d), float("nan"), dtype=kind)  # what lies around them stays as it is
    homes = tuple(packed[:, 1:-1, i * h * d : (i + 1) * h * d].view(b, t, h, d).transpose(1, 2) for i in range(3))
    lse = torch.logsumexp(scores, -1).detach().float()
    backward(ct, q, k, v, out.detach().to(kind), lse, homes, causal, 1 / math.sqrt(d), (16, 32, 4, 1), (32, 16, 4, 1))
    assert packed[:, 0].isnan().all() and packed[:, -1].isnan().all()
    return packed[:, 1:-1].clone(), homes

packed, homes = gradients()
for found, expected in zip(homes, want):
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (1.2e-2 if kind == torch.bfloat16 else 2e-3), error
assert torch.equal(packed, gradients()[0])
"""


@pytest.mark.parametrize("case", ["64 16 causal bfloat16", "33 16 causal bfloat16", "50 32 all float16"])
def test_gradients_are_autograds_and_the_same_twice(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *case.split()], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]

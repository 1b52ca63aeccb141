"""The two kernels of attention's gradient, and the sums that they leave, under Triton's interpreter, against autograd in float64; and the
call that makes them, as a device makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from support_cuda import interpreted

from sexpgpu.backends.cuda import attention, choice, library
from sexpgpu.backends.cuda.report import graphs, lowered, program_lines
from sexpgpu.compiler import Selection, choose_run, load, stages
from sexpgpu.ir import Node
from sexpgpu.ops import build, table
from sexpgpu.passes.epilogues import HEADS, sums_itself

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import math, sys
import torch
from sexpgpu.backends.cuda.attention import backward, partial_sums
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

keys, queries = (16, 32, 4, 1), (32, 16, 4, 1)
shapes = partial_sums(b, h, t, d, keys, queries)
assert shapes == ((b * -(-t // 32), h * d), (b * -(-t // 32), 2 * h * d))

def gradients(summed=True):
    packed = torch.full((b, t + 2, 3 * h * d), float("nan"), dtype=kind)  # what lies around them stays as it is
    homes = tuple(packed[:, 1:-1, i * h * d : (i + 1) * h * d].view(b, t, h, d).transpose(1, 2) for i in range(3))
    lse = torch.logsumexp(scores, -1).detach().float()
    rows = torch.full((2 + sum(n for n, _ in shapes), 2 * h * d), float("nan"))  # of partial sums, with one around them
    parts = (rows[1 : 1 + shapes[0][0]].flatten()[: shapes[0][0] * h * d].view(shapes[0]), rows[1 + shapes[0][0] : -1])
    backward(ct, q, k, v, out.detach().to(kind), lse, homes, causal, 1 / math.sqrt(d), keys, queries, parts if summed else ())
    assert packed[:, 0].isnan().all() and packed[:, -1].isnan().all()
    assert rows[0].isnan().all() and rows[-1].isnan().all()
    return packed[:, 1:-1].clone(), homes, [part.clone() for part in parts]

packed, homes, parts = gradients()
for found, expected in zip(homes, want):
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (1.2e-2 if kind == torch.bfloat16 else 2e-3), error
total = torch.cat([part.double().sum(0) for part in parts])
exact = torch.cat([g.sum((0, 2)).flatten() for g in want])
rounded = packed.double().sum((0, 1))
scale = torch.cat([(g * g).sum((0, 2)).sqrt().flatten() for g in want])  # what roundings of the operands add up to, as chance has it
limit = 4 * (2**-8 if kind == torch.bfloat16 else 2**-11) * scale.max()
assert (total - exact).abs().max() < limit, ((total - exact).abs().max(), limit)
assert not torch.equal(total, rounded)  # they are of what was not rounded
again = gradients()
assert torch.equal(packed, again[0]) and all(torch.equal(x, y) for x, y in zip(parts, again[2]))
alone, _, untouched = gradients(False)
assert torch.equal(packed, alone) and all(x.isnan().all() for x in untouched)
"""


@pytest.mark.parametrize("case", ["64 16 causal bfloat16", "33 16 causal bfloat16", "50 32 all float16", "3 16 all bfloat16", "65 16 all bfloat16"])
def test_gradients_are_autograds_and_the_same_twice(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *case.split()], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def packed(of: int, dtype: str = "bf16", width: int = 16, window: int | None = None) -> Node:
    """attend-grad-packed over [2 3 5 width]."""
    ct, q, k, v, out = (build("input", name=n, shape=(2, 3, 5, width), dtype=dtype, batch=False) for n in ("ct", "q", "k", "v", "out"))
    return build("attend-grad-packed", ct, q, k, v, out, causal=True, scale=0.25, window=window, of=of)


def operands(dtype: torch.dtype, width: int = 16) -> list[torch.Tensor]:
    """ct, q, k, v in views of packed tensors, and attention's result, in its own layout."""
    g = torch.Generator().manual_seed(0)
    ct, q, k, v = (torch.randn(2, 5, 3, width, generator=g).to(dtype).transpose(1, 2) for _ in range(4))
    out = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=0.25)
    return [ct, q, k, v, out.to(dtype)]


@pytest.mark.parametrize("width", [8, 16, 24, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_graph_knows_what_the_kernels_take(width: int, dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    assert sums_itself(packed(0, name, width)) == attention.fits(*operands(dtype, width)[1:4]) == (width in HEADS and name != "f32")
    assert not sums_itself(packed(0, name, width, window=2))


@pytest.mark.parametrize("way", ["ours", "torch's", "without statistics"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
def test_every_way_of_the_call_gives_gradients_and_sums(monkeypatch: pytest.MonkeyPatch, way: str, wanted: tuple[int, ...]) -> None:
    """What `library.put` does on a device, the launch of our kernels replaced by its meaning: sums in partial sums where the caller asks
    for these, also where no kernel of ours adds up."""
    calls: list[str] = []

    def ours(ct: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, grads: Any, causal: bool, scale: float, sums: Any = ()) -> None:
        calls.append("ours")
        gradients = wide([ct, q, k, v, out])
        for home, found in zip(grads, gradients, strict=True):
            home.copy_(found)
        for part, total in zip(sums, (gradients[0], torch.cat(gradients[1:], 1)), strict=bool(sums)):
            part.zero_()
            part[-1] = total.sum((0, 2)).flatten()

    def wide(given: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.float().clone().requires_grad_() for x in given[1:4]]
        return list(torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.25), leaves, given[0].float()))

    monkeypatch.setattr(library, "gradients", ours)
    width, dtype = (24 if way == "torch's" else 16), torch.bfloat16
    given, node = operands(dtype, width), packed(wanted[0], "bf16", width)
    own = library.Attention(True)
    if way == "ours":
        own.left[node.inputs[4]] = [torch.zeros(2, 3, 5, 1)] + [None] * 6
    shapes = library.partials(packed(1, "bf16", width))
    assert bool(shapes) == (way != "torch's")
    outs = {of: torch.full(packed(of, "bf16", width).type.shape, float("nan"), dtype=(dtype, torch.float32)[of]) for of in wanted}
    parts = [torch.full(shape, float("nan")) for shape in shapes] if 1 in wanted else []
    own.packed(node, given, outs, parts)
    assert calls == (["ours"] if way == "ours" else [])
    found = dict(outs)
    if parts:
        assert outs[1].isnan().all()  # whoever asked for partial sums adds them up
        found[1] = torch.cat([part.sum(0) for part in parts])
    for of in wanted:
        expected = table()[node.op].reference(torch, packed(of, "bf16", width), given).float()
        torch.testing.assert_close(found[of].float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["alone", "read", "watched", "wide", "only"])
def test_a_step_takes_its_bias_gradient_from_attentions_kernels(case: str) -> None:
    failures, count = interpreted("attention_sums_in_triton.py", case)
    assert not failures and count == {"only": 1, "read": 4, "watched": 4}.get(case, 3), "\n".join(failures)


def test_gpt2_has_no_product_that_adds_up_a_projections_rows() -> None:
    """One call a layer gives attention's gradient and its sums, one launch all sums of the step, and no launch more than without."""
    loaded = load(str(ROOT / "examples/gpt2.lisp"), Selection(sets=("layers=3", "batch=4")))
    run = choose_run(loaded.experiment, None)
    launches = {}
    for kinds in (choice.SWITCH.epilogues, choice.SWITCH.epilogues - {"attend-sum"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice.SWITCH, "epilogues", kinds)
            program = lowered(stages(loaded, run, "cuda"))
            launches["attend-sum" in kinds] = graphs(program)[0][1]
            told = "\n".join(program_lines(program))
            assert ("attend-sum of gpt2/block/self-attention/qkv, 3 times: the bias's gradient by" in told) == ("attend-sum" in kinds), told
    with_sums, without = launches[True], launches[False]
    assert len(with_sums.schedule.launches) == len(without.schedule.launches)
    rows = [sum(n.op == "matmul-rows" for n in c._calls) for c in (with_sums, without)]
    assert rows[1] - rows[0] == 2 * 3  # the product by it has no second result
    sums = {n for n in with_sums._calls if n.op == "attend-grad-packed" and n.attrs["of"]}
    assert len(sums) == 3 and sums <= with_sums.late
    assert with_sums.plan.peak <= 1.01 * without.plan.peak

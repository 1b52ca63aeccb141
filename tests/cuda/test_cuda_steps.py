"""Training steps as Triton kernels, under Triton's interpreter, beside the interpreter's: losses, resume, evaluations, NaN."""

from __future__ import annotations

import pytest
from support_cuda import interpreted

pytest.importorskip("triton")

CASES = (
    "digits", "digits-parts", "digits-f64", "char-lm", "char-lm-parts", "char-lm-bf16", "gpt2-bf16", "conv-digits", "vae", "pinn", "own-optimizer",
    "batch-norm", "batch-norm-parts", "muon", "counted", "index",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_steps_follow_the_interpreter(case: str) -> None:
    failures, count = interpreted("steps_in_triton.py", case)
    assert not failures, "\n".join(failures)
    assert count >= 1

"""Launches of several steps under Triton's interpreter: the same bits whatever is logged, goes together, or is resumed."""

from __future__ import annotations

import pytest
import torch
from support_cuda import interpreted

from sexpgpu.backends.cuda.device import memory_errors
from sexpgpu.diagnostics import SexpError

pytest.importorskip("triton")


@pytest.mark.parametrize("case", ["digits-parts", "char-lm-bf16", "batch-norm", "tapped", "counted", "falls", "index", "loop", "plans"])
def test_flights(case: str) -> None:
    failures, count = interpreted("flights_in_triton.py", case)
    assert not failures, "\n".join(failures)
    assert count >= 1


@pytest.mark.parametrize("text", [
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "Triton Error [CUDA]: unspecified launch failure",
])  # fmt: skip
def test_a_device_that_failed_is_a_coded_mistake(text: str) -> None:
    with pytest.raises(SexpError) as caught, memory_errors():
        raise RuntimeError(text)
    d = caught.value.diagnostic
    assert (d.code, d.exit_code, d.notes) == ("E-DEV-013", 3, (text.split("\n")[0],))
    with pytest.raises(SexpError) as caught, memory_errors():
        raise torch.AcceleratorError("the GPU has fallen off the bus")
    assert caught.value.diagnostic.code == "E-DEV-013"
    with pytest.raises(RuntimeError, match="of ours"), memory_errors():
        raise RuntimeError("a bug of ours")

"""Launches of several steps under Triton's interpreter: the same bits whatever is logged, goes together, or is resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_cuda import interpreted

from sexpgpu.backends.cuda.device import memory_errors
from sexpgpu.backends.cuda.flight import Fields, Room
from sexpgpu.diagnostics import SexpError

pytest.importorskip("triton")


@pytest.mark.parametrize("case", ["digits-parts", "char-lm-bf16", "batch-norm", "tapped", "counted", "falls", "index", "loop", "plans"])
def test_flights(case: str) -> None:
    failures, count = interpreted("flights_in_triton.py", case)
    assert not failures, "\n".join(failures)
    assert count >= 1


def test_a_step_lies_alike_wherever_it_stands_in_a_launch() -> None:
    """How the operands of a product lie decides its algorithm, and so the bits (a step of 384 bytes gave others at its second place)."""
    shapes = {"image": ((8, 12), torch.float32), "label": ((8,), torch.int32), "on": ((3,), torch.bool), "none": ((0, 4), torch.float32)}
    room = Room(3, shapes, False)
    batches = [{n: np.full(shape, step + 1).astype(torch.empty((), dtype=dtype).numpy().dtype) for n, (shape, dtype) in shapes.items()} for step in range(3)]
    room.stack(batches)
    fields = Fields(room, torch.device("cpu"))
    fields.take(room)
    for name, (shape, dtype) in shapes.items():
        steps = fields.tensors[name]
        assert steps.shape == (3, *shape) and steps.dtype == dtype
        assert all((one.data_ptr() - steps[0].data_ptr()) % 256 == 0 for one in steps)
        assert all(np.array_equal(one.numpy(), batch[name]) for one, batch in zip(steps, batches, strict=True))


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

"""What a GPU would say of every op and of whole steps, found without one: an operand on the CPU, and types that a kernel does not take."""

from __future__ import annotations

import os

import pytest
import support_cuda
from support_cuda import interpreted

pytest.importorskip("triton")

#: type of every op, or `examples` -> the least number of kernels, in every form, whose types are checked
PARTS = {"f64": 250, "f32": 250, "bf16": 250, "examples": 300}


@pytest.fixture(autouse=True)
def of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("TRITON_OF_DEVICES")
    monkeypatch.setattr(support_cuda, "FIRST", [folder] if folder else [])


@pytest.mark.parametrize("part", PARTS)
def test_calls_stay_on_the_device_and_kernels_take_their_types(part: str) -> None:
    failures, count = interpreted("without_device.py", part, timeout=900)
    assert not failures, "\n".join(failures)
    assert count >= PARTS[part]


def test_a_planted_fault_of_either_kind_is_found() -> None:
    failures, _ = interpreted("without_device.py", "planted", timeout=900)
    assert any("same device" in text or "different devices" in text for text in failures), failures
    assert any("zeros" in text and "CPU" in text for text in failures), failures
    assert any("narrow_total" in text and "CompilationError" in text for text in failures), failures

"""What is made ready while graphs are lowered: it leaves Python as it was, fails quietly, and is what Triton asks for later."""

from __future__ import annotations

import sys
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from sexpgpu.backends import initial
from sexpgpu.backends.cuda import ahead


def test_draws_of_each_kind_and_errors_that_come_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []
    drawn: list[tuple[str, object]] = []
    before = sys.getswitchinterval()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(ahead.torch, "empty", lambda size, device: (size, device))
    monkeypatch.setattr(initial, "drawn", lambda kind, settings, key, out: drawn.append((kind, out)))

    def broken() -> None:
        raise OSError("no driver")

    monkeypatch.setattr(ahead, "key_of_triton", broken)
    one = ahead.Ahead(["normal", "zeros", "uniform"])
    one.join()
    assert devices == [3] and drawn == [("normal", (2, "cuda")), ("uniform", (2, "cuda"))] and sys.getswitchinterval() == before


def test_two_at_once_leave_python_as_the_first_found_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before, gates, inside = sys.getswitchinterval(), [Event(), Event()], [Event(), Event()]
    here = iter(range(2))

    def wait() -> None:
        number = next(here)
        inside[number].set()
        assert gates[number].wait(60)

    def lost(ordinal: int) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lost)
    monkeypatch.setattr(ahead, "key_of_triton", wait)
    both = []
    for entered in inside:
        both.append(ahead.Ahead([]))
        assert entered.wait(60)
    assert sys.getswitchinterval() == pytest.approx(ahead.TURN)
    for one, gate in zip(both, gates, strict=True):
        assert sys.getswitchinterval() == pytest.approx(ahead.TURN)
        gate.set()
        one.join()
    assert sys.getswitchinterval() == before and capsys.readouterr().err == ""  # and the lost device is said where it is needed


def test_the_key_of_triton_is_kept_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.runtime import cache
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    cache.triton_key.cache_clear()
    compiler.get_ptxas_version.cache_clear()
    ahead.key_of_triton()
    assert cache.triton_key.cache_info().currsize == 1 and compiler.get_ptxas_version.cache_info().currsize == 1

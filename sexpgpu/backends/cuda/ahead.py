"""What a first step waits for although no value decides it: made ready on a thread of its own, while Python lowers the graphs.

- Triton's name for itself in the keys of its cache, a hash over its library of 400 MB; its assembler's version and the linker's list, processes
  of their own; its driver. Triton keeps each once it has it.
- The kernels of torch that draw initial values: a device loads each at its first use.

Most of it happens outside Python's lock, so it takes little of the lowering's time. Nothing of it is a value of the run. What fails here fails
again where it is needed, with its message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module
from threading import Lock, Thread

import torch

from sexpgpu.backends import initial

TURN = 2e-4  # seconds after which a thread that wants Python's lock gets it, meanwhile: a hash asks for it at each of 400 pieces


class Ahead:
    """The thread; `join` waits for it. kinds: of initial values that will be drawn."""

    def __init__(self, kinds: Collection[str]):
        self._ordinal, self._kinds = torch.cuda.current_device(), [kind for kind in kinds if kind in initial.DRAWN]
        self._thread = Thread(target=self._work, name="sexpgpu-ahead")
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        with _Turns():
            for work in (self._same_device, self._draw, key_of_triton):
                _tried(work)

    def _same_device(self) -> None:
        torch.cuda.set_device(self._ordinal)  # a thread has its own

    def _draw(self) -> None:
        for kind in self._kinds:
            initial.drawn(kind, {}, 0, torch.empty(2, device="cuda"))


class _Turns:
    """Short turns while a thread is within; when the last of several is out, those that the first one found."""

    _lock, _within, _found = Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not _Turns._within:
                _Turns._found = sys.getswitchinterval()
                sys.setswitchinterval(TURN)
            _Turns._within += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            _Turns._within -= 1
            if not _Turns._within:
                sys.setswitchinterval(_Turns._found)


def key_of_triton() -> None:
    """What of a kernel's key in Triton's cache is the same for all kernels."""
    target = import_module("triton.runtime.driver").driver.active.get_current_target()
    import_module("triton.compiler.compiler").make_backend(target).hash()
    import_module("triton.runtime.cache").triton_key()


def _tried(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:  # whatever it is, it comes again where the run needs it
        return

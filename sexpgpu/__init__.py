"""SexpGPU: a Lisp in which one file is a whole training experiment, and its compiler."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: name -> where it is; imported at first use, because `load` brings torch
_LAZY = {"load": "sexpgpu.python.load:load", "SexpError": "sexpgpu.diagnostics:SexpError"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]

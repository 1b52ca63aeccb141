"""The reference backend: runs each op of the IR through torch on the CPU (architecture.md, "The interpreter").

Its names are imported when they are asked for, so that `memory` and `fuse`, which plan, bring no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "NUMPY": "dtypes", "TORCH": "dtypes", "from_numpy": "dtypes", "to_tensor": "dtypes", "Executable": "executable", "compile_graph": "executable",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = ["NUMPY", "TORCH", "Executable", "compile_graph", "from_numpy", "to_tensor"]  # noqa: F822 - by `__getattr__`

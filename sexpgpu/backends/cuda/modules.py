"""Sources of kernels made callable, once for equal ones."""

from __future__ import annotations

import linecache
from functools import cache
from hashlib import sha256
from importlib import import_module
from typing import Any

HEADER = "import triton\nimport triton.language as tl\nfrom sexpgpu.backends.cuda.prelude import *\nfrom sexpgpu.backends.cuda import prelude as _prelude\n\n"


@cache
def load(source: str, name: str) -> Any:
    """The Triton function `name` of this source. Equal sources give the same function, so they compile once."""
    prelude = import_module("sexpgpu.backends.cuda.prelude")  # brings Triton
    text = HEADER + source
    path = f"<sexpgpu-{sha256(text.encode()).hexdigest()[:24]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)  # Triton reads sources through it
    space: dict[str, Any] = {k: v for k, v in vars(prelude).items() if not k.startswith("__")}
    exec(compile(text.replace("from sexpgpu.backends.cuda.prelude import *\n", "\n"), path, "exec"), space)
    return space[name]


def by_hand(name: str) -> Any:
    """A kernel of `kernels`, which brings Triton."""
    return getattr(import_module("sexpgpu.backends.cuda.kernels"), name)

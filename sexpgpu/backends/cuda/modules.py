"""Sources of kernels made callable, once for equal ones, and compiled several at once.

Triton keeps what it compiles on disk, keyed by the text of a function and of what it calls, the types of its arguments, Triton's
version and the device, and writes a file whole or not at all. A name and comments are no part of that text here, so that a layer
that is renamed, or one that does the same in another model, is found. The name stays with the compiled code, for profilers; where
equal code had another name first, that one.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from importlib import import_module
from typing import Any

HEADER = "import triton\nimport triton.language as tl\nfrom sexpgpu.backends.cuda.prelude import *\nfrom sexpgpu.backends.cuda import prelude as _prelude\n\n"
KEYED = "kernel"  # what every function is called in the text that the cache is keyed by

#: a function, its arguments, and Triton's options: what is launched
Wanted = tuple[Any, Sequence[Any], Mapping[str, Any]]


@cache
def load(source: str, name: str) -> Any:
    """The Triton function `name` of this source, which has no other. Equal sources give the same function, so they compile once."""
    prelude = import_module("sexpgpu.backends.cuda.prelude")  # brings Triton
    text = HEADER + keyed(source, name)
    path = f"<sexpgpu-{sha256(text.encode()).hexdigest()[:24]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)  # Triton reads sources through it
    space: dict[str, Any] = {k: v for k, v in vars(prelude).items() if not k.startswith("__")}
    space["_shown"] = lambda specialized: name
    exec(compile(text.replace("from sexpgpu.backends.cuda.prelude import *\n", "\n"), path, "exec"), space)
    return space[KEYED]


def keyed(source: str, name: str) -> str:
    """The source without its name and its lines of comment."""
    lines = [line for line in source.split("\n") if not line.lstrip().startswith("#")]
    decorated = rf"@triton\.jit(?:\((.+)\))?\ndef {re.escape(name)}\("
    text, found = re.subn(decorated, lambda m: f"@triton.jit(repr=_shown, {m[1] or ''})\ndef {KEYED}(", "\n".join(lines))
    if found != 1:
        raise ValueError(f"a source with one function `{name}` is needed")
    return text


def by_hand(name: str) -> Any:
    """A kernel of `kernels`, which brings Triton."""
    return getattr(import_module("sexpgpu.backends.cuda.kernels"), name)


def compile_together(wanted: Iterable[Wanted]) -> None:
    """Compiles what is not compiled yet, on several threads: most of it happens outside Python. The device is CUDA's current one.
    A Triton that cannot (before 3.5) compiles each at its first launch."""
    mode = getattr(import_module("triton"), "AsyncCompileMode", None)
    if mode is None:
        return
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool, mode(pool):
            for function, arguments, options in wanted:
                function.warmup(*arguments, grid=(1,), **options)
    finally:  # Triton 3.6 leaves its mode on behind a kernel that does not compile, and every later graph would fail
        import_module("triton.runtime._async_compile").active_mode.set(None)

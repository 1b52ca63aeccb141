"""The device's clock inside a captured step: how long its launches waited, told with its scalars."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def start(at):
    """Writes the nanoseconds of now to `at` [i64]."""
    tl.store(at, globaltimer())


@triton.jit
def stop(at, out):
    """Writes the seconds since `at` to `out` [f32 or f64]."""
    tl.store(out, (globaltimer() - tl.load(at)).to(tl.float32) * 1e-9)

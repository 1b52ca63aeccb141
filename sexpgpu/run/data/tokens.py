"""`(tokens location :dtype u16)`: token numbers as little-endian u16 or u32, without a header; mapped, not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.cache import Say, silent
from sexpgpu.run.data.convert import chunks
from sexpgpu.run.data.files import digest, no_rows, unreadable
from sexpgpu.run.data.stream import Stream

DTYPES = {"u16": "<u2", "u32": "<u4"}
LARGEST = 2**31 - 1  # windows give i32


def read(source: DataSource, path: Path, say: Say = silent) -> Stream:
    """Errors: E-DATA-001, 006, 009 (a token beyond i32), 035."""
    name = source.options.get("dtype", "u16")
    dtype, place = np.dtype(DTYPES[name]), source.location_span or source.span
    known = digest(source, path)
    try:
        size = path.stat().st_size
        if not size:
            no_rows(source, "no tokens at all")
        if size % dtype.itemsize:
            fail("E-DATA-035", f"{source.location} has {size:,} bytes, no multiple of the {dtype.itemsize} of a {name}",
                 place, help="the file was cut, or its :dtype is another")
        tokens = np.memmap(path, dtype, "r")
    except OSError as error:
        unreadable(source, path, error)
    if name == "u32":
        for start, part in chunks(tokens):
            if part.max() > LARGEST:
                at = int(np.argmax(part > LARGEST))
                fail("E-DATA-009",
                     f"{source.location}: token {start + at + 1:,} is {part[at]}, outside 0…{LARGEST}", place)
    return Stream(source, tokens, known)

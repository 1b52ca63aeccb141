"""`(text location :tokens bytes)`: a text, plain or gzipped, whose tokens are its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.files import no_rows, read_bytes, unpacked
from sexpgpu.run.data.stream import Stream


def read(source: DataSource, path: Path) -> Stream:
    """The whole text as uint8. Errors: E-DATA-001, 005, 006."""
    raw = read_bytes(source, path)
    data = unpacked(source, path, raw)
    if not data:
        no_rows(source, "no text at all")
    return Stream(source, np.frombuffer(data, np.uint8), hashlib.sha256(raw).hexdigest())

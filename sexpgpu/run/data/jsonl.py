"""`(jsonl location :fields …)`: a JSON object a line, plain or gzipped; a field takes the key of its name.

The text is unpacked here and parsed in pieces of whole lines, by worker processes where there is enough of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.cache import Say, silent
from sexpgpu.run.data.convert import numpy_dtype
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.files import check_file, text_chunks, unreadable, whole_lines
from sexpgpu.run.data.parsed import dataset
from sexpgpu.run.data.records import Start, Wrong, bare
from sexpgpu.run.data.workers import Task, default_workers, run_all

PIECE = 2 << 20  # bytes of text parsed in one go
BOM = b"\xef\xbb\xbf"


def read(source: DataSource, path: Path, say: Say = silent, workers: int | None = None) -> Dataset:
    """The whole file. Errors: E-DATA-001, 005, 006, 008, 009, 011, 018, 037 … 039."""
    for f in source.fields:
        numpy_dtype(source, f)
    check_file(source, path)
    try:
        size = path.stat().st_size
    except OSError as error:
        unreadable(source, path, error)
    count = default_workers(size) if workers is None else workers
    return dataset(source, path, lambda: _parts(source, path, count), say)


def _parts(source: DataSource, path: Path, workers: int) -> Iterator[dict[str, np.ndarray]]:
    fields = bare(source.fields)

    def tasks() -> Iterator[Task]:
        line = 1
        for piece in whole_lines(text_chunks(source, path), PIECE):
            data = piece.removeprefix(BOM) if line == 1 else piece
            yield Task("records:parse_lines", (data, fields, Start(source.location, line=line)), what=source.location)
            line += data.count(b"\n")

    try:
        for found in run_all(tasks(), workers):
            if found is not None:
                yield found.arrays
    except Wrong as wrong:
        fail(wrong.code, wrong.message, source.location_span or source.span, help=wrong.help)

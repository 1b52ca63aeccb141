"""A source in memory, the parts of its split, and the check of ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.convert import chunks
from sexpgpu.run.data.split import split_rows
from sexpgpu.run.data.stream import Stream
from sexpgpu.source import Span


@dataclass(frozen=True, eq=False)
class Dataset:
    """Fields as arrays whose axis 0 is the row. `digest`: SHA-256 of the file's bytes, in hex."""

    source: DataSource
    fields: Mapping[str, np.ndarray]
    digest: str
    count: int
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, part: str | None, span: Span | None = None) -> np.ndarray:
        """Row numbers of a part of the split, in file order (int64); all of them for None."""
        if part is None:
            return np.arange(self.count, dtype=np.int64)
        parts = split_rows(self.count, self.source.split, self.source.span)
        if part not in parts:
            fail("E-DATA-013", f"data `{self.source.name}` has no part `{part}`", span,
                 help=suggestion(part, parts, "parts"))
        if not len(parts[part]):
            fail("E-DATA-013",
                 f"part `{part}` of data `{self.source.name}` is empty: {self.count} rows are too few", span)
        return parts[part]

    def column(self, name: str) -> np.ndarray | None:
        """The values behind a field, axis 0 its rows; None if there is no such field."""
        return self.fields.get(name)

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """{field: values of these rows}, contiguous copies."""
        return {name: np.ascontiguousarray(values[rows]) for name, values in self.fields.items()}

    def range(self, name: str) -> tuple[Any, Any]:
        """The least and greatest value of a field, over all rows."""
        values = self.fields[name]
        return values.min().item(), values.max().item()


@dataclass(frozen=True)
class FieldBound:
    """`low <= field <= high`, asked for by an op that takes the field directly (a label of 10 classes: 0 and 9)."""

    field: str
    low: int
    high: int
    span: Span | None = None
    why: str = ""


def check_bound(dataset: Dataset | Stream, bound: FieldBound) -> None:
    """E-DATA-014 naming the first row that breaks the bound; a source without the field passes."""
    values = dataset.column(bound.field)
    if values is None or _holds_all(values.dtype, bound):
        return
    outside, first = 0, -1
    for start, part in chunks(values):
        bad = ((part < bound.low) | (part > bound.high)).reshape(-1)
        if first < 0 and bad.any():
            first = start * (part.size // len(part)) + int(np.argmax(bad))
        outside += int(bad.sum())
    if not outside:
        return
    row, within = divmod(first, values.size // len(values))
    where = f"token {row + 1}" if dataset.source.stream else f"row {row + 1}"
    fail("E-DATA-014",
         f"field `{bound.field}` of data `{dataset.source.name}` is {values[row].reshape(-1)[within].item()} in "
         f"{where}, outside {bound.low}…{bound.high}" + (f" ({bound.why})" if bound.why else ""),
         bound.span or dataset.source.span,
         notes=(f"file: {dataset.source.location}; {outside} values are outside",))


def _holds_all(dtype: np.dtype, bound: FieldBound) -> bool:
    """Whether no value of the dtype breaks the bound: bytes in a table of 256 rows need no look."""
    return dtype.kind in "iu" and bound.low <= np.iinfo(dtype).min and np.iinfo(dtype).max <= bound.high

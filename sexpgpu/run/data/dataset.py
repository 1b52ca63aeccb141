"""A source in memory, the parts of its split, and the check of ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.convert import chunks
from sexpgpu.run.data.split import split_rows
from sexpgpu.source import Span


@dataclass(frozen=True, eq=False)
class Dataset:
    """Fields as arrays whose axis 0 is the row. `digest`: SHA-256 of the file's bytes, in hex.

    `lines`: the file's line of each row, of a format that has lines.
    """

    source: DataSource
    fields: Mapping[str, np.ndarray]
    digest: str
    count: int
    statistics: Mapping[str, Any] = field(default_factory=dict)
    lines: np.ndarray | None = None

    def place(self, row: int) -> str:
        """Where a row stands in the file, by its line where there are lines."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"

    def pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, values) of parts of a field that may hold values outside low…high; none if there is no such field."""
        return pieces_of(self.fields.get(name), low, high)

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


class Checked(Protocol):
    """What `check_bound` needs of data."""

    source: DataSource

    def pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]: ...

    def place(self, row: int) -> str: ...


def check_bound(data: Checked, bound: FieldBound) -> None:
    """E-DATA-014 naming the first row that breaks the bound; a source without the field passes."""
    outside, where, value = 0, "", None
    for start, part in data.pieces(bound.field, bound.low, bound.high):
        bad = ((part < bound.low) | (part > bound.high)).reshape(-1)
        if value is None and bad.any():
            first = int(np.argmax(bad))
            where, value = data.place(start + first // (part.size // len(part))), part.reshape(-1)[first].item()
        outside += int(bad.sum())
    if value is None:
        return
    fail("E-DATA-014",
         f"field `{bound.field}` of data `{data.source.name}` is {value} in {where} of {data.source.location}, outside "
         f"{bound.low}…{bound.high}" + (f" ({bound.why})" if bound.why else ""),
         bound.span or data.source.span, notes=(f"{outside:,} {'value is' if outside == 1 else 'values are'} outside",))


def pieces_of(values: np.ndarray | None, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
    """The chunks of an array, unless no value of its dtype can be outside: bytes in a table of 256 rows need no look."""
    if values is None or (values.dtype.kind in "iu" and low <= np.iinfo(values.dtype).min and np.iinfo(values.dtype).max <= high):
        return iter(())
    return chunks(values)

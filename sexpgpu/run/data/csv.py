"""`(csv location :fields …)`: a header and rows of numbers, plain or gzipped.

Some thousand rows at a time, a column is parsed in one go by Python's float and int, which round correctly; only when that
fails is it looked at cell by cell, to name the file, line and column.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sexpgpu.diagnostics import fail, nearest
from sexpgpu.experiment.model import DataSource, Field
from sexpgpu.run.data.cache import Say, silent
from sexpgpu.run.data.convert import NUMPY as DTYPES
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.files import text_chunks, whole_lines
from sexpgpu.run.data.parsed import dataset
from sexpgpu.run.data.records import LINES

CELLS = 1 << 18  # cells parsed in one go
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


@dataclass(frozen=True, eq=False)
class _Table:
    source: DataSource
    header: list[str]
    columns: list[tuple[str, ...]]
    simple: bool  # ASCII without `_`: float() and int() then accept nothing that is not a number
    lines: list[int]  # the 1-based line each row ends on

    def bad(self, code: str, row: int, column: int, what: str) -> NoReturn:
        cell = self.columns[column][row]
        shown = cell if len(cell) <= 40 else cell[:40] + "…"
        fail(code, f"{self.source.location}, line {self.lines[row]}, column `{self.header[column]}`: `{shown}` {what}",
             self.source.location_span or self.source.span)


def read(source: DataSource, path: Path, say: Say = silent) -> Dataset:
    """The whole file. Errors: E-DATA-001 … 012."""
    return dataset(source, path, lambda: _parts(source, path), say)


def _parts(source: DataSource, path: Path) -> Iterator[dict[str, np.ndarray]]:
    for table in _tables(source, path):
        yield {field.name: _field(table, field) for field in source.fields} | {LINES: np.array(table.lines, np.int64)}


class _Bytes(io.RawIOBase):
    """Chunks as a file that is read from its beginning to its end."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._chunks, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _tables(source: DataSource, path: Path) -> Iterator[_Table]:
    """The rows in parts of about CELLS cells, each with the header."""
    place = source.location_span or source.span
    text = io.TextIOWrapper(io.BufferedReader(_Bytes(text_chunks(source, path)), 1 << 18), "utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    header: list[str] | None = None
    rows: list[list[str]] = []
    lines: list[int] = []
    some = False
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = _header(source, cells)
                continue
            if len(cells) != len(header):
                fail("E-DATA-004", f"{source.location}, line {reader.line_num}: {len(cells)} cells, but the header has "
                     f"{len(header)}", place)
            rows.append(cells)
            lines.append(reader.line_num)
            if len(rows) * len(header) >= CELLS:
                yield _table(source, header, rows, lines)
                some, rows, lines = True, [], []
    except csv.Error as error:
        fail("E-DATA-012", f"{source.location}, line {reader.line_num}: {error}", place)
    except UnicodeDecodeError:
        _not_text(source, path)
    if rows and header is not None:
        yield _table(source, header, rows, lines)
    elif not some:
        fail("E-DATA-006", f"{source.location} has {'a header but no rows' if header else 'no text at all'}", place)


def _header(source: DataSource, cells: list[str]) -> list[str]:
    header = [name.strip() for name in cells]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        fail("E-DATA-007", f"{source.location}: the header has `{twice[0]}` twice", source.location_span or source.span)
    return header


def _table(source: DataSource, header: list[str], rows: list[list[str]], lines: list[int]) -> _Table:
    columns = list(zip(*rows, strict=True))
    plain = all(text.isascii() and "_" not in text for text in map("".join, columns))
    return _Table(source, header, columns, plain, lines)


def _not_text(source: DataSource, path: Path) -> NoReturn:
    """E-DATA-008 at the first byte that is not UTF-8, which a second reading finds."""
    line = 1
    try:
        for piece in whole_lines(text_chunks(source, path), 1):
            piece.decode("utf-8")
            line += piece.count(b"\n")
    except UnicodeDecodeError as error:
        at = line + error.object.count(b"\n", 0, error.start)
        fail("E-DATA-008", f"{source.location}, line {at}: byte 0x{error.object[error.start]:02x} is not UTF-8", source.location_span or source.span, help="save the file as UTF-8")
    raise AssertionError("the first reading found it")


def _columns_of(table: _Table, field: Field) -> list[int]:
    """A scalar takes the column of its name, shape [n] takes name_0 … name_n-1."""
    if len(field.shape) > 1 or field.dtype not in DTYPES:
        fail("E-DATA-011", f"field `{field.name}`: csv has fields of shape [] or [n] and of type "
             f"{' '.join(DTYPES)}", field.span or table.source.span)
    names = [f"{field.name}_{i}" for i in range(field.shape[0])] if field.shape else [field.name]
    place = {name: i for i, name in enumerate(table.header)}
    for name in names:
        if name not in place:
            fail("E-DATA-002", f"{table.source.location} has no column `{name}`"
                 + (f", which field `{field.name}` of shape [{field.shape[0]}] takes" if field.shape else ""),
                 field.span or table.source.span,
                 notes=[f"a field of shape [{field.shape[0]}] takes the columns {names[0]} … {names[-1]}"] if field.shape else [],
                 help=(*(f"the file has `{close}`: is that the column?" for close in nearest(name, set(table.header) - set(names))),
                       f"columns of the file: {', '.join(table.header[:12])}{', …' if len(table.header) > 12 else ''}"))
    return [place[name] for name in names]


def _field(table: _Table, field: Field) -> np.ndarray:
    """[rows] or [rows, n] in the field's dtype, scaled in float64 and rounded once."""
    columns = _columns_of(table, field)
    dtype = np.dtype(DTYPES[field.dtype])
    out = np.empty((len(table.columns[0]), len(columns)), dtype)
    convert = _floats if dtype.kind == "f" else _integers
    for i, column in enumerate(columns):
        out[:, i] = convert(table, field, column, dtype)
    return out if field.shape else out[:, 0].copy()


def _floats(table: _Table, field: Field, column: int, dtype: np.dtype) -> np.ndarray:
    values = np.array(_parsed(table, column), np.float64)
    if field.scale is not None:
        values *= float(field.scale)
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    bad = ~np.isfinite(rounded)
    if bad.any():
        table.bad("E-DATA-009", int(np.argmax(bad)), column, f"is not a finite {field.dtype}"
                  + (f" after :scale {field.scale}" if field.scale is not None else ""))
    return rounded


def _integers(table: _Table, field: Field, column: int, dtype: np.dtype) -> np.ndarray:
    cells = table.columns[column]
    values = _whole(table, cells) if field.scale is None else None
    if values is None:
        values = _scaled(table, field, column)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if min(values) < low or max(values) > high:
        row = next(i for i, v in enumerate(values) if not low <= v <= high)
        table.bad("E-DATA-009", row, column, f"is outside {low}…{high}, the range of {field.dtype}")
    return np.array(values, dtype)


def _whole(table: _Table, cells: Sequence[str]) -> list[int] | None:
    """The cells as integers, or None where one is written otherwise (5.0) or is no number."""
    if not table.simple:
        return None
    try:
        return list(map(int, cells))
    except ValueError:
        return None


def _scaled(table: _Table, field: Field, column: int) -> list[int]:
    scale = 1.0 if field.scale is None else float(field.scale)
    out = []
    for row, (cell, value) in enumerate(zip(table.columns[column], _parsed(table, column), strict=True)):
        if field.scale is None and re.fullmatch(r"\s*[+-]?\d{1,4000}\s*", cell, re.ASCII):
            out.append(int(cell))
        elif math.isfinite(value) and (value * scale).is_integer():
            out.append(int(value * scale))
        else:
            table.bad("E-DATA-009", row, column, f"is not a whole number, and field `{field.name}` is {field.dtype}")
    return out


def _parsed(table: _Table, column: int) -> list[float]:
    """The column as float64, or E-DATA-003 naming the first cell that is no number."""
    cells = table.columns[column]
    if table.simple:
        try:
            return list(map(float, cells))
        except ValueError:
            pass
    for row, cell in enumerate(cells):
        if not _NUMBER.fullmatch(cell) and cell.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
            what = "is not a number" if cell.strip() else "is empty; a number belongs here"
            table.bad("E-DATA-003", row, column, what)
    return list(map(float, cells))

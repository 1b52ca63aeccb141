"""`(jsonl location :fields …)`: a JSON object a line, plain or gzipped; a field takes the key of its name.

Records are converted by the thousand in one go; only where that does not give plainly the field's numbers are they
looked at one by one, to name file, line and field.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import DataSource, Field
from sexpgpu.run.data.convert import bounds, fit, numpy_dtype
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.files import no_rows, read_bytes, unpacked

TOGETHER = 4096  # records converted in one go
KINDS = {str: "a string", bool: "true or false", type(None): "null", dict: "an object", list: "a list", int: "a number",
         float: "a number"}


@dataclass(eq=False)
class _Chunk:
    """Some records: their lines, and the values of each field."""

    source: DataSource
    simple: bool  # the text has neither true nor false, which NumPy would take for numbers
    lines: list[int] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def bad(self, code: str, f: Field, row: int, what: str) -> NoReturn:
        fail(code, f"{self.source.location}, line {self.lines[row]}, field `{f.name}`: {what}",
             self.source.location_span or self.source.span)


def read(source: DataSource, path: Path) -> Dataset:
    """The whole file. Errors: E-DATA-001, 005, 006, 008, 009, 011, 037 … 039."""
    dtypes = {f.name: numpy_dtype(source, f) for f in source.fields}
    raw = read_bytes(source, path)
    parts: dict[str, list[np.ndarray]] = {f.name: [] for f in source.fields}
    for chunk in _chunks(source, unpacked(source, path, raw)):
        for f in source.fields:
            parts[f.name].append(_column(chunk, f, dtypes[f.name]))
    fields = {name: np.concatenate(part) for name, part in parts.items() if part}
    if not fields:
        no_rows(source, "no records")
    return Dataset(source, fields, hashlib.sha256(raw).hexdigest(), len(next(iter(fields.values()))))


def _chunks(source: DataSource, data: bytes) -> Iterator[_Chunk]:
    simple = b"true" not in data and b"false" not in data
    chunk = _Chunk(source, simple, values={f.name: [] for f in source.fields})
    for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), 1):
        if not line.strip():
            continue
        record = _record(source, number, line)
        chunk.lines.append(number)
        for f in source.fields:
            if f.name not in record:
                fail("E-DATA-038", f"{source.location}, line {number}: the record has no key `{f.name}`",
                     f.span or source.span, help=suggestion(f.name, record, "keys of the record"))
            chunk.values[f.name].append(record[f.name])
        if len(chunk.lines) == TOGETHER:
            yield chunk
            chunk = _Chunk(source, simple, values={f.name: [] for f in source.fields})
    if chunk.lines:
        yield chunk


def _record(source: DataSource, number: int, line: bytes) -> dict[str, Any]:
    place = source.location_span or source.span
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        fail("E-DATA-008", f"{source.location}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8", place,
             help="save the file as UTF-8")
    except json.JSONDecodeError as error:
        fail("E-DATA-037", f"{source.location}, line {number}, column {error.colno}: not JSON ({error.msg})", place,
             help="a record is one JSON object on one line")
    except (ValueError, RecursionError):
        fail("E-DATA-037", f"{source.location}, line {number}: a number of too many digits, or lists too deep", place)
    if not isinstance(record, dict):
        fail("E-DATA-037", f"{source.location}, line {number}: a record is a JSON object, and this is "
             f"{KINDS[type(record)]}", place)
    return record


def _column(chunk: _Chunk, f: Field, dtype: np.dtype) -> np.ndarray:
    values = chunk.values[f.name]
    shape = (len(values), *f.shape)
    array = _at_once(values) if chunk.simple else None
    integers = dtype.kind != "f" and f.scale is None
    if array is None or array.shape != shape or array.dtype.kind not in ("iu" if integers else "iuf"):
        cells = [cell for row, value in enumerate(values) for cell in _cells(chunk, f, row, value, f.shape)]
        if integers:
            cells = [_whole(chunk, f, dtype, i // (len(cells) // len(values)), cell) for i, cell in enumerate(cells)]
        array = np.array(cells, np.int64 if integers else np.float64).reshape(shape)
    per_row = array.size // len(values)
    found = array

    def bad(index: int, what: str) -> NoReturn:
        chunk.bad("E-DATA-009", f, index // per_row, f"{found.reshape(-1)[index]} {what}")

    return fit(array, f, bad)


def _at_once(values: list[Any]) -> np.ndarray | None:
    try:
        return np.array(values)
    except (ValueError, OverflowError):
        return None


def _cells(chunk: _Chunk, f: Field, row: int, value: Any, shape: tuple[int, ...]) -> list[Any]:
    """The numbers of one value in order, or E-DATA-039."""
    if shape:
        if not isinstance(value, list) or len(value) != shape[0]:
            got = f"a list of {len(value)}" if isinstance(value, list) else KINDS[type(value)]
            chunk.bad("E-DATA-039", f, row, f"a list of {shape[0]} belongs here (shape "
                      f"[{' '.join(map(str, f.shape))}]), and this is {got}")
        return [cell for item in value for cell in _cells(chunk, f, row, item, shape[1:])]
    if isinstance(value, bool) and f.dtype == "bool":
        return [int(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        chunk.bad("E-DATA-039", f, row, f"a number belongs here, and this is {KINDS[type(value)]}")
    if isinstance(value, int) and (f.scale is not None or f.dtype.startswith("f")):
        try:
            return [float(value)]
        except OverflowError:
            chunk.bad("E-DATA-009", f, row, f"a number of {len(str(value))} digits is not a finite {f.dtype}")
    return [value]


def _whole(chunk: _Chunk, f: Field, dtype: np.dtype, row: int, value: int | float) -> int:
    """An integer of the dtype's range, or E-DATA-009; 5.0 is one."""
    if isinstance(value, float) and not value.is_integer():  # NaN and infinities are none either
        chunk.bad("E-DATA-009", f, row, f"{value} is not a whole number, and the field is {f.dtype}")
    low, high = bounds(dtype)
    if not low <= value <= high:
        shown = str(value) if len(str(value)) <= 40 else f"a number of {len(str(value))} digits"
        chunk.bad("E-DATA-009", f, row, f"{shown} is outside {low}…{high}, the range of {f.dtype}")
    return int(value)

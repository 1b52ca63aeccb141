"""Records (objects with a key for each field) as arrays of the fields: of JSON lines, of MessagePack, of Parquet.

The quick way hands all of them to one typed decoder. Where a record is not plainly what the fields say, the slow way
looks at them one by one: it takes what is good in another guise (5.0 for an integer) and names the first that is not.
Both run in worker processes: a mistake is a `Wrong`, which the parent makes an error with a place in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import msgspec
import numpy as np

from sexpgpu.diagnostics import suggestion
from sexpgpu.experiment.model import Field
from sexpgpu.run.data.convert import NUMPY, bounds, fit

LINES = "#line"  # the array of file lines beside those of the fields; no field has such a name
KINDS = {str: "a string", bool: "true or false", type(None): "null", dict: "an object", list: "a list", int: "a number",
         float: "a number", bytes: "bytes"}


class Wrong(Exception):
    """A mistake in the data, found where no span is known: code, message, help. Travels between processes."""

    def __init__(self, code: str, message: str, help: tuple[str, ...] = ()):  # noqa: A002 - the field's word
        super().__init__(code, message, help)
        self.code, self.message, self.help = code, message, help


@dataclass(frozen=True)
class Start:
    """Where a piece of records begins. `name`: the file or shard; a shard's records are told by number and byte."""

    name: str
    shard: bool = False
    line: int = 1
    record: int = 0
    byte: int = 0


@dataclass(eq=False)
class Cut:
    """What padding did to a field: lists filled up, lists cut, and the longest one seen."""

    padded: int = 0
    cut: int = 0
    longest: int = 0

    def join(self, other: Mapping[str, int]) -> None:
        self.padded += other["padded"]
        self.cut += other["cut"]
        self.longest = max(self.longest, other["longest"])


@dataclass(eq=False)
class Parsed:
    """Arrays by field, axis 0 the record; of text also the line of each. `cuts`: field -> what padding did."""

    arrays: dict[str, np.ndarray]
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(next(iter(self.arrays.values())))


def bare(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The fields without their places: what a worker is sent."""
    return tuple(replace(f, span=None) for f in fields)


def parse_lines(data: bytes, fields: tuple[Field, ...], start: Start) -> Parsed | None:
    """JSON lines, whole; None where all are blank. Raises Wrong: E-DATA-008, 009, 037 … 039."""
    if not data.isascii():
        _check_text(data, start)
    try:
        records = _decoder(fields).decode_lines(data)
    except (msgspec.DecodeError, RecursionError):
        return _lines_one_by_one(data, fields, start)
    if not records:
        return None
    if not _a_record_a_line(data, len(records)):
        return _lines_one_by_one(data, fields, start)
    found = _quick(records, fields, lambda row: _at_line(start, row, _line_starts(data)[row]))
    if found is None:
        return _lines_one_by_one(data, fields, start)
    if not start.shard:
        whole = data.count(b"\n") + (not data.endswith(b"\n"))
        numbers = np.arange(whole) if whole == len(records) else np.array([n for n, _ in _line_starts(data)])
        found.arrays[LINES] = numbers.astype(np.int64) + start.line
    return found


def parse_objects(objects: Sequence[Any], fields: tuple[Field, ...], places: Callable[[int], str]) -> Parsed:
    """Records that a library decoded. `places(row)` names one. Raises Wrong: E-DATA-009, 037 … 039."""
    try:
        found = _quick(msgspec.convert(objects, list[_struct(fields)]), fields, places)  # type: ignore[misc]
    except msgspec.ValidationError:
        found = None
    if found is not None:
        return found
    rows = _Rows(fields, places)
    for row, record in enumerate(objects):
        rows.add(row, record)
    return rows.parsed()


def _check_text(data: bytes, start: Start) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        row = sum(1 for _, begin in _line_starts(data) if begin <= error.start) - 1
        line = data.count(b"\n", 0, error.start)
        begin = data.rfind(b"\n", 0, error.start) + 1
        raise Wrong("E-DATA-008", f"{_at_line(start, max(row, 0), (line, begin))}: byte 0x{data[error.start]:02x} is not UTF-8",
                    ("save the file as UTF-8",)) from None


def _a_record_a_line(data: bytes, count: int) -> bool:
    """Whether `count` records, which msgspec takes whatever divides them, stand each on one line of its own.

    No record goes on with `{` after a `}`, so each `}`, newline, `{` lies between two records.
    """
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines == count and data.count(b"}\n{") == count - 1:
        return True
    texts = [text for line in data.split(b"\n") if (text := line.strip())]
    return len(texts) == count and all(text.startswith(b"{") and text.endswith(b"}") for text in texts)


def _line_starts(data: bytes) -> list[tuple[int, int]]:
    """(line from 0, byte) of every line that is not blank."""
    found, begin = [], 0
    for number, line in enumerate(data.split(b"\n")):
        if line.strip():
            found.append((number, begin))
        begin += len(line) + 1
    return found


def _at_line(start: Start, row: int, place: tuple[int, int]) -> str:
    line = start.line + place[0]
    if not start.shard:
        return f"{start.name}, line {line}"
    return f"shard {start.name}, record {start.record + row + 1} (line {line}, byte {start.byte + place[1]} of its text)"


# the quick way


@lru_cache(maxsize=8)
def _struct(fields: tuple[Field, ...]) -> type[msgspec.Struct]:
    kinds, names = [], {}
    for i, f in enumerate(fields):
        kind: Any = float if f.scale is not None or NUMPY[f.dtype] in (np.float32, np.float64, np.float16) else int
        if f.dtype == "bool" and f.scale is None:
            kind = bool | int
        for _ in f.shape:
            kind = list[kind]
        kinds.append((f"f{i}", kind))
        names[f"f{i}"] = f.name
    return msgspec.defstruct("Record", kinds, rename=names, gc=False)


@lru_cache(maxsize=8)
def _decoder(fields: tuple[Field, ...]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_struct(fields))


def _quick(records: Sequence[Any], fields: tuple[Field, ...], places: Callable[[int], str]) -> Parsed | None:
    """None where a list has another length than its field, or a number needs a closer look."""
    parsed = Parsed({})
    for i, f in enumerate(fields):
        name = f"f{i}"
        values = [getattr(record, name) for record in records]
        flattened = _flat(values, f)
        if flattened is None:
            return None
        _put(parsed, f, len(records), *flattened, places)
    return parsed


def _flat(values: list[Any], f: Field) -> tuple[np.ndarray, np.ndarray] | None:
    """All numbers in order, and the length of each record's list (1 for a scalar)."""
    lengths = np.fromiter(map(len, values), np.int64, len(values)) if f.shape else np.ones(len(values), np.int64)
    if f.shape and f.pad is None and (lengths != f.shape[0]).any():
        return None
    numbers: list[Any] = values
    for depth in range(len(f.shape)):
        if depth and any(len(part) != f.shape[depth] for part in numbers):
            return None
        numbers = list(chain.from_iterable(numbers))
    kind = np.float64 if f.scale is not None or f.dtype.startswith("f") else np.int64
    try:
        return np.fromiter(numbers, kind, len(numbers)), lengths
    except OverflowError:
        return None


def _put(parsed: Parsed, f: Field, count: int, flat: np.ndarray, lengths: np.ndarray, places: Callable[[int], str]) -> None:
    inner = int(np.prod(f.shape[1:], dtype=np.int64))
    ends = np.cumsum(lengths) * inner

    def bad(index: int, what: str) -> NoReturn:
        row = int(np.searchsorted(ends, index, side="right"))
        raise Wrong("E-DATA-009", f"{places(row)}, field `{f.name}`: {flat.reshape(-1)[index]} {what}")

    fitted = fit(flat, f, bad)
    if f.pad is None:
        parsed.arrays[f.name] = fitted.reshape(count, *f.shape)
        return
    wanted = f.shape[0]
    out = np.full((count, wanted, inner), f.pad, fitted.dtype)
    rows = np.repeat(np.arange(count), lengths)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    keep = within < wanted
    out[rows[keep], within[keep]] = fitted.reshape(-1, inner)[keep]
    parsed.arrays[f.name] = out.reshape(count, *f.shape)
    parsed.cuts[f.name] = {"padded": int((lengths < wanted).sum()), "cut": int((lengths > wanted).sum()),
                           "longest": int(lengths.max(initial=0))}


# the slow way


@dataclass(eq=False)
class _Rows:
    """Records looked at one by one."""

    fields: tuple[Field, ...]
    places: Callable[[int], str]
    values: dict[str, list[Any]] = field(default_factory=dict)
    count: int = 0

    def add(self, row: int, record: Any) -> None:
        if not isinstance(record, dict):
            raise Wrong("E-DATA-037", f"{self.places(row)}: a record is an object, and this is {_kind(record)}")
        for f in self.fields:
            if f.name not in record:
                raise Wrong("E-DATA-038", f"{self.places(row)}: the record has no key `{f.name}`",
                            suggestion(f.name, [str(key) for key in record], "keys of the record"))
            self.values.setdefault(f.name, []).append(record[f.name])
        self.count += 1

    def parsed(self) -> Parsed:
        parsed = Parsed({})
        for f in self.fields:
            whole = not f.dtype.startswith("f") and f.scale is None
            dtype, lengths = np.dtype(NUMPY[f.dtype]), []
            numbers: list[Any] = []
            for row, value in enumerate(self.values[f.name]):
                cells = self._cells(f, row, value, f.shape, f.pad is not None)
                lengths.append(len(value) if f.shape else 1)
                numbers += [self._whole(f, dtype, row, cell) for cell in cells] if whole else cells
            flat = np.array(numbers, np.int64 if whole else np.float64)
            _put(parsed, f, self.count, flat, np.array(lengths, np.int64), self.places)
        return parsed

    def bad(self, code: str, f: Field, row: int, what: str) -> NoReturn:
        raise Wrong(code, f"{self.places(row)}, field `{f.name}`: {what}")

    def _cells(self, f: Field, row: int, value: Any, shape: tuple[int, ...], ragged: bool = False) -> list[Any]:
        """The numbers of one value in order, or E-DATA-039."""
        if shape:
            if not isinstance(value, list | tuple) or (len(value) != shape[0] and not ragged):
                got = f"a list of {len(value)}" if isinstance(value, list | tuple) else _kind(value)
                hint = " (`:pad 0` in the field fills shorter ones up and cuts longer ones)" if isinstance(value, list) and f.pad is None else ""
                self.bad("E-DATA-039", f, row, f"a list of {shape[0]} belongs here (shape "
                         f"[{' '.join(map(str, f.shape))}]), and this is {got}{hint}")
            return [cell for item in value for cell in self._cells(f, row, item, shape[1:])]
        if isinstance(value, bool) and f.dtype == "bool":
            return [int(value)]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.bad("E-DATA-039", f, row, f"a number belongs here, and this is {_kind(value)}")
        if isinstance(value, int) and (f.scale is not None or f.dtype.startswith("f")):
            try:
                return [float(value)]
            except OverflowError:
                self.bad("E-DATA-009", f, row, f"a number of {len(str(value))} digits is not a finite {f.dtype}")
        return [value]

    def _whole(self, f: Field, dtype: np.dtype, row: int, value: int | float) -> int:
        """An integer of the dtype's range, or E-DATA-009; 5.0 is one."""
        if isinstance(value, float) and not value.is_integer():  # NaN and infinities are none either
            self.bad("E-DATA-009", f, row, f"{value} is not a whole number, and the field is {f.dtype}")
        low, high = bounds(dtype)
        if not low <= value <= high:
            shown = str(value) if len(str(value)) <= 40 else f"a number of {len(str(value))} digits"
            self.bad("E-DATA-009", f, row, f"{shown} is outside {low}…{high}, the range of {f.dtype}")
        return int(value)


def _kind(value: Any) -> str:
    return KINDS.get(type(value), f"a value of type {type(value).__name__}")


def _lines_one_by_one(data: bytes, fields: tuple[Field, ...], start: Start) -> Parsed | None:
    begins: list[tuple[int, int]] = []
    rows = _Rows(fields, lambda row: _at_line(start, row, begins[row]))
    for number, begin, line in _lines(data):
        begins.append((number, begin))
        rows.add(len(begins) - 1, _record(line, rows.places(len(begins) - 1)))
    if not begins:
        return None
    parsed = rows.parsed()
    if not start.shard:
        parsed.arrays[LINES] = np.array([n for n, _ in begins], np.int64) + start.line
    return parsed


def _lines(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    begin = 0
    for number, line in enumerate(data.split(b"\n")):
        if line.strip():
            yield number, begin, line
        begin += len(line) + 1


def _record(line: bytes, place: str) -> Any:
    try:
        record = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise Wrong("E-DATA-037", f"{place}, column {error.colno}: not JSON ({error.msg})",
                    ("a record is one JSON object on one line",)) from None
    except (ValueError, RecursionError):
        raise Wrong("E-DATA-037", f"{place}: a number of too many digits, or lists too deep") from None
    if not isinstance(record, dict):
        raise Wrong("E-DATA-037", f"{place}: a record is a JSON object, and this is {_kind(record)}")
    return record

"""Numbers of a file as a field's dtype: scaled in float64, rounded once, and nothing changed silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import DataSource, Field

NUMPY = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "bool": np.bool_,
}
CHUNK = 1 << 20  # values looked at in one go: a file larger than memory stays a file


def chunks(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of pieces of about CHUNK values."""
    rows = max(1, CHUNK // max(1, values.size // max(1, len(values))))
    for start in range(0, len(values), rows):
        yield start, values[start : start + rows]


def numpy_dtype(source: DataSource, field: Field) -> np.dtype:
    """The array's dtype of a field; E-DATA-011 for one that files cannot hold."""
    if field.dtype not in NUMPY:
        fail("E-DATA-011", f"field `{field.name}`: {source.format} has fields of type {' '.join(NUMPY)}, not "
             f"{field.dtype}", field.span or source.span)
    return np.dtype(NUMPY[field.dtype])


def bounds(dtype: np.dtype) -> tuple[int, int]:
    """The least and greatest integer of a dtype."""
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def fit(values: np.ndarray, field: Field, bad: Callable[[int, str], NoReturn]) -> np.ndarray:
    """`values` (of any number type) in the field's dtype. `bad(i, what)` raises for the flat index of a value."""
    dtype = np.dtype(NUMPY[field.dtype])
    if field.scale is not None:
        values = values.astype(np.float64) * float(field.scale)
    scaled = "" if field.scale is None else f" after :scale {field.scale}"
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            out = values.astype(np.float64 if values.dtype.kind != "f" else values.dtype, copy=False).astype(dtype)
        _refuse(~np.isfinite(out), bad, f"is not a finite {field.dtype}{scaled}")
        return out
    low, high = bounds(dtype)
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            _refuse(~(np.isfinite(values) & (values == np.floor(values))), bad,
                    f"is not a whole number{scaled}, and field `{field.name}` is {field.dtype}")
        outside = (values < float(low)) | (values >= float(high + 1))  # both powers of two: exact
    else:
        outside = (values < low) | (values > high)
    _refuse(outside, bad, f"is outside {low}…{high}, the range of {field.dtype}{scaled}")
    return values.astype(dtype)


def _refuse(wrong: np.ndarray, bad: Callable[[int, str], NoReturn], what: str) -> None:
    if wrong.any():
        bad(int(np.argmax(wrong.reshape(-1))), what)

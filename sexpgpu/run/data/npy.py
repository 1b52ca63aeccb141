"""`(npy location :fields …)`: NumPy's own files. A `.npy` is one field; an `.npz` has each field under its name.

Pickles are never loaded. Axis 0 is the row. A `.npy` of the field's own dtype stays mapped, and a large .npz is unpacked once into the content cache and mapped from there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from sexpgpu.diagnostics import SexpError, fail, suggestion
from sexpgpu.experiment.model import DataSource, Field
from sexpgpu.run.data.cache import Say, key_of, silent
from sexpgpu.run.data.convert import chunks, fit, numpy_dtype
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.files import digest, no_rows, unreadable
from sexpgpu.run.data.parsed import asked, cached

NPY, ZIP = b"\x93NUMPY", (b"PK\x03\x04", b"PK\x05\x06")
MAPPED = 1 << 20  # bytes from which a .npy is mapped
NAMES = {"float": "f", "int": "i", "uint": "u"}


def read(source: DataSource, path: Path, say: Say = silent) -> Dataset:
    """Errors: E-DATA-001, 006, 009, 011, 031 … 034."""
    known = digest(source, path)
    try:
        with path.open("rb") as file:
            magic = file.read(6)
    except OSError as error:
        unreadable(source, path, error)
    if magic == NPY:
        fields = _fitted(source, _single(source, path))
    elif magic[:4] in ZIP:
        size = path.stat().st_size
        fields = cached(key_of(known, *asked(source)), size, lambda: iter((_fitted(source, _archive(source, path)),)), say)
    else:
        _damaged(source, "it begins as neither a .npy nor an .npz file does")
    return Dataset(source, fields, known, len(next(iter(fields.values()))))


def _fitted(source: DataSource, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    _check_lengths(source, arrays)
    return {field.name: _field(source, field, arrays[field.name]) for field in source.fields}


def _single(source: DataSource, path: Path) -> dict[str, np.ndarray]:
    if len(source.fields) != 1:
        fail("E-DATA-034", f"{source.location} is one array, and :fields names {len(source.fields)}", source.span,
             help="keep several fields in an .npz, each under its name")
    try:
        array = np.load(path, mmap_mode="r" if path.stat().st_size >= MAPPED else None, allow_pickle=False)
    except Exception as error:  # a damaged header raises nearly anything: TokenError, SyntaxError, struct.error
        _refused(source, "", error)
    return {source.fields[0].name: array}


def _archive(source: DataSource, path: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    name = ""
    try:
        with np.load(path, allow_pickle=False) as archive:
            for field in source.fields:
                name = field.name
                if name not in archive.files:
                    fail("E-DATA-034", f"{source.location} has no array `{name}`", field.span or source.span,
                         help=suggestion(name, archive.files, "arrays"))
                found = archive[name]
                if not isinstance(found, np.ndarray):
                    _damaged(source, f"`{name}` is no array")
                arrays[name] = found
    except SexpError:
        raise
    except Exception as error:  # and so does a damaged archive
        _refused(source, name, error)
    return arrays


def _refused(source: DataSource, name: str, error: Exception) -> NoReturn:
    if "Object arrays" in str(error) or "Python objects" in str(error):
        which = f"array `{name}` of {source.location}" if name else source.location
        fail("E-DATA-032", f"{which} holds Python objects, and those are never loaded",
             source.location_span or source.span, help="save numbers: np.save(file, np.asarray(values, dtype=np.float32))")
    _damaged(source, str(error).strip("'\"").split("\n")[0] or type(error).__name__)


def _damaged(source: DataSource, why: str) -> NoReturn:
    fail("E-DATA-031", f"{source.location} is not a whole NumPy file ({why})", source.location_span or source.span,
         help="write it with np.save or np.savez")


def _check_lengths(source: DataSource, arrays: dict[str, np.ndarray]) -> None:
    (first, one), *rest = arrays.items()
    if not one.ndim:
        fail("E-DATA-033", f"{source.location}: `{first}` is a single number; axis 0 of an array is its rows",
             source.span)
    for name, other in rest:
        if not other.ndim or len(other) != len(one):
            fail("E-DATA-033", f"{source.location}: `{first}` has {len(one):,} rows, and `{name}` has "
                 f"{len(other) if other.ndim else 'none'}", source.span)
    if not len(one):
        no_rows(source, "arrays without rows")


def _field(source: DataSource, field: Field, array: np.ndarray) -> np.ndarray:
    dtype, place = numpy_dtype(source, field), field.span or source.span
    if array.shape[1:] != field.shape:
        fail("E-DATA-033", f"field `{field.name}` has shape {_shape(field.shape)}, and a row in {source.location} has "
             f"{_shape(array.shape[1:])}", place)
    whole = dtype.kind in "iub" and field.scale is None
    if array.dtype.kind not in "biuf" or (whole and array.dtype.kind == "f"):
        helps = f"declare ({field.name} f32 …), or convert the file with .astype" if array.dtype.kind == "f" else ()
        fail("E-DATA-033", f"field `{field.name}` is {field.dtype}, and {source.location} has {_dtype(array.dtype)}",
             place, help=helps)
    same = array.dtype == dtype and field.scale is None
    out = array if same else np.empty(array.shape, dtype)
    for start, part in () if same and dtype.kind != "f" else chunks(array):
        fitted = fit(part, field, partial(_bad, source, field, part, start))
        if not same:
            out[start : start + len(part)] = fitted
    return out


def _bad(source: DataSource, field: Field, part: np.ndarray, start: int, index: int, what: str) -> NoReturn:
    row = start + index // (part.size // len(part))
    fail("E-DATA-009", f"{source.location}, row {row + 1:,}, field `{field.name}`: {part.reshape(-1)[index]} {what}",
         field.span or source.span)


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + " ".join(map(str, shape)) + "]"


def _dtype(dtype: np.dtype) -> str:
    """numpy's name in ours, where there is one: float64 is f64."""
    kind = dtype.name.rstrip("0123456789")
    return NAMES[kind] + dtype.name[len(kind) :] if kind in NAMES else dtype.name

"""What goes into a prediction and what comes out: npz files, read without trusting them and written whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, printable
from sexpgpu.experiment.model import Field
from sexpgpu.ir import Node, postorder
from sexpgpu.run.checkpoints.export import write_whole
from sexpgpu.run.data.convert import NUMPY

_ROWS = {"embed": lambda node: 0, "gather": lambda node: node.attrs["axis"], "softmax-cross-entropy": lambda node: -1}
_WORDS = {np.dtype(kind): word for word, kind in NUMPY.items()}


def read_input(path: Path, names: Sequence[str], known: Iterable[Field]) -> dict[str, np.ndarray]:
    """An array for each name, in the dtype of the data's field of that name, else its own; raises E-CKPT-035."""
    fields = {field.name: field for field in known}
    mend = f"write it with numpy: np.savez({path.name!r}, {', '.join(f'{name}=…' for name in names)})"
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder or device")
        with path.open("rb") as raw:
            if raw.read(2) != b"PK":
                raise ValueError("it is no npz file")
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                fail("E-CKPT-035", f"{path} has no array `{missing[0]}`",
                     notes=[f"its arrays: {printable(', '.join(file.files)) or 'none'}"])
            arrays = {name: file[name] for name in names}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        fail("E-CKPT-035", f"{path} cannot be read: {getattr(error, 'strerror', None) or printable(str(error))}", help=mend)
    fitted = {name: _fit(name, array, fields.get(name)) for name, array in arrays.items()}
    rows = {len(array) for array in fitted.values()}
    if len(rows) != 1 or 0 in rows:
        said = ", ".join(f"{name} {len(array)}" for name, array in fitted.items())
        fail("E-CKPT-035", f"the arrays of {path} need the same number of rows, at least one: {said or 'no array'}")
    return fitted


def _fit(name: str, array: np.ndarray, field: Field | None) -> np.ndarray:
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        fail("E-CKPT-035", f"`{name}` is {array.dtype} of {array.ndim} axes; it must be numbers, axis 0 the row")
    if field is not None and array.shape[1:] != tuple(field.shape):
        fail("E-CKPT-035", f"a row of `{name}` has shape {list(array.shape[1:])}, and the field's is {list(field.shape)}")
    own = np.dtype(np.float32) if array.dtype.kind == "f" else array.dtype
    wanted = np.dtype(NUMPY[field.dtype]) if field is not None and field.dtype in NUMPY else own
    if wanted not in _WORDS:
        wanted = np.dtype(np.int64)
    if wanted.kind != "f":
        low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        if array.dtype.kind == "f" or (array.size and not low <= int(array.min()) <= int(array.max()) <= high):
            fail("E-CKPT-035", f"`{name}` is {array.dtype}, and its values do not all fit in {_WORDS[wanted]}")
    return np.ascontiguousarray(array, wanted)


def row_types(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype in the IR's words, shape of a row)."""
    return {name: (_WORDS[array.dtype], array.shape[1:]) for name, array in arrays.items()}


def check_indices(nodes: Iterable[Node], arrays: Mapping[str, np.ndarray]) -> None:
    """E-CKPT-035 for an array that an op takes rows by, with a number that is no row."""
    for node in postorder(nodes):
        if node.op in _ROWS and node.inputs[1].op == "input":
            name, count = node.inputs[1].attrs["name"], node.inputs[0].type.shape[_ROWS[node.op](node)]
            low, high = int(arrays[name].min()), int(arrays[name].max())
            if low < 0 or high >= count:
                fail("E-CKPT-035", f"`{name}` has values {low}…{high}, and `{node.op}` takes 0…{count - 1}")


def predict(predictor: Any, arrays: Mapping[str, np.ndarray], size: int) -> list[np.ndarray]:
    """The function over all rows, in batches of `size`."""
    rows = len(next(iter(arrays.values())))
    parts = [
        predictor.run({name: array[start : start + size] for name, array in arrays.items()}, start)
        for start in range(0, rows, size)
    ]
    return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]


def write_output(out: Path, outputs: Sequence[np.ndarray], force: bool) -> list[str]:
    """`output`, or `output-0`, `output-1`, … for a list; the names, each with its type."""
    names = ["output"] if len(outputs) == 1 else [f"output-{i}" for i in range(len(outputs))]
    arrays = dict(zip(names, outputs, strict=True))

    def write(stage: Path) -> None:
        with open(stage, "wb") as file:
            np.savez(file, **arrays)

    write_whole(out, force, write)
    return [f"{name} {_WORDS.get(a.dtype, a.dtype)}[{' '.join(map(str, a.shape))}]" for name, a in arrays.items()]



"""A block: arrays of equally many rows in one file of ours, written once, mapped ever after.

File: 8 bytes of magic, the header's length (u64 little-endian), a JSON header, then each array at a multiple of 64
bytes. A file that is cut or is no block is no block (`open_block` gives None) and is written anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

MAGIC = b"SXBLOCK1"
ALIGN = 64
HEADER_LIMIT = 1 << 24
DTYPES = ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")


@dataclass(frozen=True, eq=False)
class Block:
    """`arrays`: axis 0 is the row; mapped, read-only. `facts`: what was learned while the rows were read."""

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(next(iter(self.arrays.values())))


class BlockWriter:
    """Rows come in parts; an array's parts are kept in files of their own until `finish` joins them.

    So memory holds one part at a time, whatever the number of rows. `tag`: what the names of unfinished files have, so
    that whoever ends this process can remove them.
    """

    def __init__(self, path: Path, tag: str | None = None):
        self.path = path
        self._stage = path.with_name(f".{path.name}.{tag or uuid4().hex}")
        self._parts: dict[str, tuple[Any, np.dtype, tuple[int, ...]]] = {}
        self._rows = 0

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Rows after those already there. Raises OSError."""
        for name, array in arrays.items():
            if name not in self._parts:
                place = self._stage.with_name(f"{self._stage.name}.{len(self._parts)}")
                self._parts[name] = (open(place, "w+b"), array.dtype, array.shape[1:])  # noqa: SIM115 - until finish
            self._parts[name][0].write(np.ascontiguousarray(array).data)
        self._rows += len(next(iter(arrays.values())))

    def finish(self, facts: Mapping[str, Any]) -> int:
        """Joins the parts, renames the file to its name and gives its size in bytes. Raises OSError."""
        entries: dict[str, dict[str, Any]] = {}
        offset = 0
        for name, (_, dtype, shape) in self._parts.items():
            offset = -(-offset // ALIGN) * ALIGN
            entries[name] = {"dtype": _word(dtype), "shape": [self._rows, *shape], "offset": offset}
            offset += self._rows * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header = json.dumps({"arrays": entries, "facts": dict(facts), "bytes": offset}, sort_keys=True).encode()
        start = -(-(len(MAGIC) + 8 + len(header)) // ALIGN) * ALIGN
        try:
            with open(self._stage, "wb") as out:
                out.write(MAGIC + len(header).to_bytes(8, "little") + header)
                for name, (file, _, _) in self._parts.items():
                    out.seek(start + entries[name]["offset"])
                    file.seek(0)
                    while piece := file.read(1 << 20):
                        out.write(piece)
                out.truncate(start + offset)
            os.replace(self._stage, self.path)
        finally:
            self.drop()
        return start + offset

    def drop(self) -> None:
        """Leaves nothing behind."""
        for file, _, _ in self._parts.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)
        self._parts = {}
        self._stage.unlink(missing_ok=True)


def _word(dtype: np.dtype) -> str:
    return "bool" if dtype.kind == "b" else f"{dtype.kind}{dtype.itemsize}"


def open_block(path: Path) -> Block | None:
    """The block in that file, its arrays mapped; None where there is none that is whole."""
    found = _header(path)
    if found is None:
        return None
    start, header = found
    try:
        raw = np.memmap(path, np.uint8, "r")
        arrays = {}
        for name, entry in header["arrays"].items():
            dtype = np.dtype("?" if entry["dtype"] == "bool" else f"<{entry['dtype']}")
            size = dtype.itemsize * int(np.prod(entry["shape"], dtype=np.int64))
            begin = start + entry["offset"]
            arrays[name] = raw[begin : begin + size].view(dtype).reshape(entry["shape"])
        return Block(arrays, header["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def facts(path: Path) -> dict[str, Any] | None:
    """A block's facts alone, without mapping it; None where there is no whole block."""
    found = _header(path)
    return None if found is None else found[1]["facts"]


def _header(path: Path) -> tuple[int, dict[str, Any]] | None:
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC) + 8)
            size = int.from_bytes(head[len(MAGIC) :], "little")
            if head[: len(MAGIC)] != MAGIC or not 0 < size <= HEADER_LIMIT:
                return None
            header = json.loads(file.read(size))
            start = -(-(len(head) + size) // ALIGN) * ALIGN
            whole = os.fstat(file.fileno()).st_size == start + header["bytes"]
            known = all(entry["dtype"] in DTYPES for entry in header["arrays"].values())
            return (start, header) if whole and known and header["arrays"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None

"""What the header of a safetensors file says of its tensors: names, dtypes and shapes. Without torch, so that `explain` can read one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.run.checkpoints.find import Found
from sexpgpu.run.checkpoints.manifest import Torn

HEADER_BYTES = 64 << 20
#: the word of the IR <- the word of a safetensors header
DTYPES = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16",
          "I8": "i8", "U8": "u8", "U16": "u16", "BOOL": "bool"}


def header_length(head: bytes) -> int:
    """Bytes of the header that these first eight announce; raises Torn."""
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 2 <= length <= HEADER_BYTES:
        raise Torn("its header is not of a size that can be")
    return int(length)


def parse_header(text: bytes) -> dict[str, Any]:
    """Name -> entry; raises Torn, ValueError or RecursionError."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise Torn("its header is no object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def schema_of(header: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape); raises KeyError, TypeError or ValueError for entries that are not as they should be."""
    return {name: (DTYPES.get(entry["dtype"], str(entry["dtype"])), tuple(int(size) for size in entry["shape"]))
            for name, entry in header.items()}


def saved_schema(found: Found) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) from the headers alone; nothing of a tensor's size is allocated. Raises E-CKPT-002."""
    schema: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in found.manifest.files:
        try:
            data = found.files.get(entry["name"])
            length = header_length(found.place.read(entry["name"], 0, 8) if data is None else bytes(data[:8]))
            schema |= schema_of(parse_header(found.place.read(entry["name"], 8, 8 + length) if data is None else bytes(data[8 : 8 + length])))
        except (Torn, ValueError, KeyError, TypeError, RecursionError) as error:
            raise unreadable(found, entry, error) from None
    return schema


def file_schema(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of one safetensors file. Raises Torn, OSError, ValueError, KeyError, TypeError or RecursionError."""
    with open(path, "rb") as file:
        return schema_of(parse_header(file.read(header_length(file.read(8)))))


def unreadable(found: Found, entry: Mapping[str, Any], error: Exception) -> SexpError:
    """E-CKPT-002 for a file of a checkpoint."""
    return problem("E-CKPT-002", f"the checkpoint file {found.folder}/{entry['name']} cannot be read: {error}",
                   help="--resume latest takes the newest whole one of a location")

"""Tensors of a state as bytes and back: the safetensors format, digests, health. Knows no storage.

The format is written here and not by its library, which holds Python's lock while it writes: training would stand
still. Tensors of a file go by size of their elements, the largest first, and then by name, so that each is aligned.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sexpgpu.run.checkpoints.header import header_length, parse_header
from sexpgpu.run.checkpoints.manifest import Torn

PART_BYTES = 2 << 30
_TORCH: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "BOOL": torch.bool}
_WORDS = {dtype: word for word, dtype in _TORCH.items()}


def content(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def groups(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut at PART_BYTES in name order; a tensor is never divided."""
    cut: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        more = tensors[name].numel() * tensors[name].element_size()
        if cut[-1] and size + more > PART_BYTES:
            cut.append({})
            size = 0
        cut[-1][name] = tensors[name]
        size += more
    return cut


def encode(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """One file: its header, then each tensor's bytes."""
    header: dict[str, Any] = {}
    pieces: list[memoryview] = []
    at = 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        tensor = tensors[name]
        piece = content(tensor)
        header[name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(piece)]}
        at += len(piece)
        pieces.append(piece)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *pieces]


def decode(data: bytearray) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one file whose digest was compared, over its memory. Raises Torn, KeyError, TypeError, ValueError."""
    length = header_length(bytes(data[:8]))
    header, start, used = parse_header(bytes(data[8 : 8 + length])), 8 + length, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, (begin, end) = _TORCH[entry["dtype"]], entry["data_offsets"]
        shape = [int(size) for size in entry["shape"]]
        count = 1
        for size in shape:
            count *= size
        if begin != used or end - begin != count * dtype.itemsize or start + end > len(data) or min(shape, default=0) < 0:
            raise Torn(f"its header gives {name} a place that cannot be")
        used = end
        if not count:
            yield name, torch.empty(shape, dtype=dtype)
        elif (start + begin) % dtype.itemsize:
            yield name, torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=dtype).reshape(shape)
        else:
            yield name, torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).reshape(shape)
    if start + used != len(data):
        raise Torn("it has bytes that its header does not name")


def state_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(content(tensor))
    return digest.hexdigest()


def health(tensors: Mapping[str, torch.Tensor]) -> str:
    """`healthy` when every floating number is finite, else `suspect`."""
    finite = all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
    return "healthy" if finite else "suspect"


class HostCopy:
    """Copies a state to the CPU at a step's boundary. Of tensors on a device into pinned memory that is kept and used
    again: at most one copy is in flight, so nobody still reads it."""

    def __init__(self) -> None:
        self._pinned: dict[str, torch.Tensor] = {}

    def prepare(self, state: Mapping[str, torch.Tensor]) -> None:
        """Makes the pinned memory before the first step: it takes longer than a copy into it."""
        for name, tensor in state.items():
            if tensor.device.type != "cpu":
                self._buffer(name, tensor)

    def take(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contiguous CPU tensors that no later step changes."""
        copies: dict[str, torch.Tensor] = {}
        waits = set()
        for name, tensor in state.items():
            if tensor.device.type == "cpu":
                copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
                continue
            copies[name] = self._buffer(name, tensor).copy_(tensor.detach(), non_blocking=True)
            waits.add(tensor.device)
        for device in waits:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._pinned.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept

"""Shapes, strides and bytes of the values of a program, as torch has them on the CPU. Nothing here imports torch."""

from __future__ import annotations

from math import prod
from typing import Any, cast

from sexpgpu.backends.interpreter.fuse import Value
from sexpgpu.ir import DTYPES, Node
from sexpgpu.passes.schedule.fuse import original

Strides = tuple[int, ...]
Shape = tuple[int, ...]


def contiguous(shape: Shape) -> Strides:
    """Strides of a tensor whose elements lie in order."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def viewed(shape: Shape, strides: Strides, new: Shape) -> Strides | None:
    """Strides of a view of another shape, or None where the elements must be copied: what torch's `computeStride` says."""
    if 0 in shape or not shape:
        return contiguous(new)
    place, found = len(new) - 1, [0] * len(new)
    chunk, count, filled = strides[-1], 1, 1
    for axis in range(len(shape) - 1, -1, -1):
        count *= shape[axis]
        if axis and (shape[axis - 1] == 1 or strides[axis - 1] == count * chunk):
            continue
        while place >= 0 and (filled < count or new[place] == 1):
            found[place] = filled * chunk
            filled *= new[place]
            place -= 1
        if filled != count:
            return None
        if axis:
            chunk, count, filled = strides[axis - 1], 1, 1
    return tuple(found) if place == -1 else None


def dense(shape: Shape, strides: Strides) -> bool:
    """Whether the elements fill their memory, in whatever order of the axes."""
    step = 1
    for size, stride in sorted(((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda x: x[1]):
        if stride != step:
            return False
        step *= size
    return True


def bytes_of(value: Value) -> int:
    """Bytes of a node's value, or of what a fused call gives beside nodes."""
    if isinstance(value, Node):
        return value.type.bytes
    return prod(shape_of(value)) * DTYPES[dtype_of(value)]


def _beside(value: Value) -> tuple[Any, Node]:
    """Word and node of what a call gives beside nodes; of a second making those of the first."""
    word, node = cast(tuple[Any, Node], value)
    return word, original(node)


def dtype_of(value: Value) -> str:
    if isinstance(value, Node):
        return value.type.dtype
    word, node = _beside(value)
    return "i64" if word in ("index", "places") else str(node.type.dtype)


def shape_of(value: Value) -> Shape:
    """The shape of a value; of what a call gives beside nodes, by its word (`fuse`)."""
    if isinstance(value, Node):
        return value.type.shape
    word, node = _beside(value)
    shape = node.type.shape
    if word in ("mean", "rsqrt"):
        x = _normalized(node)
        kept = x.type.rank - len(x.attrs["axis"])
        return (*x.type.shape[:kept], *[1] * (x.type.rank - kept))
    if word in ("by-scale", "by-shift"):
        return tuple(node.type.shape[a] for a in node.attrs["axis"])
    if word == "sums":
        return shape[:-1]
    if word == "logs":
        logits = node.inputs[0].type
        return (logits.size // max(1, logits.shape[-1]), logits.shape[-1])
    if word == "index":
        return (node.type.size, 1)
    if word == "places" or isinstance(word, int):  # of a pool; a gradient of attention that nothing reads
        return shape
    raise AssertionError(f"a fused call gives `{word}`, and nothing says how large that is")


def _normalized(node: Node) -> Node:
    """The `normalize` in a normalization's result with scale and shift."""
    while node.op != "normalize":
        node = next(i for i in node.inputs if i.op in ("normalize", "*", "+") and _has(i, "normalize"))
    return node


def _has(node: Node, op: str) -> bool:
    return node.op == op or any(i.op == op for i in node.inputs)

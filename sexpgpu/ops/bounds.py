"""Which operands of an op index another, and how many places there are: what must lie in 0 … count - 1."""

from __future__ import annotations

from sexpgpu.ir import Node


def indexed(node: Node) -> list[tuple[int, int]]:
    """(number of the operand that indexes, count of what it indexes) of a node; those that only drop what is outside
    (one-hot) are none."""
    places, count = _places(node)
    return [(place, count) for place in places if place < len(node.inputs)]


def _places(node: Node) -> tuple[tuple[int, ...], int]:
    if node.op in ("gather", "take-along"):
        return (1,), node.inputs[0].type.shape[node.attrs["axis"]]
    if node.op == "embed":
        return (1,), node.inputs[0].type.shape[0]
    if node.op in ("scatter-add", "scatter-add-along"):
        return (1,), node.attrs["count"]
    if node.op in ("softmax-cross-entropy", "softmax-cross-entropy-grad"):
        return (1,), node.inputs[0].type.shape[-1]
    if node.op in ("linear-cross-entropy", "linear-cross-entropy-grad"):
        return (2,), node.inputs[1].type.shape[1]
    if node.op == "tensor-product":  # senders and receivers, where it has them
        return (3, 4), node.inputs[0].type.shape[0]
    if node.op == "tensor-product-grad":
        return (3, 4), node.attrs["shape"][0] if node.attrs["target"] == "a" else node.inputs[0].type.shape[0]
    return (), 0

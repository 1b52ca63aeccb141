"""Where samples of a batch are taken together and come back to each: batch norm, losses within the batch.

Assumes the forward graph, before differentiation. A node without the batch mark that depends on a batch, and that a node
with the mark uses, carries something of all samples to each.
"""

from __future__ import annotations

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.source import Span

#: ops whose axis is a place and not a direction
SHAPES = frozenset({"expand-dims", "squeeze", "concat", "stack", "gather", "slice"})


def mixing(root: Node, origins: Origins) -> list[tuple[str, Span | None]]:
    """(path, place) of each layer that mixes samples, in the order of the graph."""
    depends: set[Node] = set()
    found: dict[tuple[str, Span | None], None] = {}
    for node in postorder([root]):
        if node.type.batch or any(i in depends for i in node.inputs):
            depends.add(node)
        shared = [i for i in node.inputs if i in depends and not i.type.batch]
        batched = [i for i in node.inputs if i.type.batch]
        if node.type.batch and batched and (shared or _along_samples(node)):
            origin = origins.of(node)
            found.setdefault((origin.paths[0] if origin.paths else "", origin.spans[0] if origin.spans else None))
    return list(found)


def _along_samples(node: Node) -> bool:
    """An op along axis 0 that keeps it, such as a normalisation or a softmax over samples."""
    axis = node.attrs.get("axis")
    return node.op not in SHAPES and (axis == 0 or (isinstance(axis, tuple) and 0 in axis))

"""Where samples of a batch are taken together and come back to each: batch norm, losses within the batch.

Assumes the forward graph, before differentiation. A node without the batch mark that depends on a batch, and that a node
with the mark uses, carries something of all samples to each.
"""

from __future__ import annotations

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.source import Span


def mixing(root: Node, origins: Origins) -> list[tuple[str, Span | None]]:
    """(path, place) of each layer that mixes samples, in the order of the graph."""
    depends: set[Node] = set()
    found: dict[tuple[str, Span | None], None] = {}
    for node in postorder([root]):
        if node.type.batch or any(i in depends for i in node.inputs):
            depends.add(node)
        shared = [i for i in node.inputs if i in depends and not i.type.batch]
        if shared and node.type.batch and any(i.type.batch for i in node.inputs):
            origin = origins.of(node)
            found.setdefault((origin.paths[0] if origin.paths else "", origin.spans[0] if origin.spans else None))
    return list(found)

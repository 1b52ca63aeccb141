"""A sum with `scatter-add` adds the updates onto the other operand, where that lies in memory anyway: a tied embedding's gradient onto the
head's. Apart, zeros are written, updates are added to them, and a kernel reads both tensors and writes their sum.

Runs on a decomposed graph, after its products are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, table
from sexpgpu.passes.join import replaced
from sexpgpu.passes.schedule.views import PLAIN

NARROW = 128  # columns from which a row is worth programs of its own


def onto(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """`results` with `scatter-onto` nodes in f32 along the first axis, of what nothing else reads."""
    order, kept = postorder(results.values()), set(results.values())
    readers: dict[Node, int] = {}
    for node in order:
        for x in dict.fromkeys(node.inputs):
            readers[x] = readers.get(x, 0) + 1
    found: dict[Node, Node] = {}
    for node in order:
        if node.op != "+" or node.type.dtype != "f32" or node.type.rank != 2 or node.type.shape[1] < NARROW:
            continue
        for x, added in (node.inputs, node.inputs[::-1]):
            if added.op == "scatter-add" and added.attrs["axis"] == 0 and readers[added] == 1 and added not in kept and x.type == added.type and _made(x):
                found[node] = build("scatter-onto", x, *added.inputs)
                break
    return replaced(results, found, origins)


def _made(x: Node) -> bool:
    """Whether a library makes it, so that it stands in memory whatever reads it."""
    while x.op in PLAIN:
        x = x.inputs[0]
    return table()[x.op].lowering.kind in ("template", "contraction") and x.op != "scatter-add"

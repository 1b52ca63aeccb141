"""Indices that no device may follow out of range: each is clamped, and one number counts the tensors that had to be.

A kernel that reads at a wrong index reads whatever lies there, and a library's own check ends the whole CUDA context. So a
graph for a device carries its check: `bad-index` is 0 where every index lay in range, and where it is not, the step writes
nothing and the interpreter finds which index it was (E-RUN-031).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, constant
from sexpgpu.ops.bounds import indexed
from sexpgpu.passes.rewrite import rebuild, rewrite

BAD = "bad-index"


def bounded_fields(results: Mapping[str, Node]) -> frozenset[tuple[str, int]]:
    """(field, count) of fields that index directly: their data is checked before the first step (E-DATA-014)."""
    return frozenset(
        (node.inputs[place].attrs["name"], count)
        for node in postorder(results.values())
        for place, count in indexed(node)
        if node.inputs[place].op == "input"
    )


def guard_indices(results: Mapping[str, Node], known: Collection[tuple[str, int]] = (), origins: Origins | None = None) -> dict[str, Node]:
    """The graph with every index clamped that is no field of `known`, and with the result `bad-index` (f32, how many tensors
    held an index out of range) if there is any such index. Assumes that every gradient is expanded."""
    found: dict[tuple[Node, int], None] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        operands = list(inputs)
        for place, count in indexed(node):
            index = inputs[place]
            if index.op == "input" and (index.attrs["name"], count) in known:
                continue
            found[index, count] = None
            operands[place] = build("clamp", index, low=0, high=max(0, count - 1))
        return rebuild(node, tuple(operands)) if tuple(operands) != inputs else None

    guarded = rewrite(results, rule, origins)
    if not found:
        return guarded
    total = None
    for index, count in found:
        inside = build("logical-and", build(">=", index, constant(0, index.type.dtype)), build("<", index, constant(count, index.type.dtype)))
        wrong = build("cast", build("logical-not", build("reduce-all", inside) if index.type.rank else inside), dtype="f32")
        total = wrong if total is None else build("+", total, wrong)
    assert total is not None
    return guarded | {BAD: total}

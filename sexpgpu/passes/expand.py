"""Replaces `grad` markers by their gradients, innermost first. Assumes a typed graph; leaves no `grad` in it."""

from __future__ import annotations

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ir.node import intern
from sexpgpu.passes.autodiff import grad


def expand_gradients(results: dict[str, Node], origins: Origins) -> dict[str, Node]:
    """The results without `grad` nodes. Each node is rebuilt at most once, operands first."""
    order = postorder(results.values())
    if not any(n.op == "grad" for n in order):
        return results
    new: dict[Node, Node] = {}
    for node in order:
        inputs = tuple(new[i] for i in node.inputs)
        if node.op == "grad":
            new[node] = grad(inputs[0], [inputs[1]], origins)[0]
        elif inputs == node.inputs:
            new[node] = node
        else:
            new[node] = intern(node.op, inputs, node.attrs, node.type)
            origins.add(new[node], origins.of(node))
    return {name: new[node] for name, node in results.items()}

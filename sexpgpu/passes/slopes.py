"""The gradient of an activation as one operation, where a device computes it so with less: gelu's by tanh, which the rule of `autodiff`
writes out.

Written out it is a tanh and a dozen products, sixty instructions an element beside gelu itself. As one operation it shares gelu's exponential and
reciprocal, and a kernel of both has twenty: bytes then decide how long that takes, and arithmetic does not (docs/decisions/0056). Runs on a
decomposed graph; nodes are interned, so what the rule makes is found as exactly that.
"""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, table
from sexpgpu.passes.join import replaced


def slopes(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """The graph with `gelu-tanh-grad` for the gradients of gelu-tanh that are written out in it."""
    readers: dict[Node, list[Node]] = {}
    for node in postorder(results.values()):
        readers.setdefault(node, [])
        for operand in dict.fromkeys(node.inputs):
            readers[operand].append(node)
    found: dict[Node, Node] = {}
    for square in [n for n in readers if n.op == "square" and n.type.dtype in ("f32", "f64")]:
        x = square.inputs[0]
        for node in readers.get(slope(build("gelu-tanh", x)), ()):
            for ct in cotangents(node):
                if ct.type == node.type and derivative(build("gelu-tanh", x), ct) is node:
                    found[node] = build("gelu-tanh-grad", x, ct)
    return replaced(results, found, origins)


def derivative(gelu: Node, ct: Node) -> Node:
    """The gradient by what gelu-tanh is applied to, as its rule writes it: ct · ½ · slope."""
    found = table()["gelu-tanh"].vjp(gelu, ct)  # type: ignore[misc]
    assert found[0] is not None
    return found[0]


def slope(gelu: Node) -> Node:
    """The factor of that which no cotangent is in."""
    return derivative(gelu, gelu).inputs[1]


def cotangents(node: Node) -> tuple[Node, ...]:
    """What may be ct in a node that may be (ct · ½) · slope."""
    return tuple(x for half in node.inputs if half.op == "*" for x in half.inputs) if node.op == "*" else ()

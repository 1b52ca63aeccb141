"""Reverse-mode gradients: IR in, IR out, so they differentiate again, to any order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from sexpgpu.diagnostics import InternalError
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import OpProblem, build, constant, table
from sexpgpu.ops.helpers import zeros


def grad(scalar: Node, wrt: Sequence[Node], origins: Origins | None = None) -> list[Node]:
    """The gradient of `scalar` by each node of `wrt`, of its type; a zero where nothing depends on it.

    `wrt` may be any float nodes, inner ones too. A gradient node comes from where its forward node does, with phase
    "backward". Nothing recurses: graphs are deep.
    """
    if scalar.type.rank or not scalar.type.is_float:
        raise OpProblem(
            "E-SHAPE-016", f"grad: needs a float scalar, got {scalar.type}", help="take (mean y) or (sum y) first"
        )
    for x in wrt:
        if not x.type.is_float:
            raise OpProblem("E-SHAPE-017", f"grad: no gradient by a tensor of {x.type.dtype}")
    order = postorder([scalar])
    active = _active(order, wrt)
    cotangents: dict[Node, Node] = {scalar: constant(1.0, scalar.type.dtype)} if scalar in active else {}
    ops = table()
    for node in reversed(order):
        ct = cotangents.get(node)
        if ct is None or not any(i in active for i in node.inputs):
            continue
        with _at(origins, node):
            for operand, part in zip(node.inputs, _pull(ops[node.op], node, ct), strict=True):
                if part is None or operand not in active:
                    continue
                known = cotangents.get(operand)
                cotangents[operand] = part if known is None else build("+", known, part)
    return [cotangents[x] if x in cotangents else zeros(x.type) for x in wrt]


def _active(order: Sequence[Node], wrt: Sequence[Node]) -> set[Node]:
    """The float nodes that depend on one of `wrt`."""
    active = set(wrt)
    for node in order:
        if node not in active and node.type.is_float and any(i in active for i in node.inputs):
            active.add(node)
    return active


def _pull(op, node: Node, ct: Node) -> Sequence[Node | None]:
    """The cotangents of a node's operands."""
    if op.vjp is None:
        return (None,) * len(node.inputs)
    parts = op.vjp(node, ct)
    for operand, part in zip(node.inputs, parts, strict=True):
        if part is not None and (part.type.shape != operand.type.shape or part.type.dtype != operand.type.dtype):
            raise InternalError(f"the gradient of {node.op} gives {part.type} for an operand of {operand.type}")
    return parts


def _at(origins: Origins | None, node: Node):
    return nullcontext() if origins is None else origins.at(replace(origins.of(node), phase="backward"))

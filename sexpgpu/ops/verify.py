"""Checks a graph against the ops' definitions; runs after every pass in the tests."""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.diagnostics import InternalError
from sexpgpu.ir import Graph, Node, postorder
from sexpgpu.ops.definition import OpProblem, table


class VerifyError(InternalError):
    """A graph that no pass of ours may make: a bug, never a user's mistake."""


def verify(graph: Graph | Mapping[str, Node]) -> None:
    """Every node's op exists, has the operands and attributes of its definition, and the type that it infers."""
    results = graph.results if isinstance(graph, Graph) else graph
    ops = table()
    for node in postorder(results.values()):
        op = ops.get(node.op)
        if op is None:
            raise VerifyError(f"no op is named {node.op}")
        if set(node.attrs) != {p.name for p in op.attributes}:
            raise VerifyError(
                f"{node.op}: attributes {sorted(node.attrs)}, defined {sorted(p.name for p in op.attributes)}"
            )
        variadic = bool(op.operands) and op.operands[-1].endswith("*")
        if len(node.inputs) != len(op.operands) and not variadic:
            raise VerifyError(f"{node.op}: {len(node.inputs)} operands, defined {len(op.operands)}")
        try:
            inferred = op.infer(tuple(i.type for i in node.inputs), node.attrs)
        except OpProblem as problem:
            raise VerifyError(f"{node.op}: {problem.message}") from None
        if inferred != node.type:
            raise VerifyError(f"{node.op}: has type {node.type}, its operands give {inferred}")

"""Many small layers over the same rows as one op: what a backend makes of products with small matrices and of what stands between them
(`passes/chains.py`)."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType, postorder
from sexpgpu.ops.definition import Lowering, Op, Parameter, build, constant, evaluated, table
from sexpgpu.ops.helpers import Attrs, Types, traffic

#: steps of a :program, each of which makes a value [rows n]: ("load", input), ("point", op, arguments), ("dot", value, input, turned, scale);
#: an argument is a value's number or ("number", x). Outputs: ("value", value), or ("sum", pairs of values, scale), Σ xᵀ y.


def _infer(types: Types, attrs: Attrs) -> TensorType:
    _, shape = attrs["outputs"][attrs["of"]]
    return TensorType(types[0].dtype, shape, types[0].batch and attrs["outputs"][attrs["of"]][0][0] == "value")


def plain(node: Node) -> Node:
    """The output as the ops that it stands for."""
    values: list[Node] = []
    dtype = node.inputs[0].type.dtype
    for kind, *rest in node.attrs["program"]:
        if kind == "load":
            values.append(node.inputs[rest[0]])
        elif kind == "point":
            values.append(build(rest[0], *(constant(x[1], dtype) if isinstance(x, tuple) else values[x] for x in rest[1])))
        else:
            value, place, turned, scale = rest
            weight = node.inputs[place]
            weight = build("transpose", weight, permutation=(1, 0)) if turned else weight
            values.append(build("matmul-sum", values[value], weight, scale=scale))
    (kind, *rest), _ = node.attrs["outputs"][node.attrs["of"]]
    if kind == "value":
        return values[rest[0]]
    pairs, scale = rest
    operands = [x for a, b in pairs for x in (build("transpose", values[a], permutation=(1, 0)), values[b])]
    return build("matmul-sum", *operands, scale=scale)


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    return evaluated(torch, plain(node), dict(zip(node.inputs, args, strict=True)))


def _cost(node: Node) -> tuple[int, int]:
    inside = set(node.inputs)
    return sum(table()[n.op].cost(n)[0] for n in postorder([plain(node)]) if n not in inside and n.inputs), traffic(node)


OPS = (
    Op(
        "row-chain",
        "Output `of` of a :program of products with small matrices and pointwise ops over the same rows.",
        ("operands*",),
        _infer,
        _reference,
        _cost,
        Lowering("template", "row-chain"),
        attributes=(Parameter("program", "parts", ()), Parameter("outputs", "parts", ()), Parameter("of", "int", 0)),
        lisp=False,
        differentiable=False,
    ),
)

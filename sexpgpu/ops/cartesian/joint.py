"""Several derivatives of one product in one launch, each a sum over fillings of its other slots: what the CUDA backend makes of
`tensor-product` and `tensor-product-grad` nodes that read the same tensors (`backends/cuda/cartesian/join.py`)."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, Parameter, build, table
from sexpgpu.ops.helpers import Attrs, Types, traffic

#: an output: (target, shape, batch, uses); a use: numbers of the operands in the order of SLOTS, without the target
Out = tuple[str, tuple[int, ...], bool, tuple[tuple[int, int, int], ...]]


def _infer(types: Types, attrs: Attrs) -> TensorType:
    _, shape, batch, _ = attrs["outputs"][attrs["of"]]
    return TensorType(types[0].dtype, shape, batch)


def spread(node: Node) -> tuple[list[Node], tuple[Node, ...]]:
    """The operands, those given as two factors multiplied, and the indices."""
    count = len(node.attrs["slots"])
    operands, rest = list(node.inputs[:count]), list(node.inputs[count:])
    for n, inner in enumerate(node.attrs["inner"]):
        if inner:
            operands[n] = build("matmul", operands[n], rest.pop(0))
    return operands, tuple(rest)


def parts(node: Node) -> list[Node]:
    """The single products whose sum an output is."""
    target, shape, batch, uses = node.attrs["outputs"][node.attrs["of"]]
    operands, edges = spread(node)
    keep = {k: node.attrs[k] for k in ("l-max", "paths", "reduce-paths")}
    found = []
    for use in uses:
        filled = [operands[n] for n in use]
        if target == "result":
            found.append(build("tensor-product", *filled, *edges, symmetric=False, **keep))
        else:
            found.append(build("tensor-product-grad", *filled, *edges, target=target, shape=shape, batch=batch, **keep))
    return found


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    """The sum of the single products."""
    known = dict(zip(node.inputs, args, strict=True))
    for x in spread(node)[0]:
        if x not in known:
            known[x] = table()[x.op].reference(torch, x, [known[i] for i in x.inputs])
    total: Any = None
    for part in parts(node):
        value = table()[part.op].reference(torch, part, [known[x] for x in part.inputs])
        total = value if total is None else total + value
    return total


def _cost(node: Node) -> tuple[int, int]:
    return sum(table()[p.op].cost(p)[0] for p in parts(node)), traffic(node)


OPS = (
    Op(
        "tensor-product-joint",
        "Output `of` of several derivatives of one product that a kernel makes together. `inner` of each operand: 0, or the size over which "
        "it is the product of two factors, the second of which comes after the operands; () if none is.",
        ("operands*",),
        _infer,
        _reference,
        _cost,
        Lowering("template", "tensor-product"),
        attributes=(Parameter("slots", "parts", ()), Parameter("inner", "parts", ()), Parameter("outputs", "parts", ()), Parameter("of", "int", 0), Parameter("l-max", "int", None),
                    Parameter("paths", "triples", None), Parameter("reduce-paths", "bool", False)),
        lisp=False,
        differentiable=False,
    ),
)

"""The equivariant linear map as the CUDA backend runs it: every rank, and what its weights are multiplied by, in one launch
(`passes/rank_maps.py` makes these of `equivariant-linear` and its gradients)."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.cartesian.algebra import rank_of
from sexpgpu.ops.definition import Lowering, Op, Parameter, build, table
from sexpgpu.ops.helpers import Attrs, Types, traffic


def plain(node: Node) -> Node:
    """The map of scaled weights that a `rank-map` stands for."""
    x, *weights = node.inputs
    if node.attrs["back"]:
        return build("equivariant-linear-back", x, *weights, shape=node.type.shape, batch=node.type.batch)
    return build("equivariant-linear", x, *weights, **{"l-max": rank_of(node.type.shape[1])})


def _infer_map(types: Types, attrs: Attrs) -> TensorType:
    return TensorType(types[0].dtype, attrs["shape"], attrs["batch"])


def _reference_map(torch: Any, node: Node, args: list[Any]) -> Any:
    inner = plain(node)
    scaled = [w * s for w, s in zip(args[1:], node.attrs["scales"], strict=True)]
    return table()[inner.op].reference(torch, inner, [args[0], *scaled])


def _cost_map(node: Node) -> tuple[int, int]:
    return table()[plain(node).op].cost(plain(node))[0], traffic(node)


def pairs(node: Node) -> list[tuple[Node, Node]]:
    """Features and cotangents whose products a `rank-weights` adds."""
    return list(zip(node.inputs[::2], node.inputs[1::2], strict=True))


def _infer_weights(types: Types, attrs: Attrs) -> TensorType:
    _, _, inputs, _ = attrs["blocks"][attrs["of"]]
    return TensorType(types[0].dtype, (inputs, types[1].shape[2]))


def _reference_weights(torch: Any, node: Node, args: list[Any]) -> Any:
    rank, start, inputs, scale = node.attrs["blocks"][node.attrs["of"]]
    found: Any = None
    for (x, ct), given in zip(pairs(node), zip(args[::2], args[1::2], strict=True), strict=True):
        single = build("equivariant-linear-weight", x, ct, rank=rank, start=start, inputs=inputs)
        part = table()[single.op].reference(torch, single, list(given))
        found = part if found is None else found + part
    return found * scale


def _cost_weights(node: Node) -> tuple[int, int]:
    rank, _, _, _ = node.attrs["blocks"][node.attrs["of"]]
    return sum(2 * ct.type.shape[0] * (2 * rank + 1) * node.type.size for _, ct in pairs(node)), traffic(node)


OPS = (
    Op(
        "rank-map",
        "equivariant-linear, or with :back its gradient by features, of weights times :scales.",
        ("x", "weights*"),
        _infer_map,
        _reference_map,
        _cost_map,
        Lowering("template", "rank-map"),
        attributes=(Parameter("scales", "parts", ()), Parameter("back", "bool", False), Parameter("shape", "shape", None), Parameter("batch", "bool", False)),
        lisp=False,
        differentiable=False,
    ),
    Op(
        "rank-weights",
        "The gradients of equivariant-linear by its weights, each added over pairs of features and cotangents; the rank `of` of the "
        ":blocks (rank, first column, inputs, scale) that one launch makes.",
        ("operands*",),
        _infer_weights,
        _reference_weights,
        _cost_weights,
        Lowering("template", "rank-weights"),
        attributes=(Parameter("blocks", "parts", ()), Parameter("of", "int", 0)),
        lisp=False,
        differentiable=False,
    ),
)

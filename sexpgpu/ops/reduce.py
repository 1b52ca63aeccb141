"""Reductions over one axis, several, or all. Sums keep their dtype; extremes propagate NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    axes_of,
    axis_of,
    div,
    expand_reduced,
    mul,
    per_input,
    reduced,
    require_bool,
    require_float,
    require_number,
    spread,
    total,
)

KEEP = Parameter("keep-dims", "bool", False)


def _canonical(name: str) -> Callable[[tuple[Node, ...], Attrs], tuple[tuple[Node, ...], Attrs]]:
    return lambda inputs, attrs: (
        inputs,
        {"axis": axes_of(name, attrs["axis"], inputs[0].type.rank), "keep-dims": bool(attrs["keep-dims"])},
    )


def _count(node: Node) -> int:
    count = 1
    for axis in node.attrs["axis"]:
        count *= node.inputs[0].type.shape[axis]
    return count


def _back(node: Node, value: Node) -> Node:
    """A value of the result's shape, ready to broadcast against the operand."""
    return expand_reduced(value, node.inputs[0].type, node.attrs["axis"], node.attrs["keep-dims"])


def _sum_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (spread(_back(node, ct), node.inputs[0].type),)


def _mean_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (spread(_back(node, mul(ct, 1.0 / max(1, _count(node)))), node.inputs[0].type),)


def _extreme_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """Equal shares to all elements that attain the extreme."""
    x = node.inputs[0]
    hit = build("cast", build("=", x, spread(_back(node, node), x.type)), dtype=x.type.dtype)
    shares = total(hit, node.attrs["axis"], keep=node.attrs["keep-dims"])
    return (mul(hit, _back(node, div(ct, shares))),)


def _sum(torch: Any, node: Node, args: list[Any]) -> Any:
    axes = node.attrs["axis"]  # torch takes no axes for all of them
    return torch.sum(args[0], axes, node.attrs["keep-dims"], dtype=args[0].dtype) if axes else args[0]


def _mean(torch: Any, node: Node, args: list[Any]) -> Any:
    axes = node.attrs["axis"]
    return torch.mean(args[0], axes, node.attrs["keep-dims"]) if axes else args[0]


def _by(function: str) -> Callable[[Any, Node, list[Any]], Any]:
    def reference(torch: Any, node: Node, args: list[Any]) -> Any:
        axes = node.attrs["axis"]
        return getattr(torch, function)(args[0], axes, node.attrs["keep-dims"]) if axes else args[0]

    return reference


def _reduction(
    name: str,
    doc: str,
    check: Callable[..., None],
    reference: Callable[[Any, Node, list[Any]], Any],
    vjp: Callable[[Node, Node], tuple[Node | None, ...]] | None = None,
    empty: bool = True,
) -> Op:
    def infer(types: Types, attrs: Attrs) -> TensorType:
        check(name, types[0])
        if not empty and any(types[0].shape[a] == 0 for a in attrs["axis"]):
            raise OpProblem("E-SHAPE-015", f"{name}: nothing to reduce, an axis has size 0")
        return reduced(types[0], attrs["axis"], attrs["keep-dims"])

    return Op(
        name,
        doc,
        ("x",),
        infer,
        reference,
        per_input(1),
        Lowering("reduction", name),
        vjp=vjp,
        attributes=(Parameter("axis", "axes"), KEEP),
        differentiable=vjp is not None,
        example=f"({name} x :axis -1)",
        canonical=_canonical(name),
    )


def _arg(name: str, doc: str) -> Op:
    def infer(types: Types, attrs: Attrs) -> TensorType:
        require_number(name, types[0])
        if types[0].shape[attrs["axis"]] == 0:
            raise OpProblem("E-SHAPE-015", f"{name}: axis {attrs['axis']} has size 0")
        return reduced(types[0], (attrs["axis"],), attrs["keep-dims"], "i32")

    def reference(torch: Any, node: Node, args: list[Any]) -> Any:
        found = getattr(torch, name)(args[0], node.attrs["axis"], node.attrs["keep-dims"])
        return found.to(torch.int32)

    return Op(
        name,
        doc,
        ("x",),
        infer,
        reference,
        per_input(1),
        Lowering("reduction", name),
        differentiable=False,
        attributes=(Parameter("axis", "axis", -1), KEEP),
        example=f"({name} x :axis -1)",
        canonical=lambda inputs, attrs: (inputs, {**attrs, "axis": axis_of(name, attrs["axis"], inputs[0].type.rank)}),
    )


OPS = (
    _reduction(
        "sum", "The sum over :axis (all axes if none is given); integers stay integers.", require_number, _sum, _sum_vjp
    ),
    _reduction("mean", "The mean over :axis.", require_float, _mean, _mean_vjp, empty=False),
    _reduction(
        "reduce-max",
        "The largest element over :axis; NaN if any is. Ties share the gradient.",
        require_number,
        _by("amax"),
        _extreme_vjp,
        empty=False,
    ),
    _reduction(
        "reduce-min",
        "The smallest element over :axis; NaN if any is. Ties share the gradient.",
        require_number,
        _by("amin"),
        _extreme_vjp,
        empty=False,
    ),
    _reduction("reduce-all", "Whether all hold over :axis.", require_bool, _by("all")),
    _reduction("reduce-any", "Whether any holds over :axis.", require_bool, _by("any")),
    _arg(
        "argmax",
        "The place of the largest element along :axis, i32; the first NaN if there is one, the first of equals.",
    ),
    _arg(
        "argmin",
        "The place of the smallest element along :axis, i32; the first NaN if there is one, the first of equals.",
    ),
)

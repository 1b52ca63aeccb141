"""Products and variances over axes."""

from __future__ import annotations

from math import prod
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    axes_of,
    expand_reduced,
    is_int,
    mul,
    per_input,
    reduced,
    require_float,
    require_number,
    spread,
    sub,
)

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical_prod(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    axis = axes_of("prod", attrs["axis"], inputs[0].type.rank)
    return inputs, {"axis": axis, "keep-dims": bool(attrs["keep-dims"])}


def _infer_prod(types: Types, attrs: Attrs) -> TensorType:
    require_number("prod", types[0])
    return reduced(types[0], attrs["axis"], attrs["keep-dims"])


def _last(x: Node, axes: tuple[int, ...]) -> tuple[Node, tuple[int, ...], tuple[int, ...]]:
    """x with `axes` joined as its last one; the order that brought them there and the shape before joining."""
    kept = tuple(a for a in range(x.type.rank) if a not in axes)
    order = (*kept, *axes)
    moved = x if order == tuple(range(x.type.rank)) else build("transpose", x, permutation=order)
    shape = tuple(x.type.shape[a] for a in kept)
    flat = build("reshape", moved, shape=(*shape, prod(x.type.shape[a] for a in axes)))
    return flat, order, moved.type.shape


def _prod(torch: Any, node: Node, args: list[Any]) -> Any:
    x, axes = args[0], node.attrs["axis"]
    for axis in reversed(axes):
        x = torch.prod(x, axis, dtype=x.dtype)
    return x.reshape(node.type.shape)


def _prod_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """The product of the others, exact beside zeros: products of pairs upward, ct times siblings downward."""
    x, axes = node.inputs[0], node.attrs["axis"]
    if not axes or not x.type.size:
        return (spread(expand_reduced(ct, x.type, axes, node.attrs["keep-dims"]), x.type),)
    level, order, moved = _last(x, axes)
    *rest, count = level.type.shape
    rank, siblings, sizes = len(rest), [], []
    while (size := level.type.shape[rank]) > 1:
        if size % 2:
            one = build("broadcast", build("constant", value=1.0, dtype=x.type.dtype), shape=(*rest, 1))
            level = build("concat", level, one, axis=rank)
        pairs = build("reshape", level, shape=(*rest, (size + 1) // 2, 2))
        siblings.append(build("flip", pairs, axis=rank + 1))
        sizes.append(size)
        level = build("prod", pairs, axis=rank + 1)
    down = build("reshape", ct, shape=(*rest, 1))
    for pairs, size in zip(reversed(siblings), reversed(sizes), strict=True):
        down = mul(build("expand-dims", down, axis=-1), pairs)
        down = build("reshape", down, shape=(*rest, 2 * pairs.type.shape[rank]))
        if size % 2:
            down = build("slice", down, axis=rank, stop=size)
    down = build("reshape", down, shape=moved)
    if order != tuple(range(x.type.rank)):
        down = build("transpose", down, permutation=tuple(order.index(a) for a in range(x.type.rank)))
    return (down,)


def _canonical_variance(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    axis = axes_of("variance", attrs["axis"], inputs[0].type.rank)
    return inputs, {"axis": axis, "correction": attrs["correction"], "keep-dims": bool(attrs["keep-dims"])}


def _infer_variance(types: Types, attrs: Attrs) -> TensorType:
    require_float("variance", types[0])
    count, correction = prod(types[0].shape[a] for a in attrs["axis"]), attrs["correction"]
    if not is_int(correction) or not 0 <= correction < count:
        words = f"variance: :correction {correction} leaves nothing to divide by; {count} elements are reduced"
        raise OpProblem("E-SHAPE-022", words, help="give :correction 0, or reduce more elements")
    return reduced(types[0], attrs["axis"], attrs["keep-dims"])


def _variance(torch: Any, node: Node, args: list[Any]) -> Any:
    a = node.attrs
    if not a["axis"]:
        return args[0] - args[0]
    return torch.var(args[0], a["axis"], correction=a["correction"], keepdim=a["keep-dims"])


def _variance_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, a = node.inputs[0], node.attrs
    count = prod(x.type.shape[i] for i in a["axis"])
    centred = sub(x, build("mean", x, axis=a["axis"], **{"keep-dims": True}))
    wide = expand_reduced(mul(ct, 2.0 / (count - a["correction"])), x.type, a["axis"], a["keep-dims"])
    return (mul(centred, wide),)


_KEEP = Parameter("keep-dims", "bool", False)

OPS = (
    Op(
        "prod",
        "The product over :axis (all axes if none is given); its gradient is exact beside zeros.",
        ("x",),
        _infer_prod,
        _prod,
        per_input(1),
        Lowering("reduction", "prod"),
        vjp=_prod_vjp,
        attributes=(Parameter("axis", "axes"), _KEEP),
        example="(prod x :axis -1)",
        canonical=_canonical_prod,
    ),
    Op(
        "variance",
        "The variance over :axis: squared distances from the mean over count - :correction (1, as torch's var).",
        ("x",),
        _infer_variance,
        _variance,
        per_input(4),
        Lowering("reduction", "variance"),
        vjp=_variance_vjp,
        attributes=(Parameter("axis", "axes"), Parameter("correction", "int", 1), _KEEP),
        example="(variance x :axis -1 :correction 0)",
        canonical=_canonical_variance,
    ),
)

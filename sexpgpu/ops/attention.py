"""Scaled dot-product attention and normalization: one pass each forward; gradients in IR ops, to any order."""

from __future__ import annotations

from math import sqrt
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build, constant
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    add,
    axes_of,
    mul,
    neg,
    per_input,
    require_float,
    same_dtype,
    sub,
    total,
    traffic,
    where,
)

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical_attend(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    q = inputs[0].type
    if q.rank < 2 or not q.shape[-1]:
        raise OpProblem("E-SHAPE-007", f"attend: queries need 2 axes or more, got {q}")
    scale = 1.0 / sqrt(q.shape[-1]) if attrs["scale"] is None else float(attrs["scale"])
    return inputs, {"causal": bool(attrs["causal"]), "scale": scale}


def _infer_attend(types: Types, attrs: Attrs) -> TensorType:
    same_dtype("attend", types)
    require_float("attend", *types)
    q, k, v = types
    for name, t in (("keys", k), ("values", v)):
        if t.rank != q.rank:
            raise OpProblem("E-SHAPE-007", f"attend: queries {q} and {name} {t} differ in their number of axes")
    for number, t in ((1, k), (2, v)):
        for axis in range(q.rank - 2):
            if t.shape[axis] != q.shape[axis]:
                clash = ((0, axis), (number, axis))
                raise OpProblem("E-SHAPE-001", f"attend: axes differ: {q.shape[axis]} and {t.shape[axis]}", clash)
    last, place = q.rank - 1, q.rank - 2
    if q.shape[last] != k.shape[last]:
        clash = ((0, last), (1, last))
        raise OpProblem("E-SHAPE-003", f"attend: inner dimensions differ: {q.shape[last]} and {k.shape[last]}", clash)
    if k.shape[place] != v.shape[place]:
        clash = ((1, place), (2, place))
        raise OpProblem("E-SHAPE-001", f"attend: keys and values differ: {k.shape[place]} and {v.shape[place]}", clash)
    if attrs["causal"] and q.shape[place] != k.shape[place]:
        clash = ((0, place), (1, place))
        raise OpProblem("E-SHAPE-001", f"attend: causal needs as many queries as keys, got {q} and {k}", clash)
    return TensorType(q.dtype, (*q.shape[:-1], v.shape[-1]), q.batch)


def _attend(torch: Any, node: Node, args: list[Any]) -> Any:
    """In bf16 and f16 the weights and sums are f32, and the result is rounded once."""
    dtype = args[0].dtype
    q, k, v = (x.float() for x in args) if node.type.dtype in ("bf16", "f16") else args
    causal, scale = node.attrs["causal"], node.attrs["scale"]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.to(dtype)


def _attend_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """As in FlashAttention (Dao et al. 2022): the row sums of ct · result stand for those of [t s] matrices."""
    q, k, v = node.inputs
    scale, size = node.attrs["scale"], k.type.shape[-2]
    scaled = mul(q, scale)
    scores = build("matmul", scaled, build("transpose", k))
    if node.attrs["causal"]:
        column = build("iota", count=size)
        seen = build(">=", build("reshape", column, shape=(size, 1)), column)
        # added, not selected: one [t s] matrix for all heads, and torch's `where` is slow over broadcast masks
        scores = add(scores, where(seen, constant(0.0, q.type.dtype), float("-inf")))
    weights = build("softmax", scores)
    inner = total(mul(ct, node), (node.type.rank - 1,), keep=True)
    by_scores = mul(weights, sub(build("matmul", ct, build("transpose", v)), inner))
    return (
        mul(build("matmul", by_scores, k), scale),
        build("matmul", build("transpose", by_scores), scaled),
        build("matmul", build("transpose", weights), ct),
    )


def _attend_cost(node: Node) -> tuple[int, int]:
    q, k, v = (i.type for i in node.inputs)
    pairs = q.size // max(1, q.shape[-1]) * k.shape[-2] // (2 if node.attrs["causal"] else 1)
    return (pairs * (2 * q.shape[-1] + 2 * v.shape[-1] + 12), traffic(node))


def _canonical_normalize(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    eps = float(attrs["eps"])
    if not eps >= 0.0:
        raise OpProblem("E-SHAPE-015", f"normalize: :eps must be 0 or more, got {eps}")
    axis = axes_of("normalize", attrs["axis"], inputs[0].type.rank)
    return inputs, {"axis": axis, "eps": eps, "center": bool(attrs["center"])}


def _infer_normalize(types: Types, attrs: Attrs) -> TensorType:
    require_float("normalize", types[0])
    return types[0]


def _normalize(torch: Any, node: Node, args: list[Any]) -> Any:
    x, axes, eps = args[0], node.attrs["axis"], node.attrs["eps"]
    if node.attrs["center"]:
        if axes and axes == tuple(range(x.dim() - len(axes), x.dim())):
            return torch.nn.functional.layer_norm(x, [x.shape[a] for a in axes], eps=eps)
        x = x - x.mean(axes, True)
    return x * torch.rsqrt((x * x).mean(axes, True) + eps)


def _normalize_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (build("normalize-grad", node.inputs[0], ct, **node.attrs),)


def _infer_normalize_grad(types: Types, attrs: Attrs) -> TensorType:
    require_float("normalize-grad", *types)
    same_dtype("normalize-grad", types)
    if types[0].shape != types[1].shape:
        raise OpProblem("E-SHAPE-001", f"normalize-grad: {types[0]} and {types[1]} differ")
    return types[0]


def _normalize_grad(torch: Any, node: Node, args: list[Any]) -> Any:
    """With r = rsqrt(var + eps): r · (ct - mean(ct) - y mean(ct y)), without the second term if not centred."""
    x, ct = args
    axes, eps, center = node.attrs["axis"], node.attrs["eps"], node.attrs["center"]
    if center and axes and axes == tuple(range(x.dim() - len(axes), x.dim())):
        shape = [x.shape[a] for a in axes]
        x, ct = x.contiguous(), ct.contiguous()
        _, mean, scale = torch.native_layer_norm(x, shape, None, None, eps)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(ct, x, shape, mean, scale, None, None, [True, False, False])[0]
    if center:
        x = x - x.mean(axes, True)
    scale = torch.rsqrt((x * x).mean(axes, True) + eps)
    y = x * scale
    out = ct - y * (ct * y).mean(axes, True)
    return (out - ct.mean(axes, True) if center else out) * scale


def _normalize_grad_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """Symmetric and linear in c; by x: -r · (r y (mean(ct c) - mean(ct) mean(c) - a b) + b g(c) + a g(ct)),
    where a = mean(c y), b = mean(ct y) and g is this op."""
    x, c = node.inputs
    axes, center = node.attrs["axis"], node.attrs["center"]
    mean = lambda value: build("mean", value, axis=axes, **{"keep-dims": True})  # noqa: E731
    y = build("normalize", x, **node.attrs)
    other = build("normalize-grad", x, ct, **node.attrs)
    a, b = mean(mul(c, y)), mean(mul(ct, y))
    inner = sub(mean(mul(ct, c)), mul(a, b))
    if center:
        inner = sub(inner, mul(mean(ct), mean(c)))
    spread = sub(x, mean(x)) if center else x
    scale = build("rsqrt", add(mean(build("square", spread)), node.attrs["eps"]))
    by_x = neg(mul(scale, add(mul(mul(scale, y), inner), add(mul(b, node), mul(a, other)))))
    return (by_x, other)


_NORMALIZE = (Parameter("axis", "axes", -1), Parameter("eps", "float", 1e-5), Parameter("center", "bool", True))

OPS = (
    Op(
        "attend",
        "softmax(q kᵀ · :scale) v over the last two axes; q [… t d], k [… s d], v [… s e]. :scale is 1/√d unless "
        "given; :causal lets a query see its own and earlier keys.",
        ("q", "k", "v"),
        _infer_attend,
        _attend,
        _attend_cost,
        Lowering("template", "attend"),
        vjp=_attend_vjp,
        attributes=(Parameter("causal", "bool", False), Parameter("scale", "float")),
        example="(attend q k v :causal true)",
        canonical=_canonical_attend,
    ),
    Op(
        "normalize",
        "(x - mean) / √(variance + :eps) over :axis; with :center false x / √(mean of squares + :eps).",
        ("x",),
        _infer_normalize,
        _normalize,
        per_input(8),
        Lowering("template", "normalize"),
        vjp=_normalize_vjp,
        attributes=_NORMALIZE,
        example="(normalize x :axis -1)",
        canonical=_canonical_normalize,
    ),
    Op(
        "normalize-grad",
        "The gradient of normalize by its operand.",
        ("x", "ct"),
        _infer_normalize_grad,
        _normalize_grad,
        per_input(14),
        Lowering("template", "normalize-grad"),
        vjp=_normalize_grad_vjp,
        attributes=_NORMALIZE,
        lisp=False,
        example="(normalize-grad x ct)",
        canonical=_canonical_normalize,
    ),
)

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
    is_int,
    mul,
    neg,
    per_input,
    require_float,
    same_dtype,
    sub,
    total,
    traffic,
    unbroadcast,
    where,
)

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical_attend(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    q, window = inputs[0].type, attrs["window"]
    if q.rank < 2 or not q.shape[-1]:
        raise OpProblem("E-SHAPE-007", f"attend: queries need 2 axes or more, got {q}")
    if window is not None and (not is_int(window) or window < 1):
        raise OpProblem("E-SHAPE-015", f"attend: :window must be an integer of 1 or more, got {window}")
    scale = 1.0 / sqrt(q.shape[-1]) if attrs["scale"] is None else float(attrs["scale"])
    return inputs, {"causal": bool(attrs["causal"]), "scale": scale, "window": window}


def _infer_attend(types: Types, attrs: Attrs) -> TensorType:
    q, k, v, *masks = types
    same_dtype("attend", (q, k, v, *(m for m in masks if m.dtype != "bool")))
    require_float("attend", q, k, v)
    for name, t in (("keys", k), ("values", v)):
        if t.rank != q.rank:
            raise OpProblem("E-SHAPE-007", f"attend: queries {q} and {name} {t} differ in their number of axes")
    for number, t in ((1, k), (2, v)):
        for axis in range(q.rank - 2):
            if t.shape[axis] != (k if axis == q.rank - 3 else q).shape[axis]:
                clash = ((0, axis), (number, axis))
                raise OpProblem("E-SHAPE-001", f"attend: axes differ: {q.shape[axis]} and {t.shape[axis]}", clash)
    last, place, heads = q.rank - 1, q.rank - 2, q.rank - 3
    if heads >= 0 and q.shape[heads] != k.shape[heads] and (not k.shape[heads] or q.shape[heads] % k.shape[heads]):
        words = f"attend: axes differ: {q.shape[heads]} and {k.shape[heads]}"
        help = "the heads of keys and values must be those of the queries, or divide them"  # noqa: A001
        raise OpProblem("E-SHAPE-001", words, ((0, heads), (1, heads)), help)
    if q.shape[last] != k.shape[last]:
        clash = ((0, last), (1, last))
        raise OpProblem("E-SHAPE-003", f"attend: inner dimensions differ: {q.shape[last]} and {k.shape[last]}", clash)
    if k.shape[place] != v.shape[place]:
        clash = ((1, place), (2, place))
        raise OpProblem("E-SHAPE-001", f"attend: keys and values differ: {k.shape[place]} and {v.shape[place]}", clash)
    if (attrs["causal"] or attrs["window"]) and q.shape[place] != k.shape[place]:
        clash = ((0, place), (1, place))
        word = "causal needs" if attrs["causal"] else "a window needs"
        raise OpProblem("E-SHAPE-001", f"attend: {word} as many queries as keys, got {q} and {k}", clash)
    _check_mask(masks, (*q.shape[:-1], k.shape[place]))
    return TensorType(q.dtype, (*q.shape[:-1], v.shape[-1]), q.batch)


def _check_mask(masks: list[TensorType], scores: tuple[int, ...]) -> None:
    if len(masks) > 1:
        raise OpProblem("E-SHAPE-026", f"attend: takes one mask at most, got {len(masks)}")
    for m in masks:
        fits = m.rank <= len(scores) and all(
            a in (1, b) for a, b in zip(reversed(m.shape), reversed(scores), strict=False)
        )
        if not fits:
            raise OpProblem("E-SHAPE-026", f"attend: the mask {m} does not broadcast to the scores {list(scores)}")


def _band(torch: Any, attrs: Attrs, keys: int) -> Any:
    """Which of the keys a query may see by :causal and :window, [t s], or None for all."""
    causal, window = attrs["causal"], attrs["window"]
    if not causal and window is None:
        return None
    place = torch.arange(keys)
    apart = place[:, None] - place
    seen = apart >= 0 if causal else None
    if window is None:
        return seen
    near = apart.abs() < window
    return near if seen is None else seen & near


def _attend(torch: Any, node: Node, args: list[Any]) -> Any:
    """In bf16 and f16 the weights and sums are f32, and the result is rounded once."""
    dtype, (q, k, v, *masks) = args[0].dtype, args
    if node.type.dtype in ("bf16", "f16"):
        q, k, v = q.float(), k.float(), v.float()
        masks = [m.float() if m.is_floating_point() else m for m in masks]
    return _attend_with(torch, node.attrs, [q, k, v, *masks]).to(dtype)


def _attend_with(torch: Any, a: Attrs, args: list[Any]) -> Any:
    """attend by these settings."""
    q, k, v, *masks = args
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    run = torch.nn.functional.scaled_dot_product_attention
    # torch's fused kernel makes 0 of a row of NaN scores
    known = bool(torch.isfinite(q.sum() + k.sum())) and not any(bool(m.isnan().any()) for m in masks)
    if known and not masks and a["window"] is None:
        return run(q, k, v, is_causal=a["causal"], scale=a["scale"])
    band = _band(torch, a, k.shape[-2])
    mask = masks[0] if masks else band
    if masks and band is not None:
        mask = mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, float("-inf"))
    if not known:
        return _attend_plainly(torch, q, k, v, mask, a["scale"])
    return run(q, k, v, attn_mask=mask.expand(*q.shape[:-1], k.shape[-2]), scale=a["scale"])


def _attend_plainly(torch: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    """By its formula, so that NaN in a score that counts is NaN in the result."""
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    if mask is None:
        return torch.matmul(torch.softmax(scores, -1), v)
    seen = mask if mask.dtype == torch.bool else mask != float("-inf")
    if mask.dtype != torch.bool:
        scores = scores + mask
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.matmul(weights.masked_fill(~seen.any(-1, keepdim=True), 0.0), v)


def _seen(node: Node) -> Node | None:
    """`_band` in the IR."""
    size, causal, window = node.inputs[1].type.shape[-2], node.attrs["causal"], node.attrs["window"]
    column = build("iota", count=size)
    row = build("reshape", column, shape=(size, 1))
    seen = build(">=", row, column) if causal else None
    if window is None:
        return seen
    near = build("<", build("abs", sub(row, column)), constant(window, "i32"))
    return near if seen is None else build("logical-and", seen, near)


def _masked(node: Node, scores: Node) -> tuple[Node, Node | None]:
    """The scores with -inf where a key is not seen, and 0 or 1 for rows that see none or some, if there may be any.

    A row that sees nothing keeps its scores, so that no NaN arises in any derivative; its weights are set to 0 after.
    """
    seen, dtype = _seen(node), node.type.dtype
    alive = None
    for m in node.inputs[3:]:
        if m.type.is_float:
            allowed = build("/=", m, constant(float("-inf"), dtype))
            scores = add(scores, where(allowed, m, constant(0.0, dtype)))
        else:
            allowed = m
        seen = allowed if seen is None else build("logical-and", seen, allowed)
        if not seen.type.rank:
            seen = build("reshape", seen, shape=(1,))
        some = build("reduce-any", seen, axis=-1, **{"keep-dims": True})
        seen, alive = build("logical-or", seen, build("logical-not", some)), build("cast", some, dtype=dtype)
    if seen is not None:
        # added, not selected: one [t s] matrix for all heads, and torch's `where` is slow over broadcast masks
        scores = add(scores, where(seen, constant(0.0, dtype), float("-inf")))
    return scores, alive


def _attend_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """As in FlashAttention (Dao et al. 2022): the row sums of ct · result stand for those of [t s] matrices.

    Grouped heads lie below one another as more queries: [… h t d] as [… kv h/kv·t d].
    """
    q, k, v, *masks = node.inputs
    scale, rank = node.attrs["scale"], q.type.rank
    lead = k.type.shape[:-2]
    grouped = lead != q.type.shape[:-2]

    def fold(x: Node) -> Node:
        return build("reshape", x, shape=(*lead, -1, x.type.shape[-1])) if grouped else x

    def unfold(x: Node) -> Node:
        return build("reshape", x, shape=(*q.type.shape[:-1], x.type.shape[-1])) if grouped else x

    scaled = mul(q, scale)
    scores, alive = _masked(node, unfold(build("matmul", fold(scaled), build("transpose", k))))
    weights = build("softmax", scores)
    if alive is not None:
        weights = mul(weights, alive)
    inner = total(mul(ct, node), (rank - 1,), keep=True)
    by_scores = mul(weights, sub(unfold(build("matmul", fold(ct), build("transpose", v))), inner))
    by_bias = [None if m.type.dtype == "bool" else unbroadcast(by_scores, m.type) for m in masks]
    return (
        mul(unfold(build("matmul", fold(by_scores), k)), scale),
        build("matmul", build("transpose", fold(by_scores)), fold(scaled)),
        build("matmul", build("transpose", fold(weights)), fold(ct)),
        *by_bias,
    )


def _infer_attend_grad(types: Types, attrs: Attrs) -> TensorType:
    ct, q, k, v, out, *masks = types
    _infer_attend((q, k, v, *masks), attrs)
    same_dtype("attend-grad", (ct, q, out))
    if ct.shape != out.shape:
        raise OpProblem("E-SHAPE-001", f"attend-grad: {ct} and {out} differ")
    return (q, k, v)[attrs["of"]]


def _attend_grad(torch: Any, node: Node, args: list[Any]) -> Any:
    return _gradients(torch, node, args)[node.attrs["of"]]


def _gradients(torch: Any, node: Node, args: list[Any]) -> tuple[Any, ...]:
    """By queries, keys and values. In bf16 and f16 everything within is f32, and the results are rounded once."""
    return tuple(g.to(args[0].dtype) for g in _wide_gradients(torch, node, args))


def _wide_gradients(torch: Any, node: Node, args: list[Any]) -> tuple[Any, ...]:
    """The gradients before they are rounded."""
    ct, q, k, v, _, *masks = args
    low = ct.dtype in (torch.bfloat16, torch.float16)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v, ct = ((x.detach().float() if low else x.detach()).clone() for x in (q, k, v, ct))
        operands = [x.requires_grad_() for x in (q, k, v)]
        out = _attend_with(torch, node.attrs, [*operands, *(m.clone() for m in masks)])
        return torch.autograd.grad(out, operands, ct)


def _infer_packed(types: Types, attrs: Attrs) -> TensorType:
    q = _infer_attend_grad(types, {**attrs, "of": 0})
    if q.rank != 4 or any(t.shape != q.shape for t in types[1:4]):
        raise OpProblem("E-SHAPE-001", f"attend-grad-packed: needs [b h t d] of one shape, got {types[1]}, {types[2]} and {types[3]}")
    b, h, t, d = q.shape
    if attrs["of"]:
        return TensorType("f64" if q.dtype == "f64" else "f32", (3 * h * d,), False)
    return TensorType(q.dtype, (b, t, 3 * h * d), q.batch)


def _packed(torch: Any, node: Node, args: list[Any]) -> Any:
    b, h, t, d = node.inputs[1].type.shape
    if node.attrs["of"]:
        return torch.cat([g.sum((0, 2)).reshape(h * d) for g in _wide_gradients(torch, node, args)])
    parts = [_gradients(torch, node, args)[of].transpose(1, 2).reshape(b, t, h * d) for of in range(3)]
    return torch.cat(parts, -1)


def _attend_grad_cost(node: Node) -> tuple[int, int]:
    q, k, v = (i.type for i in node.inputs[1:4])
    pairs = q.size // max(1, q.shape[-1]) * k.shape[-2] // (2 if node.attrs["causal"] else 1)
    return (pairs * (3 * q.shape[-1] + 2 * v.shape[-1] + 12), traffic(node))


def _attend_cost(node: Node) -> tuple[int, int]:
    q, k, v = (i.type for i in node.inputs[:3])
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
        "given; :causal lets a query see its own and earlier keys, :window w only keys nearer than w. A mask that "
        "broadcasts to the scores [… t s] is bool (true: seen) or float (added). A query that sees nothing gives 0. "
        "Keys and values may have fewer heads (axis -3) than queries: each serves a group of them.",
        ("q", "k", "v", "mask*"),
        _infer_attend,
        _attend,
        _attend_cost,
        Lowering("template", "attend"),
        vjp=_attend_vjp,
        attributes=(Parameter("causal", "bool", False), Parameter("scale", "float"), Parameter("window", "int")),
        example="(attend q k v :causal true)",
        canonical=_canonical_attend,
    ),
    Op(
        "attend-grad",
        "The gradient of attend, with result `out`, by its queries, keys or values (:of 0, 1, 2).",
        ("ct", "q", "k", "v", "out", "mask*"),
        _infer_attend_grad,
        _attend_grad,
        _attend_grad_cost,
        Lowering("template", "attend-grad"),
        attributes=(
            Parameter("causal", "bool", False),
            Parameter("scale", "float"),
            Parameter("window", "int"),
            Parameter("of", "int", 0),
        ),
        lisp=False,
        differentiable=False,
        example="(attend-grad ct q k v out)",
    ),
    Op(
        "attend-grad-packed",
        "The gradients of attend by queries, keys and values [b h t d], side by side: [b t 3·h·d]; :of 1: their sums over b and t, in "
        "f32, of which nothing is rounded before: the gradient of a bias.",
        ("ct", "q", "k", "v", "out"),
        _infer_packed,
        _packed,
        _attend_grad_cost,
        Lowering("template", "attend-grad-packed"),
        attributes=(
            Parameter("causal", "bool", False),
            Parameter("scale", "float"),
            Parameter("window", "int"),
            Parameter("of", "int", 0),
        ),
        lisp=False,
        differentiable=False,
        example="(attend-grad-packed ct q k v out)",
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

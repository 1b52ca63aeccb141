"""Convolutions of one, two or three spatial axes: x [n c …], weight [o c/groups …], as in torch (correlations).

Three ops that are linear in each operand and closed under differentiation: convolve (x, w), its transpose by x and its
transpose by w. The gradients of each are the other two, so they differentiate to any order.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, Types, is_int, require_float, same_dtype, shape_of, total, traffic

Canonical = tuple[tuple[Node, ...], Attrs]
SETTINGS = ("stride", "padding", "dilation", "groups")


def per_axis(name: str, key: str, value: Any, spatial: int, least: int) -> tuple[int, ...]:
    """One number for all spatial axes, or one for each."""
    numbers = shape_of(name, value)
    numbers = numbers * spatial if len(numbers) == 1 else numbers
    if len(numbers) != spatial or min(numbers) < least:
        words = f"{name}: :{key} needs {spatial} numbers of {least} or more, or one for all, got {list(numbers)}"
        raise OpProblem("E-SHAPE-025", words)
    return numbers


def spatial_of(name: str, t: TensorType, most: int = 3) -> int:
    if not 3 <= t.rank <= 2 + most:
        words = f"{name}: needs [samples channels …] with 1 to {most} more axes, got {t}"
        raise OpProblem("E-SHAPE-007", words, help="expand-dims adds an axis of 1")
    return t.rank - 2


def _canonical(name: str) -> Callable[[tuple[Node, ...], Attrs], Canonical]:
    def canonical(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
        spatial = spatial_of(name, inputs[0].type)
        full = dict(attrs)
        for key, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            full[key] = per_axis(name, key, attrs[key], spatial, least)
        if not is_int(attrs["groups"]) or attrs["groups"] < 1:
            raise OpProblem("E-SHAPE-025", f"{name}: :groups must be an integer of 1 or more, got {attrs['groups']}")
        if "kernel" in full:
            full["kernel"] = per_axis(name, "kernel", attrs["kernel"], spatial, 1)
        if name == "convolve-transpose":
            full["size"] = _transposed_size(inputs, full, spatial)
        return inputs, full

    return canonical


def _transposed_size(inputs: tuple[Node, ...], attrs: Attrs, spatial: int) -> tuple[int, ...]:
    u, w = (i.type for i in inputs)
    _same_rank("convolve-transpose", u, w)
    if attrs["size"] not in (None, ()):
        return per_axis("convolve-transpose", "size", attrs["size"], spatial, 1)
    return tuple(
        max(1, (o - 1) * s - 2 * p + d * (k - 1) + 1)
        for o, k, s, p, d in zip(u.shape[2:], w.shape[2:], *_numbers(attrs), strict=True)
    )


def _numbers(attrs: Attrs) -> tuple[tuple[int, ...], ...]:
    return attrs["stride"], attrs["padding"], attrs["dilation"]


def _same_rank(name: str, x: TensorType, w: TensorType) -> None:
    if x.rank != w.rank:
        raise OpProblem("E-SHAPE-007", f"{name}: {x} and {w} differ in their number of axes")


def _result_shape(name: str, x: tuple[int, ...], kernel: tuple[int, ...], attrs: Attrs) -> tuple[int, ...]:
    """Sizes of the spatial axes of convolve's result."""
    sizes = []
    for axis, (n, k, s, p, d) in enumerate(zip(x, kernel, *_numbers(attrs), strict=True)):
        size = (n + 2 * p - d * (k - 1) - 1) // s + 1
        if size < 1 or k < 1:
            words = f"{name}: the kernel spans {d * (k - 1) + 1}, axis {axis + 2} is {n} and padded by {p} at each end"
            raise OpProblem("E-SHAPE-024", words, ((0, axis + 2), (1, axis + 2)))
        sizes.append(size)
    return tuple(sizes)


def _check_groups(name: str, channels: int, per_group: int, out: int, groups: int) -> None:
    if channels != per_group * groups:
        words = f"{name}: {channels} channels, but the weight takes {per_group} in each of {groups} groups"
        raise OpProblem("E-SHAPE-024", words, ((0, 1), (1, 1)))
    if out % groups:
        raise OpProblem("E-SHAPE-024", f"{name}: {out} outputs do not divide into {groups} groups", ((1, 0),))


def _infer(types: Types, attrs: Attrs) -> TensorType:
    name = "convolve"
    same_dtype(name, types)
    require_float(name, *types)
    x, w, *bias = types
    _same_rank(name, x, w)
    _check_groups(name, x.shape[1], w.shape[1], w.shape[0], attrs["groups"])
    if len(bias) > 1 or (bias and bias[0].shape != w.shape[:1]):
        shown = " ".join(map(str, bias))
        raise OpProblem("E-SHAPE-024", f"{name}: the bias must be one tensor [{w.shape[0]}], got {shown}")
    spatial = _result_shape(name, x.shape[2:], w.shape[2:], attrs)
    return TensorType(x.dtype, (x.shape[0], w.shape[0], *spatial), x.batch)


def _infer_transpose(types: Types, attrs: Attrs) -> TensorType:
    name = "convolve-transpose"
    same_dtype(name, types)
    require_float(name, *types)
    u, w = types
    _same_rank(name, u, w)
    if u.shape[1] != w.shape[0]:
        clash = ((0, 1), (1, 0))
        raise OpProblem("E-SHAPE-024", f"{name}: {u.shape[1]} channels, but the weight takes {w.shape[0]}", clash)
    _check_groups(name, w.shape[1] * attrs["groups"], w.shape[1], w.shape[0], attrs["groups"])
    back = _result_shape(name, attrs["size"], w.shape[2:], attrs)
    if back != u.shape[2:]:
        words = f"{name}: a convolution of :size {list(attrs['size'])} gives {list(back)}, not {list(u.shape[2:])}"
        raise OpProblem("E-SHAPE-024", words)
    return TensorType(u.dtype, (u.shape[0], w.shape[1] * attrs["groups"], *attrs["size"]), u.batch)


def _infer_weight(types: Types, attrs: Attrs) -> TensorType:
    name = "convolve-weight-grad"
    same_dtype(name, types)
    require_float(name, *types)
    x, u = types
    back = _result_shape(name, x.shape[2:], attrs["kernel"], attrs)
    if x.rank != u.rank or (x.shape[0], *back) != (u.shape[0], *u.shape[2:]):
        raise OpProblem("E-SHAPE-001", f"{name}: {x} and {u} differ")
    _check_groups(name, x.shape[1], x.shape[1] // attrs["groups"], u.shape[1], attrs["groups"])
    return TensorType(x.dtype, (u.shape[1], x.shape[1] // attrs["groups"], *attrs["kernel"]))


def _wide(node: Node, args: list[Any]) -> list[Any]:
    """bf16 and f16 products are summed in f32 and rounded once."""
    return [x.float() for x in args] if node.type.dtype in ("bf16", "f16") else args


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    a, dtype = node.attrs, args[0].dtype
    x, w, *bias = _wide(node, args)
    none = (0,) * (x.dim() - 2)
    out = torch.convolution(x, w, bias[0] if bias else None, *_numbers(a), False, none, a["groups"])
    return out.to(dtype)


def _backward(torch: Any, node: Node, x: Any, w: Any, u: Any, which: int) -> Any:
    """One of torch's two gradients of a convolution."""
    a = node.attrs
    none, mask = (0,) * (x.dim() - 2), [which == 0, which == 1, False]
    backward = torch.ops.aten.convolution_backward
    return backward(u, x, w, None, *_numbers(a), False, none, a["groups"], mask)[which]


def _transpose(torch: Any, node: Node, args: list[Any]) -> Any:
    u, w = _wide(node, args)
    unread = torch.empty(node.type.shape, dtype=u.dtype)
    return _backward(torch, node, unread, w, u, 0).to(args[0].dtype)


def _weight(torch: Any, node: Node, args: list[Any]) -> Any:
    x, u = _wide(node, args)
    unread = torch.empty(node.type.shape, dtype=x.dtype)
    return _backward(torch, node, x, unread, u, 1).to(args[0].dtype)


def _settings(node: Node) -> Attrs:
    return {key: node.attrs[key] for key in SETTINGS}


def _spatial(x: Node) -> tuple[int, ...]:
    return x.type.shape[2:]


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, w, *bias = node.inputs
    by_x = build("convolve-transpose", ct, w, size=_spatial(x), **_settings(node))
    by_w = build("convolve-weight-grad", x, ct, kernel=_spatial(w), **_settings(node))
    channel_sum = total(ct, (0, *range(2, ct.type.rank)))
    return (by_x, by_w, channel_sum) if bias else (by_x, by_w)


def _transpose_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    u, w = node.inputs
    by_u = build("convolve", ct, w, **_settings(node))
    return (by_u, build("convolve-weight-grad", ct, u, kernel=_spatial(w), **_settings(node)))


def _weight_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, u = node.inputs
    by_x = build("convolve-transpose", u, ct, size=_spatial(x), **_settings(node))
    return (by_x, build("convolve", x, ct, **_settings(node)))


def _cost(node: Node) -> tuple[int, int]:
    """Two operations for each element of convolve's result and each weight that it meets."""
    u = node.type if node.op == "convolve" else node.inputs[node.op == "convolve-weight-grad"].type
    w = node.type if node.op == "convolve-weight-grad" else node.inputs[1].type
    return (2 * u.size * prod(w.shape[1:]), traffic(node))


_ATTRIBUTES = (
    Parameter("stride", "shape", 1),
    Parameter("padding", "shape", 0),
    Parameter("dilation", "shape", 1),
    Parameter("groups", "int", 1),
)

OPS = (
    Op(
        "convolve",
        "The convolution (correlation) of x [n c …] with weight [o c/:groups …] over 1 to 3 spatial axes, and a bias "
        "[o] if one is given. :stride, :padding (zeros at both ends) and :dilation: one number, or one an axis.",
        ("x", "weight", "bias*"),
        _infer,
        _reference,
        _cost,
        Lowering("contraction", "convolve"),
        vjp=_vjp,
        attributes=_ATTRIBUTES,
        example="(convolve x w :stride 2 :padding 1)",
        canonical=_canonical("convolve"),
    ),
    Op(
        "convolve-transpose",
        "The transpose of convolve by x, for x [n o …] and the same weight [o c/:groups …]; result [n c …]. :size is "
        "that of its spatial axes, the smallest possible unless given.",
        ("x", "weight"),
        _infer_transpose,
        _transpose,
        _cost,
        Lowering("contraction", "convolve-transpose"),
        vjp=_transpose_vjp,
        attributes=(*_ATTRIBUTES, Parameter("size", "shape")),
        example="(convolve-transpose x w :stride 2)",
        canonical=_canonical("convolve-transpose"),
    ),
    Op(
        "convolve-weight-grad",
        "The transpose of convolve by its weight: the weight's gradient, of x and the result's cotangent.",
        ("x", "ct"),
        _infer_weight,
        _weight,
        _cost,
        Lowering("contraction", "convolve-weight-grad"),
        vjp=_weight_vjp,
        attributes=(*_ATTRIBUTES, Parameter("kernel", "shape", None, required=True)),
        lisp=False,
        example="(convolve-weight-grad x ct :kernel 3)",
        canonical=_canonical("convolve-weight-grad"),
    ),
)

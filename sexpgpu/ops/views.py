"""Ops that only rearrange elements. Most fold into the index expressions of whatever reads them."""

from __future__ import annotations

from math import prod
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    axes_of,
    axis_of,
    is_int,
    per_element,
    require_float,
    same_dtype,
    shape_of,
    unbroadcast,
    view_cost,
)

Inputs = tuple[Node, ...]
Canonical = tuple[Inputs, Attrs]
VIEW = Lowering("view")


# reshape, squeeze, expand-dims ------------------------------------------------------------------


def _canonical_reshape(inputs: Inputs, attrs: Attrs) -> Canonical:
    """Resolves a -1."""
    given, size = attrs["shape"], inputs[0].type.size
    sizes = list(given) if isinstance(given, list | tuple) else [given]
    if sizes.count(-1) == 1:
        known = prod(s for s in sizes if is_int(s) and s != -1)
        if known > 0 and size % known == 0:
            sizes[sizes.index(-1)] = size // known
        elif known > 0 and all(map(is_int, sizes)):
            raise _count_problem(inputs[0].type, sizes)
    return inputs, {"shape": shape_of("reshape", sizes)}


def _count_problem(old: TensorType, sizes: list[int] | tuple[int, ...]) -> OpProblem:
    wanted = "x".join(map(str, sizes)) or "1 (a scalar)"
    return OpProblem("E-SHAPE-005", f"reshape: {old} has {old.size} elements, the new shape {wanted} does not fit them")


def _infer_reshape(types: Types, attrs: Attrs) -> TensorType:
    """Keeps the batch mark while samples stay the leading factor of the row-major order."""
    old, shape = types[0], attrs["shape"]
    if prod(shape) != old.size:
        raise _count_problem(old, shape)
    kept = bool(
        old.batch and shape and shape[0] and old.shape[0] and not (shape[0] % old.shape[0] and old.shape[0] % shape[0])
    )
    return TensorType(old.dtype, shape, kept)


def _reshape_back(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (build("reshape", ct, shape=node.inputs[0].type.shape),)


def _reshape(torch: Any, node: Node, args: list[Any]) -> Any:
    return args[0].reshape(node.type.shape)


def _canonical_squeeze(inputs: Inputs, attrs: Attrs) -> Canonical:
    old = inputs[0].type
    ones = tuple(a for a, s in enumerate(old.shape) if s == 1)
    return inputs, {"axis": ones if attrs["axis"] is None else axes_of("squeeze", attrs["axis"], old.rank)}


def _infer_squeeze(types: Types, attrs: Attrs) -> TensorType:
    old = types[0]
    for axis in attrs["axis"]:
        if old.shape[axis] != 1:
            raise OpProblem("E-SHAPE-005", f"squeeze: axis {axis} has size {old.shape[axis]}, not 1", ((0, axis),))
    shape = tuple(s for a, s in enumerate(old.shape) if a not in attrs["axis"])
    return TensorType(old.dtype, shape, old.batch and 0 not in attrs["axis"])


def _canonical_expand(inputs: Inputs, attrs: Attrs) -> Canonical:
    rank = inputs[0].type.rank
    axis = attrs["axis"]
    count = len(axis) if isinstance(axis, list | tuple) else 1
    return inputs, {"axis": axes_of("expand-dims", axis, rank + count)}


def _infer_expand(types: Types, attrs: Attrs) -> TensorType:
    shape = list(types[0].shape)
    for axis in attrs["axis"]:
        shape.insert(axis, 1)
    return TensorType(types[0].dtype, tuple(shape), types[0].batch and 0 not in attrs["axis"])


# transpose, broadcast, flip ---------------------------------------------------------------------


def _canonical_transpose(inputs: Inputs, attrs: Attrs) -> Canonical:
    rank, order = inputs[0].type.rank, attrs["permutation"]
    if order is None:
        if rank < 2:
            raise OpProblem("E-SHAPE-007", f"transpose: needs 2 axes or more, got rank {rank}")
        return inputs, {"permutation": (*range(rank - 2), rank - 1, rank - 2)}
    order = tuple(order) if isinstance(order, list | tuple) else (order,)
    if not all(is_int(a) and -rank <= a < rank for a in order) or sorted(a % rank for a in order) != list(range(rank)):
        shown = " ".join(map(str, order))
        raise OpProblem(
            "E-SHAPE-010", f"transpose: [{shown}] is no order of the {rank} axes", help="name each axis once"
        )
    return inputs, {"permutation": tuple(a % rank for a in order)}


def _infer_transpose(types: Types, attrs: Attrs) -> TensorType:
    order = attrs["permutation"]
    return TensorType(types[0].dtype, tuple(types[0].shape[a] for a in order), types[0].batch and order[0] == 0)


def _transpose_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    order = node.attrs["permutation"]
    return (build("transpose", ct, permutation=tuple(order.index(a) for a in range(len(order)))),)


def _canonical_broadcast(inputs: Inputs, attrs: Attrs) -> Canonical:
    return inputs, {"shape": shape_of("broadcast", attrs["shape"]), "batch": bool(attrs["batch"])}


def _infer_broadcast(types: Types, attrs: Attrs) -> TensorType:
    old, shape = types[0], attrs["shape"]
    extra = len(shape) - old.rank
    if extra < 0:
        raise OpProblem("E-SHAPE-007", f"broadcast: the shape has {len(shape)} axes, the tensor {old.rank}")
    for axis, size in enumerate(old.shape):
        if size not in (1, shape[axis + extra]):
            raise OpProblem("E-SHAPE-001", f"broadcast: axes differ: {size} and {shape[axis + extra]}", ((0, axis),))
    own = old.batch and extra == 0 and old.shape[:1] == shape[:1]
    return TensorType(old.dtype, shape, bool(shape) and (attrs["batch"] or own))


def _canonical_flip(inputs: Inputs, attrs: Attrs) -> Canonical:
    return inputs, {"axis": axes_of("flip", attrs["axis"], inputs[0].type.rank)}


# slice, pad, concat -----------------------------------------------------------------------------


def _canonical_slice(inputs: Inputs, attrs: Attrs) -> Canonical:
    """Bounds as 0 … size and the stop drawn in to one past the last element taken."""
    old = inputs[0].type
    axis = axis_of("slice", attrs["axis"], old.rank)
    size, step = old.shape[axis], attrs["step"]
    start, stop = attrs["start"], size if attrs["stop"] is None else attrs["stop"]
    if not all(map(is_int, (start, stop, step))) or step < 1:
        raise OpProblem(
            "E-SHAPE-009", f"slice: start, stop and step must be integers, step 1 or more, got {start} {stop} {step}"
        )
    start, stop = (b + size if b < 0 else b for b in (start, stop))
    if not (0 <= start <= size and start <= stop <= size):
        raise OpProblem(
            "E-SHAPE-009", f"slice: {start} … {stop} does not lie in axis {axis} of size {size}", ((0, axis),)
        )
    count = -(-(stop - start) // step)
    stop = start + (count - 1) * step + 1 if count else start
    return inputs, {"axis": axis, "start": start, "stop": stop, "step": step}


def _infer_slice(types: Types, attrs: Attrs) -> TensorType:
    old, axis = types[0], attrs["axis"]
    count = -(-(attrs["stop"] - attrs["start"]) // attrs["step"])
    shape = (*old.shape[:axis], count, *old.shape[axis + 1 :])
    return TensorType(old.dtype, shape, old.batch and (axis != 0 or count == old.shape[0]))


def _slice(torch: Any, node: Node, args: list[Any]) -> Any:
    a = node.attrs
    return args[0][(slice(None),) * a["axis"] + (slice(a["start"], a["stop"], a["step"]),)]


def _slice_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    a, old = node.attrs, node.inputs[0].type
    zeros = (0,) * old.rank
    at = lambda v: (*zeros[: a["axis"]], v, *zeros[a["axis"] + 1 :])  # noqa: E731
    after = old.shape[a["axis"]] - a["stop"]
    return (build("pad", ct, before=at(a["start"]), after=at(after), interior=at(a["step"] - 1), batch=old.batch),)


def _canonical_pad(inputs: Inputs, attrs: Attrs) -> Canonical:
    rank = inputs[0].type.rank
    full: Attrs = {"value": (float if inputs[0].type.is_float else int)(attrs["value"]), "batch": bool(attrs["batch"])}
    for name in ("before", "after", "interior"):
        full[name] = (0,) * rank if attrs[name] is None else shape_of("pad", attrs[name])
        if len(full[name]) != rank:
            raise OpProblem("E-SHAPE-007", f"pad: :{name} has {len(full[name])} numbers, the tensor {rank} axes")
    return inputs, full


def _infer_pad(types: Types, attrs: Attrs) -> TensorType:
    old = types[0]
    shape = tuple(
        s + max(0, s - 1) * i + b + a
        for s, b, a, i in zip(old.shape, attrs["before"], attrs["after"], attrs["interior"], strict=True)
    )
    return TensorType(old.dtype, shape, bool(shape) and (attrs["batch"] or (old.batch and shape[0] == old.shape[0])))


def _pad(torch: Any, node: Node, args: list[Any]) -> Any:
    a = node.attrs
    out = torch.full(node.type.shape, a["value"], dtype=args[0].dtype)
    region = tuple(
        slice(b, b + max(0, s - 1) * (i + 1) + min(s, 1), i + 1)
        for s, b, i in zip(args[0].shape, a["before"], a["interior"], strict=True)
    )
    out[region] = args[0]
    return out


def _pad_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    a, old = node.attrs, node.inputs[0].type
    for axis, size in enumerate(old.shape):
        if size == node.type.shape[axis]:
            continue
        start, step = a["before"][axis], a["interior"][axis] + 1
        stop = start + (size - 1) * step + 1 if size else start
        ct = build("slice", ct, axis=axis, start=start, stop=stop, step=step)
    return (ct,)


def _canonical_concat(inputs: Inputs, attrs: Attrs) -> Canonical:
    if not inputs:
        raise OpProblem("E-SHAPE-014", "concat: needs a tensor or more")
    return inputs, {"axis": axis_of("concat", attrs["axis"], inputs[0].type.rank)}


def _infer_concat(types: Types, attrs: Attrs) -> TensorType:
    first, axis = types[0], attrs["axis"]
    same_dtype("concat", types)
    for number, t in enumerate(types[1:], 1):
        if t.rank != first.rank:
            raise OpProblem("E-SHAPE-007", f"concat: ranks differ: {first.rank} and {t.rank}")
        for a in range(t.rank):
            if a != axis and t.shape[a] != first.shape[a]:
                raise OpProblem(
                    "E-SHAPE-008", f"concat: axis {a} differs: {first.shape[a]} and {t.shape[a]}", ((0, a), (number, a))
                )
    shape = (*first.shape[:axis], sum(t.shape[axis] for t in types), *first.shape[axis + 1 :])
    mark = any(t.batch for t in types) and (axis != 0 or len(types) == 1)
    return TensorType(first.dtype, shape, mark)


def _concat_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    parts, start, axis = [], 0, node.attrs["axis"]
    for x in node.inputs:
        stop = start + x.type.shape[axis]
        parts.append(build("slice", ct, axis=axis, start=start, stop=stop))
        start = stop
    return tuple(parts)


def _tril_infer(types: Types, attrs: Attrs) -> TensorType:
    if types[0].rank < 2:
        raise OpProblem("E-SHAPE-007", f"tril: needs 2 axes or more, got rank {types[0].rank}")
    return types[0]


def _cumsum_infer(types: Types, attrs: Attrs) -> TensorType:
    require_float("cumsum", types[0])
    return types[0]


def _cumsum_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (build("cumsum", ct, axis=node.attrs["axis"], reverse=not node.attrs["reverse"]),)


def _cumsum(torch: Any, node: Node, args: list[Any]) -> Any:
    axis = node.attrs["axis"]
    if node.attrs["reverse"]:
        return torch.cumsum(args[0].flip(axis), axis).flip(axis)
    return torch.cumsum(args[0], axis)


_AXIS = Parameter("axis", "axes")

OPS = (
    Op(
        "reshape",
        "The same elements in row-major order under another shape; one size may be -1.",
        ("x",),
        _infer_reshape,
        _reshape,
        view_cost,
        VIEW,
        vjp=_reshape_back,
        positional=("shape",),
        attributes=(Parameter("shape", "shape", None, required=True),),
        example="(reshape x [2 -1])",
        canonical=_canonical_reshape,
    ),
    Op(
        "squeeze",
        "x without axes of size 1: those of :axis, or all.",
        ("x",),
        _infer_squeeze,
        _reshape,
        view_cost,
        VIEW,
        vjp=_reshape_back,
        attributes=(_AXIS,),
        example="(squeeze x :axis 1)",
        canonical=_canonical_squeeze,
    ),
    Op(
        "expand-dims",
        "x with a new axis of size 1 at each place of :axis in the result.",
        ("x",),
        _infer_expand,
        _reshape,
        view_cost,
        VIEW,
        vjp=_reshape_back,
        attributes=(Parameter("axis", "axes", 0),),
        example="(expand-dims x :axis -1)",
        canonical=_canonical_expand,
    ),
    Op(
        "transpose",
        "x with its axes in the order of :permutation; the last two swapped if none is given.",
        ("x",),
        _infer_transpose,
        lambda torch, node, args: args[0].permute(node.attrs["permutation"]),
        view_cost,
        VIEW,
        vjp=_transpose_vjp,
        positional=("permutation",),
        attributes=(Parameter("permutation", "axes"),),
        example="(transpose x [0 2 1])",
        canonical=_canonical_transpose,
    ),
    Op(
        "broadcast",
        "x repeated along axes of size 1 and new leading axes, to :shape.",
        ("x",),
        _infer_broadcast,
        lambda torch, node, args: args[0].expand(node.type.shape),
        view_cost,
        VIEW,
        vjp=lambda node, ct: (unbroadcast(ct, node.inputs[0].type),),
        positional=("shape",),
        attributes=(Parameter("shape", "shape", None, required=True), Parameter("batch", "bool", False)),
        example="(broadcast x [4 3])",
        canonical=_canonical_broadcast,
    ),
    Op(
        "flip",
        "x in reverse order along :axis.",
        ("x",),
        lambda types, attrs: TensorType(types[0].dtype, types[0].shape, types[0].batch and 0 not in attrs["axis"]),
        lambda torch, node, args: torch.flip(args[0], node.attrs["axis"]),
        view_cost,
        VIEW,
        vjp=lambda node, ct: (build("flip", ct, axis=node.attrs["axis"]),),
        attributes=(_AXIS,),
        example="(flip x :axis 0)",
        canonical=_canonical_flip,
    ),
    Op(
        "slice",
        "The elements :start … :stop (not included) of one axis, every :step-th; negative bounds count from the end.",
        ("x",),
        _infer_slice,
        _slice,
        view_cost,
        VIEW,
        vjp=_slice_vjp,
        attributes=(
            Parameter("axis", "axis", 0),
            Parameter("start", "int", 0),
            Parameter("stop", "int"),
            Parameter("step", "int", 1),
        ),
        example="(slice x :axis 1 :start 0 :stop 2)",
        canonical=_canonical_slice,
    ),
    Op(
        "pad",
        "x with :before and :after elements of :value at the ends of each axis, and :interior between elements.",
        ("x",),
        _infer_pad,
        _pad,
        per_element(0),
        VIEW,
        vjp=_pad_vjp,
        attributes=(
            Parameter("before", "shape"),
            Parameter("after", "shape"),
            Parameter("interior", "shape"),
            Parameter("value", "float", 0.0),
            Parameter("batch", "bool", False),
        ),
        example="(pad x :before [0 1] :after [0 1])",
        canonical=_canonical_pad,
    ),
    Op(
        "concat",
        "Tensors joined along :axis.",
        ("xs*",),
        _infer_concat,
        lambda torch, node, args: torch.cat(args, node.attrs["axis"]),
        per_element(0),
        VIEW,
        vjp=_concat_vjp,
        attributes=(Parameter("axis", "axis", 0),),
        example="(concat x y :axis -1)",
        canonical=_canonical_concat,
    ),
    Op(
        "tril",
        "x with zeros above the diagonal :offset of its last two axes (offset 0: the main one).",
        ("x",),
        _tril_infer,
        lambda torch, node, args: torch.tril(args[0], node.attrs["offset"]),
        per_element(0),
        Lowering("pointwise", "where(column <= row + offset, {0}, 0)"),
        vjp=lambda node, ct: (build("tril", ct, offset=node.attrs["offset"]),),
        attributes=(Parameter("offset", "int", 0),),
        example="(tril x)",
    ),
    Op(
        "cumsum",
        "Running sums along :axis; :reverse from the end.",
        ("x",),
        _cumsum_infer,
        _cumsum,
        per_element(1),
        Lowering("reduction", "cumsum"),
        vjp=_cumsum_vjp,
        attributes=(Parameter("axis", "axis", -1), Parameter("reverse", "bool", False)),
        example="(cumsum x :axis 0)",
        canonical=lambda inputs, attrs: (
            inputs,
            {"axis": axis_of("cumsum", attrs["axis"], inputs[0].type.rank), "reverse": bool(attrs["reverse"])},
        ),
    ),
)

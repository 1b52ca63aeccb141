"""Order along one axis: sort, argsort, the k largest; reading and adding along an axis at indices of equal rank.

NaN counts as the largest, as in torch; equal elements (0 and -0 too) keep their order, so results are the same
everywhere. A gradient goes back to the elements that the result was taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    axis_of,
    is_int,
    per_element,
    require_indices,
    require_number,
    traffic,
)

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical(name: str) -> Callable[[tuple[Node, ...], Attrs], Canonical]:
    def canonical(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
        full = {**attrs, "axis": axis_of(name, attrs["axis"], inputs[0].type.rank)}
        for flag in full.keys() & {"descending", "batch"}:
            full[flag] = bool(full[flag])
        return inputs, full

    return canonical


def _cost(node: Node) -> tuple[int, int]:
    x = node.inputs[0].type
    return (int(x.size * log2(max(2, x.shape[node.attrs["axis"]]))), traffic(node))


def _moved(t: TensorType, axis: int, size: int, dtype: str | None = None) -> TensorType:
    """`t` with another size of `axis`; samples that change places or number are no longer the batch's."""
    return TensorType(dtype or t.dtype, (*t.shape[:axis], size, *t.shape[axis + 1 :]), t.batch and axis != 0)


# sort, argsort -----------------------------------------------------------------------------------


def _infer_sort(types: Types, attrs: Attrs) -> TensorType:
    require_number("sort", types[0])
    return _moved(types[0], attrs["axis"], types[0].shape[attrs["axis"]])


def _infer_argsort(types: Types, attrs: Attrs) -> TensorType:
    require_number("argsort", types[0])
    return _moved(types[0], attrs["axis"], types[0].shape[attrs["axis"]], "i32")


def _sorted(torch: Any, node: Node, x: Any, descending: bool) -> Any:
    return torch.sort(x, dim=node.attrs["axis"], descending=descending, stable=True)


def _back(indices: Node, node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, axis = node.inputs[0].type, node.attrs["axis"]
    return (build("scatter-add-along", ct, indices, axis=axis, count=x.shape[axis], batch=x.batch),)


def _sort_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return _back(build("argsort", node.inputs[0], **node.attrs), node, ct)


# top-k -------------------------------------------------------------------------------------------


def _check_top(name: str, types: Types, attrs: Attrs) -> None:
    require_number(name, types[0])
    size, k = types[0].shape[attrs["axis"]], attrs["k"]
    if not is_int(k) or not 1 <= k <= size:
        raise OpProblem("E-SHAPE-021", f"{name}: k is {k}, axis {attrs['axis']} has {size}", ((0, attrs["axis"]),))


def _infer_top(types: Types, attrs: Attrs) -> TensorType:
    _check_top("top-k", types, attrs)
    return _moved(types[0], attrs["axis"], attrs["k"])


def _infer_top_indices(types: Types, attrs: Attrs) -> TensorType:
    _check_top("top-k-indices", types, attrs)
    return _moved(types[0], attrs["axis"], attrs["k"], "i32")


def _top(which: int) -> Callable[[Any, Node, list[Any]], Any]:
    def reference(torch: Any, node: Node, args: list[Any]) -> Any:
        found = _sorted(torch, node, args[0], True)[which].narrow(node.attrs["axis"], 0, node.attrs["k"]).contiguous()
        return found.to(torch.int32) if which else found

    return reference


def _top_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return _back(build("top-k-indices", node.inputs[0], **node.attrs), node, ct)


# along an axis -----------------------------------------------------------------------------------


def _check_along(name: str, x: TensorType, indices: TensorType, axis: int) -> None:
    require_number(name, x)
    require_indices(name, indices)
    if x.rank != indices.rank:
        raise OpProblem("E-SHAPE-007", f"{name}: {x} and indices {indices} differ in their number of axes")
    for a, (size, other) in enumerate(zip(x.shape, indices.shape, strict=True)):
        if size != other and a != axis:
            raise OpProblem("E-SHAPE-001", f"{name}: axes differ: {size} and {other}", ((0, a), (1, a)))


def _infer_take(types: Types, attrs: Attrs) -> TensorType:
    x, indices = types
    axis = attrs["axis"]
    _check_along("take-along", x, indices, axis)
    return TensorType(x.dtype, indices.shape, indices.batch if axis == 0 else x.batch or indices.batch)


def _take_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (*_back(node.inputs[1], node, ct), None)


def _infer_add(types: Types, attrs: Attrs) -> TensorType:
    updates, indices = types
    axis, count = attrs["axis"], attrs["count"]
    if not is_int(count) or count < 0:
        raise OpProblem("E-SHAPE-013", f"scatter-add-along: :count must be an integer of 0 or more, got {count}")
    _check_along("scatter-add-along", updates, indices, axis)
    if updates.shape[axis] != indices.shape[axis]:
        sizes = f"{updates.shape[axis]} and {indices.shape[axis]}"
        raise OpProblem("E-SHAPE-001", f"scatter-add-along: axes differ: {sizes}", ((0, axis), (1, axis)))
    moved = _moved(updates, axis, count)
    return TensorType(moved.dtype, moved.shape, moved.batch or attrs["batch"])


def _add(torch: Any, node: Node, args: list[Any]) -> Any:
    """Adds in index order: deterministic on the CPU."""
    updates, indices = args
    out = torch.zeros(node.type.shape, dtype=updates.dtype)
    return out.scatter_add_(node.attrs["axis"], indices.long(), updates)


_AXIS = Parameter("axis", "axis", -1)
_DESCENDING = Parameter("descending", "bool", False)
_K = Parameter("k", "int", None, required=True)

OPS = (
    Op(
        "sort-along",
        "x sorted along :axis, ascending unless :descending; NaN counts as the largest.",
        ("x",),
        _infer_sort,
        lambda torch, node, args: _sorted(torch, node, args[0], node.attrs["descending"])[0],
        _cost,
        Lowering("external", "sort"),
        vjp=_sort_vjp,
        attributes=(_AXIS, _DESCENDING),
        example="(sort-along x :axis -1)",
        canonical=_canonical("sort-along"),
    ),
    Op(
        "argsort",
        "The i32 indices that sort x along :axis, equal elements in their order; NaN counts as the largest.",
        ("x",),
        _infer_argsort,
        lambda torch, node, args: _sorted(torch, node, args[0], node.attrs["descending"])[1].to(torch.int32),
        _cost,
        Lowering("external", "argsort"),
        differentiable=False,
        attributes=(_AXIS, _DESCENDING),
        example="(argsort x :axis -1)",
        canonical=_canonical("argsort"),
    ),
    Op(
        "top-k",
        "The k largest elements along :axis, largest first; NaN counts as the largest. Their places: top-k-indices.",
        ("x",),
        _infer_top,
        _top(0),
        _cost,
        Lowering("external", "top-k"),
        vjp=_top_vjp,
        attributes=(_K, _AXIS),
        positional=("k",),
        example="(top-k x 2)",
        canonical=_canonical("top-k"),
    ),
    Op(
        "top-k-indices",
        "The i32 places of the k largest elements along :axis, largest first; of equals the first.",
        ("x",),
        _infer_top_indices,
        _top(1),
        _cost,
        Lowering("external", "top-k-indices"),
        differentiable=False,
        attributes=(_K, _AXIS),
        positional=("k",),
        example="(top-k-indices x 2)",
        canonical=_canonical("top-k-indices"),
    ),
    Op(
        "take-along",
        "The element of x at each index along :axis; x and the indices have equal sizes elsewhere.",
        ("x", "indices"),
        _infer_take,
        lambda torch, node, args: torch.gather(args[0], node.attrs["axis"], args[1].long()),
        per_element(0),
        Lowering("view", "take-along"),
        vjp=_take_vjp,
        attributes=(_AXIS,),
        example="(take-along x (argsort x))",
        canonical=_canonical("take-along"),
    ),
    Op(
        "scatter-add-along",
        "Zeros of :count along :axis, to which each update is added at its index: the transpose of take-along.",
        ("updates", "indices"),
        _infer_add,
        _add,
        lambda node: (node.inputs[0].type.size, traffic(node)),
        Lowering("template", "scatter-add-along"),
        vjp=lambda node, ct: (build("take-along", ct, node.inputs[1], axis=node.attrs["axis"]), None),
        attributes=(_AXIS, Parameter("count", "int", None, required=True), Parameter("batch", "bool", False)),
        example="(scatter-add-along x (argsort x) :count 3)",
        canonical=_canonical("scatter-add-along"),
    ),
)

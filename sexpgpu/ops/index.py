"""Reading and adding at indices, which are i32 or i64 and must lie in range: a negative one is an error at run time."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    axis_of,
    is_int,
    per_element,
    require_dtype,
    require_indices,
    require_number,
    same_dtype,
    traffic,
)
from sexpgpu.ops.leaves import TORCH_NAMES

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical_gather(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    return inputs, {"axis": axis_of("gather", attrs["axis"], inputs[0].type.rank)}


def _infer_gather(types: Types, attrs: Attrs) -> TensorType:
    x, indices = types
    axis = attrs["axis"]
    require_indices("gather", indices)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return TensorType(x.dtype, shape, indices.batch if axis == 0 else x.batch)


def _gather(torch: Any, node: Node, args: list[Any]) -> Any:
    x, indices = args
    if x.dim() == 2 and node.attrs["axis"] == 0 and x.is_floating_point():
        return torch.nn.functional.embedding(indices, x)
    return torch.index_select(x, node.attrs["axis"], indices.reshape(-1)).reshape(node.type.shape)


def _gather_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, indices = node.inputs
    axis = node.attrs["axis"]
    return (build("scatter-add", ct, indices, axis=axis, count=x.type.shape[axis], batch=x.type.batch), None)


def _canonical_scatter(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    updates, indices = inputs
    rank = updates.type.rank - indices.type.rank + 1
    if rank < 1:
        raise OpProblem(
            "E-SHAPE-007", f"scatter-add: updates {updates.type} have fewer axes than indices {indices.type}"
        )
    if not is_int(attrs["count"]) or attrs["count"] < 0:
        raise OpProblem("E-SHAPE-013", f"scatter-add: :count must be an integer of 0 or more, got {attrs['count']}")
    return inputs, {
        "axis": axis_of("scatter-add", attrs["axis"], rank),
        "count": attrs["count"],
        "batch": bool(attrs["batch"]),
    }


def _infer_scatter(types: Types, attrs: Attrs) -> TensorType:
    updates, indices = types
    axis, count = attrs["axis"], attrs["count"]
    require_number("scatter-add", updates)
    require_indices("scatter-add", indices)
    middle = updates.shape[axis : axis + indices.rank]
    for a, (size, other) in enumerate(zip(middle, indices.shape, strict=True)):
        if size != other:
            raise OpProblem("E-SHAPE-001", f"scatter-add: axes differ: {size} and {other}", ((0, axis + a), (1, a)))
    shape = (*updates.shape[:axis], count, *updates.shape[axis + indices.rank :])
    return TensorType(updates.dtype, shape, attrs["batch"] or (axis != 0 and updates.batch))


def _scatter(torch: Any, node: Node, args: list[Any]) -> Any:
    """Adds in index order: deterministic on the CPU."""
    updates, indices = args
    axis = node.attrs["axis"]
    flat = updates.reshape(*updates.shape[:axis], -1, *updates.shape[axis + indices.dim() :])
    out = torch.zeros(node.type.shape, dtype=updates.dtype)
    return out.index_add_(axis, indices.reshape(-1), flat)


def _scatter_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (build("gather", ct, node.inputs[1], axis=node.attrs["axis"]), None)


def _infer_onto(types: Types, attrs: Attrs) -> TensorType:
    x, updates, indices = types
    same_dtype("scatter-onto", (x, updates))
    found = _infer_scatter((updates, indices), {"axis": 0, "count": x.shape[0] if x.rank else 0, "batch": False})
    if found.shape != x.shape:
        raise OpProblem("E-SHAPE-001", f"scatter-onto: updates {updates} at {indices} do not belong to {x}")
    return x


def _onto(torch: Any, node: Node, args: list[Any]) -> Any:
    """In index order."""
    x, updates, indices = args
    return x.clone().index_add_(0, indices.reshape(-1), updates.reshape(-1, *x.shape[1:]))


def _infer_one_hot(types: Types, attrs: Attrs) -> TensorType:
    require_indices("one-hot", types[0])
    if not is_int(attrs["count"]) or attrs["count"] < 1:
        raise OpProblem("E-SHAPE-013", f"one-hot: :count must be an integer of 1 or more, got {attrs['count']}")
    batch = types[0].batch and types[0].rank > 0
    return TensorType(require_dtype("one-hot", attrs["dtype"]), (*types[0].shape, attrs["count"]), batch)


def _one_hot(torch: Any, node: Node, args: list[Any]) -> Any:
    classes = torch.arange(node.attrs["count"], dtype=args[0].dtype)
    return (args[0].unsqueeze(-1) == classes).to(getattr(torch, TORCH_NAMES[node.type.dtype]))


OPS = (
    Op(
        "gather",
        "The slices of x along :axis that the indices name; their shape stands in place of that axis.",
        ("x", "indices"),
        _infer_gather,
        _gather,
        per_element(0),
        Lowering("view", "gather"),
        vjp=_gather_vjp,
        attributes=(Parameter("axis", "axis", 0),),
        example="(gather table tokens)",
        canonical=_canonical_gather,
    ),
    Op(
        "scatter-add",
        "Zeros of :count along :axis, to which each update is added at its index: the transpose of gather.",
        ("updates", "indices"),
        _infer_scatter,
        _scatter,
        lambda node: (node.inputs[0].type.size, per_element(0)(node)[1]),
        Lowering("template", "scatter-add"),
        vjp=_scatter_vjp,
        attributes=(
            Parameter("axis", "axis", 0),
            Parameter("count", "int", None, required=True),
            Parameter("batch", "bool", False),
        ),
        example="(scatter-add x indices :count 10)",
        canonical=_canonical_scatter,
    ),
    Op(
        "scatter-onto",
        "x with each update added at its index of the first axis. A pass makes it of a sum with `scatter-add` (`passes/onto.py`).",
        ("x", "updates", "indices"),
        _infer_onto,
        _onto,
        lambda node: (node.inputs[1].type.size, traffic(node)),
        Lowering("template", "scatter-onto"),
        lisp=False,
        differentiable=False,
        example="(scatter-onto x updates indices)",
    ),
    Op(
        "one-hot",
        "1 at the index along a new last axis of :count, 0 elsewhere.",
        ("indices",),
        _infer_one_hot,
        _one_hot,
        per_element(1),
        Lowering("pointwise", "{0} == index"),
        differentiable=False,
        positional=("count",),
        attributes=(Parameter("count", "int", None, required=True), Parameter("dtype", "dtype", "f32")),
        example="(one-hot label 10)",
    ),
)

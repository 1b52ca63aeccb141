"""The equivariant linear map: one matrix a rank, shared by its components."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.cartesian.algebra import width
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, Types, is_int, require_float, same_dtype, traffic, zeros

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    if len(inputs) < 2:
        raise OpProblem("E-SHAPE-014", "equivariant-linear: needs features and a weight for each rank")
    top = len(inputs) - 2 if attrs["l-max"] is None else attrs["l-max"]
    if not is_int(top) or top < 0:
        raise OpProblem("E-SHAPE-015", f"equivariant-linear: :l-max must be an integer of 0 or more, got {top}")
    return inputs, {"l-max": top}


def _infer(types: Types, attrs: Attrs) -> TensorType:
    x, *weights = types
    dtype = same_dtype("equivariant-linear", types)
    require_float("equivariant-linear", *types)
    if x.rank not in (2, 3):
        raise OpProblem("E-SHAPE-007", f"equivariant-linear: features need [rows (l+1)² channels], or a product's paths in a row; got {x}")
    for number, w in enumerate(weights, 1):
        if w.rank != 2:
            raise OpProblem("E-SHAPE-007", f"equivariant-linear: a weight needs 2 axes, [inputs outputs], got {w}")
        if w.shape[1] != weights[0].shape[1]:
            words = f"equivariant-linear: the weights have {weights[0].shape[1]} and {w.shape[1]} outputs"
            raise OpProblem("E-SHAPE-001", words, ((1, 1), (number, 1)), "all ranks have the same number of channels")
    need = sum((2 * rank + 1) * w.shape[0] for rank, w in enumerate(weights))
    have = x.size // x.shape[0] if x.shape[0] else x.shape[1] * (x.shape[2] if x.rank == 3 else 1)
    if x.rank == 3 and x.shape[1] != width(len(weights) - 1):
        words = f"features of {x.shape[1]} components need a weight for each of their ranks, got {len(weights)}"
        raise OpProblem("E-SHAPE-030", f"equivariant-linear: {words}", help="weights for ranks above :l-max are given too")
    if need != have:
        sizes = " + ".join(f"{2 * rank + 1}·{w.shape[0]}" for rank, w in enumerate(weights))
        raise OpProblem("E-SHAPE-003", f"equivariant-linear: the weights take {sizes} = {need} columns, and there are {have}")
    return TensorType(dtype, (x.shape[0], width(attrs["l-max"]), weights[0].shape[1]), x.batch)


def _blocks(node: Node) -> list[tuple[int, int, int]]:
    """(rank, first column, inputs) of each rank that has a weight and a place in the result."""
    out, start = [], 0
    for rank, w in enumerate(node.inputs[1:]):
        if rank <= node.attrs["l-max"]:
            out.append((rank, start, w.type.shape[0]))
        start += (2 * rank + 1) * w.type.shape[0]
    return out


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    """Sums of bf16 and f16 are in f32, rounded once. Ranks without a weight are zero."""
    x, *weights = args
    rows, outputs = node.type.shape[0], node.type.shape[2]
    dtype = torch.float32 if node.type.dtype in ("bf16", "f16") else x.dtype
    flat = x.to(dtype).reshape(rows, -1) if rows else x.to(dtype).reshape(0, _columns(node))
    parts = []
    for rank, start, inputs in _blocks(node):
        block = flat[:, start : start + (2 * rank + 1) * inputs].reshape(rows * (2 * rank + 1), inputs)
        parts.append(torch.matmul(block, weights[rank].to(dtype)).reshape(rows, 2 * rank + 1, outputs))
    missing = node.type.shape[1] - width(len(parts) - 1)
    if missing:
        parts.append(torch.zeros(rows, missing, outputs, dtype=dtype))
    return torch.cat(parts, 1).to(x.dtype)


def _columns(node: Node) -> int:
    return sum((2 * rank + 1) * w.type.shape[0] for rank, w in enumerate(node.inputs[1:]))


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """By x: the map of the transposed weights. By a weight: a matrix product of its rank's blocks. Both differentiate again."""
    x, *weights = node.inputs
    rows, outputs, reached = x.type.shape[0], node.type.shape[2], min(node.attrs["l-max"], len(weights) - 1)
    flat = build("reshape", x, shape=(rows, _columns(node)))
    parts, grads = [], []
    for rank, start, inputs in _blocks(node):
        size = 2 * rank + 1
        block = build("slice", ct, axis=1, start=rank * rank, stop=(rank + 1) ** 2)
        block = build("reshape", block, shape=(rows * size, outputs))
        own = build("slice", flat, axis=1, start=start, stop=start + size * inputs)
        own = build("reshape", own, shape=(rows * size, inputs))
        grads.append(build("matmul", build("transpose", own, permutation=(1, 0)), block))
        pulled = build("matmul", block, build("transpose", weights[rank], permutation=(1, 0)))
        parts.append(build("reshape", pulled, shape=(rows, size * inputs)))
    for rank in range(reached + 1, len(weights)):
        grads.append(zeros(weights[rank].type))
        parts.append(zeros(TensorType(x.type.dtype, (rows, (2 * rank + 1) * weights[rank].type.shape[0]), x.type.batch)))
    back = build("reshape", build("concat", *parts, axis=1), shape=x.type.shape)
    return (_marked(back, x.type), *grads)


def _marked(x: Node, like: TensorType) -> Node:
    return x if x.type == like else build("broadcast", x, shape=like.shape, batch=like.batch)


def _cost(node: Node) -> tuple[int, int]:
    rows = node.type.shape[0]
    return 2 * rows * node.type.shape[2] * sum((2 * rank + 1) * inputs for rank, _, inputs in _blocks(node)), traffic(node)


OPS = (
    Op(
        "equivariant-linear",
        "Mixes the channels (and paths) of every rank by a matrix of its own, the same for all 2l+1 components: x [rows (l+1)² "
        "channels], or a tensor-product's paths in a row, and a weight [inputs outputs] for each rank of x, from 0 on, where "
        "inputs are the rank's paths times channels, path-major. Result [rows (:l-max+1)² outputs]; ranks that x lacks are "
        "zero, ranks above :l-max are left out.",
        ("x", "weights*"),
        _infer,
        _reference,
        _cost,
        Lowering("contraction"),
        vjp=_vjp,
        attributes=(Parameter("l-max", "int", None),),
        example="(equivariant-linear x w-0 w-1)",
        canonical=_canonical,
    ),
)

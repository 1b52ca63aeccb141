"""The equivariant linear map: one matrix a rank, shared by its components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.cartesian.algebra import rank_of, width
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
    have = _width(x)
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
    flat = x.to(dtype).reshape(rows, _width(node.inputs[0].type))
    parts = []
    for rank, start, inputs in _blocks(node):
        block = flat[:, start : start + (2 * rank + 1) * inputs].reshape(rows * (2 * rank + 1), inputs)
        parts.append(torch.matmul(block, weights[rank].to(dtype)).reshape(rows, 2 * rank + 1, outputs))
    missing = node.type.shape[1] - width(len(parts) - 1)
    if missing:
        parts.append(torch.zeros(rows, missing, outputs, dtype=dtype))
    return torch.cat(parts, 1).to(x.dtype)


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, *weights = node.inputs
    kept = weights[: min(node.attrs["l-max"], len(weights) - 1) + 1]
    back = build("equivariant-linear-back", ct, *weights, shape=x.type.shape, batch=x.type.batch)
    return (back, *_weight_grads(x, ct, kept), *(zeros(w.type) for w in weights[len(kept) :]))


def _vjp_back(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """ct is of the features' type: by the cotangent it is the map itself, and weights change places with nothing."""
    given, *weights = node.inputs
    top = rank_of(given.type.shape[1])
    assert top is not None
    kept = weights[: min(top, len(weights) - 1) + 1]
    forward = build("equivariant-linear", ct, *weights, **{"l-max": top})
    return (marked(forward, given.type), *_weight_grads(ct, given, kept), *(zeros(w.type) for w in weights[len(kept) :]))


def _weight_grads(x: Node, ct: Node, weights: Sequence[Node]) -> list[Node]:
    """Of each rank's weight: its block of x, transposed, times its block of ct."""
    start, grads = 0, []
    for rank, w in enumerate(weights):
        grads.append(build("equivariant-linear-weight", x, ct, rank=rank, start=start, inputs=w.type.shape[0]))
        start += (2 * rank + 1) * w.type.shape[0]
    return grads


def _infer_weight(types: Types, attrs: Attrs) -> TensorType:
    return TensorType(types[0].dtype, (attrs["inputs"], types[1].shape[2]))


def _vjp_weight(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """Bilinear in x and the cotangent: each is mapped by ct at its rank, and nothing reaches the other ranks."""
    x, given = node.inputs
    a, rows = node.attrs, x.type.shape[0]
    size, start, square = 2 * a["rank"] + 1, a["start"], a["rank"] ** 2
    flat = build("reshape", x, shape=(rows, _width(x.type)))
    own = build("slice", flat, axis=1, start=start, stop=start + size * a["inputs"])
    own = build("reshape", own, shape=(rows * size, a["inputs"]))
    block = build("slice", given, axis=1, start=square, stop=square + size)
    block = build("reshape", block, shape=(rows * size, given.type.shape[2]))
    by_x = build("reshape", build("matmul", block, build("transpose", ct, permutation=(1, 0))), shape=(rows, size * a["inputs"]))
    rest = _width(x.type) - start - size * a["inputs"]
    by_x = build("pad", by_x, before=(0, start), after=(0, rest), interior=(0, 0), value=0.0)
    by_given = build("reshape", build("matmul", own, ct), shape=(rows, size, given.type.shape[2]))
    by_given = build("pad", by_given, before=(0, square, 0), after=(0, given.type.shape[1] - square - size, 0), interior=(0, 0, 0), value=0.0)
    return marked(build("reshape", by_x, shape=x.type.shape), x.type), marked(by_given, given.type)


def _reference_weight(torch: Any, node: Node, args: list[Any]) -> Any:
    """Summed in f32 at least, rounded once."""
    x, ct = args
    a, rows = node.attrs, ct.shape[0]
    size = 2 * a["rank"] + 1
    dtype = torch.float32 if node.type.dtype in ("bf16", "f16") else x.dtype
    own = x.reshape(rows, _width(node.inputs[0].type))[:, a["start"] : a["start"] + size * a["inputs"]].reshape(rows * size, a["inputs"])
    block = ct[:, a["rank"] ** 2 : (a["rank"] + 1) ** 2].reshape(rows * size, ct.shape[2])
    return torch.matmul(own.to(dtype).t(), block.to(dtype)).to(x.dtype)


def _width(t: TensorType) -> int:
    return t.shape[1] * (t.shape[2] if t.rank == 3 else 1)


def marked(x: Node, like: TensorType) -> Node:
    """`x` with the batch mark of `like`, whose shape it has."""
    return x if x.type == like else build("broadcast", x, shape=like.shape, batch=like.batch)


def _infer_back(types: Types, attrs: Attrs) -> TensorType:
    return TensorType(types[0].dtype, attrs["shape"], attrs["batch"])


def _reference_back(torch: Any, node: Node, args: list[Any]) -> Any:
    """The gradient by the features: each rank's block times its weight, transposed; ranks that ct lacks are zero."""
    ct, *weights = args
    rows, top = node.type.shape[0], rank_of(node.inputs[0].type.shape[1])
    dtype = torch.float32 if node.type.dtype in ("bf16", "f16") else ct.dtype
    parts, wide = [], ct.to(dtype)
    for rank, w in enumerate(weights):
        size = (2 * rank + 1) * w.shape[0]
        if top is None or rank > top:
            parts.append(torch.zeros(rows, size, dtype=dtype))
            continue
        block = wide[:, rank * rank : (rank + 1) ** 2].reshape(rows * (2 * rank + 1), w.shape[1])
        parts.append(torch.matmul(block, w.to(dtype).t()).reshape(rows, size))
    return torch.cat(parts, 1).reshape(node.type.shape).to(ct.dtype)


def _cost(node: Node) -> tuple[int, int]:
    rows, outputs = node.type.shape[0], node.inputs[1].type.shape[1]
    return 2 * rows * outputs * sum((2 * rank + 1) * inputs for rank, _, inputs in _blocks(node)), traffic(node)


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
    Op(
        "equivariant-linear-back",
        "The gradient of equivariant-linear by its features, from a cotangent and the weights.",
        ("cotangent", "weights*"),
        _infer_back,
        _reference_back,
        lambda node: (2 * node.inputs[0].type.shape[0] * sum((2 * rank + 1) * w.type.size for rank, w in enumerate(node.inputs[1:])), traffic(node)),
        Lowering("contraction"),
        vjp=_vjp_back,
        attributes=(Parameter("shape", "shape", None), Parameter("batch", "bool", False)),
        lisp=False,
    ),
    Op(
        "equivariant-linear-weight",
        "The gradient of equivariant-linear by its weight of one rank, from the features and a cotangent.",
        ("x", "cotangent"),
        _infer_weight,
        _reference_weight,
        lambda node: (2 * node.inputs[0].type.shape[0] * (2 * node.attrs["rank"] + 1) * node.type.size, traffic(node)),
        Lowering("contraction"),
        vjp=_vjp_weight,
        attributes=(Parameter("rank", "int", 0), Parameter("start", "int", 0), Parameter("inputs", "int", 1)),
        lisp=False,
    ),
)

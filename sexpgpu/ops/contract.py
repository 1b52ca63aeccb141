"""Matrix products, batched with NumPy's broadcasting, differentiable to any order."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, Types, broadcast_type, require_float, same_dtype, traffic, unbroadcast

# Operands of one axis are a row on the left and a column on the right, as in NumPy; that axis is gone from the result.


def _matrix(t: TensorType, left: bool) -> TensorType:
    if t.rank >= 2:
        return t
    return TensorType(t.dtype, (1, *t.shape) if left else (*t.shape, 1))


def _infer(types: Types, attrs: Attrs) -> TensorType:
    dtype = same_dtype("matmul", types)
    require_float("matmul", *types)
    a, b = types
    if not a.rank or not b.rank:
        raise OpProblem(
            "E-SHAPE-007", f"matmul: needs tensors of 1 axis or more, got {a} and {b}", help="use * with a scalar"
        )
    inner = (1, max(0, b.rank - 2))
    left, right = _matrix(a, True), _matrix(b, False)
    if left.shape[-1] != right.shape[-2]:
        raise OpProblem(
            "E-SHAPE-003",
            f"matmul: inner dimensions differ: {left.shape[-1]} and {right.shape[-2]}",
            ((0, a.rank - 1), inner),
        )
    stack = broadcast_type(
        "matmul", tuple(TensorType(dtype, t.shape[:-2], t.batch and t.rank > 2) for t in (left, right)), dtype
    )
    rows = (left.shape[-2],) if a.rank > 1 else ()
    columns = (right.shape[-1],) if b.rank > 1 else ()
    mark = stack.batch if stack.shape else bool(rows) and a.batch
    return TensorType(dtype, (*stack.shape, *rows, *columns), mark)


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    """bf16 and f16 products are summed in f32 and rounded once, on every backend."""
    a, b = args
    if node.type.dtype in ("bf16", "f16"):
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def product_type(types: Types, attrs: Attrs) -> TensorType:
    """The type of a product of these two operands; raises `OpProblem`."""
    return _infer(types, attrs)


def _swap(x: Node) -> Node:
    return build("transpose", x)


def _flat(x: Node) -> Node:
    """[… m n] as […·m n]."""
    return build("reshape", x, shape=(prod(x.type.shape[:-1]), x.type.shape[-1])) if x.type.rank > 2 else x


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    a, b = node.inputs
    left, right = (
        build("reshape", x, shape=_matrix(x.type, x is a and i == 0).shape) if x.type.rank == 1 else x
        for i, x in enumerate((a, b))
    )
    shape = list(node.type.shape)
    if a.type.rank == 1:
        shape.insert(len(shape) - (b.type.rank > 1), 1)
    if b.type.rank == 1:
        shape.append(1)
    ct = ct if tuple(shape) == ct.type.shape else build("reshape", ct, shape=tuple(shape))
    by_a = unbroadcast(build("matmul", ct, _swap(right)), left.type)
    if right.type.rank == 2 and left.type.rank > 2:  # one product over all rows, not a sum of products a sample
        by_b = build("matmul", _swap(_flat(left)), _flat(ct))
    else:
        by_b = unbroadcast(build("matmul", _swap(left), ct), right.type)
    back = lambda g, x: g if g.type.shape == x.type.shape else build("reshape", g, shape=x.type.shape)  # noqa: E731
    return (back(by_a, a), back(by_b, b))


def _wide(types: Types) -> str:
    return "f64" if types[0].dtype == "f64" else "f32"


def _widened(torch: Any, x: Any) -> Any:
    return x if x.dtype == torch.float64 else x.float()


def _with_bias(torch: Any, node: Node, args: list[Any]) -> Any:
    a, b, bias = (_widened(torch, x) for x in args)
    return (torch.matmul(a, b) + bias).to(args[0].dtype)


def _sum(torch: Any, node: Node, args: list[Any]) -> Any:
    return sum(torch.matmul(a, b) for a, b in zip(args[::2], args[1::2], strict=True)) * node.attrs["scale"]


def _cost(node: Node) -> tuple[int, int]:
    return (2 * node.type.size * node.inputs[0].type.shape[-1], traffic(node))


def _cost_sum(node: Node) -> tuple[int, int]:
    return (sum(2 * node.type.size * a.type.shape[-1] for a in node.inputs[::2]), traffic(node))


OPS = (
    Op(
        "matmul",
        "The matrix product over the last axis of a and the last but one of b; leading axes broadcast.",
        ("a", "b"),
        _infer,
        _reference,
        _cost,
        Lowering("contraction"),
        vjp=_vjp,
        example="(matmul x w)",
    ),
    Op(
        "matmul-f32",
        "matmul of bf16 or f16 operands whose sums are given as they are, in f32 (of f64 operands, f64).",
        ("a", "b"),
        lambda types, attrs: replace(_infer(types, attrs), dtype=_wide(types)),
        lambda torch, node, args: torch.matmul(*(_widened(torch, x) for x in args)),
        _cost,
        Lowering("contraction"),
        lisp=False,
        differentiable=False,
        example="(matmul-f32 a b)",
    ),
    Op(
        "matmul-bias",
        "matmul plus a row: bf16 or f16 operands, summed in f32 and rounded once.",
        ("a", "b", "bias"),
        lambda types, attrs: _infer(types[:2], attrs),
        _with_bias,
        _cost,
        Lowering("contraction"),
        lisp=False,
        differentiable=False,
        example="(matmul-bias a b bias)",
    ),
    Op(
        "matmul-sum",
        "The sum of the products of pairs of matrices, times :scale. Weights of edges that are made anew for each of their readers have numbers `again`.",
        ("operands*",),
        lambda types, attrs: _infer(types[:2], {}),
        _sum,
        _cost_sum,
        Lowering("contraction"),
        attributes=(Parameter("scale", "float", 1.0), Parameter("again", "int", 0)),
        lisp=False,
        differentiable=False,
        example="(matmul-sum a b c d)",
    ),
)

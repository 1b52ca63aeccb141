"""Matrix products with what a library computes on their way out. Passes make them (`passes/epilogues.py`); no gradient is asked of them.

Sums are in f32 (of f64 operands f64), and each result is rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.contract import product_type
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter
from sexpgpu.ops.helpers import Attrs, Types, traffic


def _wide(dtype: str) -> str:
    return "f64" if dtype == "f64" else "f32"


def _widened(torch: Any, x: Any) -> Any:
    return x if x.dtype == torch.float64 else x.float()


def _sums(torch: Any, args: list[Any]) -> Any:
    """a · b (+ bias), not rounded."""
    a, b, *bias = (_widened(torch, x) for x in args)
    return torch.matmul(a, b) + bias[0] if bias else torch.matmul(a, b)


def _infer(types: Types, attrs: Attrs) -> TensorType:
    return product_type(types[:2], attrs)


def _gelu(torch: Any, node: Node, args: list[Any]) -> Any:
    found = _sums(torch, args)
    return (found if node.attrs["of"] else torch.nn.functional.gelu(found, approximate="tanh")).to(args[0].dtype)


def _gelu_grad(torch: Any, node: Node, args: list[Any]) -> Any:
    found, x = _sums(torch, args[:2]), _widened(torch, args[2])
    return torch.ops.aten.gelu_backward(found, x, approximate="tanh").to(args[0].dtype)


def _infer_rows(types: Types, attrs: Attrs) -> TensorType:
    found = product_type(types, attrs)
    if types[0].rank != 2 or types[1].rank != 2:
        raise OpProblem("E-SHAPE-001", f"matmul-rows: needs two matrices, got {types[0]} and {types[1]}")
    wide = replace(found, dtype=_wide(found.dtype))
    return replace(wide, shape=found.shape[1:], batch=False) if attrs["of"] else wide


def _rows(torch: Any, node: Node, args: list[Any]) -> Any:
    return _widened(torch, args[1]).sum(0) if node.attrs["of"] else _sums(torch, args)


def _infer_add(types: Types, attrs: Attrs) -> TensorType:
    found = product_type(types[:2], attrs)
    found = replace(found, dtype=_wide(found.dtype))
    if {types[2].dtype, types[3].dtype} != {found.dtype} or types[3].shape != found.shape or types[2].shape != found.shape[-1:]:
        raise OpProblem("E-SHAPE-001", f"matmul-add: needs a row and a tensor for {found}, got {types[2]} and {types[3]}")
    return found


def _cost(node: Node) -> tuple[int, int]:
    """Of the product, whichever of its results the node is."""
    a, b = node.inputs[0].type, node.inputs[1].type
    return (2 * a.size * b.shape[-1], traffic(node))


def _op(name: str, doc: str, operands: str, infer: Any, reference: Any, example: str, joint: bool = False) -> Op:
    return Op(
        name, doc, tuple(operands.split()), infer, reference, _cost, Lowering("contraction"),
        attributes=(Parameter("of", "int", 0),) if joint else (), lisp=False, differentiable=False, example=example,
    )  # fmt: skip


OPS = (
    _op("matmul-gelu", "The tanh approximation of gelu over a · b + bias; :of 1: what it is applied to.", "a b bias", _infer, _gelu,
        "(matmul-gelu a b bias :of 1)", joint=True),
    _op("matmul-gelu-grad", "The derivative at x of gelu's tanh approximation, times a · b.", "a b x", _infer, _gelu_grad, "(matmul-gelu-grad a b x)"),
    _op("matmul-rows", "a · b of two matrices, in f32; :of 1: the sums over the rows of b. A weight's gradient and its bias's.", "a b", _infer_rows, _rows,
        "(matmul-rows a b :of 1)", joint=True),
    _op("matmul-add", "a · b + bias + c: bias, c and the result in f32.", "a b bias c", _infer_add,
        lambda torch, node, args: _sums(torch, args[:3]) + args[3], "(matmul-add a b bias c)"),
)

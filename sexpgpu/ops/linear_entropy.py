"""A projection and the cross-entropy of its result as one op, so that the logits never stand whole in memory.

Its references are the two ops one after the other. The idea is that of Liger's fused linear cross-entropy (Hsu et al. 2024).
"""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter
from sexpgpu.ops.helpers import Attrs, Types, require_float, require_indices, same_dtype, traffic

LOSS = 2  # :of the gradient op: the losses themselves


def _check(name: str, types: Types) -> None:
    x, weight, labels = types[:3]
    require_float(name, x, weight)
    same_dtype(name, (x, weight))
    require_indices(name, labels)
    if weight.rank != 2 or x.rank != labels.rank + 1 or x.shape[:-1] != labels.shape or x.shape[-1] != weight.shape[0]:
        raise OpProblem("E-SHAPE-001", f"{name}: {x}, {weight} and labels {labels} do not belong together")


def _infer(types: Types, attrs: Attrs) -> TensorType:
    _check("linear-cross-entropy", types)
    return TensorType("f64" if types[0].dtype == "f64" else "f32", types[2].shape, types[2].batch)


def _infer_grad(types: Types, attrs: Attrs) -> TensorType:
    _check("linear-cross-entropy-grad", types)
    wide = "f64" if types[0].dtype == "f64" else "f32"
    if attrs["of"] == LOSS:
        return TensorType(wide, types[2].shape, types[2].batch)
    return types[0] if attrs["of"] == 0 else TensorType(wide, types[1].shape)


def _logits(torch: Any, x: Any, weight: Any) -> Any:
    if x.dtype in (torch.bfloat16, torch.float16):
        return torch.matmul(x.float(), weight.float()).to(x.dtype).float()
    return torch.matmul(x, weight)


def _losses(torch: Any, node: Node, args: list[Any]) -> Any:
    x, weight, labels = args[:3]
    logits = _logits(torch, x, weight)
    flat = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long(), reduction="none")
    return flat.reshape(labels.shape)


def _grad(torch: Any, node: Node, args: list[Any]) -> Any:
    if node.attrs["of"] == LOSS:
        return _losses(torch, node, args)
    x, weight, labels, ct = args
    p = torch.softmax(_logits(torch, x, weight), -1)
    p.view(-1, p.shape[-1]).scatter_add_(1, labels.reshape(-1, 1).long(), torch.full((labels.numel(), 1), -1.0, dtype=p.dtype))
    low = x.dtype in (torch.bfloat16, torch.float16)
    by_logits = p.mul_(ct.unsqueeze(-1))
    if low:
        by_logits = by_logits.to(x.dtype).float()
    if node.attrs["of"] == 0:
        return torch.matmul(by_logits, (weight.float() if low else weight).T).to(x.dtype)
    rows = (x.float() if low else x).reshape(-1, x.shape[-1])
    return torch.matmul(rows.T, by_logits.reshape(-1, by_logits.shape[-1]))


def _flops(products: int) -> Any:
    def cost(node: Node) -> tuple[int, int]:
        x, weight = node.inputs[0].type, node.inputs[1].type
        return (products * 2 * x.size * weight.shape[1] + 12 * x.size // max(1, x.shape[-1]) * weight.shape[1], traffic(node))

    return cost


OPS = (
    Op(
        "linear-cross-entropy",
        "softmax-cross-entropy of matmul: x [… d], weight [d classes], labels […] i32; losses […] f32.",
        ("x", "weight", "labels"),
        _infer,
        _losses,
        _flops(1),
        Lowering("template", "linear-cross-entropy"),
        lisp=False,
        differentiable=False,
        example="(linear-cross-entropy x weight labels)",
    ),
    Op(
        "linear-cross-entropy-grad",
        "Its gradient, times ct […], by x (:of 0) or weight (:of 1, in f32), or the losses (:of 2): one pass makes all three.",
        ("x", "weight", "labels", "ct"),
        _infer_grad,
        _grad,
        _flops(1),
        Lowering("template", "linear-cross-entropy-grad"),
        attributes=(Parameter("of", "int", 0),),
        lisp=False,
        differentiable=False,
        example="(linear-cross-entropy-grad x weight labels ct)",
    ),
)

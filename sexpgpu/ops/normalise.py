"""Softmax and its kin: composites that run as one pass, with gradients in ops that differentiate again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    axis_of,
    expand_reduced,
    mul,
    per_input,
    reduced,
    require_float,
    require_indices,
    same_dtype,
    sub,
    total,
)

Canonical = tuple[tuple[Node, ...], Attrs]


def _canonical(name: str) -> Callable[[tuple[Node, ...], Attrs], Canonical]:
    return lambda inputs, attrs: (inputs, {**attrs, "axis": axis_of(name, attrs["axis"], inputs[0].type.rank)})


def _infer_same(name: str) -> Callable[[Types, Attrs], TensorType]:
    def infer(types: Types, attrs: Attrs) -> TensorType:
        require_float(name, *types)
        return types[0]

    return infer


def _softmax_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (build("softmax-grad", node, ct, axis=node.attrs["axis"]),)


def _infer_softmax_grad(types: Types, attrs: Attrs) -> TensorType:
    require_float("softmax-grad", *types)
    same_dtype("softmax-grad", types)
    if types[0].shape != types[1].shape:
        raise OpProblem("E-SHAPE-001", f"softmax-grad: {types[0]} and {types[1]} differ")
    return types[0]


def _softmax_grad(torch: Any, node: Node, args: list[Any]) -> Any:
    y, ct = args
    return torch.ops.aten._softmax_backward_data(ct, y, node.attrs["axis"], y.dtype)


def _softmax_grad_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """Of y · (c - Σ c y): by y, ct · (c - Σ c y) - c Σ ct y; by c, the same op of ct."""
    y, c = node.inputs
    row = lambda value: total(mul(value, y), (node.attrs["axis"],), keep=True)  # noqa: E731
    by_y = sub(mul(ct, sub(c, row(c))), mul(c, row(ct)))
    return (by_y, build("softmax-grad", y, ct, axis=node.attrs["axis"]))


def _log_softmax_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return (sub(ct, mul(build("exp", node), total(ct, (node.attrs["axis"],), keep=True))),)


def _infer_logsumexp(types: Types, attrs: Attrs) -> TensorType:
    require_float("logsumexp", types[0])
    return reduced(types[0], (attrs["axis"],), attrs["keep-dims"])


def _logsumexp_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x, axis = node.inputs[0], node.attrs["axis"]
    return (mul(build("softmax", x, axis=axis), expand_reduced(ct, x.type, (axis,), node.attrs["keep-dims"])),)


def _check_labels(name: str, logits: TensorType, labels: TensorType) -> None:
    require_float(name, logits)
    require_indices(name, labels)
    if logits.rank != labels.rank + 1:
        raise OpProblem("E-SHAPE-007", f"{name}: logits {logits} need one axis more than labels {labels}")
    for axis, (a, b) in enumerate(zip(logits.shape, labels.shape, strict=False)):
        if a != b:
            raise OpProblem("E-SHAPE-001", f"{name}: axes differ: {a} and {b}", ((0, axis), (1, axis)))


def _infer_entropy(types: Types, attrs: Attrs) -> TensorType:
    logits, labels = types
    _check_labels("softmax-cross-entropy", logits, labels)
    return TensorType(logits.dtype, labels.shape, labels.rank > 0 and (logits.batch or labels.batch))


def _entropy(torch: Any, node: Node, args: list[Any]) -> Any:
    logits, labels = args
    flat = logits.reshape(-1, logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, labels.reshape(-1).long(), reduction="none")
    return loss.reshape(labels.shape)


def _entropy_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    logits, labels = node.inputs
    return (build("softmax-cross-entropy-grad", logits, labels, ct), None)


def _infer_entropy_grad(types: Types, attrs: Attrs) -> TensorType:
    logits, labels, ct = types
    _check_labels("softmax-cross-entropy-grad", logits, labels)
    same_dtype("softmax-cross-entropy-grad", (logits, ct))
    if ct.shape != labels.shape:
        raise OpProblem("E-SHAPE-001", f"softmax-cross-entropy-grad: {ct} and {labels} differ")
    return logits


def _entropy_grad(torch: Any, node: Node, args: list[Any]) -> Any:
    logits, labels, ct = args
    out = torch.softmax(logits, -1)
    rows = out.view(-1, out.shape[-1])
    index = labels.reshape(-1, 1).long()
    rows.scatter_add_(1, index, torch.full(index.shape, -1.0, dtype=out.dtype))
    return out.mul_(ct.unsqueeze(-1))


def _entropy_grad_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """Of c·(p - onehot): by the logits c·p·(ct - Σ p ct), by c the inner product with p - onehot."""
    logits, labels, c = node.inputs
    last = (logits.type.rank - 1,)
    p = build("softmax", logits, axis=-1)
    hot = build("one-hot", labels, count=logits.type.shape[-1], dtype=logits.type.dtype)
    wide = expand_reduced(c, logits.type, last, False) if c.type.rank else c
    by_logits = mul(wide, build("softmax-grad", p, ct))
    return (by_logits, None, total(mul(ct, sub(p, hot)), last))


_AXIS = Parameter("axis", "axis", -1)

OPS = (
    Op(
        "softmax",
        "exp(x) / Σ exp(x) along :axis.",
        ("x",),
        _infer_same("softmax"),
        lambda torch, node, args: torch.softmax(args[0], node.attrs["axis"]),
        per_input(12),
        Lowering("template", "softmax"),
        vjp=_softmax_vjp,
        attributes=(_AXIS,),
        example="(softmax x :axis -1)",
        canonical=_canonical("softmax"),
    ),
    Op(
        "softmax-grad",
        "The gradient of softmax, by its result y: y · (ct - Σ ct y) along :axis.",
        ("y", "ct"),
        _infer_softmax_grad,
        _softmax_grad,
        per_input(4),
        Lowering("template", "softmax-grad"),
        vjp=_softmax_grad_vjp,
        attributes=(_AXIS,),
        lisp=False,
        example="(softmax-grad y ct)",
        canonical=_canonical("softmax-grad"),
    ),
    Op(
        "log-softmax",
        "x - logsumexp(x) along :axis.",
        ("x",),
        _infer_same("log-softmax"),
        lambda torch, node, args: torch.log_softmax(args[0], node.attrs["axis"]),
        per_input(12),
        Lowering("template", "log-softmax"),
        vjp=_log_softmax_vjp,
        attributes=(_AXIS,),
        example="(log-softmax x)",
        canonical=_canonical("log-softmax"),
    ),
    Op(
        "logsumexp",
        "log Σ exp(x) along :axis, without overflow.",
        ("x",),
        _infer_logsumexp,
        lambda torch, node, args: torch.logsumexp(args[0], node.attrs["axis"], node.attrs["keep-dims"]),
        per_input(10),
        Lowering("reduction", "logsumexp"),
        vjp=_logsumexp_vjp,
        attributes=(_AXIS, Parameter("keep-dims", "bool", False)),
        example="(logsumexp x :axis -1)",
        canonical=_canonical("logsumexp"),
    ),
    Op(
        "softmax-cross-entropy",
        "-log softmax(logits)[label] of each row; logits [… classes], labels […] i32.",
        ("logits", "labels"),
        _infer_entropy,
        _entropy,
        per_input(12),
        Lowering("template", "softmax-cross-entropy"),
        vjp=_entropy_vjp,
        example="(softmax-cross-entropy logits labels)",
    ),
    Op(
        "softmax-cross-entropy-grad",
        "The gradient of softmax-cross-entropy by its logits: ct · (softmax - one-hot).",
        ("logits", "labels", "ct"),
        _infer_entropy_grad,
        _entropy_grad,
        per_input(14),
        Lowering("template", "softmax-cross-entropy-grad"),
        vjp=_entropy_grad_vjp,
        lisp=False,
        example="(softmax-cross-entropy-grad logits labels ct)",
    ),
)

"""Ops that act element by element, with NumPy's broadcasting. Operands have one dtype; comparisons give bool.

A lowering's expression names the functions of the kernels' prelude; `{0}` is the first operand. max, min, relu and
clamp propagate NaN (language.md, "Numbers and types"), which Triton's own do not: the prelude's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build, constant
from sexpgpu.ops.helpers import (
    Attrs,
    Types,
    add,
    broadcast_type,
    combine,
    div,
    mul,
    neg,
    per_element,
    require_bool,
    require_dtype,
    require_float,
    require_number,
    same_dtype,
    sub,
    unbroadcast,
    where,
    zeros,
)
from sexpgpu.ops.leaves import TORCH_NAMES

Derivative = Callable[[Node, Node], Sequence[Node | None]]
DOMAINS = {
    "float": require_float,
    "number": require_number,
    "bool": require_bool,
    "any": lambda name, *types: None,
}


def _vjp(derivative: Derivative) -> Callable[[Node, Node], tuple[Node | None, ...]]:
    """The derivative with each cotangent summed over the axes its operand was broadcast along."""

    def vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
        found = derivative(node, ct)
        return tuple(None if g is None else unbroadcast(g, x.type) for g, x in zip(found, node.inputs, strict=True))

    return vjp


def pointwise(
    name: str,
    doc: str,
    operands: str,
    expression: str,
    reference: Callable[[Any, Node, list[Any]], Any],
    derivative: Derivative | None = None,
    *,
    domain: str = "float",
    result: str = "",
    flops: int = 1,
    attributes: tuple[Parameter, ...] = (),
    positional: tuple[str, ...] = (),
    lisp: bool = True,
    example: str = "",
) -> Op:
    """An op whose result has the broadcast shape of its operands; `result` is its dtype if not theirs."""
    names = tuple(operands.split())

    def infer(types: Types, attrs: Attrs) -> TensorType:
        dtype = same_dtype(name, types)
        DOMAINS[domain](name, *types)
        return broadcast_type(name, types, result or dtype)

    return Op(
        name,
        doc,
        names,
        infer,
        reference,
        per_element(flops),
        Lowering("pointwise", expression),
        vjp=_vjp(derivative) if derivative else None,
        attributes=attributes,
        positional=positional,
        lisp=lisp,
        example=example or f"({name} {operands})",
        differentiable=derivative is not None,
    )


def _torch(function: str) -> Callable[[Any, Node, list[Any]], Any]:
    """The reference that is one function of torch, by name."""
    return lambda torch, node, args: getattr(torch, function)(*args)


def _functional(function: str) -> Callable[[Any, Node, list[Any]], Any]:
    return lambda torch, node, args: getattr(torch.nn.functional, function)(*args)


def _x(node: Node) -> Node:
    return node.inputs[0]


def _ties(wins: str) -> Derivative:
    """max and min: the cotangent goes to the winner, half to each at a tie."""

    def derivative(node: Node, ct: Node) -> Sequence[Node]:
        a, b = node.inputs
        half, nothing = mul(ct, 0.5), zeros(TensorType(ct.type.dtype))
        equal = build("=", a, b)
        other = ">" if wins == "<" else "<"
        return [where(equal, half, where(build(sign, a, b), ct, nothing)) for sign in (wins, other)]

    return derivative


def _power_derivative(node: Node, ct: Node) -> Sequence[Node | None]:
    x, p = node.inputs
    if p.op == "constant":  # keeps 0 · x^-1 out of the higher derivatives of x^1 and x^2
        value = p.attrs["value"]
        if value in (0.0, 1.0):
            return (ct if value else None, None)
        return (
            mul(
                ct, mul(x, 2.0) if value == 2.0 else mul(build("power", x, constant(value - 1.0, x.type.dtype)), value)
            ),
            None,
        )
    by_x = mul(ct, mul(p, build("power", x, sub(p, 1.0))))
    positive = combine(">", x, 0.0)
    safe = where(positive, x, 1.0)
    by_p = mul(ct, mul(node, build("log", safe)))
    return (by_x, by_p)


def _gaussian(x: Node) -> Node:
    """The standard normal density at x."""
    return mul(build("exp", mul(build("square", x), -0.5)), 1.0 / sqrt(2.0 * pi))


def _silu_derivative(node: Node, ct: Node) -> Sequence[Node]:
    s = build("sigmoid", _x(node))
    return (mul(ct, mul(s, add(mul(_x(node), sub(1.0, s)), 1.0))),)


def _gelu_grad_derivative(node: Node, ct: Node) -> Sequence[Node]:
    """Of c·g'(x), where g'' = φ(x)(2 - x²)."""
    x, c = node.inputs
    curvature = mul(_gaussian(x), sub(2.0, build("square", x)))
    return (mul(mul(ct, c), curvature), build("gelu-grad", x, ct))


def _clamp(torch: Any, node: Node, args: list[Any]) -> Any:
    return torch.clamp(args[0], node.attrs["low"], node.attrs["high"])


def _clamp_derivative(node: Node, ct: Node) -> Sequence[Node]:
    inside = []
    if node.attrs["low"] is not None:
        inside.append(combine(">=", _x(node), node.attrs["low"]))
    if node.attrs["high"] is not None:
        inside.append(combine("<=", _x(node), node.attrs["high"]))
    for mask in inside:
        ct = where(mask, ct, 0.0)
    return (ct,)


def _canonical_clamp(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[tuple[Node, ...], Attrs]:
    low, high = attrs["low"], attrs["high"]
    if low is None and high is None:
        raise OpProblem("E-SHAPE-015", "clamp: needs :low, :high or both")
    kind = float if inputs[0].type.is_float else int
    for bound in (low, high):
        if bound is not None and kind is int and int(bound) != bound:
            raise OpProblem(
                "E-SHAPE-006", f"clamp: the bound {bound} is no integer", help="cast the tensor: (cast x f32)"
            )
    return inputs, {"low": None if low is None else kind(low), "high": None if high is None else kind(high)}


def _divide(torch: Any, node: Node, args: list[Any]) -> Any:
    return torch.div(*args)


def _infer_where(types: Types, attrs: Attrs) -> TensorType:
    require_bool("where", types[0])
    return broadcast_type("where", types, same_dtype("where", types[1:]))


def _infer_cast(types: Types, attrs: Attrs) -> TensorType:
    return TensorType(require_dtype("cast", attrs["dtype"]), types[0].shape, types[0].batch)


def _cast(torch: Any, node: Node, args: list[Any]) -> Any:
    return args[0].to(getattr(torch, TORCH_NAMES[node.type.dtype]))


def _cast_vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    x = node.inputs[0]
    return (build("cast", ct, dtype=x.type.dtype) if x.type.is_float and node.type.is_float else None,)


def _mod_derivative(node: Node, ct: Node) -> Sequence[Node | None]:
    x, y = node.inputs
    return (mul(ct, 1.0), mul(neg(ct), build("floor", div(x, y))))


def _compare(name: str, doc: str, function: str, domain: str = "number") -> Op:
    sign = {"=": "==", "/=": "!="}.get(name, name)
    return pointwise(name, doc, "x y", f"{{0}} {sign} {{1}}", _torch(function), domain=domain, result="bool")


def _unary(name: str, doc: str, derivative: Derivative | None, *, function: str = "", **more: Any) -> Op:
    """An op of one operand that torch and the kernels' prelude know by one name."""
    return pointwise(name, doc, "x", f"{function or name}({{0}})", _torch(function or name), derivative, **more)


_NOTHING: Derivative = lambda node, ct: (None,)  # noqa: E731 - a constant almost everywhere

_ARITHMETIC = (
    pointwise("+", "The sum of two tensors.", "x y", "{0} + {1}", _torch("add"), lambda n, c: (c, c), domain="number"),
    pointwise(
        "-",
        "The difference of two tensors.",
        "x y",
        "{0} - {1}",
        _torch("sub"),
        lambda n, c: (c, neg(c)),
        domain="number",
    ),
    pointwise(
        "*",
        "The product of two tensors, element by element.",
        "x y",
        "{0} * {1}",
        _torch("mul"),
        lambda n, c: (mul(c, n.inputs[1]), mul(c, n.inputs[0])),
        domain="number",
    ),
    pointwise(
        "/",
        "The quotient of two float tensors.",
        "x y",
        "{0} / {1}",
        _divide,
        lambda n, c: (div(c, n.inputs[1]), neg(mul(c, div(n, n.inputs[1])))),
    ),
    pointwise(
        "max",
        "The larger of two; NaN if either is. At a tie each gets half of the gradient.",
        "x y",
        "maximum({0}, {1})",
        _torch("maximum"),
        _ties(">"),
        domain="number",
    ),
    pointwise(
        "min",
        "The smaller of two; NaN if either is. At a tie each gets half of the gradient.",
        "x y",
        "minimum({0}, {1})",
        _torch("minimum"),
        _ties("<"),
        domain="number",
    ),
    pointwise(
        "power",
        "x to the power y; the gradient by y is that of positive x.",
        "x y",
        "power({0}, {1})",
        _torch("pow"),
        _power_derivative,
        flops=20,
    ),
    pointwise(
        "mod",
        "The remainder of x / y with the sign of y, as in Lisp and Python.",
        "x y",
        "mod({0}, {1})",
        _torch("remainder"),
        _mod_derivative,
        domain="number",
        flops=4,
    ),
)

_FUNCTIONS = (
    _unary("neg", "-x.", lambda n, c: (neg(c),), domain="number"),
    _unary("abs", "The absolute value.", lambda n, c: (mul(c, build("sign", _x(n))),), domain="number"),
    _unary("sign", "-1, 0 or 1; NaN of NaN for floats is 0.", _NOTHING, domain="number"),
    _unary("exp", "e to the power x.", lambda n, c: (mul(c, n),), flops=8),
    _unary("log", "The natural logarithm.", lambda n, c: (div(c, _x(n)),), flops=8),
    _unary("log1p", "log(1 + x), exact near 0.", lambda n, c: (div(c, add(_x(n), 1.0)),), flops=8),
    _unary("expm1", "exp(x) - 1, exact near 0.", lambda n, c: (mul(c, add(n, 1.0)),), flops=8),
    _unary("sqrt", "The square root.", lambda n, c: (div(mul(c, 0.5), n),), flops=4),
    _unary("rsqrt", "1 / sqrt(x).", lambda n, c: (mul(mul(c, -0.5), mul(n, build("square", n))),), flops=4),
    _unary("reciprocal", "1 / x.", lambda n, c: (neg(mul(c, build("square", n))),), flops=4),
    _unary("sin", "The sine.", lambda n, c: (mul(c, build("cos", _x(n))),), flops=10),
    _unary("cos", "The cosine.", lambda n, c: (neg(mul(c, build("sin", _x(n)))),), flops=10),
    _unary("tanh", "The hyperbolic tangent.", lambda n, c: (mul(c, sub(1.0, build("square", n))),), flops=10),
    _unary("sigmoid", "1 / (1 + exp(-x)).", lambda n, c: (mul(c, mul(n, sub(1.0, n))),), flops=10),
    _unary(
        "erf",
        "The error function.",
        lambda n, c: (mul(c, mul(build("exp", neg(build("square", _x(n)))), 2.0 / sqrt(pi))),),
        flops=15,
    ),
    _unary("square", "x · x.", lambda n, c: (mul(c, mul(_x(n), 2.0)),), domain="number"),
    _unary("floor", "The largest integer not above x, as a float. No gradient.", _NOTHING),
    _unary("ceil", "The smallest integer not below x, as a float. No gradient.", _NOTHING),
    _unary("round", "The nearest integer, halves to even, as a float. No gradient.", _NOTHING),
    pointwise(
        "softplus",
        "log(1 + exp(x)).",
        "x",
        "softplus({0})",
        lambda torch, node, args: torch.logaddexp(args[0], torch.zeros_like(args[0])),
        lambda n, c: (mul(c, build("sigmoid", _x(n))),),
        flops=18,
    ),
    pointwise(
        "relu",
        "max(x, 0); NaN stays NaN.",
        "x",
        "maximum({0}, 0)",
        _torch("relu"),
        lambda n, c: (build("relu-grad", _x(n), c),),
    ),
    pointwise(
        "gelu",
        "x Φ(x), with the exact error function.",
        "x",
        "gelu({0})",
        _functional("gelu"),
        lambda n, c: (build("gelu-grad", _x(n), c),),
        flops=18,
    ),
    pointwise("silu", "x · sigmoid(x).", "x", "silu({0})", _functional("silu"), _silu_derivative, flops=12),
    pointwise(
        "relu-grad",
        "The gradient of relu: ct where x is above 0 (or NaN), else 0.",
        "x ct",
        "where({0} <= 0, 0, {1})",
        lambda torch, node, args: torch.where(args[0] <= 0, torch.zeros_like(args[1]), args[1]),
        lambda n, c: (None, build("relu-grad", _x(n), c)),
        lisp=False,
    ),
    pointwise(
        "gelu-grad",
        "The gradient of gelu: ct · (Φ(x) + x φ(x)).",
        "x ct",
        "gelu_grad({0}, {1})",
        # torch's does not broadcast, and a simplified ct may
        lambda torch, node, args: torch.ops.aten.gelu_backward(*reversed(torch.broadcast_tensors(*args))),
        _gelu_grad_derivative,
        lisp=False,
        flops=30,
    ),
)

_LOGIC = (
    _compare("=", "Whether x equals y, element by element.", "eq", "any"),
    _compare("/=", "Whether x differs from y.", "ne", "any"),
    _compare("<", "Whether x is below y.", "lt"),
    _compare("<=", "Whether x is at most y.", "le"),
    _compare(">", "Whether x is above y.", "gt"),
    _compare(">=", "Whether x is at least y.", "ge"),
    pointwise("logical-and", "Whether both hold.", "x y", "{0} & {1}", _torch("logical_and"), domain="bool"),
    pointwise("logical-or", "Whether either holds.", "x y", "{0} | {1}", _torch("logical_or"), domain="bool"),
    pointwise("logical-xor", "Whether exactly one holds.", "x y", "{0} ^ {1}", _torch("logical_xor"), domain="bool"),
    pointwise("logical-not", "Whether x does not hold.", "x", "not_({0})", _torch("logical_not"), domain="bool"),
    pointwise("is-nan", "Whether x is not a number.", "x", "{0} != {0}", _torch("isnan"), result="bool"),
    pointwise(
        "is-finite", "Whether x is neither infinite nor NaN.", "x", "is_finite({0})", _torch("isfinite"), result="bool"
    ),
)

_CLAMP = Op(
    "clamp",
    "x, but not below :low and not above :high; NaN stays NaN.",
    ("x",),
    pointwise("clamp", "", "x", "", _clamp, domain="number").infer,
    _clamp,
    per_element(2),
    Lowering("pointwise", "clamp({0}, low, high)"),
    vjp=_vjp(_clamp_derivative),
    attributes=(Parameter("low", "float"), Parameter("high", "float")),
    example="(clamp x :low 0 :high 1)",
    canonical=_canonical_clamp,
)

_WHERE = Op(
    "where",
    "x where the mask holds, else y.",
    ("mask", "x", "y"),
    _infer_where,
    _torch("where"),
    per_element(1),
    Lowering("pointwise", "where({0}, {1}, {2})"),
    vjp=_vjp(lambda n, c: (None, where(n.inputs[0], c, 0.0), where(n.inputs[0], 0.0, c))),
    example="(where (> x 0) x y)",
)

_CAST = Op(
    "cast",
    "x in another dtype; a float to an integer drops the fraction.",
    ("x",),
    _infer_cast,
    _cast,
    per_element(1),
    Lowering("pointwise", "cast({0}, dtype)"),
    vjp=_cast_vjp,
    attributes=(Parameter("dtype", "dtype", None, required=True),),
    positional=("dtype",),
    example="(cast x f32)",
)

OPS = (*_ARITHMETIC, *_FUNCTIONS, *_LOGIC, _CLAMP, _WHERE, _CAST)
POINTWISE = frozenset(op.name for op in OPS)

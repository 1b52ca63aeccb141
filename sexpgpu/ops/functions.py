"""More functions element by element: inverse and hyperbolic functions, logarithms of base 2, further activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log, pi, sqrt
from typing import Any

from sexpgpu.ir import Node
from sexpgpu.ops.definition import Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, add, combine, div, mul, neg, sub, where
from sexpgpu.ops.pointwise import Derivative, pointwise

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_LN2 = log(2.0)


def _x(node: Node) -> Node:
    return node.inputs[0]


def _square(x: Node) -> Node:
    return build("square", x)


def _unary(name: str, doc: str, derivative: Derivative, **more: Any) -> Op:
    """An op of one operand that torch and the kernels' prelude know by one name."""
    reference = lambda torch, node, args: getattr(torch, name)(args[0])  # noqa: E731
    return pointwise(name, doc, "x", f"{name}({{0}})", reference, derivative, flops=15, **more)


def _negative_exp(x: Node) -> Node:
    """exp(min(x, 0)): the branch not taken stays finite, in every derivative."""
    return build("exp", combine("min", x, 0.0))


def _setting(op: Op, key: str) -> Op:
    """`op` whose float attribute `key` must be finite."""

    def canonical(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[tuple[Node, ...], Attrs]:
        value = float(attrs[key])
        if value - value != 0.0:
            raise OpProblem("E-SHAPE-015", f"{op.name}: :{key} must be finite, got {value}")
        return inputs, {key: value}

    return replace(op, canonical=canonical)


def _elu_derivative(node: Node, ct: Node) -> tuple[Node]:
    return (mul(ct, where(combine(">", _x(node), 0.0), 1.0, mul(_negative_exp(_x(node)), node.attrs["alpha"]))),)


def _selu_derivative(node: Node, ct: Node) -> tuple[Node]:
    below = mul(_negative_exp(_x(node)), SELU_ALPHA)
    return (mul(mul(ct, SELU_SCALE), where(combine(">", _x(node), 0.0), 1.0, below)),)


def _leaky_derivative(node: Node, ct: Node) -> tuple[Node]:
    return (where(combine(">", _x(node), 0.0), ct, mul(ct, node.attrs["slope"])),)


def _mish_derivative(node: Node, ct: Node) -> tuple[Node]:
    x = _x(node)
    t = build("tanh", build("softplus", x))
    return (mul(ct, add(t, mul(mul(x, build("sigmoid", x)), sub(1.0, _square(t))))),)


def _gelu_tanh_derivative(node: Node, ct: Node) -> tuple[Node]:
    """With u = √(2/π)(x + 0.044715 x³): ½(1 + tanh u) + ½ x (1 - tanh² u) u'."""
    x, k = _x(node), sqrt(2.0 / pi)
    xx = _square(x)
    t = build("tanh", mul(mul(x, k), add(mul(xx, 0.044715), 1.0)))
    slope = mul(add(mul(xx, 3 * 0.044715), 1.0), k)
    return (mul(mul(ct, 0.5), add(add(t, 1.0), mul(mul(x, slope), sub(1.0, _square(t))))),)


def _atan2_derivative(node: Node, ct: Node) -> tuple[Node, Node]:
    y, x = node.inputs
    scaled = div(ct, add(_square(x), _square(y)))
    return (mul(scaled, x), neg(mul(scaled, y)))


def _functional(function: str, **settings: str) -> Callable[[Any, Node, list[Any]], Any]:
    """The fused function of torch.nn.functional; `settings`: its keyword -> our attribute."""
    return lambda torch, node, args: getattr(torch.nn.functional, function)(
        *args, **{theirs: node.attrs[ours] for theirs, ours in settings.items()}
    )


OPS = (
    _unary("tan", "The tangent.", lambda n, c: (mul(c, add(_square(n), 1.0)),)),
    _unary("asin", "The inverse sine; NaN outside -1 … 1.", lambda n, c: (mul(c, _inverse(sub(1.0, _square(_x(n))))),)),
    _unary(
        "acos",
        "The inverse cosine; NaN outside -1 … 1.",
        lambda n, c: (neg(mul(c, _inverse(sub(1.0, _square(_x(n)))))),),
    ),
    _unary("atan", "The inverse tangent.", lambda n, c: (div(c, add(_square(_x(n)), 1.0)),)),
    _unary("sinh", "The hyperbolic sine.", lambda n, c: (mul(c, build("cosh", _x(n))),)),
    _unary("cosh", "The hyperbolic cosine.", lambda n, c: (mul(c, build("sinh", _x(n))),)),
    _unary("asinh", "The inverse hyperbolic sine.", lambda n, c: (mul(c, _inverse(add(_square(_x(n)), 1.0))),)),
    _unary(
        "acosh",
        "The inverse hyperbolic cosine; NaN below 1.",
        lambda n, c: (mul(c, _inverse(sub(_square(_x(n)), 1.0))),),
    ),
    _unary("atanh", "The inverse hyperbolic tangent.", lambda n, c: (div(c, sub(1.0, _square(_x(n)))),)),
    _unary("exp2", "2 to the power x.", lambda n, c: (mul(mul(c, n), _LN2),)),
    _unary("log2", "The logarithm of base 2.", lambda n, c: (div(c, mul(_x(n), _LN2)),)),
    pointwise(
        "atan2",
        "The angle of the point (x, y), -π … π: (atan2 y x).",
        "y x",
        "atan2({0}, {1})",
        lambda torch, node, args: torch.atan2(*args),
        _atan2_derivative,
        flops=20,
    ),
    pointwise(
        "hypot",
        "√(x² + y²) without overflow; the gradient at (0, 0) is NaN.",
        "x y",
        "hypot({0}, {1})",
        lambda torch, node, args: torch.hypot(*args),
        lambda n, c: (mul(c, div(n.inputs[0], n)), mul(c, div(n.inputs[1], n))),
        flops=8,
    ),
    _setting(
        pointwise(
            "leaky-relu",
            "x where above 0, else :slope · x.",
            "x",
            "where({0} > 0, {0}, {0} * slope)",
            _functional("leaky_relu", negative_slope="slope"),
            _leaky_derivative,
            flops=2,
            attributes=(Parameter("slope", "float", 0.01),),
            example="(leaky-relu x :slope 0.2)",
        ),
        "slope",
    ),
    _setting(
        pointwise(
            "elu",
            "x where above 0, else :alpha · (exp(x) - 1).",
            "x",
            "where({0} > 0, {0}, alpha * expm1({0}))",
            _functional("elu", alpha="alpha"),
            _elu_derivative,
            flops=10,
            attributes=(Parameter("alpha", "float", 1.0),),
            example="(elu x :alpha 1)",
        ),
        "alpha",
    ),
    pointwise(
        "selu",
        "The self-normalizing elu: 1.0507 · (x where above 0, else 1.6733 · (exp(x) - 1)).",
        "x",
        "selu({0})",
        _functional("selu"),
        _selu_derivative,
        flops=11,
    ),
    pointwise("mish", "x · tanh(softplus(x)).", "x", "mish({0})", _functional("mish"), _mish_derivative, flops=25),
    pointwise(
        "gelu-tanh",
        "gelu by its tanh approximation, as GPT-2 has it.",
        "x",
        "gelu_tanh({0})",
        lambda torch, node, args: torch.nn.functional.gelu(args[0], approximate="tanh"),
        _gelu_tanh_derivative,
        flops=18,
    ),
    pointwise(
        "gelu-tanh-grad",
        "The gradient of gelu-tanh: ct times its derivative at x. A pass for a device makes it, after gradients are taken.",
        "x ct",
        "gelu_tanh_grad({0}, {1})",
        lambda torch, node, args: torch.ops.aten.gelu_backward(*reversed(torch.broadcast_tensors(*args)), approximate="tanh"),
        lisp=False,
        flops=20,
    ),
)


def _inverse(x: Node) -> Node:
    return build("rsqrt", x)

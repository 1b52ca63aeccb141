"""Small rewrites that change no bit of a result, NaN and -0 included.

So x + 0 stays (it turns -0 into 0) while x - 0 goes; constants are folded only by operations that IEEE 754 rounds
correctly, in the dtype's own rounding, so that the text of a graph is the same on every machine.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping
from math import copysign

from sexpgpu.ir import DTYPES, Node, Origins
from sexpgpu.ops import build, constant, table
from sexpgpu.ops.definition import OpProblem
from sexpgpu.passes.rewrite import rebuild, rewrite

_FOLD: dict[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "neg": operator.neg,
}
_INTEGER_RANGE = {"i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}


def simplify(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """An equal graph with fewer nodes. Types of results stay, batch marks too. Runs after precision."""
    return rewrite(results, _simpler, origins)


def _simpler(node: Node, inputs: tuple[Node, ...]) -> Node:
    new = rebuild(node, inputs)
    for _ in range(8):  # a rule's result may suit another rule; rules shrink, so this ends
        better = _step(new)
        if better is None or better.type != new.type:
            return new
        new = better
    return new


def _step(node: Node) -> Node | None:
    if node.inputs and table()[node.op].lowering.kind == "pointwise":
        found = _fold(node) or _identity(node) or _narrow(node)
        if found is not None:
            return found
    rule = _RULES.get(node.op)
    return rule(node) if rule else None


def _round(value: float, dtype: str) -> float | None:
    """A float in this dtype's rounding, or None where it overflows or we have no exact way."""
    if dtype == "f64":
        return value
    if dtype != "f32":
        return None
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return None


def _fold(node: Node) -> Node | None:
    """Arithmetic of constants. Double rounding of + - * / from f64 to f32 is innocuous (Figueroa 1995)."""
    if node.op not in _FOLD or any(i.op != "constant" for i in node.inputs):
        return None
    dtype, values = node.type.dtype, [i.attrs["value"] for i in node.inputs]
    if node.type.is_float:
        values = [_round(v, dtype) for v in values]
        if None in values or (node.op == "/" and values[1] == 0.0):
            return None
        value = _round(_FOLD[node.op](*values), dtype)
        return None if value is None or value != value else constant(value, dtype)
    low, high = _INTEGER_RANGE.get(dtype, (1, 0))
    value = _FOLD[node.op](*values)
    return constant(value, dtype) if low <= value <= high else None


def _constant_value(node: Node) -> float | None:
    """The value of a constant, also a broadcast one."""
    if node.op == "broadcast":
        node = node.inputs[0]
    return node.attrs["value"] if node.op == "constant" else None


def _is_minus_zero(value: float | None) -> bool:
    return isinstance(value, float) and value == 0.0 and copysign(1.0, value) < 0.0


def _identity(node: Node) -> Node | None:
    """x * 1, x / 1, x - 0, x + -0, integer x + 0, - - x, casts that do nothing."""
    op = node.op
    if op in ("+", "-", "*", "/"):
        a, b = node.inputs
        left, right = _constant_value(a), _constant_value(b)
        integer = node.type.is_integer
        plain_zero = right == 0 and right is not None and not _is_minus_zero(right)
        if right == 1 and op in "*/":
            return a
        if left == 1 and op == "*":
            return b
        if op == "-" and plain_zero:
            return a
        if op == "+" and (_is_minus_zero(right) or (integer and right == 0)):
            return a
        if op == "+" and (_is_minus_zero(left) or (integer and left == 0)):
            return b
    if op == "neg" and node.inputs[0].op == "neg":
        return node.inputs[0].inputs[0]
    return _cast(node) if op == "cast" else None


def _cast(node: Node) -> Node | None:
    (x,) = node.inputs
    if x.type.dtype == node.type.dtype:
        return x
    if x.op != "cast":
        return None
    origin = x.inputs[0]
    exact = origin.type.is_float and x.type.is_float and _holds(x.type.dtype, origin.type.dtype)
    return (
        (origin if origin.type.dtype == node.type.dtype else build("cast", origin, dtype=node.type.dtype))
        if exact
        else None
    )


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    return wide == narrow or (DTYPES[wide] >= 4 and DTYPES[wide] > DTYPES[narrow])


def _narrow(node: Node) -> Node | None:
    """A broadcast operand of a pointwise op need not be spread if the others give the shape."""
    for number, x in enumerate(node.inputs):
        if x.op != "broadcast" or len(node.inputs) == 1:
            continue
        try:
            new = build(node.op, *node.inputs[:number], x.inputs[0], *node.inputs[number + 1 :], **node.attrs)
        except OpProblem:
            continue
        if new.type == node.type:
            return new
    return None


def _reshape(node: Node) -> Node | None:
    (x,) = node.inputs
    if x.type == node.type:
        return x
    if x.op in ("reshape", "squeeze", "expand-dims"):
        if x.inputs[0].type == node.type:
            return x.inputs[0]
        return build("reshape", x.inputs[0], shape=node.type.shape)
    return None


def _transpose(node: Node) -> Node | None:
    (x,), order = node.inputs, node.attrs["permutation"]
    if order == tuple(range(len(order))):
        return x
    if x.op == "transpose":
        inner = x.attrs["permutation"]
        return build("transpose", x.inputs[0], permutation=tuple(inner[a] for a in order))
    return None


def _broadcast(node: Node) -> Node | None:
    (x,) = node.inputs
    if x.type == node.type:
        return x
    return build("broadcast", x.inputs[0], **node.attrs) if x.op == "broadcast" else None


def _sum(node: Node) -> Node | None:
    return node.inputs[0] if not node.attrs["axis"] else None


_RULES: dict[str, Callable[[Node], Node | None]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand-dims": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "sum": _sum,
}

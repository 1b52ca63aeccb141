"""Numbers: exact integers and ratios, IEEE floats. A tensor among the arguments makes it the tensor op of the name.

Costs are charged before the work (budget.py). Knobs of the arguments are joined in the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.lisp import exact
from sexpgpu.lisp.budget import digits, divide, multiply, size
from sexpgpu.lisp.builtins.define import joined, listed, native, raw, whole, wrong_type
from sexpgpu.lisp.parameters import check_count, check_keys
from sexpgpu.lisp.values import KnobBool, Native, Tensor, plain

TABLE: dict[str, Native] = {}
FLOAT_COST = 100  # a correctly rounded function is some 50 microseconds of decimal arithmetic
_SMALL = 1 << 62
Number = int | float | Fraction


def number(name: str, value: Any) -> Number:
    """A number without its knobs."""
    if not isinstance(value, int | float | Fraction) or isinstance(value, bool | KnobBool):
        raise wrong_type(name, "numbers", value)
    return plain(value)


def to_float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        fail("E-EVAL-022", "this number is too large for a 64-bit float")


def _tidy(value: Any) -> Any:
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


def tensor_call(ev: Any, name: str, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    if ev.tensor_op is None:
        fail("E-EVAL-006", f"`{name}` takes numbers here, not a tensor")
    return ev.tensor_op(name, args, kwargs, span)


def has_tensor(args: list) -> bool:
    return any(isinstance(a, Tensor) for a in args)


def combine(ev: Any, name: str, op: Callable, a: Number, b: Number) -> Number:
    """One exact or float operation of two plain numbers, paid first."""
    if isinstance(a, float) or isinstance(b, float):
        ev.spend(1, name)
        return _float_op(name, op, to_float(a), to_float(b))
    x, y = size(a), size(b)
    fraction = isinstance(a, Fraction) or isinstance(b, Fraction) or op is operator.truediv
    if fraction:  # a ratio reduces by a gcd, which is a division of the products
        ev.spend(multiply(x, y) + divide(x + y, x + y), name)
        if op is operator.truediv:
            return _tidy(Fraction(a) / Fraction(b)) if b != 0 else zero_division(name)
    else:
        ev.spend(multiply(x, y) if op is operator.mul else max(x, y), name)
    return _tidy(op(a, b))


def _float_op(name: str, op: Callable, a: float, b: float) -> float:
    if op is operator.truediv and b == 0:
        zero_division(name)
    return op(a, b)


def compare_cost(values: list[Number]) -> int:
    """Comparing numbers one after the other: their digits; ratios are multiplied out."""
    sizes = [size(v) for v in values]
    if any(isinstance(v, Fraction) for v in values):
        return len(values) * multiply(max(sizes), max(sizes))
    return sum(sizes)


def zero_division(name: str) -> Any:
    fail("E-EVAL-007", f"`{name}` divides by zero")


def _fold(name: str, op: Callable, unit: int | None) -> None:
    """`+ - * /`: the fast path is two small integers, which is nearly every call."""
    whole_op = op is not operator.truediv

    def fold(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        if len(args) == 2 and not kwargs and whole_op:
            a, b = args
            if type(a) is int and type(b) is int and -_SMALL < a < _SMALL and -_SMALL < b < _SMALL:
                bits = a.bit_length() if abs(a) > abs(b) else b.bit_length()
                ev.budget.left -= (bits * 1233 >> 12) + 1
                return op(a, b)
        if kwargs or has_tensor(args):
            if has_tensor(args):
                return tensor_call(ev, name, args, kwargs, span)
            check_keys(TABLE[name], kwargs, ())
        if not args:
            if unit is None:
                check_count(TABLE[name], 0, 1, None)
            return unit
        values = [number(name, a) for a in args]
        if len(values) == 1:
            if name == "-":
                ev.spend(size(values[0]), name)
                result = -values[0]
            else:
                result = combine(ev, name, op, 1, values[0]) if name == "/" else values[0]
        else:
            result = values[0]
            for value in values[1:]:
                result = combine(ev, name, op, result, value)
        return joined(result, *args)

    fold.__doc__ = {"+": "The sum.", "*": "The product.", "-": "The first less the others; one argument negated.",
                    "/": "The first divided by the others, exactly for integers and ratios."}[name]
    raw(TABLE, name, "(&rest numbers)" if unit is not None else "(number &rest numbers)")(fold)


_fold("+", operator.add, 0)
_fold("*", operator.mul, 1)
_fold("-", operator.sub, None)
_fold("/", operator.truediv, None)


def _compare(name: str, op: Callable) -> None:
    def compare(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        if len(args) == 2 and type(args[0]) is int and type(args[1]) is int:
            bits = args[0].bit_length()
            ev.budget.left -= (bits * 1233 >> 12) + 1
            return op(args[0], args[1])
        if has_tensor(args):
            return tensor_call(ev, name, args, kwargs, span)
        check_keys(TABLE[name], kwargs, ())
        if not args:
            check_count(TABLE[name], 0, 1, None)
        if name in ("=", "/=") and not all(isinstance(a, int | float | Fraction) for a in args):
            value = next(a for a in args if not isinstance(a, int | float | Fraction))
            raise wrong_type(name, "numbers", value, "compare other values with `eq` or `equal`")
        values = [number(name, a) for a in args]
        ev.spend(compare_cost(values), name)
        if name == "/=":
            ev.spend(len(values) * compare_cost(values), name)
            pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1:]]
        else:
            pairs = list(zip(values, values[1:], strict=False))
        return joined(all(op(a, b) for a, b in pairs), *args)

    compare.__doc__ = f"Whether `{name}` holds between all arguments in order."
    raw(TABLE, name, "(number &rest numbers)")(compare)


for _name, _op in (("=", operator.eq), ("/=", operator.ne), ("<", operator.lt), (">", operator.gt), ("<=", operator.le),
                   (">=", operator.ge)):
    _compare(_name, _op)


def _extreme(name: str, better: Callable) -> None:
    def extreme(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        if has_tensor(args):
            return tensor_call(ev, name, args, kwargs, span)
        check_keys(TABLE[name], kwargs, ())
        if not args:
            check_count(TABLE[name], 0, 1, None)
        best = None
        values = [number(name, a) for a in args]
        ev.spend(compare_cost(values), name)
        for value in values:
            if value != value:
                return joined(value, *args)
            best = value if best is None or better(value, best) else best
        return joined(best, *args)

    extreme.__doc__ = f"The {'largest' if name == 'max' else 'smallest'} number; NaN if one is NaN."
    raw(TABLE, name, "(number &rest numbers)")(extreme)


_extreme("max", operator.gt)
_extreme("min", operator.lt)


def _unary(name: str, doc: str, fn: Callable[[Any, Number], Number]) -> None:
    def unary(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        if has_tensor(args):
            return tensor_call(ev, name, args, kwargs, span)
        check_keys(TABLE[name], kwargs, ())
        check_count(TABLE[name], len(args), 1, 1)
        value = number(name, args[0])
        ev.spend(size(value), name)
        return joined(fn(ev, value), args[0])

    unary.__doc__ = doc
    raw(TABLE, name, "(number)")(unary)


def _absolute(ev: Any, x: Number) -> Number:
    return abs(x)


def _square_root(ev: Any, x: Number) -> Number:
    value = to_float(x)
    if value < 0:
        fail("E-EVAL-007", "a negative number has no square root here")
    return math.sqrt(value)  # exact rounding is required of it by IEEE 754


def _logarithm(ev: Any, x: Number) -> Number:
    ev.spend(FLOAT_COST, "log")
    value = to_float(x)
    if value <= 0:
        fail("E-EVAL-007", "`log` takes a positive number")
    return exact.log(value)


def _float_function(name: str) -> Callable[[Any, Number], Number]:
    fn = getattr(exact, name)

    def apply(ev: Any, x: Number) -> float:
        value = to_float(x)
        # the argument's size decides how many digits of pi its reduction needs
        ev.spend(FLOAT_COST + (abs(math.frexp(value)[1]) if value == value and abs(value) != math.inf else 0), name)
        return fn(value)

    return apply


_unary("abs", "The absolute value.", _absolute)
_unary("sqrt", "The square root, a float.", _square_root)
_unary("log", "The natural logarithm, correctly rounded.", _logarithm)
for _name in ("exp", "sin", "cos", "tan", "tanh"):
    _unary(_name, f"`{_name}`, correctly rounded.", _float_function(_name))


def _power(name: str) -> Callable:
    def power(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        """The first to the power of the second: exact for an integer exponent of an integer or ratio."""
        if has_tensor(args):
            return tensor_call(ev, name, args, kwargs, span)
        check_keys(TABLE[name], kwargs, ())
        check_count(TABLE[name], len(args), 2, 2)
        x, y = number(name, args[0]), number(name, args[1])
        if isinstance(y, int) and not isinstance(x, float):
            return joined(_exact_power(ev, name, x, y), *args)
        ev.spend(FLOAT_COST * 4, name)
        a, b = to_float(x), to_float(y)
        if a == 0 and b < 0:
            zero_division(name)
        if a < 0 and b != int(b if abs(b) != math.inf else 0) and abs(b) != math.inf:
            fail("E-EVAL-007", f"`{name}` of a negative number to a fraction is no real number")
        return joined(exact.power(a, b), *args)

    return power


def _exact_power(ev: Any, name: str, x: int | Fraction, y: int) -> Number:
    if x == 0 and y < 0:
        zero_division(name)
    base = Fraction(x)
    if base in (0, 1, -1):
        ev.spend(1, name)
        return _tidy(base ** (y % 2 + 2 if y else 0)) if base != 0 or y else 1
    ev.spend(digits(y), name)
    result = size(x) * abs(y)  # digits of the result, about
    ev.spend(multiply(result, result), name)
    return _tidy(base**y)


for _name in ("pow", "expt"):
    raw(TABLE, _name, "(base exponent)")(_power(_name))


def _rounding(name: str, doc: str, fn: Callable[[Number], int]) -> None:
    def rounding(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        if has_tensor(args):
            return tensor_call(ev, name, args, kwargs, span)
        check_keys(TABLE[name], kwargs, ())
        check_count(TABLE[name], len(args), 1, 2)
        value = number(name, args[0])
        if len(args) == 2:
            by = number(name, args[1])
            if by == 0:
                zero_division(name)
            if isinstance(value, int) and isinstance(by, int) and name == "floor":
                ev.spend(divide(size(value), size(by)), name)
                return joined(value // by, *args)
            if not all(isinstance(v, int | Fraction) or math.isfinite(v) for v in (value, by)):
                fail("E-EVAL-022", f"`{name}` of an infinity or NaN is no integer")
            # exact, so that the quotient is not rounded before it is rounded
            value = combine(ev, name, operator.truediv, Fraction(value), Fraction(by))
        if isinstance(value, float) and not math.isfinite(value):
            fail("E-EVAL-022", f"`{name}` of an infinity or NaN is no integer")
        ev.spend(divide(size(value), size(value)) if isinstance(value, Fraction) else size(value), name)
        return joined(fn(value), *args)

    rounding.__doc__ = doc
    raw(TABLE, name, "(number &optional divisor)")(rounding)


_rounding("floor", "The largest integer not above the number (or quotient).", math.floor)
_rounding("ceiling", "The smallest integer not below the number (or quotient).", math.ceil)
_rounding("round", "The nearest integer, halves to the even one.", round)
_rounding("truncate", "The integer part.", math.trunc)


def _modulo(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The remainder of a floor division: it has the divisor's sign."""
    if has_tensor(args):
        return tensor_call(ev, "mod", args, kwargs, span)
    check_keys(TABLE["mod"], kwargs, ())
    check_count(TABLE["mod"], len(args), 2, 2)
    x, y = number("mod", args[0]), number("mod", args[1])
    if y == 0:
        zero_division("mod")
    ev.spend(divide(size(x), size(y)), "mod")
    if isinstance(x, float) or isinstance(y, float):
        x, y = to_float(x), to_float(y)
        if math.isinf(x):
            fail("E-EVAL-007", "`mod` of an infinity has no value")
    return joined(_tidy(x % y), *args)


raw(TABLE, "mod", "(number divisor)")(_modulo)


@native(TABLE, "rem", "(number divisor)")
def _remainder(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The remainder of a truncating division of integers: it has the number's sign."""
    x, y = whole("rem", args[0]), whole("rem", args[1])
    if y == 0:
        zero_division("rem")
    ev.spend(divide(size(x), size(y)), "rem")
    rest = abs(x) % abs(y)
    return joined(-rest if x < 0 else rest, *args)


def _many_integers(name: str, fn: Callable[..., int], doc: str) -> None:
    def many(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        values = [whole(name, a) for a in args]
        for value in values:
            ev.spend(divide(size(value), size(value)), name)
        if name == "lcm":
            total = sum(size(v) for v in values)
            ev.spend(divide(total, total), name)
        return joined(fn(*values), *args)

    many.__doc__ = doc
    native(TABLE, name, "(&rest integers)")(many)


_many_integers("gcd", math.gcd, "The greatest common divisor.")
_many_integers("lcm", math.lcm, "The least common multiple.")


@native(TABLE, "1+", "(number)")
def _plus_one(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """One more."""
    return TABLE["+"].fn(ev, [args[0], 1], {}, span)


@native(TABLE, "1-", "(number)")
def _minus_one(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """One less."""
    return TABLE["-"].fn(ev, [args[0], 1], {}, span)


def _sum(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The sum of a list of numbers; of a tensor, the tensor op."""
    if has_tensor(args) or (kwargs and args and not isinstance(args[0], tuple)):
        return tensor_call(ev, "sum", args, kwargs, span)
    check_keys(TABLE["sum"], kwargs, ())
    check_count(TABLE["sum"], len(args), 1, 1)
    items = list(listed("sum", args[0]))
    return TABLE["+"].fn(ev, items, {}, span)


raw(TABLE, "sum", "(list)")(_sum)


@native(TABLE, "numerator", "(number)")
def _numerator(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The part of a ratio above the line."""
    value = number("numerator", args[0])
    if isinstance(value, float):
        raise wrong_type("numerator", "an integer or ratio", value)
    return joined(value.numerator, args[0])


@native(TABLE, "denominator", "(number)")
def _denominator(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The part of a ratio below the line."""
    value = number("denominator", args[0])
    if isinstance(value, float):
        raise wrong_type("denominator", "an integer or ratio", value)
    return joined(value.denominator, args[0])


@native(TABLE, "float", "(number)")
def _to_float(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The nearest 64-bit float."""
    ev.spend(size(args[0]), "float")
    return joined(to_float(number("float", args[0])), args[0])

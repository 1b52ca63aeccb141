"""Compile-time float functions, correctly rounded: the same bits on every machine, where libm's differ.

Each is computed in decimal with digits to spare and rounded once; if the last digits leave the rounding open (Ziv's
test), with more. Exact results are found exactly, so they cannot hang that test.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from functools import cache
from math import inf, isinf, isnan, nan

_START = 40


def _context(digits: int) -> Context:
    return Context(prec=digits, Emax=MAX_EMAX, Emin=MIN_EMIN)


def _rounded(approximate: Callable[[int], Decimal]) -> float:
    """The float nearest to the value that `approximate(digits)` gives to within a unit of its last digits."""
    digits = _START
    while True:
        value = approximate(digits + 5)
        context = _context(digits + 5)
        slack = abs(value).scaleb(-digits, context)
        low, high = float(context.subtract(value, slack)), float(context.add(value, slack))
        if low == high or digits > 1_000:
            return float(value)
        digits *= 2


def exp(x: float) -> float:
    if isnan(x) or x == inf or x == 0:
        return nan if isnan(x) else inf if x == inf else 1.0
    if x > 710 or x < -746:
        return inf if x > 0 else 0.0
    return _rounded(lambda n: _context(n).exp(Decimal(x)))


def log(x: float) -> float:
    """Natural logarithm of a positive float."""
    if isnan(x) or x == inf:
        return x
    return 0.0 if x == 1 else _rounded(lambda n: _context(n).ln(Decimal(x)))


def power(x: float, y: float) -> float:
    """`x` to the `y`, as IEEE 754's pow has it (a negative `x` to a fraction is NaN)."""
    if y == 0 or x == 1:
        return 1.0
    if isnan(x) or isnan(y):
        return nan
    whole = not isinf(y) and y == int(y)
    if x == 0 or isinf(x) or isinf(y):
        return float(x) ** y if x != 0 or y > 0 else inf
    if x < 0 and not whole:
        return nan
    sign = -1.0 if x < 0 and int(y) % 2 else 1.0
    base = abs(x)
    if base == 1:
        return sign
    # only a power this small can be exact or lie halfway between two floats, where Ziv's test would never decide
    if whole and abs(y) <= 64:
        return sign * _fraction(Fraction(base) ** int(y))
    size = _context(_START).multiply(_context(_START).ln(Decimal(base)), Decimal(y))
    if size > 710 or size < -746:
        return sign * (inf if size > 0 else 0.0)

    def approximate(n: int) -> Decimal:
        c = _context(n + 10)
        return c.exp(c.multiply(c.ln(Decimal(base)), Decimal(y)))

    return sign * _rounded(approximate)


def _fraction(value: Fraction) -> float:
    try:
        return value.numerator / value.denominator
    except OverflowError:
        return inf


@cache
def _pi(digits: int) -> Decimal:
    """Machin's formula in integers."""
    unit = 10 ** (digits + 10)

    def arctan_inverse(n: int) -> int:
        term = total = unit // n
        k, sign = 3, -1
        while term:
            term //= n * n
            total += sign * (term // k)
            k, sign = k + 2, -sign
        return total

    scaled = 4 * (4 * arctan_inverse(5) - arctan_inverse(239))
    return _context(digits).divide(Decimal(scaled), Decimal(unit))


def _reduced(x: float, digits: int) -> tuple[Decimal, int, int]:
    """`x` less the nearest multiple of pi/2, that multiple modulo 4, and the digits in use."""
    digits += 20 + (max(0, Decimal(x).adjusted()) if x else 0)
    # near a multiple of pi/2 the difference of doubles is never below about 1e-20 of it
    digits += 25
    c = _context(digits)
    half = c.divide(_pi(digits), Decimal(2))
    turns = c.divide(Decimal(x), half).to_integral_value()
    return c.subtract(Decimal(x), c.multiply(turns, half)), int(turns) % 4, digits


def _series(r: Decimal, digits: int, odd: bool) -> Decimal:
    c = _context(digits)
    square, k = c.multiply(r, r), 2 if odd else 1
    term = total = r if odd else Decimal(1)
    while term and term.adjusted() > total.adjusted() - digits:
        term = c.divide(c.multiply(term, -square), Decimal(k * (k + 1)))
        total = c.add(total, term)
        k += 2
    return total


def _sine(x: float, n: int, shift: int) -> Decimal:
    r, quarter, digits = _reduced(x, n)
    quarter = (quarter + shift) % 4
    value = _series(r, digits, quarter % 2 == 0)
    return -value if quarter >= 2 else value


def sin(x: float) -> float:
    if isnan(x) or isinf(x):
        return nan
    return x if x == 0 else _rounded(lambda n: _sine(x, n, 0))


def cos(x: float) -> float:
    if isnan(x) or isinf(x):
        return nan
    return 1.0 if x == 0 else _rounded(lambda n: _sine(x, n, 1))


def tan(x: float) -> float:
    if isnan(x) or isinf(x):
        return nan
    return x if x == 0 else _rounded(lambda n: _context(n).divide(_sine(x, n, 0), _sine(x, n, 1)))


def tanh(x: float) -> float:
    if isnan(x) or x == 0:
        return x
    if abs(x) > 20:
        return 1.0 if x > 0 else -1.0

    def approximate(n: int) -> Decimal:
        c = _context(n + 30 + abs(min(0, Decimal(x).adjusted())))
        e = c.exp(c.multiply(Decimal(2), Decimal(x)))
        return c.divide(c.subtract(e, 1), c.add(e, 1))

    return _rounded(approximate)

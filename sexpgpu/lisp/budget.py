"""The bound on evaluation: units left, who spent them, and what operations on large numbers cost.

A node costs 1, an element of a new list 4, a character of a new string 1, an integer operation the digits of its
operands, and a multiplication, division or power what its algorithm costs. Charged before the work, so that a huge
result is refused before it exists.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

ELEMENT = 4
CHARACTER = 1
FRAME = 4  # of a call or an iteration, which makes a scope: as a list element, so that an empty loop ends soon too
GRAPH_NODE = 100
PARAMETER = 1_000
EXPANSION = 100  # one macro call: its result is compiled anew
FORM = 30  # of a macro's result: a form is several objects where a list element is one


class Budget:
    """Units left of the limit. `cells` has one counter a function of the program, `natives` one a builtin."""

    __slots__ = ("limit", "left", "cells", "natives")

    def __init__(self, limit: int):
        self.limit = limit
        self.left = limit
        self.cells: list[list] = []  # [units, name, span]
        self.natives: Counter[str] = Counter()

    @property
    def spent(self) -> int:
        return self.limit - self.left

    def cell(self, name: str, span) -> list:
        made = [0, name, span]
        self.cells.append(made)
        return made

    def largest(self, count: int = 3) -> list[tuple[int, str, object]]:
        """The largest spenders: (units, name, place)."""
        merged: dict[tuple, int] = {}
        for units, name, span in self.cells:
            key = (name, span.place if span is not None else "")
            merged[key] = merged.get(key, 0) + units
        for name, units in self.natives.items():
            merged[(name, "builtin")] = units
        ranked = sorted(((u, n, p) for (n, p), u in merged.items() if u), key=lambda row: (-row[0], row[1], row[2]))
        return ranked[:count]


def digits(n: int) -> int:
    """About the decimal digits of an integer, never less than 1."""
    return (n.bit_length() * 1233 >> 12) + 1


def size(value) -> int:
    """Digits of a number: of both parts of a ratio, 1 of a float."""
    if isinstance(value, int):
        return digits(value)
    if isinstance(value, Fraction):
        return digits(value.numerator) + digits(value.denominator)
    return 1


def multiply(a: int, b: int) -> int:
    """A product of numbers of `a` and `b` digits: Karatsuba on limbs of 9 digits, never less than the digits."""
    small, large = (a, b) if a < b else (b, a)
    if large < 100:
        return large
    if large > 1_000_000_000:  # past every limit, and past what the formula below computes
        return large
    limbs = small // 9 + 1
    return max(a + b, int(limbs**1.585 * ((large // 9 + 1) / limbs)))


def divide(a: int, b: int) -> int:
    """A quotient, remainder or gcd of `a` by `b` digits: schoolbook."""
    if a < 100 and b < 100:
        return a if a > b else b
    return max(a + b, (a // 9 + 1) * (b // 9 + 1))

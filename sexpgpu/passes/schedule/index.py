"""Integer index expressions over loop variables of known size, kept so that equal ones look equal.

An expression is a sum of atoms times integers, plus an integer. An atom is a loop variable, a value that a kernel
loaded (an index of `gather`), or a quotient or remainder of an expression. All are 0 or more where they are used
unmasked, so `//` and `%` mean the same in Python, C and Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod


@dataclass(frozen=True)
class Var:
    """A loop variable that runs over 0 … size - 1, or (`loaded`) a value that a kernel read and that lies in that range."""

    name: str
    size: int
    loaded: object = None  # what was read: the emitter finds its name by it


@dataclass(frozen=True)
class Div:
    x: Expr
    by: int


@dataclass(frozen=True)
class Mod:
    x: Expr
    by: int


Atom = Var | Div | Mod


@dataclass(frozen=True)
class Expr:
    """Σ coefficient · atom + const; atoms in a fixed order, no coefficient 0."""

    terms: tuple[tuple[Atom, int], ...] = ()
    const: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.const))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value, both included."""
        low = high = self.const
        for atom, k in self.terms:
            a, b = _atom_bounds(atom)
            low, high = low + min(a * k, b * k), high + max(a * k, b * k)
        return low, high

    def __add__(self, other: Expr | int) -> Expr:
        other = lift(other)
        terms = dict(self.terms)
        for atom, k in other.terms:
            terms[atom] = terms.get(atom, 0) + k
        return _make(terms, self.const + other.const)

    def __mul__(self, k: int) -> Expr:
        return Expr(tuple((a, c * k) for a, c in self.terms), self.const * k) if k else Expr()

    def __floordiv__(self, by: int) -> Expr:
        return floor_div(self, by)

    def __mod__(self, by: int) -> Expr:
        return remainder(self, by)

    @property
    def variables(self) -> frozenset[Var]:
        """The variables it depends on."""
        found: set[Var] = set()
        stack: list[Expr] = [self]
        while stack:
            for atom, _ in stack.pop().terms:
                if isinstance(atom, Var):
                    found.add(atom)
                else:
                    stack.append(atom.x)
        return frozenset(found)


def lift(value: Expr | Var | int) -> Expr:
    """An expression of a number, a variable or itself."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Var):
        return Expr(((value, 1),)) if value.size > 1 or value.loaded is not None else Expr()
    return Expr((), value)


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Var):
        return 0, max(0, atom.size - 1)
    low, high = atom.x.bounds
    if isinstance(atom, Div):
        return low // atom.by, high // atom.by
    return 0, min(atom.by - 1, high) if low >= 0 else atom.by - 1


def _order(item: tuple[Atom, int]) -> tuple:
    atom, k = item
    return (-abs(k), *_named(atom))


@lru_cache(maxsize=4096)
def _named(atom: Atom) -> tuple[str, str]:
    return type(atom).__name__, repr(atom)


def _make(terms: Mapping[Atom, int], const: int) -> Expr:
    """The expression of these terms; X // m · (k m) + X % m · k becomes X · k again."""
    terms = {a: k for a, k in terms.items() if k}
    if len(terms) < 2:
        return Expr(tuple(terms.items()), const)
    for atom in [a for a in terms if isinstance(a, Mod)]:
        k = terms.get(atom, 0)
        if not k or not isinstance(atom, Mod):
            continue
        whole = floor_div(atom.x, atom.by)
        if whole.const or not whole.terms or any(terms.get(a) != c * k * atom.by for a, c in whole.terms):
            continue
        for a, _ in whole.terms:
            del terms[a]
        del terms[atom]
        return Expr(tuple(terms.items()), const) + atom.x * k
    return Expr(tuple(sorted(terms.items(), key=_order)), const)


def _split(x: Expr, by: int) -> tuple[Expr, Expr]:
    """x as (multiple of `by`) / by and the rest."""
    whole = _make({a: k // by for a, k in x.terms if k % by == 0}, x.const // by)
    rest = _make({a: k for a, k in x.terms if k % by}, x.const % by)
    return whole, rest


def _apart(x: Expr, by: int) -> tuple[int, Expr, Expr] | None:
    """(d, a, b) with x = d a + b, d a divisor of `by` above 1, and b in 0 … d - 1; the largest such d."""
    divisors = sorted({gcd(by, k) for _, k in x.terms} | {gcd(by, x.const)}, reverse=True)
    for d in divisors:
        if not 1 < d < by:
            continue
        a, b = _split(x, d)
        low, high = b.bounds
        if a.terms and low >= 0 and high < d:
            return d, a, b
    return None


@lru_cache(maxsize=4096)
def floor_div(x: Expr, by: int) -> Expr:
    """x // by."""
    if by == 1:
        return x
    whole, rest = _split(x, by)
    low, high = rest.bounds
    if low >= 0 and high < by:
        return whole
    if (parts := _apart(rest, by)) is not None:
        return whole + floor_div(parts[1], by // parts[0])
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and not rest.const and isinstance(rest.terms[0][0], Div):
        inner = rest.terms[0][0]
        return whole + floor_div(inner.x, inner.by * by)
    return whole + Expr(((Div(rest, by), 1),))


@lru_cache(maxsize=4096)
def remainder(x: Expr, by: int) -> Expr:
    """x % by."""
    if by == 1:
        return Expr()
    _, rest = _split(x, by)
    low, high = rest.bounds
    if low >= 0 and high < by:
        return rest
    if (parts := _apart(rest, by)) is not None:
        return remainder(parts[1], by // parts[0]) * parts[0] + parts[2]
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and not rest.const and isinstance(rest.terms[0][0], Mod):
        inner = rest.terms[0][0]
        if inner.by % by == 0:
            return remainder(inner.x, by)
    return Expr(((Mod(rest, by), 1),))


Index = tuple[Expr, ...]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))


@lru_cache(maxsize=8192)  # a model has few shapes and many values of each
def offset(index: Index, shape: tuple[int, ...]) -> Expr:
    """The row-major place of an element."""
    total = Expr()
    for i, step, size in zip(index, strides(shape), shape, strict=True):
        if size != 1:
            total = total + i * step
    return total


@lru_cache(maxsize=8192)
def unravel(place: Expr, shape: tuple[int, ...]) -> Index:
    """The index whose row-major place is `place`, which lies in range."""
    found = []
    for size, step in zip(shape, strides(shape), strict=True):
        found.append(Expr() if size == 1 else remainder(floor_div(place, step), size) if step * size < prod(shape) else floor_div(place, step))
    return tuple(found)


def render(x: Expr, name: Callable[[Var], str]) -> str:
    """The expression as source of Python and of Triton alike."""
    parts = []
    for atom, k in x.terms:
        if isinstance(atom, Var):
            text = name(atom)
        else:
            text = f"({render(atom.x, name)}) {'//' if isinstance(atom, Div) else '%'} {atom.by}"
            text = f"({text})"
        parts.append(text if k == 1 else f"{text} * {k}")
    if x.const or not parts:
        parts.append(str(x.const))
    return " + ".join(parts)

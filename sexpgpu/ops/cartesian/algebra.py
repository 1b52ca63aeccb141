"""The algebra of symmetric traceless tensors over three axes, in exact fractions.

A tensor T of rank l is its polynomial p(q) = T·q^l: symmetric tensors are homogeneous polynomials of degree l, traceless
ones the harmonic among them. Contracting indices is differentiating, taking traces is the Laplacian, and everything below
is arithmetic of such polynomials, for any rank.

Stored components: of the (l+1)(l+2)/2 entries T(a,b,c) (a indices x, b y, c z) those with c <= 1, which are 2l+1; the rest
follow from zero trace, T(a,b,c) = -T(a+2,b,c-2) - T(a,b+2,c-2). The basis is not orthonormal from rank 2 on.

What a kernel generator needs: `paths` (which products there are, in the order of weights and outputs), `terms` (the sparse
bilinear form of one path) and `expansion` (polynomials of the edge attributes). Everything is cached; a rank's first use
costs milliseconds at rank 3, seconds from rank 6 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from math import comb, factorial
from typing import NamedTuple

Exponents = tuple[int, int, int]
Polynomial = dict[Exponents, Fraction]


class Path(NamedTuple):
    """One product: operand 1 of rank `first`, operand 2 of rank `second`, result of rank `result`."""

    first: int
    second: int
    result: int


class Term(NamedTuple):
    """result[k] += coefficient · first[i] · second[j], over stored components."""

    i: int
    j: int
    k: int
    coefficient: Fraction


@cache
def components(rank: int) -> tuple[Exponents, ...]:
    """The stored components of a rank in order, as counts of x, y and z indices."""
    if rank == 2:
        return ((2, 0, 0), (0, 2, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1))
    if rank == 3:
        return ((3, 0, 0), (2, 1, 0), (2, 0, 1), (1, 2, 0), (1, 1, 1), (0, 2, 1), (0, 3, 0))
    flat = tuple((rank - b, b, 0) for b in range(rank + 1))
    return flat + tuple((rank - 1 - b, b, 1) for b in range(rank))


def component_name(exponents: Exponents) -> str:
    """xxy for (2, 1, 0); 1 for the scalar."""
    return "".join(axis * count for axis, count in zip("xyz", exponents, strict=True)) or "1"


def allowed(path: Sequence[int]) -> bool:
    """|l1 - l2| <= l3 <= l1 + l2 and an even sum: natural parities (-1)^l multiply to the result's."""
    first, second, result = path
    return abs(first - second) <= result <= first + second and sum(path) % 2 == 0


@cache
def paths(first: int, second: int, result: int, symmetric: bool = False) -> tuple[Path, ...]:
    """Every product of ranks up to `first` and `second` into ranks up to `result`, in the order of weights and outputs.

    For each result rank the direct paths (operand 1 of the higher or equal rank), then, unless symmetric, the swapped.
    """
    found = []
    for l3 in range(result + 1):
        pairs = [(hi, lo) for hi in range(first + 1) for lo in range(min(hi, second) + 1)]
        if not symmetric:
            pairs += [(lo, hi) for hi in range(second + 1) for lo in range(min(hi - 1, first) + 1)]
        found += [Path(a, b, l3) for a, b in pairs if allowed((a, b, l3))]
    return tuple(found)


def double_factorial(n: int) -> int:
    """n!! for odd n; (-1)!! is 1."""
    product = 1
    for k in range(n, 0, -2):
        product *= k
    return product


def multinomial(exponents: Exponents) -> int:
    a, b, c = exponents
    return comb(a + b + c, a) * comb(b + c, b)


def normalization(path: Path) -> Fraction:
    """The constant that makes direction tensors multiply to direction tensors: f(T^l1(n), T^l2(n)) = T^l3(n)."""
    l1, l2, l3 = path
    k = (l1 + l2 - l3) // 2
    over = double_factorial(2 * (l1 - k) - 1) * double_factorial(2 * (l2 - k) - 1) * double_factorial(2 * k - 1)
    return Fraction(factorial(l1) * factorial(l2) * double_factorial(2 * l3 - 1), over * factorial(l1 + l2 - k))


def monomials(degree: int) -> tuple[Exponents, ...]:
    """Exponents of all monomials of a degree."""
    return tuple((a, b, degree - a - b) for a in range(degree, -1, -1) for b in range(degree - a, -1, -1))


def derivative(p: Polynomial, by: Exponents) -> Polynomial:
    out: Polynomial = {}
    for exponents, value in p.items():
        for have, want in zip(exponents, by, strict=True):
            for step in range(want):
                value *= have - step
        if value:
            left = (exponents[0] - by[0], exponents[1] - by[1], exponents[2] - by[2])
            out[left] = out.get(left, Fraction(0)) + value
    return out


def times(p: Polynomial, q: Polynomial) -> Polynomial:
    out: Polynomial = {}
    for (a, b, c), u in p.items():
        for (d, e, f), v in q.items():
            key = (a + d, b + e, c + f)
            out[key] = out.get(key, Fraction(0)) + u * v
    return {key: value for key, value in out.items() if value}


@cache
def _stored(rank: int) -> tuple[Polynomial, ...]:
    """The polynomial of each stored component's unit tensor."""
    full: list[dict[Exponents, Fraction]] = []
    for own in components(rank):
        tensor = {e: Fraction(e == own) for e in components(rank)}
        for a, b, c in sorted(monomials(rank), key=lambda e: e[2]):
            if c > 1:
                tensor[a, b, c] = -tensor[a + 2, b, c - 2] - tensor[a, b + 2, c - 2]
        full.append({e: value * multinomial(e) for e, value in tensor.items() if value})
    return tuple(full)


@cache
def _harmonic(degree: int) -> dict[Exponents, tuple[Fraction, ...]]:
    """Monomial -> stored components of its harmonic part: Σ_k (-1)^k (2L-2k-1)!! / ((2k)!! (2L-1)!!) r^2k Δ^k."""
    square: Polynomial = {(2, 0, 0): Fraction(1), (0, 2, 0): Fraction(1), (0, 0, 2): Fraction(1)}
    table = {}
    for monomial in monomials(degree):
        trace: Polynomial = {monomial: Fraction(1)}
        radius: Polynomial = {(0, 0, 0): Fraction(1)}
        total: Polynomial = {}
        for k in range(degree // 2 + 1):
            scale = Fraction((-1) ** k * double_factorial(2 * degree - 2 * k - 1),
                             2**k * factorial(k) * double_factorial(2 * degree - 1))
            for e, value in times(radius, trace).items():
                total[e] = total.get(e, Fraction(0)) + scale * value
            trace = _sum(derivative(trace, by) for by in ((2, 0, 0), (0, 2, 0), (0, 0, 2)))
            radius = times(radius, square)
        table[monomial] = tuple(total.get(e, Fraction(0)) / multinomial(e) for e in components(degree))
    return table


def _sum(parts: Iterable[Polynomial]) -> Polynomial:
    out: Polynomial = {}
    for part in parts:
        for key, value in part.items():
            out[key] = out.get(key, Fraction(0)) + value
    return {key: value for key, value in out.items() if value}


@cache
def terms(path: Path) -> tuple[Term, ...]:
    """The bilinear form of a path, by result component, then first, then second: the symmetric traceless part of the
    contraction over k = (l1 + l2 - l3)/2 indices, times `normalization`."""
    l1, l2, l3 = path
    if l1 < l2:
        swapped = [Term(j, i, k, c) for i, j, k, c in terms(Path(l2, l1, l3))]
        return tuple(sorted(swapped, key=lambda t: (t.k, t.i, t.j)))
    k = (l1 + l2 - l3) // 2
    scale = normalization(path) * Fraction(factorial(l1 - k) * factorial(l2 - k), factorial(l1) * factorial(l2))
    by = [(g, multinomial(g)) for g in monomials(k)]
    left = [[derivative(p, g) for g, _ in by] for p in _stored(l1)]
    right = [[derivative(p, g) for g, _ in by] for p in _stored(l2)]
    found = []
    for i, ps in enumerate(left):
        for j, qs in enumerate(right):
            values = [Fraction(0)] * len(components(l3))
            for (_, count), p, q in zip(by, ps, qs, strict=True):
                for exponents, value in times(p, q).items():
                    for place, part in enumerate(_harmonic(l3)[exponents]):
                        values[place] += count * value * part
            found += [Term(i, j, place, scale * value) for place, value in enumerate(values) if value]
    return tuple(sorted(found, key=lambda t: (t.k, t.i, t.j)))


@cache
def expansion(rank: int) -> tuple[Polynomial, ...]:
    """The stored components of T^l(n) as polynomials of the unit vector n:
    (1/l!) Σ_m (-1)^m (2l-2m-1)!! {n^(l-2m) δ^m}, whose contraction with q^l is the Legendre polynomial P_l(n·q)."""
    out: list[Polynomial] = [{} for _ in components(rank)]
    square: Polynomial = {(2, 0, 0): Fraction(1), (0, 2, 0): Fraction(1), (0, 0, 2): Fraction(1)}
    radius: Polynomial = {(0, 0, 0): Fraction(1)}
    for m in range(rank // 2 + 1):
        power = rank - 2 * m
        scale = Fraction((-1) ** m * double_factorial(2 * rank - 2 * m - 1), factorial(power) * factorial(m) * 2**m)
        for vector in monomials(power):  # (n·q)^power = Σ multinomial n^e q^e
            in_q = times({vector: Fraction(multinomial(vector))}, radius)
            for place, e in enumerate(components(rank)):
                value = in_q.get(e, Fraction(0)) * scale / multinomial(e)
                if value:
                    out[place][vector] = out[place].get(vector, Fraction(0)) + value
        radius = times(radius, square)
    return tuple(out)


def width(rank: int) -> int:
    """Components of ranks 0 … rank together: (rank + 1)²."""
    return (rank + 1) ** 2


def rank_of(count: int) -> int | None:
    """The highest rank of so many components, or None if it is no square."""
    root = round(count**0.5)
    return root - 1 if count > 0 and root * root == count else None

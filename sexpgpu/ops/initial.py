"""Initial values, computed on the host in float64 and rounded to float32: the same bits everywhere.

Only + - * / and sqrt of float64 are used, which IEEE 754 fixes to the last bit: the logarithm is our own, the normal
quantile is Wichura's PPND16 (algorithm AS 241, Applied Statistics 37, 1988), good to about 1e-16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from sexpgpu.ops.definition import OpProblem
from sexpgpu.ops.philox import philox

#: kind -> {attribute: default}
KINDS: dict[str, dict[str, float]] = {
    "zeros": {},
    "ones": {},
    "constant": {"value": 0.0},
    "normal": {"mean": 0.0, "std": 1.0},
    "uniform": {"low": 0.0, "high": 1.0},
    "orthogonal": {"gain": 1.0},
}

_CHUNK = 65536  # values at a time: the working set stays in cache, and a call is long beside Python's lock
_PIECE = 8 * _CHUNK  # values of one call, which one thread makes

LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # fdlibm's split of ln 2
SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt 1/2
ATANH = tuple(1.0 / (2 * i + 3) for i in range(11))  # s < 0.172: the rest is below 1e-18

A = (
    3.3871328727963666080e0,
    1.3314166789178437745e2,
    1.9715909503065514427e3,
    1.3731693765509461125e4,
    4.5921953931549871457e4,
    6.7265770927008700853e4,
    3.3430575583588128105e4,
    2.5090809287301226727e3,
)
B = (
    1.0,
    4.2313330701600911252e1,
    6.8718700749205790830e2,
    5.3941960214247511077e3,
    2.1213794301586595867e4,
    3.9307895800092710610e4,
    2.8729085735721942674e4,
    5.2264952788528545610e3,
)
C = (
    1.42343711074968357734e0,
    4.63033784615654529590e0,
    5.76949722146069140550e0,
    3.64784832476320460504e0,
    1.27045825245236838258e0,
    2.41780725177450611770e-1,
    2.27238449892691845833e-2,
    7.74545014278341407640e-4,
)
D = (
    1.0,
    2.05319162663775882187e0,
    1.67638483018380384940e0,
    6.89767334985100004550e-1,
    1.48103976427480074590e-1,
    1.51986665636164571966e-2,
    5.47593808499534494600e-4,
    1.05075007164441684324e-9,
)
E = (
    6.65790464350110377720e0,
    5.46378491116411436990e0,
    1.78482653991729133580e0,
    2.96560571828504891230e-1,
    2.65321895265761230930e-2,
    1.24266094738807843860e-3,
    2.71155556874348757815e-5,
    2.01033439929228813265e-7,
)
F = (
    1.0,
    5.99832206555887937690e-1,
    1.36929880922735805310e-1,
    1.48753612908506148525e-2,
    7.86869131145613259100e-4,
    1.84631831751005468180e-5,
    1.42151175831644588870e-7,
    2.04426310338993978564e-15,
)


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """By Horner's rule, into `out` if it is given."""
    out = np.multiply(x, coefficients[-1], out=out)
    for c in reversed(coefficients[1:-1]):
        out += c
        out *= x
    out += coefficients[0]
    return out


def exact_log(x: np.ndarray) -> np.ndarray:
    """The natural logarithm of positive normal float64s, to about 1 ulp, by x = 2^k m and 2 atanh((m - 1) / (m + 1))."""
    bits = np.ascontiguousarray(x, np.float64).view(np.int64)
    power = (bits - SQRT_HALF) >> 52  # that k for which m is in [sqrt 1/2, sqrt 2)
    m, k = (bits - (power << 52)).view(np.float64), power.astype(np.float64)
    s = m - 1.0
    m += 1.0
    s /= m
    z = s * s
    series = _polynomial(ATANH, z)
    series *= z
    s *= 2.0
    series *= s
    series += k * LN2_LOW
    s += series
    k *= LN2_HIGH
    k += s
    return k


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """The x below which a standard normal falls with probability p, 0 < p < 1."""
    flat = np.array(p, np.float64).reshape(-1)  # a copy, which becomes the result
    _quantiles(flat, np.empty((2, flat.size)))
    return flat.reshape(np.shape(p))


def _quantiles(p: np.ndarray, memory: np.ndarray) -> None:
    """`normal_quantile` in place; `memory`: float64 of two rows as long."""
    r, under = memory[0, : p.size], memory[1, : p.size]
    np.subtract(p, 0.5, out=r)
    tail = np.flatnonzero(np.abs(r, out=under) > 0.425)
    edge = p[tail]
    p[:] = r
    np.multiply(p, p, out=r)
    np.subtract(0.180625, r, out=r)  # below 0 in the tails, which are replaced
    p *= _polynomial(A, r, under)
    p /= _polynomial(B, r, under)
    if tail.size:
        p[tail] = np.copysign(_tails(np.minimum(edge, 1.0 - edge)), edge - 0.5)


def _tails(p: np.ndarray) -> np.ndarray:
    """-x of the quantiles of p < 0.075."""
    r = np.sqrt(-exact_log(p))
    a = r - 1.6
    x = _polynomial(C, a)
    x /= _polynomial(D, a)
    far = np.flatnonzero(r > 5.0)
    if far.size:  # one in 10^11
        b = r[far] - 5.0
        x[far] = _polynomial(E, b) / _polynomial(F, b)
    return x


def _uniforms(key: int, first: int, out: np.ndarray, memory: np.ndarray) -> None:
    """52-bit uniforms strictly between 0 and 1, two words of Philox each, numbers `first` (even) … of the stream, into float64
    [count]; `memory`: uint64, six rows of at least half as many."""
    count = (out.size + 1) // 2
    words = memory[:, :count]
    words[0] = np.arange(first // 2, first // 2 + count, dtype=np.uint64)
    np.right_shift(words[0], np.uint64(32), out=words[1])
    words[0] &= np.uint64(0xFFFFFFFF)
    words[2:4] = 0
    drawn = philox(words, (key & 0xFFFFFFFF, key >> 32))
    for half in (0, 1):
        high, low = drawn[2 * half : 2 * half + 2]
        high >>= np.uint64(6)
        high <<= np.uint64(26)
        low >>= np.uint64(6)
        high |= low
        high |= np.uint64(0x4330 << 48)  # the bits of 2^52 and this whole number
        out[half::2] = (high.view(np.float64) - (2.0**52 - 0.5))[: (out.size + 1 - half) // 2]
    out *= 2.0**-52


def _orthogonal(shape: tuple[int, ...], key: int) -> np.ndarray:
    """Orthonormal rows of the matrix [shape[0], the rest] where it is wide, else columns: float64, flat.

    Gram-Schmidt of standard normals, uniform over such matrices (Mezzadri 2007; Saxe et al. 2014 start networks so).
    Sums go along axis 0, one row after another, so that no vector width of a machine decides their order.
    """
    rows, columns = shape[0], prod(shape[1:])
    many, few = max(rows, columns), min(rows, columns)
    flat = np.empty(many * few)
    _uniforms(key, 0, flat, np.empty((6, (flat.size + 1) // 2), np.uint64))
    vectors = normal_quantile(flat).reshape(many, few)  # one a column
    for i in range(few):
        own = vectors[:, i : i + 1]
        own /= np.sqrt(np.add.reduce(own * own, axis=0))
        rest = vectors[:, i + 1 :]
        rest -= own * np.add.reduce(rest * own, axis=0)
    return (vectors if rows >= columns else vectors.T).reshape(-1)


def _drawn(normal: bool, add: float, scale: float, key: int, first: int, out: np.ndarray) -> None:
    """Values `first` … of a tensor that is drawn value by value, into the memory of `out`."""
    width = min(_CHUNK, out.size)
    wide, words = np.empty((3, width)), np.empty((6, (width + 1) // 2), np.uint64)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        values = wide[0, : part.size]
        _uniforms(key, first + start, values, words)
        if normal:
            _quantiles(values, wide[1:])
        values *= scale
        values += add
        part[:] = values.astype(np.float32)


def pieces(kind: str, attrs: Mapping[str, Any], shape: tuple[int, ...], key: int, out: np.ndarray) -> list[Callable[[], None]]:
    """Calls that together write the initial value into `out`, flat and of any float type, each a part of its own: they may run at
    once, and how they are cut decides no bit. The values are those of `initial_value`."""
    if kind not in KINDS:
        raise OpProblem("E-SHAPE-015", f"{kind} is no initial value", help="initial values: " + " ".join(KINDS))
    a = {name: float(attrs.get(name, default)) for name, default in KINDS[kind].items()}
    if kind in ("zeros", "ones", "constant"):
        return [partial(out.fill, np.float32({"zeros": 0.0, "ones": 1.0}.get(kind, a.get("value", 0.0))))]
    if kind == "orthogonal":

        def whole() -> None:
            out[:] = (a["gain"] * _orthogonal(shape, key)).astype(np.float32)

        return [whole]
    add, scale = (a["mean"], a["std"]) if kind == "normal" else (a["low"], a["high"] - a["low"])
    return [partial(_drawn, kind == "normal", add, scale, key, start, out[start : start + _PIECE]) for start in range(0, out.size, _PIECE)]


def initial_value(kind: str, attrs: Mapping[str, Any], shape: tuple[int, ...], key: int) -> np.ndarray:
    """float64 of `shape`, each rounded to float32.

    `kind`: a name in KINDS; `key`: `draw_key(seed, path, 0, "init")`.
    """
    flat = np.empty(prod(shape))
    for write in pieces(kind, attrs, shape, key, flat):
        write()
    return flat.reshape(shape)

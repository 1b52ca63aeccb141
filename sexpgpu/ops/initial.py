"""Initial values, computed on the host in float64 and rounded to float32: the same bits everywhere.

Only + - * / and sqrt of float64 are used, which IEEE 754 fixes to the last bit: the logarithm is our own, the normal
quantile is Wichura's PPND16 (algorithm AS 241, Applied Statistics 37, 1988), good to about 1e-16.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from sexpgpu.ops.definition import OpProblem
from sexpgpu.ops.philox import blocks

#: kind -> {attribute: default}
KINDS: dict[str, dict[str, float]] = {
    "zeros": {},
    "ones": {},
    "constant": {"value": 0.0},
    "normal": {"mean": 0.0, "std": 1.0},
    "uniform": {"low": 0.0, "high": 1.0},
    "orthogonal": {"gain": 1.0},
}

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # fdlibm's split of ln 2

_A = (
    3.3871328727963666080e0,
    1.3314166789178437745e2,
    1.9715909503065514427e3,
    1.3731693765509461125e4,
    4.5921953931549871457e4,
    6.7265770927008700853e4,
    3.3430575583588128105e4,
    2.5090809287301226727e3,
)
_B = (
    1.0,
    4.2313330701600911252e1,
    6.8718700749205790830e2,
    5.3941960214247511077e3,
    2.1213794301586595867e4,
    3.9307895800092710610e4,
    2.8729085735721942674e4,
    5.2264952788528545610e3,
)
_C = (
    1.42343711074968357734e0,
    4.63033784615654529590e0,
    5.76949722146069140550e0,
    3.64784832476320460504e0,
    1.27045825245236838258e0,
    2.41780725177450611770e-1,
    2.27238449892691845833e-2,
    7.74545014278341407640e-4,
)
_D = (
    1.0,
    2.05319162663775882187e0,
    1.67638483018380384940e0,
    6.89767334985100004550e-1,
    1.48103976427480074590e-1,
    1.51986665636164571966e-2,
    5.47593808499534494600e-4,
    1.05075007164441684324e-9,
)
_E = (
    6.65790464350110377720e0,
    5.46378491116411436990e0,
    1.78482653991729133580e0,
    2.96560571828504891230e-1,
    2.65321895265761230930e-2,
    1.24266094738807843860e-3,
    2.71155556874348757815e-5,
    2.01033439929228813265e-7,
)
_F = (
    1.0,
    5.99832206555887937690e-1,
    1.36929880922735805310e-1,
    1.48753612908506148525e-2,
    7.86869131145613259100e-4,
    1.84631831751005468180e-5,
    1.42151175831644588870e-7,
    2.04426310338993978564e-15,
)


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    out = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = out * x + c
    return out


def exact_log(x: np.ndarray) -> np.ndarray:
    """The natural logarithm of positive float64s, to about 1 ulp, by x = 2^k m and 2 atanh((m - 1) / (m + 1))."""
    m, k = np.frexp(x)
    small = m < 0.7071067811865476
    m, k = np.where(small, m * 2.0, m), np.where(small, k - 1, k).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = _polynomial(tuple(1.0 / (2 * i + 3) for i in range(11)), z) * z  # s < 0.172: the rest is below 1e-18
    return k * _LN2_HIGH + (2.0 * s + (2.0 * s * series + k * _LN2_LOW))


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """The x below which a standard normal falls with probability p, 0 < p < 1."""
    q = p - 0.5
    centre = np.abs(q) <= 0.425
    r = np.where(centre, 0.180625 - q * q, 0.0)
    out = q * _polynomial(_A, r) / _polynomial(_B, r)
    tail = ~centre
    if tail.any():
        qt = q[tail]
        r = np.sqrt(-exact_log(np.where(qt < 0.0, p[tail], 1.0 - p[tail])))
        near = r <= 5.0
        a, b = np.where(near, r - 1.6, 0.0), np.where(near, 0.0, r - 5.0)
        x = np.where(near, _polynomial(_C, a) / _polynomial(_D, a), _polynomial(_E, b) / _polynomial(_F, b))
        out[tail] = np.where(qt < 0.0, -x, x)
    return out


def _uniforms(key: int, count: int) -> np.ndarray:
    """52-bit uniforms strictly between 0 and 1, two words of Philox each: float64 [count]."""
    w = blocks(key, 0, (count + 1) // 2, 0).reshape(-1, 2)[:count]
    whole = (w[:, 0] >> np.uint32(6)).astype(np.float64) * 2.0**26 + (w[:, 1] >> np.uint32(6)).astype(np.float64)
    return (whole + 0.5) * 2.0**-52


def _orthogonal(shape: tuple[int, ...], key: int) -> np.ndarray:
    """Orthonormal rows of the matrix [shape[0], the rest] where it is wide, else columns: float64, flat.

    Gram-Schmidt of standard normals, uniform over such matrices (Mezzadri 2007; Saxe et al. 2014 start networks so).
    Sums go along axis 0, one row after another, so that no vector width of a machine decides their order.
    """
    rows, columns = shape[0], prod(shape[1:])
    many, few = max(rows, columns), min(rows, columns)
    vectors = normal_quantile(_uniforms(key, many * few)).reshape(many, few)  # one a column
    for i in range(few):
        own = vectors[:, i : i + 1]
        own /= np.sqrt(np.add.reduce(own * own, axis=0))
        rest = vectors[:, i + 1 :]
        rest -= own * np.add.reduce(rest * own, axis=0)
    return (vectors if rows >= columns else vectors.T).reshape(-1)


def initial_value(kind: str, attrs: Mapping[str, Any], shape: tuple[int, ...], key: int) -> np.ndarray:
    """float64 of `shape`, each rounded to float32.

    `kind`: a name in KINDS; `key`: `draw_key(seed, path, 0, "init")`.
    """
    if kind not in KINDS:
        raise OpProblem("E-SHAPE-015", f"{kind} is no initial value", help="initial values: " + " ".join(KINDS))
    a = {name: float(attrs.get(name, default)) for name, default in KINDS[kind].items()}
    count = prod(shape)
    if kind in ("zeros", "ones", "constant"):
        flat = np.full(count, {"zeros": 0.0, "ones": 1.0}.get(kind, a.get("value", 0.0)))
    elif kind == "normal":
        flat = a["mean"] + a["std"] * normal_quantile(_uniforms(key, count))
    elif kind == "orthogonal":
        flat = a["gain"] * _orthogonal(shape, key)
    else:
        flat = a["low"] + (a["high"] - a["low"]) * _uniforms(key, count)
    return flat.astype(np.float32).astype(np.float64).reshape(shape)

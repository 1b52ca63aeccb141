"""Cases of the ops of issue 3 for `op_cases.CASES`: (op, operands, meaning in NumPy float64, attributes)."""

from __future__ import annotations

import numpy as np

R23, U23 = ((2, 3), "real"), ((2, 3), "unit")


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(causal=False, window=None):
    """q [… h t d], k and v [… g s d]; a row that sees nothing is 0."""

    def meaning(q, k, v, mask=None):
        if q.ndim > 2:
            k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        s = q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
        i, j = np.ogrid[: s.shape[-2], : s.shape[-1]]
        if mask is not None:
            s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
        if causal:
            s = np.where(j <= i, s, -np.inf)
        if window:
            s = np.where(abs(i - j) < window, s, -np.inf)
        dead = (s == -np.inf).all(-1, keepdims=True)
        return np.where(dead, 0, _softmax(np.where(dead, 0, s)) @ v)

    return meaning


def convolve(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    def meaning(x, w, bias=None):
        x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
        size = [(n - s) // t + 1 for n, s, t in zip(x.shape[2:], spans, stride, strict=True)]
        out = np.zeros((x.shape[0], w.shape[0], *size))
        per = w.shape[0] // groups
        for o in range(w.shape[0]):
            for c in range(w.shape[1]):
                for at in np.ndindex(*w.shape[2:]):
                    cut = tuple(
                        slice(a * d, a * d + (n - 1) * t + 1, t)
                        for a, d, n, t in zip(at, dilation, size, stride, strict=True)
                    )
                    out[:, o] += w[(o, c, *at)] * x[(slice(None), o // per * w.shape[1] + c, *cut)]
        return out if bias is None else out + bias.reshape(-1, *[1] * (x.ndim - 2))

    return meaning


def transpose_of(linear, shape):
    """The transpose of a linear function of a tensor of this shape, by its matrix."""

    def meaning(ct):
        out = np.zeros(shape)
        for at in np.ndindex(*shape):
            unit = np.zeros(shape)
            unit[at] = 1
            out[at] = (linear(unit) * ct).sum()
        return out

    return meaning


def pool(function, window, stride, padding=0, fill=0.0):
    """Over the last axis."""

    def meaning(x):
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding)), constant_values=fill)
        starts = range(0, x.shape[-1] - window + 1, stride)
        return np.stack([function(x[..., s : s + window], -1) for s in starts], -1)

    return meaning


def max_places(x, window, stride):
    return np.stack([s + x[..., s : s + window].argmax(-1) for s in range(0, x.shape[-1] - window + 1, stride)], -1)


def max_grad(x, ct):
    out, places = np.zeros_like(x), max_places(x, 3, 2)
    for at in np.ndindex(*ct.shape):
        out[(*at[:-1], places[at])] += ct[at]
    return out


def scatter_along(u, i):
    out = np.zeros((u.shape[0], 4))
    for at in np.ndindex(*u.shape):
        out[at[0], i[at]] += u[at]
    return out


C2 = {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 2], "groups": 2}
X2, W2 = ((1, 2, 3, 4), "real"), ((2, 1, 2, 2), "real")
X1, W1 = ((2, 2, 5), "real"), ((3, 2, 2), "real")
_conv2 = convolve((2, 1), (1, 0), (1, 2), 2)
_conv1 = convolve((2,), (1,), (1,))
QKV = (((2, 2, 3, 2), "real"), ((2, 1, 3, 2), "real"), ((2, 1, 3, 2), "real"))
QK1 = (((3, 2), "real"),) * 3


def _pool2(x):
    return np.stack([np.stack([x[..., i : i + 2, j : j + 2].max((-1, -2)) for j in (0, 2)], -1) for i in (0, 2)], -2)


BREADTH = [
    *((n, (((2, 2), "unit"),), f) for n, f in (("asin", np.arcsin), ("acos", np.arccos), ("atanh", np.arctanh))),
    *((n, (R23,), f) for n, f in (("atan", np.arctan), ("sinh", np.sinh), ("cosh", np.cosh), ("asinh", np.arcsinh))),
    *((n, (R23,), f) for n, f in (("tan", np.tan), ("exp2", np.exp2))),
    ("acosh", (((2, 3), "above"),), np.arccosh),
    ("log2", (U23,), np.log2),
    ("atan2", (R23, ((3,), "real")), np.arctan2),
    ("hypot", (((2, 1), "real"), ((3,), "real")), np.hypot),
    ("leaky-relu", (R23,), lambda x: np.where(x > 0, x, 0.2 * x), {"slope": 0.2}),
    ("elu", (R23,), lambda x: np.where(x > 0, x, 1.5 * np.expm1(x)), {"alpha": 1.5}),
    ("selu", (R23,), lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))),
    ("mish", (R23,), lambda x: x * np.tanh(np.logaddexp(x, 0))),
    (
        "gelu-tanh",
        (R23,),
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    ("prod", (R23,), np.prod),
    ("prod", (((2, 3, 2), "real"),), lambda x: x.prod((0, 2), keepdims=True), {"axis": [0, 2], "keep-dims": True}),
    ("prod", (((5, 1), "real"),), lambda x: x.prod(0), {"axis": 0}),
    ("prod", (((), "real"),), np.prod),
    ("variance", (R23,), lambda x: x.var(ddof=1)),
    ("variance", (((2, 3, 2), "real"),), lambda x: x.var((0, 2)), {"axis": [0, 2], "correction": 0}),
    ("variance", (R23,), lambda x: x.var(1, ddof=1, keepdims=True), {"axis": 1, "keep-dims": True}),
    ("sort-along", (R23,), np.sort),
    ("sort-along", (R23,), lambda x: -np.sort(-x, 0), {"axis": 0, "descending": True}),
    ("argsort", (R23,), lambda x: np.argsort(x).astype(np.int32)),
    ("top-k", (((2, 4), "real"),), lambda x: -np.sort(-x)[:, :2], {"k": 2}),
    ("top-k", (R23,), lambda x: -np.sort(-x, 0)[:1], {"k": 1, "axis": 0}),
    ("top-k-indices", (((2, 4), "real"),), lambda x: np.argsort(-x)[:, :3].astype(np.int32), {"k": 3}),
    ("take-along", (R23, ((2, 4), "index:3")), lambda x, i: np.take_along_axis(x, i, -1)),
    ("take-along", (R23, ((1, 3), "index:2")), lambda x, i: np.take_along_axis(x, i, 0), {"axis": 0}),
    ("scatter-add-along", (R23, ((2, 3), "index:4")), scatter_along, {"count": 4}),
    ("embed", (((4, 2), "real"), ((2, 3), "index:4")), lambda t, i: t[i]),
    ("embed", (((3, 2, 2), "real"), ((), "index:3")), lambda t, i: t[i]),
    *(
        ("einsum", operands, lambda *x, e=e: np.einsum(e, *x), {"equation": e})
        for e, operands in (
            ("ij,jk->ik", (R23, ((3, 2), "real"))),
            ("ij,ij->", (R23, R23)),
            ("ij,k->jki", (R23, ((2,), "real"))),
            ("...ij,...jk->...ik", (((2, 2, 2), "real"), ((2, 2), "real"))),
            ("ba,c", (R23, ((2,), "real"))),
            ("iij->ij", (((2, 2, 2), "real"),)),
            ("ii,ik->k", (((2, 2), "real"), ((2, 2), "real"))),
            ("ij->j", (R23,)),
            ("i,ij,j->", (((2,), "real"), R23, ((3,), "real"))),
        )
    ),
    ("convolve", (X2, W2), _conv2, C2),
    ("convolve", (X1, W1, ((3,), "real")), _conv1, {"stride": 2, "padding": 1}),
    ("convolve", (((1, 1, 2, 2, 2), "real"), ((1, 1, 1, 2, 2), "real")), convolve((1,) * 3, (0,) * 3, (1,) * 3)),
    (
        "convolve-transpose",
        (((1, 2, 2, 2), "real"), W2),
        lambda u, w: transpose_of(lambda x: _conv2(x, w), (1, 2, 3, 4))(u),
        {**C2, "size": [3, 4]},
    ),
    (
        "convolve-transpose",
        (((2, 3, 3), "real"), W1),
        lambda u, w: transpose_of(lambda x: _conv1(x, w), (2, 2, 4))(u),
        {"stride": 2, "padding": 1},
    ),
    (
        "convolve-weight-grad",
        (X2, ((1, 2, 2, 2), "real")),
        lambda x, u: transpose_of(lambda w: _conv2(x, w), (2, 1, 2, 2))(u),
        {**C2, "kernel": [2, 2]},
    ),
    ("max-pool", (((2, 1, 6), "real"),), pool(np.max, 3, 2, 1, -np.inf), {"window": 3, "stride": 2, "padding": 1}),
    ("max-pool", (((1, 1, 4, 4), "real"),), _pool2, {"window": 2}),
    ("max-pool-grad", (((1, 2, 5), "real"), ((1, 2, 2), "real")), max_grad, {"window": 3, "stride": 2}),
    (
        "max-pool-pick",
        (((1, 2, 5), "real"), ((1, 2, 5), "real")),
        lambda x, v: np.take_along_axis(v, max_places(x, 3, 2), -1),
        {"window": 3, "stride": 2},
    ),
    ("average-pool", (((2, 1, 6), "real"),), pool(np.mean, 3, 2, 1), {"window": 3, "stride": 2, "padding": 1}),
    (
        "average-pool",
        (((1, 2, 4, 2), "real"),),
        lambda x: x.reshape(1, 2, 2, 2, 1, 2).mean((3, 5)),
        {"window": [2, 2]},
    ),
    (
        "average-pool-grad",
        (((1, 1, 3), "real"),),
        transpose_of(pool(np.mean, 3, 2, 1), (1, 1, 6)),
        {"window": 3, "stride": 2, "padding": 1, "size": 6},
    ),
    ("attend", QKV, attend(causal=True), {"causal": True}),
    ("attend", (*QK1, ((3, 3), "bool")), attend()),
    ("attend", (*QKV, ((2, 1, 1, 3), "bool")), attend(causal=True, window=2), {"causal": True, "window": 2}),
    ("attend", (*QKV, ((2, 3, 1), "real")), attend(window=2), {"window": 2}),
    ("attend", (*QKV, ((3, 3), "real")), attend(causal=True), {"causal": True}),
]

"""One or more cases of every op: operand shapes and domains, attributes, and its meaning in NumPy float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import erf
from typing import Any

import numpy as np
from breadth_cases import BREADTH
from cartesian_cases import CARTESIAN

from sexpgpu.ir import Node
from sexpgpu.ops import build


@dataclass(frozen=True)
class Case:
    """`operands`: (shape, kind) each; kind: real, positive, unit (0 … 1), above (1), apart (no two within 0.05), bool,
    index:n."""

    op: str
    operands: tuple[tuple[tuple[int, ...], str], ...]
    expected: Callable[..., Any]
    attrs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}-{'-'.join('x'.join(map(str, s)) for s, _ in self.operands)}"


def value(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    """A test tensor: at least 1e-3 away from 0, integers and ties where that matters."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if kind == "bool":
        return rng.random(shape) < 0.5
    if kind.startswith("index:"):
        return rng.integers(0, int(kind[6:]), shape).astype(np.int32)
    if kind == "positive":
        return 0.4 + rng.random(shape)
    if kind == "above":
        return 1.2 + rng.random(shape)
    if kind == "unit":
        return 0.05 + 0.9 * rng.random(shape)
    spaced = (np.arange(count) - count / 2 + 0.37) * (0.31 if kind == "apart" else 0.173) + seed * 0.0137
    return rng.permutation(spaced).reshape(shape)


def leaf(number: int, array: np.ndarray) -> Node:
    dtype = {"f": "f64", "i": "i32", "b": "bool"}[array.dtype.kind]
    return build("input", name=f"x{number}", shape=array.shape, dtype=dtype, batch=False)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: np.ndarray, step: float = 1e-30) -> np.ndarray:
    """By a complex step: not the rule that the op is written from."""
    return (_gelu_tanh(x + 1j * step) / step).imag


def _softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _entropy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -np.log(np.take_along_axis(_softmax(x), y[..., None], -1))[..., 0]


def _attend(causal: bool, scale: float | None = None) -> Callable[..., Any]:
    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        s = q @ np.swapaxes(k, -1, -2) * (scale or q.shape[-1] ** -0.5)
        if causal:
            s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
        return _softmax(s) @ v

    return attend


def _attend_grad(of: int, causal: bool, scale: float) -> Callable[..., Any]:
    def gradient(ct: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> np.ndarray:
        s = q @ np.swapaxes(k, -1, -2) * scale
        p = _softmax(np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf) if causal else s)
        by_p = ct @ np.swapaxes(v, -1, -2)
        by_s = p * (by_p - (by_p * p).sum(-1, keepdims=True)) * scale
        return (by_s @ k, np.swapaxes(by_s, -1, -2) @ q, np.swapaxes(p, -1, -2) @ ct)[of]

    return gradient


def _attend_grad_packed(causal: bool, scale: float, of: int = 0) -> Callable[..., Any]:
    def gradient(*operands: np.ndarray) -> np.ndarray:
        parts = [np.swapaxes(_attend_grad(which, causal, scale)(*operands), 1, 2) for which in range(3)]
        packed = np.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], -1)
        return packed.sum((0, 1)) if of else packed

    return gradient


def _linear_entropy_grad(of: int) -> Callable[..., Any]:
    def gradient(x: np.ndarray, w: np.ndarray, y: np.ndarray, ct: np.ndarray) -> np.ndarray:
        by_logits = ct[..., None] * (_softmax(x @ w) - np.eye(w.shape[1])[y])
        if of == 2:
            return _entropy(x @ w, y)
        return by_logits @ w.T if of == 0 else np.tensordot(x, by_logits, (range(x.ndim - 1), range(x.ndim - 1)))

    return gradient


def _normalize(axis: Any, eps: float, center: bool = True) -> Callable[..., Any]:
    def normalize(x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis, keepdims=True) if center else x
        return x / np.sqrt((x * x).mean(axis, keepdims=True) + eps)

    return normalize


def _normalize_grad(axis: Any, eps: float, center: bool = True) -> Callable[..., Any]:
    def gradient(x: np.ndarray, c: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis, keepdims=True) if center else x
        r = 1 / np.sqrt((x * x).mean(axis, keepdims=True) + eps)
        y = x * r
        return r * (c - center * c.mean(axis, keepdims=True) - y * (c * y).mean(axis, keepdims=True))

    return gradient


def _onto(x: np.ndarray, u: np.ndarray, i: np.ndarray) -> np.ndarray:
    found = x.copy()
    np.add.at(found, i, u)
    return found


def _scatter(axis: int, count: int) -> Callable[..., Any]:
    def scatter(u: np.ndarray, i: np.ndarray) -> np.ndarray:
        flat = np.moveaxis(u.reshape(*u.shape[:axis], i.size, *u.shape[axis + i.ndim :]), axis, 0)
        out = np.zeros((count, *flat.shape[1:]))
        np.add.at(out, i.reshape(-1), flat)
        return np.moveaxis(out, 0, axis)

    return scatter


_erf = np.vectorize(erf, otypes=[float])
_phi = lambda x: 0.5 * (1 + _erf(x / np.sqrt(2)))  # noqa: E731
_sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
_gelu_slope = lambda x: _phi(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)  # noqa: E731

REAL, POS, APART = ((2, 3), "real"), ((2, 3), "positive"), ((2, 3), "apart")
ROW, COLUMN, SCALAR = ((3,), "real"), ((2, 1), "real"), ((), "real")


def _unary(kind: str, **functions: Callable[..., Any]) -> list[Case]:
    return [Case(name.rstrip("_").replace("_", "-"), (((2, 3), kind),), f) for name, f in functions.items()]


def _binary(name: str, f: Callable[..., Any], right: str = "real") -> list[Case]:
    shapes = (((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((2, 3), ()), ((), (2, 3)))
    return [Case(name, ((a, "real"), (b, right)), f) for a, b in shapes]


#: x², x w / 2, twice that; the second output is a sum over the rows
CHAIN = (("load", 0), ("point", "*", (0, 0)), ("dot", 0, 1, False, 0.5), ("point", "*", (("number", 2.0), 2)))
CHAIN_OUTPUTS = ((("value", 3), (4, 2)), (("sum", ((1, 2),), 6.0), (3, 2)))

CASES: list[Case] = [
    *_binary("+", np.add),
    *_binary("-", np.subtract),
    *_binary("*", np.multiply),
    *_binary("/", np.divide, "positive"),
    *_binary("max", np.maximum),
    *_binary("min", np.minimum),
    *_binary("mod", np.mod, "positive"),
    *(Case(n, (REAL, ROW), f) for n, f in {"=": np.equal, "/=": np.not_equal, "<": np.less}.items()),
    *(Case(n, (REAL, ROW), f) for n, f in {"<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}.items()),
    Case("power", (POS, REAL), np.power),
    Case("power", (POS, SCALAR), np.power),
    *_unary("real", neg=np.negative, abs=np.abs, sign=np.sign, exp=np.exp, expm1=np.expm1, sin=np.sin, cos=np.cos),
    *_unary("real", tanh=np.tanh, sigmoid=_sigmoid, erf=_erf, square=np.square, floor=np.floor, ceil=np.ceil),
    *_unary("real", round=np.round, softplus=lambda x: np.logaddexp(x, 0), relu=lambda x: np.maximum(x, 0)),
    *_unary("real", gelu=lambda x: x * _phi(x), silu=lambda x: x * _sigmoid(x), is_nan=np.isnan, is_finite=np.isfinite),
    *_unary("positive", log=np.log, log1p=np.log1p, sqrt=np.sqrt, rsqrt=lambda x: x**-0.5, reciprocal=lambda x: 1 / x),
    Case("relu-grad", (REAL, REAL), lambda x, c: np.where(x <= 0, 0, c)),
    Case("gelu-grad", (REAL, REAL), lambda x, c: c * _gelu_slope(x)),
    Case("gelu-tanh-grad", (REAL, REAL), lambda x, c: c * _gelu_tanh_slope(x)),
    *(
        Case(f"logical-{n}", (((2, 3), "bool"), ((3,), "bool")), f)
        for n, f in {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.items()
    ),
    Case("logical-not", (((2, 3), "bool"),), np.logical_not),
    Case("clamp", (REAL,), lambda x: np.clip(x, -0.2, 0.25), {"low": -0.2, "high": 0.25}),
    Case("clamp", (ROW,), lambda x: np.maximum(x, 0.1), {"low": 0.1}),
    Case("where", (((2, 3), "bool"), REAL, ROW), np.where),
    Case("where", (((3,), "bool"), SCALAR, COLUMN), np.where),
    Case("cast", (REAL,), lambda x: x, {"dtype": "f64"}),
    Case("cast", (REAL,), lambda x: np.trunc(x).astype(np.int32), {"dtype": "i32"}),
    Case("sum", (REAL,), np.sum),
    Case("sum", (((2, 3, 2), "real"),), lambda x: x.sum((0, 2)), {"axis": [0, -1]}),
    Case("sum", (REAL,), lambda x: x.sum(1, keepdims=True), {"axis": 1, "keep-dims": True}),
    Case("sum", (SCALAR,), np.sum),
    Case("mean", (REAL,), np.mean),
    Case("mean", (((2, 3, 2), "real"),), lambda x: x.mean((0, 2)), {"axis": (0, 2)}),
    Case("reduce-max", (APART,), lambda x: x.max(1), {"axis": -1}),
    Case("reduce-max", (APART,), np.max),
    Case("reduce-min", (APART,), lambda x: x.min(0, keepdims=True), {"axis": 0, "keep-dims": True}),
    Case("reduce-all", (((2, 3), "bool"),), lambda x: x.all(1), {"axis": 1}),
    Case("reduce-any", (((2, 3), "bool"),), np.any),
    Case("argmax", (APART,), lambda x: x.argmax(-1).astype(np.int32)),
    Case("argmin", (APART,), lambda x: x.argmin(0).astype(np.int32), {"axis": 0}),
    Case("reshape", (REAL,), lambda x: x.reshape(3, 2), {"shape": [3, -1]}),
    Case("squeeze", (COLUMN,), np.squeeze),
    Case("expand-dims", (REAL,), lambda x: x[:, None, :, None], {"axis": [1, -1]}),
    Case("transpose", (REAL,), np.transpose),
    Case("transpose", (((2, 3, 2), "real"),), lambda x: x.transpose(2, 0, 1), {"permutation": [2, 0, 1]}),
    Case("broadcast", (COLUMN,), lambda x: np.broadcast_to(x, (2, 2, 3)), {"shape": [2, 2, 3]}),
    Case("flip", (REAL,), lambda x: x[:, ::-1], {"axis": 1}),
    Case("slice", (((2, 7), "real"),), lambda x: x[:, 1:6:2], {"axis": 1, "start": 1, "stop": -1, "step": 2}),
    Case("slice", (REAL,), lambda x: x[1:], {"start": 1}),
    Case(
        "pad",
        (REAL,),
        lambda x: np.pad(x, ((0, 1), (2, 0)), constant_values=1.5),
        {"before": [0, 2], "after": [1, 0], "value": 1.5},
    ),
    Case("pad", (ROW,), lambda x: np.array([x[0], 0, x[1], 0, x[2], 0]), {"interior": [1], "after": [1]}),
    Case("concat", (REAL, COLUMN, REAL), lambda *x: np.concatenate(x, 1), {"axis": -1}),
    Case("tril", (((2, 3, 3), "real"),), lambda x: np.tril(x, 1), {"offset": 1}),
    Case("cumsum", (REAL,), lambda x: np.cumsum(x, 1)),
    Case("cumsum", (REAL,), lambda x: np.cumsum(x[::-1], 0)[::-1], {"axis": 0, "reverse": True}),
    Case("gather", (((4, 2), "real"), ((2, 3), "index:4")), lambda x, i: x[i]),
    Case("gather", (((2, 4), "real"), ((3,), "index:4")), lambda x, i: x[:, i], {"axis": 1}),
    Case("gather", (((4, 2), "real"), ((), "index:4")), lambda x, i: x[i]),
    Case("gather", (((2, 4, 3), "real"), ((), "index:4")), lambda x, i: x[:, i], {"axis": 1}),
    Case("scatter-add", (((3, 2), "real"), ((3,), "index:2")), _scatter(0, 4), {"count": 4}),
    Case("scatter-add", (((2,), "real"), ((), "index:3")), _scatter(0, 3), {"count": 3}),
    Case("scatter-add", (((2, 2), "real"), ((), "index:3")), _scatter(1, 3), {"axis": 1, "count": 3}),
    Case("scatter-add", (((), "real"), ((), "index:3")), _scatter(0, 3), {"count": 3}),
    Case("scatter-add", (((2, 2, 2), "real"), ((2, 2), "index:3")), _scatter(1, 3), {"axis": 1, "count": 3}),
    Case("scatter-onto", (((4, 2), "real"), ((2, 3, 2), "real"), ((2, 3), "index:4")), _onto),
    Case("scatter-onto", (((4, 2), "real"), ((2,), "real"), ((), "index:4")), _onto),
    Case("one-hot", (((2, 2), "index:4"),), lambda i: np.eye(4)[i], {"count": 4, "dtype": "f64"}),
    Case("one-hot", (((), "index:4"),), lambda i: np.eye(4)[i], {"count": 4, "dtype": "f64"}),
    Case("matmul", (((2, 3), "real"), ((3, 2), "real")), np.matmul),
    Case("matmul", (((2, 2, 3), "real"), ((3, 2), "real")), np.matmul),
    Case("matmul", (((2, 3), "real"), ((2, 3, 2), "real")), np.matmul),
    Case("matmul", (((2, 1, 2, 2), "real"), ((2, 2, 1), "real")), np.matmul),
    Case("matmul", (((3,), "real"), ((3,), "real")), np.matmul),
    Case("matmul", (((3,), "real"), ((2, 3, 2), "real")), np.matmul),
    Case("matmul", (((2, 2, 3), "real"), ((3,), "real")), np.matmul),
    Case("matmul-f32", (((2, 2, 3), "real"), ((3, 2), "real")), np.matmul),
    *(Case("row-chain", (((4, 3), "real"), ((3, 2), "real")), meaning, {"program": CHAIN, "outputs": CHAIN_OUTPUTS, "of": of})
      for of, meaning in enumerate((lambda x, w: 2 * (x @ w) * 0.5, lambda x, w: 3.0 * (x * x).T @ (x @ w)))),
    Case("matmul-sum", (((2, 3), "real"), ((3, 2), "real"), ((2, 1), "real"), ((1, 2), "real")), lambda a, b, c, d: 0.5 * (a @ b + c @ d), {"scale": 0.5}),
    Case("matmul-bias", (((2, 2, 3), "real"), ((3, 2), "real"), ((2,), "real")), lambda a, b, c: a @ b + c),
    *(Case("matmul-gelu", (((2, 2, 3), "real"), ((3, 2), "real"), ((2,), "real")), lambda a, b, c, of=of: (a @ b + c if of else _gelu_tanh(a @ b + c)), {"of": of})
      for of in range(2)),
    Case("matmul-gelu-grad", (((2, 2, 3), "real"), ((3, 2), "real"), ((2, 2, 2), "real")), lambda a, b, x: a @ b * _gelu_tanh_slope(x)),
    *(Case("matmul-rows", (((2, 3), "real"), ((3, 4), "real")), lambda a, b, of=of: (b.sum(0) if of else a @ b), {"of": of}) for of in range(2)),
    Case("matmul-add", (((2, 2, 3), "real"), ((3, 2), "real"), ((2,), "real"), ((2, 2, 2), "real")), lambda a, b, c, d: a @ b + c + d),
    Case("linear-cross-entropy", (((2, 2, 3), "real"), ((3, 4), "real"), ((2, 2), "index:4")), lambda x, w, y: _entropy(x @ w, y)),
    *(Case("linear-cross-entropy-grad", (((2, 2, 3), "real"), ((3, 4), "real"), ((2, 2), "index:4"), ((2, 2), "real")),
           _linear_entropy_grad(of), {"of": of}) for of in range(3)),
    Case("linear-cross-entropy", (ROW, ((3, 4), "real"), ((), "index:4")), lambda x, w, y: _entropy(x @ w, y)),
    *(Case("linear-cross-entropy-grad", (ROW, ((3, 4), "real"), ((), "index:4"), SCALAR), _linear_entropy_grad(of), {"of": of}) for of in (0, 2)),
    Case("softmax", (REAL,), _softmax),
    Case("softmax", (REAL,), lambda x: _softmax(x, 0), {"axis": 0}),
    Case("log-softmax", (REAL,), lambda x: np.log(_softmax(x))),
    Case("logsumexp", (REAL,), lambda x: np.log(np.exp(x).sum(-1))),
    Case("logsumexp", (REAL,), lambda x: np.log(np.exp(x).sum(0, keepdims=True)), {"axis": 0, "keep-dims": True}),
    Case("softmax-cross-entropy", (REAL, ((2,), "index:3")), _entropy),
    Case("softmax-cross-entropy", (((2, 2, 3), "real"), ((2, 2), "index:3")), _entropy),
    Case("softmax-cross-entropy", (ROW, ((), "index:3")), _entropy),
    Case(
        "softmax-cross-entropy-grad",
        (REAL, ((2,), "index:3"), ((2,), "real")),
        lambda x, y, c: c[:, None] * (_softmax(x) - np.eye(3)[y]),
    ),
    Case("attend", (((2, 3, 2), "real"), ((2, 3, 2), "real"), ((2, 3, 2), "real")), _attend(True), {"causal": True}),
    Case("attend", (((2, 2), "real"), ((3, 2), "real"), ((3, 1), "real")), _attend(False, 0.7), {"scale": 0.7}),
    *(Case("attend-grad", (((2, 3, 2), "real"),) * 5, _attend_grad(of, True, 0.7), {"of": of, "causal": True, "scale": 0.7})
      for of in range(3)),
    *(Case("attend-grad", tuple((shape, "real") for shape in ((2, 1), (2, 3), (4, 3), (4, 1), (2, 1))),
           _attend_grad(of, False, 3**-0.5), {"of": of, "scale": 3**-0.5}) for of in range(3)),
    *(Case("attend-grad-packed", (((2, 2, 3, 2), "real"),) * 5, _attend_grad_packed(True, 0.7, of), {"causal": True, "scale": 0.7, "of": of}) for of in range(2)),
    Case("normalize", (((2, 4), "real"),), _normalize(-1, 1e-5)),
    Case(
        "normalize",
        (((2, 2, 2), "real"),),
        _normalize((0, 2), 0.1, False),
        {"axis": [0, 2], "eps": 0.1, "center": False},
    ),
    Case("normalize", (((4, 2), "real"),), _normalize(0, 0.01), {"axis": 0, "eps": 0.01}),
    Case("softmax-grad", (REAL, REAL), lambda y, c: y * (c - (c * y).sum(-1, keepdims=True))),
    Case("softmax-grad", (REAL, REAL), lambda y, c: y * (c - (c * y).sum(0, keepdims=True)), {"axis": 0}),
    Case("normalize-grad", (REAL, REAL), _normalize_grad(-1, 0.01), {"eps": 0.01}),
    Case("normalize-grad", (REAL, REAL), _normalize_grad((0, 1), 0.01), {"eps": 0.01, "axis": None}),
    Case("normalize-grad", (REAL, REAL), _normalize_grad(0, 0.01), {"eps": 0.01, "axis": 0}),
    Case("normalize-grad", (REAL, REAL), _normalize_grad(-1, 0.01, False), {"eps": 0.01, "center": False}),
    Case("variable", (REAL,), lambda x: x, {"id": 1}),
    Case("stop-gradient", (REAL,), lambda x: x),
    Case("again", (REAL, REAL), lambda x, gate: x),
    Case("iota", (), lambda: np.arange(5, dtype=np.int32), {"count": 5}),
    Case("constant", (), lambda: np.float64(1.5), {"value": 1.5, "dtype": "f64"}),
    *(Case(*row) for row in [*BREADTH, *CARTESIAN]),
]

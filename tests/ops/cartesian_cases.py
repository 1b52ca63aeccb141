"""Cases of the Cartesian ops for `op_cases.CASES`: (op, operands, meaning in NumPy float64, attributes)."""

from __future__ import annotations

import numpy as np

from sexpgpu.ops.cartesian.algebra import Path, derivative, expansion, paths, terms
from sexpgpu.ops.cartesian.product import Form


def expand(l_max, by=(0, 0, 0)):
    def meaning(n):
        columns = [
            sum(float(c) * np.prod(n ** np.array(e), -1) for e, c in derivative(p, by).items()) + 0 * n[..., 0]
            for rank in range(l_max + 1)
            for p in expansion(rank)
        ]
        return np.stack(columns, -1)

    return meaning


def product(l1, l2, top, target="result", shape=None, channels=None, reduced=False):
    """The sum over rows, paths, channels and terms, one number at a time; `shape` and `channels` of the slot sought."""
    every = paths(l1, l2, top)
    form = Form(l1, l2, *(channels or (1, 1)), every, reduced)
    place = {row: i for i, row in enumerate(form.rows)}

    def meaning(*values):
        slots = dict(zip([s for s in ("a", "b", "weights", "result") if s != target], values[:3], strict=True))
        out = slots[target] = np.zeros(shape)
        a, b, w, c = (slots[s] for s in ("a", "b", "weights", "result"))
        a, b = (x.reshape(*x.shape[:2], -1) for x in (a, b))
        width = max(a.shape[2], b.shape[2])
        w = np.broadcast_to(w, (len(b), w.shape[-1])).reshape(len(b), len(every), width) if target != "weights" else None
        for e in range(len(b)):
            i, j = (values[4][e], values[3][e]) if len(values) > 3 else (e, e)
            for p, path in enumerate(every):
                for t in terms(Path(*path)):
                    for f in range(width):
                        fa, fb = f % a.shape[2], f % b.shape[2]
                        x, y = (j, path[0] ** 2 + t.i, fa), (e, path[1] ** 2 + t.j, fb)
                        z = (i, path[2] ** 2 + t.k, f) if reduced else (i, place[p, t.k] * width + f)
                        v = float(t.coefficient)
                        if target == "result":
                            out[z] += v * w[e, p, f] * a[x] * b[y]
                        elif target == "weights":
                            out[(e, p * width + f) if out.ndim == 2 else p * width + f] += v * a[x] * b[y] * c[z]
                        elif target == "a":
                            out[x if out.ndim == 3 else x[:2]] += v * w[e, p, f] * b[y] * c[z]
                        else:
                            out[y if out.ndim == 3 else y[:2]] += v * w[e, p, f] * a[x] * c[z]
        return out

    return meaning


def linear(outputs, top):
    def meaning(x, *weights):
        flat, parts, at = x.reshape(len(x), -1), [], 0
        for rank, w in enumerate(weights):
            size = (2 * rank + 1) * len(w)
            if rank <= top:
                parts.append(flat[:, at : at + size].reshape(len(x), 2 * rank + 1, len(w)) @ w)
            at += size
        have = sum(p.shape[1] for p in parts)
        return np.concatenate([*parts, np.zeros((len(x), (top + 1) ** 2 - have, outputs))], 1)

    return meaning


def linear_back(shape):
    def meaning(ct, *weights):
        parts = [
            (ct[:, rank**2 : (rank + 1) ** 2] if ct.shape[1] > rank**2 else np.zeros((len(ct), 2 * rank + 1, ct.shape[2]))) @ w.T
            for rank, w in enumerate(weights)
        ]
        return np.concatenate([p.reshape(len(ct), -1) for p in parts], 1).reshape(shape)

    return meaning


def linear_weight(rank, start, inputs):
    def meaning(x, ct):
        own = x.reshape(len(x), -1)[:, start : start + (2 * rank + 1) * inputs].reshape(-1, inputs)
        return own.T @ ct[:, rank**2 : (rank + 1) ** 2].reshape(-1, ct.shape[2])

    return meaning


def rank_weights_case(of):
    """Two ranks over two pairs of features and cotangents."""
    blocks = ((0, 0, 2, 0.5), (1, 2, 2, 2.0))
    rank, start, inputs, scale = blocks[of]
    one = linear_weight(rank, start, inputs)
    operands = (((2, 4, 2), R), ((2, 4, 3), R)) * 2
    return ("rank-weights", operands, lambda a, b, c, d: scale * (one(a, b) + one(c, d)), {"blocks": blocks, "of": of})


R = "real"
N3, E3 = "index:3", ((4,), "index:3")
A, B = ((3, 4, 2), R), ((4, 4), R)
COUNT = len(paths(1, 1, 1))
GRAD = {"l-max": 1, "paths": tuple(map(tuple, paths(1, 1, 1))), "batch": False}
KEPT, SUMMED = {"l-max": 1, "reduce-paths": False}, {"l-max": 1, "reduce-paths": True}


def grad_case(target, operands, shape, channels, reduced=False):
    attrs = {**GRAD, "reduce-paths": reduced, "target": target, "shape": shape}
    return ("tensor-product-grad", operands, product(1, 1, 1, target, shape, channels, reduced), attrs)


def joint_case(of):
    """The gradient by a over (b, w, c) plus that over (v, w, c), and the one by the weights over (a, b, c), of five operands and indices."""
    outputs = (("a", (3, 4, 2), False, ((1, 2, 3), (4, 2, 3))), ("weights", (4, COUNT * 2), False, ((0, 1, 3),)))
    attrs = {k: GRAD[k] for k in ("l-max", "paths")} | {"slots": ("a", "b", "weights", "result", "b"), "outputs": outputs, "of": of}
    target, shape, _, uses = outputs[of]

    def meaning(*values):
        return sum(product(1, 1, 1, target, shape, (2, 1))(*(values[n] for n in use), *values[5:]) for use in uses)

    return ("tensor-product-joint", (A, B, ((4, COUNT * 2), R), ((3, 16), R), B, E3, E3), meaning, attrs)


def parts_case(of):
    """The gradients by a and by the weights of a product whose weights are half of h m, and what the second goes to: rows of it times n, and k transposed times it."""
    outputs = (("a", (3, 4, 2), False, ((1, 2, 3),)), ("weights", (4, COUNT * 2), False, ((0, 1, 3),)))
    attrs = {k: GRAD[k] for k in ("l-max", "paths")} | {"slots": ("a", "b", "weights", "result"), "scales": (0.0, 0.0, 0.5, 0.0), "outputs": outputs,
                                                       "after": ((1, "rows", 2.0), (1, "sums", 3.0)), "size": 3, "of": of}

    def meaning(a, b, h, c, m, n, k, *ends):
        if of == 0:
            return product(1, 1, 1, "a", (3, 4, 2), (2, 1))(b, 0.5 * h @ m, c, *ends)
        by_weights = product(1, 1, 1, "weights", (4, COUNT * 2), (2, 1))(a, b, c, *ends)
        return (by_weights, 2 * by_weights @ n, 3 * k.T @ by_weights)[of - 1]

    return ("tensor-product-parts", (A, B, ((4, 5), R), ((3, 16), R), ((5, COUNT * 2), R), ((COUNT * 2, 3), R), ((4, 2), R), E3, E3), meaning, attrs)


CARTESIAN = [
    joint_case(0),
    joint_case(1),
    *map(parts_case, range(4)),
    ("cartesian-expand", (((2, 3), "unit"),), expand(3), {"l-max": 3}),
    ("cartesian-expand", (((3,), "unit"),), expand(0), {"l-max": 0}),
    ("cartesian-expand-derivative", (((2, 3), "unit"),), expand(3, (1, 0, 1)), {"l-max": 3, "by": (1, 0, 1)}),
    ("tensor-product", (A, B, ((4, COUNT * 2), R), E3, E3), product(1, 1, 1, shape=(3, 16), channels=(2, 1)), KEPT),
    ("tensor-product", (A, B, ((COUNT * 2,), R), E3, E3), product(1, 1, 1, shape=(3, 4, 2), channels=(2, 1), reduced=True), SUMMED),
    ("tensor-product", (((2, 1, 2), R), ((2, 4, 2), R), ((2, 4), R)), product(0, 1, 1, shape=(2, 8), channels=(2, 2)), KEPT),
    ("tensor-product", (((2, 4), R), ((2, 4, 2), R), ((COUNT * 2,), R)), product(1, 1, 1, shape=(2, 16), channels=(1, 2)), KEPT),
    grad_case("a", (B, ((4, COUNT * 2), R), ((3, 16), R), E3, E3), (3, 4, 2), (2, 1)),
    grad_case("b", (A, ((4, COUNT * 2), R), ((3, 16), R), E3, E3), (4, 4), (2, 1)),
    grad_case("weights", (A, B, ((3, 16), R), E3, E3), (4, COUNT * 2), (2, 1)),
    grad_case("weights", (((2, 4, 2), R), ((2, 4, 2), R), ((2, 4, 2), R)), (COUNT * 2,), (2, 2), True),
    grad_case("a", (((2, 4, 2), R), ((COUNT * 2,), R), ((2, 16), R)), (2, 4), (1, 2)),
    grad_case("b", (((2, 4, 2), R), ((COUNT * 2,), R), ((2, 4, 2), R)), (2, 4, 2), (2, 2), True),
    ("equivariant-linear", (((2, 4, 2), R), ((2, 3), R), ((2, 3), R)), linear(3, 1), {}),
    ("equivariant-linear", (((2, 10), R), ((4, 1), R), ((2, 1), R)), linear(1, 2), {"l-max": 2}),
    ("equivariant-linear", (((2, 4, 2), R), ((2, 3), R), ((2, 3), R)), linear(3, 0), {"l-max": 0}),
    ("equivariant-linear-back", (((2, 4, 3), R), ((2, 3), R), ((2, 3), R)), linear_back((2, 4, 2)), {"shape": (2, 4, 2)}),
    ("equivariant-linear-back", (((2, 1, 1), R), ((4, 1), R), ((2, 1), R)), linear_back((2, 10)), {"shape": (2, 10)}),
    ("equivariant-linear-back", (((2, 9, 1), R), ((4, 1), R), ((2, 1), R)), linear_back((2, 10)), {"shape": (2, 10)}),
    ("equivariant-linear-weight", (((2, 4, 2), R), ((2, 4, 3), R)), linear_weight(1, 2, 2), {"rank": 1, "start": 2, "inputs": 2}),
    ("equivariant-linear-weight", (((2, 10), R), ((2, 4, 1), R)), linear_weight(0, 0, 4), {"rank": 0, "start": 0, "inputs": 4}),
    ("rank-map", (((2, 4, 2), R), ((2, 3), R), ((2, 3), R)), lambda x, u, v: linear(3, 2)(x, 2 * u, -v),
     {"scales": (2.0, -1.0), "shape": (2, 9, 3), "batch": False}),
    ("rank-map", (((2, 1, 1), R), ((4, 1), R), ((2, 1), R)), lambda x, u, v: linear_back((2, 10))(x, 0.5 * u, v),
     {"scales": (0.5, 1.0), "back": True, "shape": (2, 10), "batch": False}),
    rank_weights_case(0),
    rank_weights_case(1),
]

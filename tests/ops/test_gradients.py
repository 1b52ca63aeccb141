"""First and second gradients of every op by differences of the fourth order in float64."""

import numpy as np
import pytest
from op_cases import CASES, leaf, value

from sexpgpu.backends.interpreter import Executable, from_numpy
from sexpgpu.ir import Node
from sexpgpu.ops import build, table
from sexpgpu.ops.verify import verify
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.simplify import simplify

STEP = 2e-4
DIFFERENTIABLE = [c for c in CASES if table()[c.op].differentiable and c.attrs.get("dtype") != "i32"]


def weighted(node: Node, seed: int) -> Node:
    """Σ node · fixed weights: a scalar that sees every element."""
    weights = value(node.type.shape, "real", seed)
    flat = [build("constant", value=float(w), dtype="f64") for w in weights.reshape(-1)]
    row = build("concat", *(build("reshape", w, shape=(1,)) for w in flat)) if flat else None
    return build("sum", build("*", node, build("reshape", row, shape=node.type.shape)))


def differences(scalar: Node, bindings: dict, wrt: list[Node]) -> list[np.ndarray]:
    executable = Executable({"y": scalar})
    call = lambda: float(executable.run(bindings)["y"])  # noqa: E731
    out = []
    for x in wrt:
        flat, found = bindings[x].view(-1), np.zeros(x.type.size)
        for i in range(x.type.size):
            kept = float(flat[i])
            for h, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
                flat[i] = kept + h * STEP
                found[i] += weight * call() / (12 * STEP)
            flat[i] = kept
        out.append(found.reshape(x.type.shape))
    return out


def compare(scalar: Node, gradients: list[Node], bindings: dict, wrt: list[Node]) -> None:
    results = {str(i): g for i, g in enumerate(gradients)}
    verify(results)
    verify(simplify(results))
    got, together = (Executable(results, fused=f).run(bindings) for f in (False, True))
    simpler = Executable(simplify(results), fused=False).run(bindings)
    for i, expected in enumerate(differences(scalar, bindings, wrt)):
        g = got[str(i)].numpy()
        assert (np.abs(g - expected) <= 1e-6 * np.maximum(1.0, np.abs(expected))).all(), (g, expected)
        np.testing.assert_array_equal(g, simpler[str(i)].numpy())
        np.testing.assert_allclose(g, together[str(i)].numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_first_and_second_gradient(case):
    arrays = [value(shape, kind, seed + 1) for seed, (shape, kind) in enumerate(case.operands)]
    leaves = [leaf(i, a) for i, a in enumerate(arrays)]
    bindings = {n: from_numpy(a.copy(), n.type.dtype) for n, a in zip(leaves, arrays, strict=True)}
    wrt = [n for n in leaves if n.type.is_float]
    node = build(case.op, *leaves, **case.attrs)
    if case.op == "stop-gradient":
        assert all(g.op == "broadcast" for g in grad(weighted(node, 7), wrt))
        return
    scalar = weighted(node, 7)
    first = grad(scalar, wrt)
    compare(scalar, first, bindings, wrt)
    scalar = weighted(first[0], 11)
    for i, g in enumerate(first[1:]):
        scalar = build("+", scalar, weighted(g, 13 + i))
    compare(scalar, grad(scalar, wrt), bindings, wrt)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
def test_constant_powers_have_gradients_at_zero(exponent):
    x = build("input", name="x", shape=(), dtype="f64", batch=False)
    y = build("power", x, build("constant", value=exponent, dtype="f64"))
    g = grad(y, [x])[0]
    h = grad(g, [x])[0]
    run = Executable({"g": g, "h": h}).run({x: from_numpy(np.zeros(()), "f64")})
    assert float(run["g"]) == (1.0 if exponent == 1 else 0.0)
    assert float(run["h"]) == (2.0 if exponent == 2 else 0.0)


def test_ties_share_the_gradient():
    x, y = (build("input", name=n, shape=(2,), dtype="f64", batch=False) for n in "xy")
    bind = {x: from_numpy(np.array([1.0, 2.0]), "f64"), y: from_numpy(np.array([1.0, 3.0]), "f64")}
    a, b = grad(build("sum", build("max", x, y)), [x, y])
    c = grad(build("reduce-max", build("concat", x, y, x)), [x])[0]
    out = Executable({"a": a, "b": b, "c": c}).run(bind)
    assert out["a"].tolist() == [0.5, 0.0] and out["b"].tolist() == [0.5, 1.0] and out["c"].tolist() == [0.0, 0.0]

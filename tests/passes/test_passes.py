"""Autodiff, precision, simplify and the rewrite driver: depth, sharing, provenance, bits."""

import numpy as np
import pytest
import torch

from sexpgpu.backends.interpreter import Executable
from sexpgpu.ir import Origin, Origins, postorder
from sexpgpu.ops import OpProblem, build, constant
from sexpgpu.ops.verify import verify
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.rewrite import rewrite, substitute
from sexpgpu.passes.simplify import simplify


def x(*shape, name="x", dtype="f32"):
    return build("input", name=name, shape=shape, dtype=dtype, batch=False)


def run(node, **values):
    executable = Executable({"y": node})
    return executable.run({n: torch.tensor(values[n.attrs["name"]], dtype=torch.float32) for n in executable.leaves})[
        "y"
    ]


def test_interned_operands_get_both_shares():
    a, b = x(name="a"), x(name="b")
    assert float(run(grad(build("+", a, a), [a])[0])) == 2.0
    y = build("+", build("*", a, build("exp", b)), build("neg", build("neg", a)))
    ga, gb = grad(y, [a, b])
    assert float(run(ga, b=0.5)) == pytest.approx(np.exp(0.5) + 1)
    assert float(run(gb, a=3.0, b=0.5)) == pytest.approx(3 * np.exp(0.5))


def test_gradient_of_nothing_is_zero_and_of_itself_is_one():
    a, b = x(2, 3, name="a"), x(name="b")
    zero, one = grad(b, [a, b])
    assert zero.type == a.type and not run(zero).any() and float(run(one)) == 1.0
    (stopped,) = grad(build("sum", build("stop-gradient", a)), [a])
    assert not run(stopped).any()


def test_gradient_by_an_inner_node_and_a_variable():
    a = x(name="a")
    inner = build("variable", build("square", a), id=1)
    other = build("variable", build("square", a), id=2)
    assert inner is not other
    g = grad(build("*", inner, other), [inner, a])
    assert float(run(g[0], a=3.0)) == 9.0 and float(run(g[1], a=3.0)) == 4 * 27


def test_third_order():
    a = x(name="a")
    y = build("power", a, constant(5, "f32"))
    for _ in range(3):
        y = grad(y, [a])[0]
    assert float(run(y, a=2.0)) == 60 * 4


def test_refusals():
    with pytest.raises(OpProblem, match="scalar"):
        grad(x(2), [x(2)])
    with pytest.raises(OpProblem, match="i32"):
        grad(x(), [x(dtype="i32")])


def test_fifty_thousand_nodes_need_no_recursion():
    a = x(2)
    y = a
    for i in range(25_000):
        y = build("+", build("*", y, constant(1.0 + i % 2, "f32")) if i < 2 else build("sin", y), a)
    results = {"y": build("sum", y)}
    verify(results)
    simpler = simplify(results)
    (g,) = grad(simpler["y"], [a])
    assert len(postorder([g])) > 50_000
    out = Executable({"g": g}).run({a: torch.ones(2)})["g"]
    assert torch.isfinite(out).all()
    del y, results, simpler, g  # dies without recursion too


def test_origins_reach_gradients_and_merge():
    origins = Origins()
    a = x(3, name="a")
    with origins.at(Origin(paths=("net/0",), knobs=("width",))):
        y = build("sum", build("exp", a))
    (g,) = grad(y, [a], origins)
    assert origins.of(g).phase == "backward" and origins.of(g).paths == ("net/0",)
    with origins.at(Origin(paths=("other",))):
        z = build("neg", build("neg", y))
    out = simplify({"z": z}, origins)
    assert out["z"] is y and origins.of(y).paths == ("net/0", "other")


def test_rewrite_shares_and_substitutes():
    a, b = x(name="a"), x(name="b")
    y = build("*", build("exp", a), build("exp", a))
    seen = []
    out = rewrite({"y": y}, lambda n, i: seen.append(n) or (build("log", *i) if n.op == "exp" else None))
    assert len(seen) == 3 and out["y"] is build("*", build("log", a), build("log", a))
    assert substitute({"y": y}, {a: b})["y"] is build("*", build("exp", b), build("exp", b))
    assert substitute({"y": y}, {})["y"] is y


def test_bf16_casts_contractions_alone():
    a, w = x(4, 3, name="a"), x(3, 2, name="w")
    y = build("sum", build("exp", build("matmul", a, w)))
    out = apply_precision({"y": y, "g": grad(y, [w])[0]}, "bf16")
    verify(out)
    for node in postorder(out.values()):
        assert (
            node.type.dtype == ("bf16" if node.op == "matmul" or node.attrs.get("dtype") == "bf16" else "f32")
            or node.op == "transpose"
        )
    assert out["y"].type == y.type
    assert apply_precision({"y": y}, "tf32")["y"] is y


def test_f64_retypes_everything():
    a = x(4, 3, name="a")
    y = build("sum", build("*", build("cast", build("cast", a, dtype="i32"), dtype="f32"), constant(0.1, "f32")))
    out = apply_precision({"y": y}, "f64")
    verify(out)
    assert {n.type.dtype for n in postorder(out.values())} == {"f64", "i32"}
    (leaf,) = Executable(out).leaves
    assert Executable(out).run({leaf: torch.ones(4, 3, dtype=torch.float64)})["y"] == 12 * 0.1


def test_simplify_removes_what_does_nothing():
    a = x(2, 3)
    t = lambda n: build("transpose", n)  # noqa: E731
    same = [
        build("*", a, constant(1, "f32")),
        build("/", a, constant(1, "f32")),
        build("-", a, constant(0, "f32")),
        build("+", a, constant(-0.0, "f32")),
        build("neg", build("neg", a)),
        t(t(a)),
        build("reshape", build("reshape", a, shape=(6,)), shape=(2, 3)),
        build("cast", a, dtype="f32"),
        build("cast", build("cast", a, dtype="f64"), dtype="f32"),
        build("broadcast", a, shape=(2, 3)),
        build("sum", a, axis=()),
    ]
    assert all(simplify({"y": n})["y"] is a for n in same), [n for n in same if simplify({"y": n})["y"] is not a]


def test_simplify_keeps_what_changes_bits():
    a = x(2, 3)
    kept = [
        build("+", a, constant(0, "f32")),
        build("*", a, constant(0, "f32")),
        build("-", a, constant(-0.0, "f32")),
        build("cast", build("cast", a, dtype="bf16"), dtype="f32"),
        build("cast", build("cast", a, dtype="i32"), dtype="f32"),
        build("*", x(3), build("broadcast", constant(1, "f32"), shape=(2, 3))),
    ]
    assert all(simplify({"y": n})["y"].op in (n.op, "broadcast") and simplify({"y": n})["y"] is not a for n in kept)


def test_folded_constants_round_as_the_dtype_does():
    c = simplify({"y": build("+", constant(0.1, "f32"), constant(0.2, "f32"))})["y"]
    assert c.op == "constant" and c.attrs["value"] == float(np.float32(0.1) + np.float32(0.2))
    assert simplify({"y": build("+", constant(2**31 - 1, "i32"), constant(1, "i32"))})["y"].op == "+"
    assert simplify({"y": build("/", constant(1, "f32"), constant(0, "f32"))})["y"].op == "/"

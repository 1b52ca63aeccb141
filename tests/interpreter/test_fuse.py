"""Fused calls, memory that is written over, and updates over vectors mean what the ops mean one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sexpgpu.backends.interpreter import Executable, emit
from sexpgpu.backends.interpreter.draws import Ahead, StepContext
from sexpgpu.backends.interpreter.memory import keep_freed
from sexpgpu.backends.leaves import source_of
from sexpgpu.ops import build, constant
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.flatten import ALIGN, flatten
from sexpgpu.passes.simplify import simplify


def leaf(name, *shape, op="param"):
    return build("input", name=name, shape=shape, dtype="f64") if op == "input" else build(op, path=name, shape=shape, dtype="f64")


def affine(x, name, out):
    w, b = leaf(f"{name}/w", x.type.shape[-1], out), leaf(f"{name}/b", out)
    return build("+", build("matmul", x, w), b)


def normed(x, name):
    d = x.type.shape[-1]
    return build("+", build("*", build("normalize", x), leaf(f"{name}/scale", d)), leaf(f"{name}/shift", d))


def transformer():
    b, t, d, h = 2, 5, 6, 2
    x, labels = leaf("x", b, t, d), build("input", name="labels", shape=(b, t), dtype="i32")
    u = normed(x, "norm")
    heads = [build("transpose", build("reshape", build("matmul", u, leaf(n, d, d)), shape=(b, t, h, d // h)), permutation=(0, 2, 1, 3)) for n in "qkv"]
    y = build("transpose", build("attend", *heads, causal=True), permutation=(0, 2, 1, 3))
    y = affine(build("reshape", y, shape=(b, t, d)), "out", d)
    drawn = build("cast", build("random-bernoulli", shape=(b, t, d), path="drop", p=0.7), dtype="f64")
    x = build("+", x, build("*", y, build("*", constant(1 / 0.7, "f64"), drawn)))
    x = build("+", x, affine(build("gelu", affine(build("normalize", x), "up", 12)), "down", d))
    return build("mean", build("softmax-cross-entropy", affine(x, "head", 7), labels)), {labels: torch.randint(0, 7, (b, t), dtype=torch.int32)}


def pictures():
    x, labels = leaf("x", 4, 2, 8, 8, op="input"), build("input", name="labels", shape=(4,), dtype="i32")
    for name, c in (("a", 3), ("b", 5)):
        w, b = leaf(f"{name}/w", c, x.type.shape[1], 3, 3), leaf(f"{name}/b", c)
        x = build("max-pool", build("relu", build("convolve", x, w, b, padding=1)), window=2)
    logits = affine(build("reshape", x, shape=(4, -1)), "out", 6)
    return build("mean", build("softmax-cross-entropy", logits, labels)), {labels: torch.randint(0, 6, (4,), dtype=torch.int32)}


def both(loss, given):
    """(fused, one by one, the fused source) of the loss and its gradients."""
    plain = Executable({"loss": loss}, fused=False)
    params = [n for n in plain.leaves if n.op == "param"]
    results = simplify({"loss": loss, **{p.attrs["path"]: g for p, g in zip(params, grad(loss, params), strict=True)}})
    torch.manual_seed(1)
    values = given | {n: torch.randn(n.type.shape, dtype=torch.float64) for n in plain.leaves if n not in given}
    fused, alone = Executable(results), Executable(results, fused=False)
    kept = {n: v.clone() for n, v in values.items()}
    out = fused.run(values, 3, 5), alone.run(values, 3, 5)
    assert all(torch.equal(v, kept[n]) for n, v in values.items())  # nothing was written over that is the caller's
    return *out, emit.emit(results, fused.leaves)[0]


CALLS = {
    transformer: ("attend(", "attend_grad(", "layer_norm_backward(", "addmm(", "addcmul(", "entropy_grad(", "draw("),
    pictures: ("convolution_backward(", "max_pool(", "pool_backward(", "threshold_backward(", "entropy("),
}


@pytest.mark.parametrize("make", CALLS)
def test_fused_calls_mean_the_ops(make):
    fused, alone, source = both(*make())
    assert [call for call in CALLS[make] if call not in source] == []
    for name, value in alone.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-10, atol=1e-12, msg=name)


def upsampling():
    """The forward pass and the gradient by the weight of a transposed convolution look like both gradients of another."""
    w, v = leaf("w", 3, 2, 2, 2), leaf("v", 3, 2, 2, 2)
    x = build("relu", affine(leaf("x", 4, 5, op="input"), "in", 3 * 3 * 3))
    x = build("reshape", x, shape=(4, 3, 3, 3))
    y = build("convolve", build("convolve-transpose", x, w, stride=2), v)
    return build("mean", build("*", y, y)), {}


def field_of_forces():
    """A layer norm whose shift depends on the gradient of its own result."""
    x = affine(leaf("x", 4, 5, op="input"), "in", 6)
    y = build("*", build("normalize", x), leaf("scale", 6))
    slope = grad(build("sum", build("sin", y)), [x])[0]
    shift = build("sum", slope, axis=0)
    z = build("+", y, shift)
    return build("mean", build("*", z, z)), {}


def steered_attention():
    """Attention whose gradient's factor is made from other gradients of it."""
    q, k, v = (leaf(n, 1, 2, 3, 4) for n in "qkv")
    y = build("attend", q, k, v)
    first = grad(build("sum", build("*", y, leaf("ct", 1, 2, 3, 4))), [q])[0]
    return build("sum", build("*", build("attend", first, k, v), y)), {}


@pytest.mark.parametrize("make", [upsampling, field_of_forces, steered_attention])
def test_what_one_call_gives_never_waits_for_itself(make):
    fused, alone, _ = both(*make())
    for name, value in alone.items():
        assert torch.allclose(fused[name], value, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("where", [(0, 0, 2, 1), (1, 0, 4, 0), (2, 0, 3, 2)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attention_keeps_what_is_not_finite(where, value):
    q, k, v = (build("param", path=n, shape=(1, 2, 5, 4), dtype="f64") for n in "qkv")
    y = build("attend", q, k, v, causal=True)
    results = {"y": y, **{f"g{i}": g for i, g in enumerate(grad(build("sum", y), [q, k, v]))}}
    assert "attend_grad(" in emit.emit(results, [q, k, v])[0]
    torch.manual_seed(0)
    values = {n: torch.randn(1, 2, 5, 4, dtype=torch.float64) for n in (q, k, v)}
    number, head, row, column = where
    values[(q, k, v)[number]][0, head, row, column] = value
    if value != value and number == 0:
        values[q][0, head, row] = value  # a whole row of scores without a number
    fused, alone = (Executable(results, fused=f).run(values) for f in (True, False))
    for name in results:
        assert (fused[name].isfinite() | ~alone[name].isfinite()).all(), name
        assert not fused["y"].isfinite().all()


def random_update(draw):
    """Results over three leaves of state and one of gradients, each replacing one leaf; sharing and order by chance."""
    state = [build("slot", path=str(i), slot="s", shape=(4,), dtype="f64") for i in range(3)]
    nodes = [*state, build("gradient", path="g", shape=(4,), dtype="f64"), constant(0.5, "f64"), constant(-1.25, "f64")]
    for _ in range(draw.randint(3, 14)):
        if draw.random() < 0.25:
            nodes.append(build(draw.choice(["neg", "tanh", "square", "sin"]), draw.choice(nodes[:4] + nodes[6:])))
        else:
            nodes.append(build(draw.choice("+-*"), draw.choice(nodes), draw.choice(nodes)))
    wide = [n for n in nodes if n.type.shape == (4,)]
    return state, {str(i): draw.choice(wide) for i in range(3)}


@pytest.mark.parametrize("seed", range(60))
def test_an_update_in_place_is_the_update(seed):
    draw = random.Random(seed)
    state, results = random_update(draw)
    norm = build("sqrt", build("sum", build("square", build("gradient", path="g", shape=(4,), dtype="f64"))))
    homes = dict(zip("012", state, strict=True))
    whole = {**results, "norm": norm}
    torch.manual_seed(seed)
    plain = Executable(whole, fused=False)
    values = {n: torch.randn(4, dtype=torch.float64) for n in plain.leaves}
    for leaf_ in state:
        values.setdefault(leaf_, torch.randn(4, dtype=torch.float64))
    expected = plain.run(values)
    expected = {name: value.clone() for name, value in expected.items()}
    program = Executable(whole, homes, plain.leaves, ["norm"])
    outs = [values[leaf_] for leaf_ in state]
    shut = StepContext(open=False)
    kept = {n: v.clone() for n, v in values.items()}
    before = [kept[leaf_] for leaf_ in state]
    (got,) = program.call([values[n] for n in program.leaves], shut, 0, outs)
    assert torch.allclose(got, expected["norm"]) and all(torch.equal(a, b) for a, b in zip(before, outs, strict=True))
    for node, value in values.items():  # a gradient's memory is scratch, also where nothing else is written
        value.copy_(kept[node])
    program.call([values[n] for n in program.leaves], StepContext(), 0, outs)
    for name, out in zip("012", outs, strict=True):
        torch.testing.assert_close(out, expected[name], rtol=1e-12, atol=1e-12, msg=f"{name}: {program.results[name]}")


def momentum(shape, name, rate):
    p, g, m = (build(op, path=name, shape=shape, dtype="f64", **more) for op, more in (("param", {}), ("gradient", {}), ("slot", {"slot": "m"})))
    new = build("+", build("*", constant(0.9, "f64"), m), g)
    return {f"param/{name}": build("-", p, build("*", constant(rate, "f64"), new)), f"opt/m/{name}": new}, g


def test_vectors_of_equal_updates():
    """Two rates are two groups; an update with a product is none; gaps are aligned and never seen."""
    shapes = {"a": (3, 5), "b": (7,), "c": (), "d": (2, 2), "e": (2, 3)}
    results, gradients = {}, []
    for name, shape in shapes.items():
        update, g = momentum(shape, name, 0.5 if name == "d" else 0.1)
        if name == "e":
            update["param/e"] = build("matmul", constant_like((2, 2)), update["param/e"])
        results |= update
        gradients.append(g)
    total = None
    for g in gradients:
        square = build("sum", build("*", g, g))
        total = square if total is None else build("+", total, square)
    results["gradient-norm"] = build("sqrt", total)
    owners = {("param", n): ("param", n) for n in shapes} | {("opt", f"m/{n}"): ("opt/m", n) for n in shapes}
    owners |= {("gradient", n): ("gradient", n) for n in shapes}
    flat = flatten(simplify(results), list(shapes), owners, source_of)
    assert [g.names for g in flat.groups] == [["a", "b", "c"], ["d"]]
    assert flat.groups[0].offsets == {"a": 0, "b": 16, "c": 24} and flat.groups[0].size == 24 + ALIGN // 8
    assert set(flat.results) == {"param//0", "opt/m//0", "param//1", "opt/m//1", "param/e", "opt/m/e", "gradient-norm"}
    torch.manual_seed(2)
    values = {name: {role: torch.randn(s, dtype=torch.float64) for role in ("param", "opt/m", "gradient")} for name, s in shapes.items()}
    expected = Executable(results, fused=False)
    got = expected.run({n: values[owners[source_of(n)][1]][owners[source_of(n)][0]] for n in expected.leaves})
    program = Executable(flat.results)
    bound = {}
    for name, node in {**flat.homes, **{f"gradient/{n}": g for n, g in flat.gradients.items()}}.items():
        role = "gradient" if node.op == "gradient" else name.rsplit("/", 2)[0] if "//" in name else name.rpartition("/")[0]
        if node.type.rank == 1 and node.type.shape[0] in (32, 8) and "//" in node.attrs["path"]:
            group = flat.groups[int(node.attrs["path"][-1])]
            vector = torch.full((group.size,), 7.0 if role != "gradient" else 0.0, dtype=torch.float64)
            for n in group.names:
                flatly = values[n][role].reshape(-1)
                vector[group.offsets[n] : group.offsets[n] + flatly.numel()] = flatly
            bound[node] = vector
        else:
            bound[node] = values["e"][role]
    out = program.run(bound)
    assert torch.allclose(out["gradient-norm"], got["gradient-norm"], rtol=1e-12)
    for group in flat.groups:
        for role in ("param", "opt/m"):
            for n in group.names:
                size = values[n][role].numel()
                part = out[group.vector(role)][group.offsets[n] : group.offsets[n] + size].reshape(shapes[n])
                torch.testing.assert_close(part, got[f"{role}/{n}"], rtol=1e-14, atol=0)
    torch.testing.assert_close(out["param/e"], got["param/e"])


def constant_like(shape):
    return build("broadcast", constant(0.5, "f64"), shape=shape)


def test_masks_drawn_ahead_are_those_drawn_now():
    mask = build("random-bernoulli", shape=(300, 200), path="p", p=0.3, batch=True)
    executable = Executable({"y": build("*", constant(2.5, "f32"), build("cast", mask, dtype="f32"))})
    (one,) = executable.masks
    ahead = Ahead(11, 300)
    ahead.ask(executable.masks, 4, 300)
    assert len(ahead.pending) == 1
    (got,) = executable.call([], StepContext(11, 4, 300, 300, ahead), 4)
    assert not ahead.pending and torch.equal(got, one.draw(StepContext(11, 4, 300, 300)))
    assert abs(got.mean() - 0.75) < 0.02 and set(np.unique(got.numpy())) == {0.0, 2.5}
    ahead.ask(executable.masks, 5)
    ahead.forget()
    assert not ahead.pending
    ahead.close()


def test_freed_memory_stays():
    if not keep_freed():
        pytest.skip("the C library is not glibc")
    resource = pytest.importorskip("resource")
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # noqa: E731
    for _ in range(3):
        torch.ones(2_000_000)
    before = faults()
    for _ in range(10):
        torch.ones(2_000_000)
    assert faults() - before < 2_000  # each would fault 1,953 pages if it were given back


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 3, 2), (4, 0, 2), (4, 3, 0), ((2, 0), 3, 2), ((2, 4), 0, 2)], ids=str)
def test_products_over_axes_of_size_0(rows, inner, columns):
    """A product over nothing is 0 and its gradients are of the operands' shapes, fused or not, as torch says."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    x, w, b = leaf("x", *rows, inner), leaf("w", inner, columns), leaf("b", columns)
    y = build("+", build("matmul", x, w), b)
    loss = build("sum", build("*", y, y))
    graph = simplify({"y": y, **dict(zip(("dx", "dw", "db"), grad(loss, [x, w, b]), strict=True))})
    values = {n: torch.randn(n.type.shape, dtype=torch.float64) for n in (x, w, b)}
    tensors = {n: v.clone().requires_grad_() for n, v in values.items()}
    product = tensors[x] @ tensors[w] + tensors[b]
    product.square().sum().backward()
    for fused in (True, False):
        got = Executable(graph, fused=fused).run(values, 0, 0)
        torch.testing.assert_close(got["y"], product.detach())
        for name, n in (("dx", x), ("dw", w), ("db", b)):
            assert got[name].shape == n.type.shape
            torch.testing.assert_close(got[name], tensors[n].grad, msg=name)

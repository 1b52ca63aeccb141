"""Every op case of tests/ops, and shapes and values that kernels get wrong: `python ops_in_triton.py PART`."""

from __future__ import annotations

import os
import sys
import time

from harness import compare, draws, run, tell  # first: it chooses the interpreter

# isort: split
import numpy as np
import torch
from op_cases import CASES, leaf, value

from sexpgpu.backends.interpreter import compile_graph
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build, constant, table
from sexpgpu.ops.random import DRAWS
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients

SLOW = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")


def graph_of(case, dtype="f64"):
    """Value and first gradients of a case, with bindings, in f64 or f32."""
    arrays = [value(s, k, i) for i, (s, k) in enumerate(case.operands)]
    leaves, bindings = [], {}
    for i, array in enumerate(arrays):
        node = leaf(i, array)
        if node.type.is_float and dtype != "f64":
            node = build("input", name=f"x{i}", shape=array.shape, dtype=dtype, batch=False)
        leaves.append(node)
        tensor = torch.tensor(array)
        bindings[node] = tensor.float() if node.type.dtype == "f32" else tensor
    attrs = {**case.attrs, "dtype": dtype} if case.attrs.get("dtype") == "f64" else case.attrs
    node = build(case.op, *leaves, **attrs)
    results = {"y": node}
    floats = [x for x in leaves if x.type.is_float]
    if node.type.is_float and table()[case.op].differentiable and floats:
        total = build("sum", build("*", node, build("sin", node)))
        results |= {f"g{i}": g for i, g in enumerate(grad(total, floats))}
    return results, bindings


def cases(dtype, tolerance):
    failures, count = [], 0
    part, parts = map(int, os.environ.get("TESTED_PART", "0/1").split("/"))
    for case in CASES[part::parts]:
        if case.op in DRAWS:
            continue
        start = time.time()
        print(case, case.attrs, file=sys.stderr, flush=True)  # the last is that at which it was stopped, if it was
        results, bindings = graph_of(case, dtype)
        failures += [f"{case}: {text}" for text in compare(results, bindings, tolerance)]
        count += 1
        if time.time() - start > SLOW:
            print(f"{time.time() - start:.1f}s {case}", file=sys.stderr)
    return failures, count


# --- sizes ---

SHAPES = [(1,), (3,), (127,), (129,), (1, 1), (3, 129), (127, 3), (1, 127), (129, 1), (5, 130), (3, 5, 7), (2, 1, 129)]


def sized(shape: tuple[int, ...], dtype: str) -> tuple[dict[str, Node], dict[Node, torch.Tensor]]:
    """Pointwise values, sums of every form, softmax, normalization and views of x, and their gradients, as one graph."""
    x = build("input", name="x", shape=shape, dtype=dtype, batch=False)
    row = build("input", name="row", shape=shape[-1:], dtype=dtype, batch=False)
    last = len(shape) - 1
    soft = build("softmax", x, axis=last)
    normal = build("*", build("normalize", x, axis=last, eps=1e-3), row)
    y = build("+", build("gelu", normal), build("*", soft, build("sin", x)))
    loss = build("sum", build("*", y, y))
    turned = tuple(reversed(range(len(shape))))
    results = {
        "y": y,
        "loss": loss,
        "columns": build("sum", y, axis=0),
        "rows": build("sum", build("*", x, y), axis=last),
        "top": build("reduce-max", x, axis=last),
        "low": build("reduce-min", x, axis=0),
        "lse": build("logsumexp", x, axis=last),
        "turned": build("+", build("transpose", x, permutation=turned), constant(1.0, dtype)),
        "flat": build("exp", build("reshape", build("flip", x, axis=(last,)), shape=(x.type.size,))),
        "padded": build("pad", x, before=(1,) * len(shape), after=(2,) * len(shape), value=0.5),
        "joined": build("concat", x, y, axis=last),
        "mean": build("mean", y, axis=tuple(range(len(shape)))),
    }
    results |= {f"g{i}": g for i, g in enumerate(grad(loss, [x, row]))}
    rng = np.random.default_rng(sum(shape))
    wide = torch.float64 if dtype == "f64" else torch.float32
    return results, {n: torch.tensor(rng.standard_normal(n.type.shape)).to(wide) for n in (x, row)}


def sizes():
    failures, count = [], 0
    for shape in SHAPES:
        for dtype, tolerance in (("f64", 1e-9), ("f32", 3e-5)):
            for placed in (True, False):
                if dtype == "f32" and not placed:
                    continue
                results, bindings = sized(shape, dtype)
                failures += [f"{shape} {dtype}: {text}" for text in compare(results, bindings, tolerance, placed)]
                count += 1
    return failures, count


# --- one element of an axis ---


def single():
    """One column of what depends on the column: the emitter knows then which operand it is, or that it is none."""
    failures, count = [], 0
    for rows, width in ((6, 2), (17, 5), (1, 3)):
        x, y = (build("input", name=n, shape=(rows, width), dtype="f32", batch=False) for n in "xy")
        rng = np.random.default_rng(rows)
        bindings = {n: torch.tensor(rng.standard_normal(n.type.shape)).float() for n in (x, y)}
        whole = {
            "joined": build("concat", x, build("+", x, y), build("exp", y), axis=1), "flat": build("concat", y, x, axis=0),
            "padded": build("pad", x, before=(1, 2), after=(0, 1), value=0.5), "apart": build("pad", x, before=(0, 0), after=(0, 0), interior=(0, 1), value=2.0),
            "lower": build("tril", build("*", x, y)), "turned": build("flip", build("concat", x, y, axis=1), axis=(1,)),
        }
        for name, node in whole.items():
            for axis in (0, 1):
                for at in range(node.type.shape[axis]) if axis else (0, node.type.shape[0] - 1):
                    piece = build("slice", node, axis=axis, start=at, stop=at + 1)
                    graph = {"piece": build("+", piece, constant(1.0, "f32")), "sum": build("sum", piece, axis=axis)}
                    failures += [f"{name} {rows} {width} axis {axis} at {at}: {text}" for text in compare(graph, bindings, 3e-5)]
                    count += 1
    return failures, count


# --- bf16 in memory ---


def low():
    """Values in bf16 that kernels load, round and store: exactly as torch rounds them; whole functions to a few units."""
    failures, count = [], 0
    rng = np.random.default_rng(5)
    for dtype, torch_dtype, unit in (("bf16", torch.bfloat16, 2**-7), ("f16", torch.float16, 2**-10)):
        for shape in [(1,), (127,), (3, 129)]:
            a, b = (build("input", name=n, shape=shape, dtype=dtype, batch=False) for n in "ab")
            bindings = {n: torch.tensor(rng.standard_normal(shape) * 3).to(torch_dtype) for n in (a, b)}
            f = build("cast", a, dtype="f32")
            exact = {
                "sum": build("+", a, b), "product": build("*", a, b), "max": build("max", a, b), "min": build("min", a, b),
                "relu": build("relu", a), "neg": build("neg", a), "wide": f, "where": build("where", build(">", a, b), a, b),
                "rounded": build("cast", build("*", f, constant(1.37, "f32")), dtype=dtype), "copy": build("reshape", a, shape=(a.type.size,)),
                "top": build("reduce-max", a, axis=0),
            }
            failures += [f"{dtype} {shape}: {text}" for text in compare(exact, bindings, 0)]
            near = {"exp": build("exp", a), "gelu": build("gelu", a), "tanh": build("tanh", b), "quotient": build("/", a, build("+", build("abs", b), constant(1.0, dtype)))}
            failures += [f"{dtype} {shape}: {text}" for text in compare(near, bindings, 2 * unit)]
            count += 2
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = build("input", name="x", shape=(1 << 16,), dtype="bf16", batch=False)
    failures += [f"patterns: {text}" for text in compare({"wide": build("cast", x, dtype="f32")}, {x: every}, 0)]
    bits = torch.tensor(rng.integers(0, 1 << 32, 1 << 16), dtype=torch.int64).to(torch.int32).view(torch.float32)
    y = build("input", name="y", shape=(1 << 16,), dtype="f32", batch=False)
    failures += [f"patterns: {text}" for text in compare({"low": build("cast", y, dtype="bf16")}, {y: bits}, 0)]
    return failures, count + 2


# --- what is not a number ---


def special():
    """NaN and infinities pass through max, min, relu, clamp and their reductions as torch has them."""
    failures, count = [], 0
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -2.5]
    pairs = torch.tensor([(p, q) for p in values for q in values])
    a, b = (build("input", name=n, shape=(len(pairs),), dtype="f32", batch=False) for n in "ab")
    bindings = {a: pairs[:, 0].clone(), b: pairs[:, 1].clone()}
    results = {name: build(name, a, b) for name in ("max", "min", "+", "*", "<", "<=", ">", ">=", "=", "/=")}
    results |= {name: build(name, a) for name in ("relu", "abs", "sign", "is-nan", "is-finite", "exp", "sqrt", "tanh", "sigmoid", "floor")}
    results["clamp"] = build("clamp", a, low=-1.0, high=1.0)
    failures += compare(results, bindings, 1e-6)
    for place in (0, 2, 128):
        for columns in (3, 129):
            row = torch.randn(5, columns)
            row[place % 5, place % columns] = float("nan")
            x = build("input", name="x", shape=(5, columns), dtype="f32", batch=False)
            reduced = {f"{op}-{axis}": build(op, x, axis=axis) for op in ("reduce-max", "reduce-min", "sum") for axis in ((0,), (1,), (0, 1))}
            reduced |= {"lse": build("logsumexp", x, axis=1), "softmax": build("softmax", x, axis=1), "argmax": build("argmax", x, axis=1)}
            failures += [f"NaN at {place} of {columns}: {text}" for text in compare(reduced, {x: row}, 1e-5)]
            count += 1
    inf = torch.full((3, 17), -float("inf"))
    inf[1] = 1.0
    inf[2, 4] = float("inf")
    x = build("input", name="x", shape=(3, 17), dtype="f32", batch=False)
    failures += [f"infinite rows: {t}" for t in compare({"lse": build("logsumexp", x, axis=1), "top": build("reduce-max", x, axis=1)}, {x: inf}, 1e-6)]
    return failures, count + 2


# --- draws ---


def draw():
    """The documented bits: every draw is the interpreter's, at several steps and places in the batch."""
    failures, count = [], 0
    logits = build("input", name="l", shape=(6, 5), dtype="f32", batch=True)
    x = build("input", name="x", shape=(6, 21), dtype="f32", batch=True)
    bindings = {logits: torch.randn(6, 5), x: torch.zeros(6, 21)}
    results = {
        "uniform": build("random-uniform", x, path="a/b", number=0),
        "bernoulli": build("random-bernoulli", x, path="a/b", number=1, p=0.3),
        "normal": build("random-normal", x, path="c", number=0),
        "categorical": build("random-categorical", logits, path="d", number=2),
        "keep": x,
    }
    for seed, step, offset in ((0, 0, 0), (7, 3, 6), (1, 70_000, 12)):
        expected = compile_graph(results).run(bindings, seed, step, offset)
        found = run(results, bindings, draws(seed, step, offset, 6))
        for name in ("uniform", "bernoulli", "categorical"):
            if not torch.equal(expected[name], found[name]):
                failures.append(f"{name} at step {step}, sample {offset}")
        if not torch.allclose(expected["normal"], found["normal"], atol=2e-6):
            failures.append(f"normal at step {step}: off by {(expected['normal'] - found['normal']).abs().max():.1e}")
        count += 1
    return failures, count


def second():
    """Second derivatives, which `grad` inside a loss asks for."""
    failures, count = [], 0
    for op in ("tanh", "gelu", "softplus", "exp", "softmax", "normalize"):
        x = build("input", name="x", shape=(3, 5), dtype="f64", batch=False)
        y = build(op, x)
        g = grad(build("sum", build("*", y, build("sin", y))), [x])[0]
        h = grad(build("sum", build("*", g, g)), [x])[0]
        results = expand_gradients({"g": g, "h": h}, Origins())
        failures += [f"{op}: {text}" for text in compare(results, {x: torch.randn(3, 5, dtype=torch.float64)}, 1e-8)]
        count += 1
    return failures, count


def wild():
    """A kernel that stores one element behind its tensor, to try the harness."""
    from sexpgpu.backends.cuda import emit

    store = emit.Emitter.store

    def far(self, unit, name):
        store(self, unit, name)
        self.body[-1] = self.body[-1].replace("p1 + (", "p1 + 1 + (")

    emit.Emitter.store = far
    x = build("input", name="x", shape=(5,), dtype="f32", batch=False)
    return compare({"y": build("exp", x)}, {x: torch.zeros(5)}, 1e-6), 1


PARTS = {
    "wild": wild,
    "f64": lambda: cases("f64", 1e-9),
    "f32": lambda: cases("f32", 2e-4),
    "sizes": sizes,
    "single": single,
    "low": low,
    "special": special,
    "draws": draw,
    "second": second,
}

if __name__ == "__main__":
    tell(*PARTS[sys.argv[1]]())

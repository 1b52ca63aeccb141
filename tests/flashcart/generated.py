"""Run in a process of its own with TRITON_INTERPRET=1 (test_generated_kernels.py): generated kernels beside the reference ops.

Prints a JSON line {name, worst, checked} a case; any mismatch beyond the tolerance raises.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from oracle import Bench, close, derivatives, dot, oracle
from test_cartesian_oracle import ORACLE, VARIANTS, index, variant

from sexpgpu.backends.cuda.cartesian import join as join_
from sexpgpu.backends.cuda.cartesian import launch, plan, tune
from sexpgpu.backends.cuda.cartesian.config import Config
from sexpgpu.backends.cuda.cartesian.join import join
from sexpgpu.backends.cuda.cartesian.lanes import Lanes
from sexpgpu.backends.cuda.cartesian.launch import Products, Runner
from sexpgpu.ir import postorder
from sexpgpu.ops import build, constant, table
from sexpgpu.passes import products as products_
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.schedule.fuse import parts_of
from sexpgpu.passes.simplify import simplify

FOLDER = Path(tempfile.mkdtemp())
BASE = Config(folder=FOLDER)


def products(config=BASE, walk=None):
    run = Runner(config, print, True, "interpreted")
    if walk:
        own = run.plan
        run.plan = lambda product: __import__("sexpgpu.backends.cuda.cartesian.plan", fromlist=["plan"]).plan(product, config, walk)
        assert own is not run.plan
    return Products(lambda: run)


def evaluate(results, bindings, kept):
    """Every node by its reference, products by their kernels: (results, names of product ops)."""
    lowered = join(simplify(results))
    values, ops = {}, []
    for node in postorder(lowered.values()):
        if node in bindings:
            values[node] = bindings[node]
            continue
        operands = [values[x] for x in node.inputs]
        if node.op.startswith("tensor-product"):
            ops.append(node.op)
            values[node] = kept.call(node, operands)
        elif node.op == "scatter-add":
            ops.append(node.op)
            values[node] = kept.added(node, operands)
        else:
            values[node] = table()[node.op].reference(torch, node, operands)
    assert not kept.left, "an output of a joint launch that nobody took"
    kept.forget()
    return {name: values[node].double().numpy() for name, node in lowered.items()}, ops


def in_parts(results, b, kept, size):
    """As `evaluate`, products over edges in parts of `size`, with what stands before and behind them: (results, the nodes in parts by their operands)."""
    from sexpgpu.backends.cuda.cartesian import parts, sweep

    parts.EDGES = parts.ALIGNED = size
    lowered = parts.in_parts(products_.products(join(decompose(simplify(results)))))
    values, members = dict(b.bindings), {}
    order = postorder(lowered.values())
    for node in order:
        if node.op == "tensor-product-parts":
            members.setdefault(parts_of(node), []).append(node)
    for node in order:
        operands = [values[x] for x in node.inputs] if node not in values else []
        if node in values:
            continue
        if node.op == "tensor-product-parts":
            own = members[parts_of(node)]
            outs = {n.attrs["of"]: torch.full(n.type.shape, float("nan")) for n in own}
            room = torch.full((max(1, sweep.scratch(node) // 4),), float("nan")).view(torch.uint8)
            sweep.run(kept._run(), node, operands, outs, room, kept.edges_of(node, operands))
            values |= {n: outs[n.attrs["of"]] for n in own}
        elif node.op.startswith("tensor-product"):
            values[node] = kept.call(node, operands)
        else:
            values[node] = table()[node.op].reference(torch, node, operands)
    kept.forget()
    return {name: values[node].double().numpy() for name, node in lowered.items()}, members


def both(name, b, results, kept, tolerance):
    """The kernels' results beside the reference's, relative to the largest entry."""
    expected = b.run(**results)
    got, ops = evaluate(results, b.bindings, kept)
    worst = 0.0
    for key, value in expected.items():
        assert got[key].shape == value.shape, (name, key)
        if value.size:
            worst = max(worst, float(np.max(np.abs(got[key] - value)) / max(1.0, np.max(np.abs(value)))))
    print(json.dumps({"name": name, "worst": worst, "checked": len(expected), "joint": ops.count("tensor-product-joint"), "ops": len(ops), "added": ops.count("scatter-add")}), flush=True)
    assert worst <= tolerance, (name, worst)
    return got


def of_variant(name, kept, dtype="f64", tolerance=1e-12):
    b = Bench(dtype)
    out, wrt, c, tangents = variant(b, name)
    first, second = derivatives(out, wrt, c, tangents)
    return both(f"{name} {dtype}", b, {"out": out} | {str(i): g for i, g in enumerate(first + second)}, kept, tolerance)


def of_graph(b, nodes, senders, receivers, channels, ranks=(1, 1, 1), shared=False, reduced=False, dtype="f32", seed=0):
    """Result, first and second derivatives of a convolution with random operands."""
    rng = np.random.default_rng(seed)
    l1, l2, top = ranks
    from sexpgpu.ops.cartesian.algebra import paths

    size, edges = len(paths(l1, l2, top)) * channels, len(senders)
    shape = {"x": (nodes, (l1 + 1) ** 2, channels), "y": (edges, (l2 + 1) ** 2), "w": (size,) if shared else (edges, size)}
    leaf = {k: b.leaf(k, rng.standard_normal(s)) for k, s in shape.items()}
    ends = b.leaf("senders", np.asarray(senders, np.int32), "i32"), b.leaf("receivers", np.asarray(receivers, np.int32), "i32")
    out = build("tensor-product", *leaf.values(), *ends, **{"l-max": top, "reduce-paths": reduced})
    c = b.leaf("c", rng.standard_normal(out.type.shape))
    tangents = [b.leaf("v" + k, rng.standard_normal(s)) for k, s in shape.items()]
    first, second = derivatives(out, list(leaf.values()), c, tangents)
    return {"out": out} | {str(i): g for i, g in enumerate(first + second)}


def of_rows(b, rows, channels, ranks, shared, reduced, seed=0):
    """Result, first and second derivatives of a product by rows."""
    rng = np.random.default_rng(seed)
    l1, l2, top = ranks
    from sexpgpu.ops.cartesian.algebra import paths

    size = len(paths(l1, l2, top)) * channels
    shape = {"x": (rows, (l1 + 1) ** 2, channels), "y": (rows, (l2 + 1) ** 2, channels), "w": (size,) if shared else (rows, size)}
    leaf = {k: b.leaf(k, rng.standard_normal(s)) for k, s in shape.items()}
    out = build("tensor-product", *leaf.values(), **{"l-max": top, "reduce-paths": reduced})
    c = b.leaf("c", rng.standard_normal(out.type.shape))
    first, second = derivatives(out, list(leaf.values()), c, [b.leaf("v" + k, rng.standard_normal(s)) for k, s in shape.items()])
    return {"out": out} | {str(i): g for i, g in enumerate(first + second)}


def of_factors(b, nodes, senders, receivers, channels, inner, ranks=(1, 1, 1), seed=0, bias=False):
    """A convolution whose weights are hidden rows times a matrix: result, and derivatives by all four, first and second."""
    rng = np.random.default_rng(seed)
    l1, l2, top = ranks
    from sexpgpu.ops.cartesian.algebra import paths

    size, edges = len(paths(l1, l2, top)) * channels, len(senders)
    shape = {"x": (nodes, (l1 + 1) ** 2, channels), "y": (edges, (l2 + 1) ** 2), "h": (edges, inner), "m": (inner, size)}
    leaf = {k: b.leaf(k, rng.standard_normal(s) / (inner**0.5 if k == "m" else 1)) for k, s in shape.items()}
    ends = b.leaf("senders", np.asarray(senders, np.int32), "i32"), b.leaf("receivers", np.asarray(receivers, np.int32), "i32")
    weights = build("matmul", leaf["h"], leaf["m"])
    if bias:
        weights = build("+", weights, b.leaf("bias", rng.standard_normal(size)))
    out = build("tensor-product", leaf["x"], leaf["y"], weights, *ends, **{"l-max": top})
    c = b.leaf("c", rng.standard_normal(out.type.shape))
    tangents = [b.leaf("v" + k, rng.standard_normal(s) / (inner**0.5 if k == "m" else 1)) for k, s in shape.items()]
    first, second = derivatives(out, list(leaf.values()), c, tangents)
    return {"out": out} | {str(i): g for i, g in enumerate(first + second)}


def of_training(b, nodes, senders, receivers, channels, inner, seed=0):
    """A loss over an energy's gradients by an edge's attributes and hidden rows, and its own gradients: as a potential is trained on forces."""
    rng = np.random.default_rng(seed)
    edges = len(senders)
    shape = {"x": (nodes, 4, channels), "y": (edges, 4), "h": (edges, inner), "m": (inner, 4 * channels)}
    leaf = {k: b.leaf(k, rng.standard_normal(s) / (inner**0.5 if k == "m" else 1)) for k, s in shape.items()}
    ends = b.leaf("senders", np.asarray(senders, np.int32), "i32"), b.leaf("receivers", np.asarray(receivers, np.int32), "i32")
    weights = build("*", build("matmul", leaf["h"], leaf["m"]), constant(0.3, "f32"))
    out = build("tensor-product", leaf["x"], leaf["y"], weights, *ends, **{"l-max": 1})
    first = grad(dot(out, out), [leaf["y"], leaf["h"]])
    loss = build("+", *(dot(g, g) for g in first))
    return {"loss": loss, "first": first[0], "hidden": first[1]} | {k: g for k, g in zip(leaf, grad(loss, list(leaf.values())), strict=True)}


def factored(results):
    """How many operands of the products of these results are given as factors, and how many weights are made in memory for them."""
    nodes = postorder(join(simplify(results)).values())
    products = [n for n in nodes if n.op.startswith("tensor-product")]
    given = [n.inputs[i] for n in products if n.op.endswith("joint") for i, k in enumerate(n.attrs["inner"]) if k]
    made = {x for n in products for x in n.inputs if x.op == "matmul"}
    return len(set(given)), len(made)


def of_losses(b, seed=3):
    """Gradients of a loss over a result and its first derivatives, as a potential's training has them: several cotangents each."""
    rng = np.random.default_rng(seed)
    shape = {"x": (4, 4, 3), "y": (7, 4), "w": (7, 12)}
    leaf = {k: b.leaf(k, rng.standard_normal(s)) for k, s in shape.items()}
    ends = b.leaf("senders", rng.integers(0, 4, 7), "i32"), b.leaf("receivers", rng.integers(0, 4, 7), "i32")
    out = build("tensor-product", *leaf.values(), *ends, **{"l-max": 1})
    first = grad(dot(b.leaf("c", rng.standard_normal(out.type.shape)), out), list(leaf.values()))
    loss = dot(out, out)
    for g in first:
        loss = build("+", loss, dot(g, g))
    return {str(i): g for i, g in enumerate(grad(loss, list(leaf.values())))}


def of_forces(b, nodes, senders, receivers, dtype, seed=0):
    """Positions to edges to a product, and back: rows of 3 added at either end of each edge, their own gradients, and what no product knows."""
    rng = np.random.default_rng(seed)
    ends = b.leaf("senders", np.asarray(senders, np.int32), "i32"), b.leaf("receivers", np.asarray(receivers, np.int32), "i32")
    place, x = b.leaf("place", rng.standard_normal((nodes, 3))), b.leaf("x", rng.standard_normal((nodes, 4, 2)))
    other = b.leaf("other", rng.integers(0, 4, len(senders)), "i32")
    w = b.leaf("w", rng.standard_normal((len(senders), 8)))
    edge = build("-", *(build("gather", place, e, axis=0) for e in ends))
    y = build("concat", build("sum", build("*", edge, edge), axis=(1,), **{"keep-dims": True}), edge, axis=1)
    out = build("tensor-product", x, y, w, *ends, **{"l-max": 1})
    force = grad(dot(out, out), [place])[0]
    return {"force": force, "again": grad(dot(force, force), [place])[0], "wide": build("scatter-add", build("concat", w, w, w, axis=1), ends[0], axis=0, count=nodes),
            "apart": build("scatter-add", edge, other, axis=0, count=4), "numbers": build("scatter-add", build("sum", w, axis=(1,)), other, axis=0, count=5)}


def of_oracle_graph(name, kept, dtype="f64"):
    """The oracle's own numbers: within 1e-12 in f64, and in f32, whose kernels are others, within 2e-5 of the largest."""
    g, b = ORACLE[name], Bench(dtype)
    size1, size2 = (g["l1"] + 1) ** 2, (g["l2"] + 1) ** 2
    shape = {"in1": (6, size1, 2), "in2": (20, size2), "w": (20, 2 * g["n_paths"]), "c": g["out_shape"]}
    shape |= {"v1": shape["in1"], "v2": shape["in2"], "vw": shape["w"]}
    node = {k: b.leaf(k, np.reshape(g[k], s)) for k, s in shape.items()}
    wrt = [node["in1"], node["in2"], node["w"]]
    out = build("tensor-product", *wrt, *index(b), **{"l-max": g["lo"]})
    first, second = derivatives(out, wrt, node["c"], [node["v1"], node["v2"], node["vw"]])
    names = ["g1", "g2", "gw", "dc", "d1", "d2", "dw"]
    got, ops = evaluate({"out": out} | dict(zip(names, first + second, strict=True)), b.bindings, kept)
    worst = max(float(np.max(np.abs(value.reshape(-1) - np.reshape(g[key], -1)))) / float(np.max(np.abs(g[key]))) for key, value in got.items())
    if dtype == "f64":
        for key, value in got.items():
            close(value, g[key])
    assert worst <= (1e-12 if dtype == "f64" else 2e-5), worst
    print(json.dumps({"name": f"{name} {dtype}", "worst": worst, "checked": len(got), "joint": ops.count("tensor-product-joint"), "ops": len(ops)}), flush=True)


def single_paths(kept, highest):
    for entry in oracle()["single_path"]:
        l1, l2, l3 = entry["rank_in1"], entry["rank_in2"], entry["rank_out"]
        if max(l1, l2, l3) > highest:
            continue
        b = Bench()
        full = lambda rank, values: np.concatenate([np.zeros(rank * rank), values])[None]  # noqa: E731
        from sexpgpu.ops.cartesian.algebra import Path, paths

        below = [next(p for p in paths(l1, l2, l3) if p.result == rank) for rank in range(l3)]
        x, y, w = b.leaf("x", full(l1, entry["in1"])), b.leaf("y", full(l2, entry["in2"])), b.leaf("w", [[0.0] * l3 + [1.0]])
        out = build("tensor-product", x, y, w, paths=tuple(tuple(p) for p in (*below, Path(l1, l2, l3))), **{"l-max": l3, "reduce-paths": True})
        g1, g2, gw = grad(dot(out, b.leaf("ct", full(l3, entry["cotangent"])[..., None])), [x, y, w])
        got, _ = evaluate({"out": out, "g1": g1, "g2": g2, "gw": gw}, b.bindings, kept)
        close(got["out"][0, l3**2 :], entry["out"])
        close(got["g1"][0, l1**2 :], entry["grad_in1"])
        close(got["g2"][0, l2**2 :], entry["grad_in2"])
        close(got["gw"][0, -1:], entry["grad_weight"])
    print(json.dumps({"name": "single paths"}), flush=True)


def main(what):
    rng = np.random.default_rng(1)
    if what in ("oracle", "oracle3"):  # the second by hand: all of rank 3
        kept, top = products(), 3 if what == "oracle3" else 2
        single_paths(kept, top)
        for dtype in ("f64", "f32"):
            of_oracle_graph(f"graph_l{top}", kept, dtype)
        for name in VARIANTS:
            if (max(ORACLE["variants"][name]["ranks"][:2]) <= 2) == (top == 2):
                of_variant(name, kept)
                if top == 3:
                    of_variant(name, kept, "f32", 2e-5)
    elif what == "graphs":
        for channels in (1, 3, 20, 64, 127):
            b = Bench("f32")
            both(f"channels {channels}", b, of_graph(b, 5, rng.integers(0, 5, 9), rng.integers(0, 5, 9), channels), products(), 2e-5)
        for name, nodes, senders, receivers in (("no edges", 3, [], []), ("isolated", 7, [1, 1, 6], [6, 2, 1]), ("one node", 1, [0, 0], [0, 0])):
            b = Bench("f32")
            both(name, b, of_graph(b, nodes, senders, receivers, 4), products(), 2e-5)
        b = Bench("bf16")
        both("bf16", b, of_graph(b, 4, [0, 1, 2, 3, 0], [1, 0, 0, 2, 2], 8, dtype="bf16"), products(), 0.03)
        for channels, edges in ((20, 40), (12, 40), (64, 9)):  # four channels a thread; six groups of five lanes a warp, ten of three, two of sixteen
            b = Bench("bf16")
            both(f"bf16 {channels}", b, of_graph(b, 5, rng.integers(0, 5, edges), rng.integers(0, 5, edges), channels, dtype="bf16"), products(), 0.03)
        for channels, edges in ((18, 40), (28, 20)):  # groups that do not fill a warp: three of nine lanes, two of fourteen
            b = Bench("f32")
            both(f"channels {channels}", b, of_graph(b, 5, rng.integers(0, 5, edges), rng.integers(0, 5, edges), channels), products(), 2e-5)
        b = Bench("f64")
        both("several cotangents", b, of_losses(b), products(), 1e-12)
        b = Bench("f32")
        results = of_graph(b, 6, rng.integers(0, 6, 30), rng.integers(0, 6, 30), 20)
        one, two = (evaluate(results, b.bindings, products())[0] for _ in range(2))
        assert all(np.array_equal(one[k], two[k]) for k in one)
        print(json.dumps({"name": "twice", "equal": True}), flush=True)
    elif what == "factors":
        join_.INSIDE = 0
        for channels, inner in ((8, 16), (20, 24), (64, 64)):
            b = Bench("f32")
            results = of_factors(b, 5, rng.integers(0, 5, 23), rng.integers(0, 5, 23), channels, inner)
            both(f"factors {channels} {inner}", b, results, products(), 2e-5)
            print(json.dumps({"name": "operands as factors, weights in memory", "counts": factored(results)}), flush=True)
        b = Bench("f32")
        both("factors, isolated", b, of_factors(b, 6, [1, 1, 5], [5, 2, 1], 8, 16), products(), 2e-5)
        b = Bench("f32")
        both("factors, no edges", b, of_factors(b, 3, [], [], 8, 16), products(), 2e-5)
        b = Bench("f32")
        results = of_factors(b, 5, rng.integers(0, 5, 9), rng.integers(0, 5, 9), 8, 16, bias=True)
        both("factors and bias", b, results, products(), 2e-5)
        print(json.dumps({"name": "with a bias", "counts": factored(results)}), flush=True)
        b = Bench("bf16")
        both("factors bf16", b, of_factors(b, 4, [0, 1, 2, 3, 0], [1, 0, 0, 2, 2], 8, 16), products(), 0.03)
        b = Bench("f32")
        results = of_factors(b, 5, rng.integers(0, 5, 12), rng.integers(0, 5, 12), 7, 16)  # an odd number of channels has no kernel for it
        both("factors, odd", b, results, products(), 2e-5)
        print(json.dumps({"name": "odd", "counts": factored(results)}), flush=True)
    elif what == "plans":
        launch.LONGEST = 3
        for channels, dtype, tolerance, slots in ((3, "f64", 1e-12, None), (4, "f32", 2e-5, None), (4, "f32", 2e-5, 2), (4, "bf16", 0.03, None)):
            b = Bench(dtype)  # an atom with many edges has several walks
            ends = [0, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 3, 3, 3]
            both(f"walks {channels} {dtype} {slots}", b, of_graph(b, 5, *ends, channels), products(dataclasses.replace(BASE, slots=slots)), tolerance)
        for dtype, tolerance in (("f64", 1e-12), ("f32", 2e-5), ("bf16", 0.03)):
            b = Bench(dtype)
            ends = rng.integers(0, 4, 14), np.sort(rng.integers(1, 4, 14))
            results = of_forces(b, 5, *ends, dtype)
            results = {k: v for k, v in results.items() if dtype != "bf16" or k in ("apart", "numbers")}
            one = both(f"forces {dtype}", b, results, products(), tolerance)
            two = one if dtype != "f32" else evaluate(results, b.bindings, products())[0]
            assert all(np.array_equal(one[k], two[k]) for k in one)
        launch.LONGEST = 256
        plan.ROWWISE = plan.LARGEST = 5  # products by rows in several launches, with other tiles each
        for dtype, shared, reduced in (("f64", True, False), ("f32", False, True)):
            b = Bench(dtype)
            results = of_rows(b, 3, 3, (1, 2, 2), shared, reduced)
            kept = products()
            own, count = kept._run().tile, iter(range(1000))
            kept._run().tile = lambda *what, own=own, count=count: own(*what)._replace(rows=(16, 2)[next(count) % 2])
            both(f"rows in parts {dtype}", b, results, kept, 1e-12 if dtype == "f64" else 2e-5)
        plan.ROWWISE, plan.LARGEST, launch.WAVE = 140, 250, 2  # tiles of one row and no masks; three rows and two programs
        for channels, ranks, reduced, dtype in ((4, (2, 1, 2), False, "f32"), (3, (1, 2, 2), True, "f32"), (4, (2, 2, 2), False, "bf16")):
            b = Bench(dtype)
            kept = products()
            kept._run().tile = lambda *what: tune.Tile(1, 4, 1)
            both(f"rows one by one {channels} {dtype}", b, of_rows(b, 3, channels, ranks, True, reduced), kept, 0.03 if dtype == "bf16" else 2e-5)
        launch.WAVE = 4  # two programs, of three rows and of two; two blocks of channels, the second nearly empty
        b, kept = Bench("f32"), products()
        kept._run().tile = lambda *what: tune.Tile(1, 32, 1)
        both("rows one by one 33 f32", b, of_rows(b, 5, 33, (1, 1, 1), True, False), kept, 2e-5)
        launch.WAVE, launch.SPAN = 1056, 300
        run, worst = products()._run(), 0.0
        for rows, columns, dtype in ((0, 3, "f32"), (1, 1, "f32"), (300, 40, "f32"), (301, 33, "f32"), (1000, 1, "bf16"), (2500, 3, "f64"), (700, 2, "")):  # sums of sums beyond SPAN rows
            parts = torch.tensor(rng.standard_normal((rows, columns)), dtype=torch.float64 if dtype == "f64" else torch.float32)
            found = run.summed(parts, dtype)
            assert found.shape == (1, columns) and found.dtype == (torch.bfloat16 if dtype == "bf16" else parts.dtype)
            expected = parts.double().sum(0).to(found.dtype).double()
            worst = max(worst, float(((found[0].double() - expected).abs() / (1 + expected.abs())).max()) / (2**10 if dtype == "bf16" else 1))
        print(json.dumps({"name": "sums of rows", "worst": worst}), flush=True)
        assert worst <= 2e-5, worst
        launch.SPAN = 2048
        for name, changes, walk in (
            ("receiver walk", {}, "receiver"), ("edge", {"scatter": "edge"}, None), ("slots", {"slots": 3}, None),
            ("budgets", {"csr_budget": 3, "bwd_budget": 3, "peak_aware": False}, "receiver"), ("full", {"bwd_split": "full", "dbwd_split": "full"}, None),
        ):
            for shared, reduced in ((False, False), (True, True)):
                b = Bench("f64")
                results = of_graph(b, 4, rng.integers(0, 4, 11), rng.integers(0, 4, 11), 3, (1, 1, 1), shared, reduced, "f64")
                both(f"{name} shared={shared}", b, results, products(dataclasses.replace(BASE, **changes), walk), 1e-12)
            b = Bench("f32")  # an even number of channels: thread by thread
            results = of_graph(b, 4, rng.integers(0, 4, 11), rng.integers(0, 4, 11), 4, (2, 1, 2) if name == "slots" else (1, 1, 1))
            both(f"{name} even", b, results, products(dataclasses.replace(BASE, **changes), walk), 2e-5)
    elif what == "parts":
        products_.TALL = 4
        from sexpgpu.backends.cuda.cartesian import parts

        for apart, channels, nodes, edges, size, changes in ((False, 64, 4, 8, 3, {}), (True, 36, 9, 6, 4, {"slots": 2, "bwd_split": "full", "dbwd_split": "full"})):
            if apart:  # as where no launch reads all that a gradient is made of
                parts._Group.takes = lambda *given: False
            b = Bench("f32")  # of random ends: a node has edges in some parts, in all, or none
            results = of_training(b, nodes, rng.integers(0, nodes, edges), rng.integers(0, nodes, edges), channels, 16)
            got, members = in_parts(results, b, products(dataclasses.replace(BASE, **changes)), size)
            again, _ = in_parts(results, b, products(dataclasses.replace(BASE, **changes)), size)
            assert all(np.array_equal(got[k], again[k]) for k in got)
            expected = b.run(**results)
            worst = max(float(np.max(np.abs(got[k] - v)) / max(1.0, np.max(np.abs(v)))) for k, v in expected.items())
            behind = [sorted(kind for _, kind, _ in n[0].attrs["after"]) for n in members.values()]
            print(json.dumps({"name": f"parts of {size}, {channels} channels", "worst": worst, "behind": sorted(behind)}), flush=True)
            assert worst <= 2e-5, worst
    elif what == "tiles":  # lanes for an edge, with loads a step early and without; channels that they divide, and that they do not
        ends = [0, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 3, 3, 3]
        for channels, lanes, warps, early, dtype in ((64, 16, 2, 1, "f32"), (64, 32, 1, 1, "f32"), (64, 8, 4, 0, "f32"), (20, 16, 1, 1, "f32"), (20, 8, 2, 1, "bf16"), (6, 4, 1, 1, "bf16"), (6, 2, 2, 0, "f32")):
            b = Bench(dtype)
            kept = products()
            kept._run().tile = lambda *what, lanes=lanes, warps=warps, early=early: Lanes(lanes, 2, 1, warps, early=early)
            both(f"{lanes} lanes of {channels} early={early} {dtype}", b, of_graph(b, 6, *ends, channels, (1, 2, 2)), kept, 0.03 if dtype == "bf16" else 2e-5)


if __name__ == "__main__":
    main(sys.argv[1])

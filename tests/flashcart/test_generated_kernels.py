"""The generated kernels: their values under Triton's interpreter, that they compile for sm_90, plans, settings and the cache."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from sexpgpu.backends.cuda.cartesian import cache as cache_  # noqa: E402
from sexpgpu.backends.cuda.cartesian import join as join_  # noqa: E402
from sexpgpu.backends.cuda.cartesian import lanes, source  # noqa: E402
from sexpgpu.backends.cuda.cartesian import launch as launch_  # noqa: E402
from sexpgpu.backends.cuda.cartesian import parts as parts_  # noqa: E402
from sexpgpu.backends.cuda.cartesian.cache import MARK, Cache  # noqa: E402
from sexpgpu.backends.cuda.cartesian.config import Config, from_environment  # noqa: E402
from sexpgpu.backends.cuda.cartesian.join import _factored, join  # noqa: E402
from sexpgpu.backends.cuda.cartesian.plan import Launch, groups, plan, rank_costs, room  # noqa: E402
from sexpgpu.backends.cuda.cartesian.product import passes  # noqa: E402
from sexpgpu.backends.cuda.cartesian.tune import Kept, Tile, across_of, candidates, default, wide_of  # noqa: E402
from sexpgpu.cli import device  # noqa: E402
from sexpgpu.compiler import Selection, load  # noqa: E402
from sexpgpu.diagnostics import SexpError, SexpErrors  # noqa: E402
from sexpgpu.ir import postorder  # noqa: E402
from sexpgpu.ops import build  # noqa: E402
from sexpgpu.ops.cartesian import algebra  # noqa: E402
from sexpgpu.ops.cartesian.algebra import paths  # noqa: E402
from sexpgpu.ops.cartesian.product import Form  # noqa: E402
from sexpgpu.passes import products as products_  # noqa: E402
from sexpgpu.passes.autodiff import grad  # noqa: E402
from sexpgpu.passes.schedule.decompose import decompose  # noqa: E402
from sexpgpu.passes.schedule.fuse import Call, fuse  # noqa: E402
from sexpgpu.passes.simplify import simplify  # noqa: E402
from sexpgpu.settings import read  # noqa: E402

HERE = Path(__file__).parent


def interpreted(script, *arguments, **more):
    """A script's JSON lines, in a process whose kernels run on the CPU."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run([sys.executable, str(script), *arguments], cwd=HERE, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def product(ranks=(2, 2, 2), channels=4, second_channels=1, reduced=False, shared=False, edges=True, dtype="f32"):
    l1, l2, top = ranks
    return passes(Form(l1, l2, channels, second_channels, paths(l1, l2, top), reduced), shared, edges, dtype)


def test_values_of_the_oracle():
    rows = {r["name"]: r for r in interpreted(HERE / "generated.py", "oracle")}
    assert set(rows) == {"single paths", "graph_l2 f64", "graph_l2 f32", "l003 f64", "l2_reduce f64"}
    for dtype in ("f64", "f32"):  # the result alone; 3 gradients; 4 of second order
        assert rows[f"graph_l2 {dtype}"]["ops"] == 8 and rows[f"graph_l2 {dtype}"]["joint"] == 7


def test_the_oracle_by_compiled_graphs(tmp_path):
    """Ranks up to 2, in f32; all of it on a GPU is `benchmarks/on_gpu.py --part oracle`."""
    said, told = interpreted(HERE / "oracle_in_triton.py", "2", FLASHCART_CACHE_DIR=str(tmp_path))
    assert not told["failures"] and told["count"] == 93 and said["worst"] <= 2e-5
    assert len(said["small"]) <= 2, said["small"]


def test_graphs_channels_and_dtypes():
    rows = interpreted(HERE / "generated.py", "graphs")
    assert [r["name"] for r in rows] == [*(f"channels {c}" for c in (1, 3, 20, 64, 127)), "no edges", "isolated", "one node", "bf16",
                                         *(f"bf16 {c}" for c in (20, 12, 64)), "channels 18", "channels 28", "several cotangents", "twice"]


def test_weights_as_factors():
    """Products of bf16 halves, by matrix instructions as the PTX manual states them."""
    rows = interpreted(HERE / "generated.py", "factors")
    worst = {r["name"]: r["worst"] for r in rows if "worst" in r}
    assert list(worst) == ["factors 8 16", "factors 20 24", "factors 64 64", "factors, isolated", "factors, no edges", "factors and bias", "factors bf16", "factors, odd"]
    assert [r["counts"] for r in rows if "counts" in r] == [[1, 0]] * 4 + [[0, 1]]  # no weights in memory, but of an odd number of channels


def test_edges_in_parts():
    """Weights, products and what their gradients go to, for some edges after others; a sum that waits for what depends on its gradients is made of gradients made once more,
    by the launches of the second backward pass, or by themselves."""
    rows = interpreted(HERE / "generated.py", "parts")
    assert [r["behind"] for r in rows] == [[[], [], ["rows"], ["rows", "sums", "sums"]], [[], [], ["rows"], ["rows", "sums"], ["sums"]]]


def test_every_plan_gives_the_same_values():
    rows = interpreted(HERE / "generated.py", "plans")
    assert len(rows) == 29 and [r["added"] for r in rows if r["name"].startswith("forces")] == [7, 7, 2]


def test_every_arrangement_of_lanes_gives_the_same_values():
    rows = interpreted(HERE / "generated.py", "tiles")
    assert len(rows) == 7 and all(r["checked"] == 8 for r in rows)


def test_the_benchmark_runs_without_a_gpu(tmp_path):
    rows = interpreted(HERE.parent.parent / "benchmarks" / "tensor_product.py", "--dry-run", "--graphs", "random,rows", "--passes", "forward",
                       FLASHCART_CACHE_DIR=str(tmp_path))
    assert [r["name"] for r in rows] == ["check random 1,1->1 c3 f32", "random 1,1->1 c3 forward", "check rows 1,1->1 c3 f32", "rows 1,1->1 c3 forward",
                                         "over ours"]
    assert rows[0]["right"] and rows[2]["right"] and len(rows[0]["errors"]) == 8
    for row in (rows[1], rows[3]):
        assert row["ms"]["ours"]["median"] > 0 and row["floor_bytes"] > 0
        assert set(row["ms"]) | set(row["lacks"]) == {"ours", "flashcart", "cuequivariance", "openequivariance"}


def ptxas():
    import triton.backends.nvidia as nvidia

    return (Path(nvidia.__file__).parent / "bin" / "ptxas").exists()


@pytest.mark.skipif(not ptxas(), reason="Triton brings no ptxas here")
def test_kernels_compile_for_hopper():
    """In a process of its own, so that no interpreter is on; rank 1 here, all ranks by benchmarks/kernel_statistics.py."""
    script = HERE.parent.parent / "benchmarks" / "kernel_statistics.py"
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    kinds = ["csr", "edge", "bf16"]
    done = subprocess.run([sys.executable, str(script), "--products", "1,1,1", "--channels", "32", "--kinds", ",".join(kinds)],
                          env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [k for k in dict.fromkeys(r["kind"] for r in rows)] == kinds
    assert all(r["spilled"] == 0 and 0 < r["registers"] <= 255 for r in rows)
    with_atomics = {(r["kind"], r["pass"]) for r in rows if r["atomics"]}
    assert with_atomics == {("edge", p) for p in ("forward", "backward", "second")}  # the others add in a fixed order
    done = subprocess.run([sys.executable, str(script), "--products", "1,1,1", "--channels", "16", "--inner", "16", "--kinds", "csr,bf16"],
                          env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(r["matrix"] and not r["spilled"] and not r["atomics"] for r in rows)


# --- plans ---


def test_groups_of_the_reference():
    cost = lambda *ranks: rank_costs(product(ranks)["forward"])  # noqa: E731
    assert sum(cost(3, 3, 3)) == 99 and groups(cost(3, 3, 3), 100, True) == [(0, 1, 2, 3)]
    assert groups(cost(3, 3, 3), 50, False) == [(0, 1), (2,), (3,)]
    assert groups(cost(2, 3, 3), 50, False) == [(0, 1, 2), (3,)]
    assert groups(cost(4, 4, 4), 100, True) == [(0, 1, 2), (3,), (4,)]
    assert groups([1, 0, 5], 0, False) == [(0, 1), (2,)]


def test_plans():
    p = product((2, 3, 3), 64)
    assert plan(p["forward"], Config()) == [Launch("receiver", (0,), (0, 1, 2, 3), (0, 1)), Launch("receiver", (0,), (0, 1, 2, 3), (2,))]
    assert plan(p["backward"], Config()) == [Launch("sender", (0, 1, 2), (0, 1, 2, 3), firsts) for firsts in ((0, 1), (2,))]
    assert plan(product((2, 2, 2), 64)["backward"], Config()) == [Launch("sender", (0, 1, 2), (0, 1, 2))]
    assert [(x.mode, x.outputs) for x in plan(p["backward"], Config(bwd_split="full"))] == [("sender", (n,)) for n in range(3) for _ in range(2)]
    assert [x.outputs for x in plan(p["second"], Config(dbwd_split="full"))][-4:] == [(1, 2), (1, 2), (3,), (3,)]
    assert [x.mode for x in plan(p["second"], Config(scatter="edge"))] == ["edge", "edge"]
    assert [x.ranks for x in plan(p["backward"], Config(bwd_budget=50, peak_aware=False), "receiver")] == [(0, 1, 2), (3,)]
    assert [x.mode for x in plan(product(edges=False, second_channels=4)["second"], Config())] == ["rows"]


def test_plans_by_rows():
    """One launch where a thread has room for all, else the result apart; divided by ranks of the result beyond rank 4."""
    def launches(ranks, what, dtype="f32"):
        return [(x.outputs, x.ranks) for x in plan(product(ranks, 64, 64, shared=True, edges=False, dtype=dtype)[what], Config())]

    assert launches((3, 3, 3), "second") == [((0, 1, 2, 3), (0, 1, 2, 3))]
    assert launches((3, 3, 3), "second", "f64") == [((0,), (0, 1, 2, 3)), ((1, 2, 3), (0, 1, 2, 3))]
    assert launches((4, 4, 4), "backward") == [((0, 1, 2), (0, 1, 2, 3, 4))] and len(launches((4, 4, 4), "second")) == 2
    assert launches((5, 5, 5), "forward") == [((0,), (0, 1, 2, 3)), ((0,), (4,)), ((0,), (5,))]


def test_tiles_by_rows():
    """A warp a row, two channels a thread of a result where there is room; four rows where channels are few."""
    def tiles(ranks, channels, dtype="f32"):
        made = product(ranks, channels, channels, shared=True, edges=False, dtype=dtype)
        return [tuple(default(p, launch)) for p in made.values() for launch in plan(p, Config())]

    assert tiles((3, 3, 3), 128) == [(1, 64, 1), (1, 32, 1), (1, 32, 1)]
    assert tiles((3, 3, 3), 96) == [(1, 32, 1)] * 3 and tiles((3, 3, 3), 20) == [(4, 32, 4)] * 3
    assert tiles((3, 3, 3), 64, "f64") == [(1, 32, 1)] * 4


def test_launches_of_rank_three_leave_room():
    """By ranks of features, so that each is read once; a product of odd channels goes by ranks of the result."""
    second = product((3, 3, 3), 64)["second"]
    assert [(x.mode, x.firsts) for x in plan(second, Config())] == [
        (mode, firsts) for mode in ("receiver", "sender") for firsts in ((0, 1), (2,), (3,))]
    for numbers in ([0], [1, 2, 3]):
        paths_of = [n for x in plan(second, Config()) if x.outputs == tuple(numbers) for n in x.paths(second.form)]
        assert sorted(paths_of) == list(range(23))
    odd = product((3, 3, 3), 63)["second"]
    assert room(odd, [0]) < 99
    assert [x.ranks for x in plan(odd, Config())] == [(0, 1, 2), (3,), (0, 1, 2, 3)]


def test_budget_of_the_second_derivative():
    second = product((2, 2, 2), 64)["second"]
    assert len(plan(second, Config())) == 2
    assert [x.ranks for x in plan(second, Config(dbwd_budget=0))][:3] == [(0,), (1,), (2,)]
    assert len(plan(product((2, 2, 2), 64)["forward"], Config(dbwd_budget=0))) == 1


def test_slots_by_the_mean_degree():
    c = Config()
    assert [c.slots_of(d * 10, 10) for d in (63, 64, 100, 128, 500, 5000)] == [1, 2, 4, 4, 16, 64]
    assert Config(slots=3).slots_of(10, 10) == 3 and Config(least_degree=5).slots_of(60, 10) == 1


@pytest.mark.parametrize("degrees", [(0, 1, 2), (7,), (3, 0, 9, 4, 1, 0), (100, 1, 1), (0, 0, 50)])
@pytest.mark.parametrize("longest", [1, 3, 4, 200])
def test_walks_divide_the_edges(degrees, longest, monkeypatch):
    """Each edge is in one walk of its node, none is longer than the limit, and a node's further walks are where `more` says."""
    monkeypatch.setattr(launch_, "LONGEST", longest)
    receivers = np.random.default_rng(0).permutation(np.repeat(np.arange(len(degrees)), degrees))
    edges = launch_.Edges(torch.zeros(len(receivers), dtype=torch.int32), torch.from_numpy(receivers), len(degrees))
    walk = edges.by("receiver")
    assert len(walk.begins) == len(walk.ends) == len(walk.nodes) == len(degrees) + edges.extra
    found = []
    for number, (begin, end, node) in enumerate(zip(walk.begins.tolist(), walk.ends.tolist(), walk.nodes.tolist(), strict=True)):
        assert 0 <= end - begin <= longest
        places = walk.order[begin:end].numpy()
        assert (receivers[places] == node).all()
        if number >= len(degrees) and end > begin:
            assert walk.more[node] <= number - len(degrees) < walk.more[node + 1]
        found += list(places)
    assert sorted(found) == list(range(len(receivers)))
    assert walk.more[-1] <= edges.extra or not edges.extra


def test_ranks_beyond_the_kernels_run_by_the_library(tmp_path):
    run = launch_.Runner(Config(l_max=1, folder=tmp_path), print, True, "interpreted")
    assert run.takes(product((1, 1, 1))["second"]) and not run.takes(product((1, 2, 1))["forward"]) and not run.takes(product((1, 1, 2))["forward"])


def test_no_size_of_a_graph_is_in_a_kernel():
    """So another mean degree compiles nothing."""
    for p in (product()["backward"], product(channels=3)["backward"]):
        (launch,) = plan(p, Config())
        tile = default(p, launch)
        made = lanes.generate(p, "sender", launch.paths(p.form), tile) if isinstance(tile, lanes.Lanes) else source.generate(p, "sender", launch.paths(p.form))
        assert "do_not_specialize=['count', 'edges', 'slots']" in made.source


def test_second_weight_gradients_store_once():
    text = source.generate(product((1, 1, 1))["second"].only(product((1, 1, 1))["second"].outputs[3:]), "sender", (0, 1, 2, 3)).source
    assert text.count("tl.store") == 4  # one a path


def factors(channels=8, inner=16, more=False, **changes):
    """The operands of a product of hidden rows and a matrix that `join` gives as factors."""
    leaf = lambda name, *shape, dtype="f32": build("input", name=name, dtype=dtype, shape=shape, batch=False)  # noqa: E731
    weights = build("matmul", leaf("h", 5, inner), leaf("m", inner, 4 * channels))
    out = build("tensor-product", leaf("x", 3, 4, channels), leaf("y", 5, 4), weights, leaf("s", 5, dtype="i32"), leaf("r", 5, dtype="i32"), **{"l-max": 1})
    results = {"out": out} | ({"weights": weights} if more else {})
    found = _factored(postorder(results.values()), results, Config(**changes))
    joined = join(results) if not changes else {}
    assert not joined or (joined["out"].op == "tensor-product-joint") == bool(found)
    return len(found)


def test_when_weights_are_factors(monkeypatch):
    monkeypatch.setattr(join_, "INSIDE", 0)
    assert factors() == factors(inner=64) == factors(channels=20) == 1
    assert factors(channels=7) == factors(inner=65) == factors(more=True) == factors(scatter="edge") == factors(l_max=0) == 0


def test_weights_are_made_right_before_each_reader(monkeypatch):
    """However large. No two launches share them, so that none lives from the forward pass to its derivatives."""
    monkeypatch.setattr(products_, "TALL", 4)
    leaf = lambda name, *shape, dtype="f32": build("input", name=name, dtype=dtype, shape=shape, batch=False)  # noqa: E731
    h, m, x, y = leaf("h", 5, 16), leaf("m", 16, 4 * 64), leaf("x", 3, 4, 64), leaf("y", 5, 4)
    out = build("tensor-product", x, y, build("matmul", h, m), leaf("s", 5, dtype="i32"), leaf("r", 5, dtype="i32"), **{"l-max": 1})
    loss = build("sum", build("square", out))
    results = simplify({"loss": loss} | dict(zip("xyhm", grad(loss, [x, y, h, m]), strict=True)))

    def order():
        found = products_.products(join(decompose(results)))
        return [l.node for l in fuse(found).launches if isinstance(l, Call)]

    calls = order()
    made = [n for n in calls if n.op == "matmul-sum" and n.attrs["again"]]
    readers = [n for n in calls if n.op.startswith("tensor-product") and set(n.inputs) & set(made)]
    assert len(made) == 2 == len({n.attrs["again"] for n in made}) and len({n.inputs for n in readers}) == 2
    for node in made:
        after = calls[calls.index(node) + 1]
        assert node in after.inputs
    monkeypatch.setattr(join_, "INSIDE", 0)
    assert order() == calls


def test_what_is_made_in_parts(monkeypatch):
    """Products over many edges, whose weights are made for them alone, where there are kernels that walk some of the edges."""
    monkeypatch.setattr(products_, "TALL", 4)
    monkeypatch.setattr(parts_, "EDGES", 4)
    monkeypatch.setattr(parts_, "ALIGNED", 1)

    def made(edges=9, channels=64, dtype="f32", read=False, **changes):
        monkeypatch.setattr(parts_, "config", lambda: dataclasses.replace(Config(folder=HERE), **changes))
        leaf = lambda name, *shape, dtype=dtype: build("input", name=name, dtype=dtype, shape=shape, batch=False)  # noqa: E731
        weights = build("matmul", leaf("h", edges, 16), leaf("m", 16, 4 * channels))
        ends = leaf("s", edges, dtype="i32"), leaf("r", edges, dtype="i32")
        results = {"out": build("tensor-product", leaf("x", 3, 4, channels), leaf("y", edges, 4), weights, *ends, **{"l-max": 1})} | ({"weights": weights} if read else {})
        nodes = postorder(parts_.in_parts(products_.products(results)).values())
        found = [n for n in nodes if n.op == "tensor-product-parts"]
        assert not found or not [n for n in nodes if n.op.startswith("matmul")]
        return len(found)

    assert made() == made(channels=80) == made(edges=6) == 1
    assert made(edges=5) == made(channels=63) == made(dtype="f64") == made(dtype="bf16") == made(read=True) == made(scatter="edge") == made(l_max=0) == 0


def test_gradients_by_attributes_stay_with_their_layer(monkeypatch):
    """Two layers over the same edges: each layer's gradient makes its part of theirs, and nobody walks the edges again for the sum. And the gradient of a
    radial matrix through two cotangents is two sums over edges, each as soon as it can be made."""
    monkeypatch.setattr(products_, "TALL", 4)
    leaf = lambda name, *shape, dtype="f32": build("input", name=name, dtype=dtype, shape=shape, batch=False)  # noqa: E731
    y, h, m, ends = leaf("y", 5, 4), leaf("h", 5, 16), leaf("m", 16, 4 * 64), (leaf("s", 5, dtype="i32"), leaf("r", 5, dtype="i32"))
    weights = build("matmul", h, m)
    loss = None
    for name in "ab":
        out = build("tensor-product", leaf(f"x{name}", 3, 4, 64), y, build("*", weights, leaf(f"k{name}", 5, 4 * 64)), *ends, **{"l-max": 1})
        energy = build("sum", build("square", out))
        loss = energy if loss is None else build("+", loss, energy)
    found = join(decompose(simplify(dict(zip("yhm", grad(loss, [y, h, m]), strict=True)))))
    nodes = postorder(found.values())
    made = {n.inputs: [o[0] for o in n.attrs["outputs"]] for n in nodes if n.op == "tensor-product-joint"}
    assert sorted(map(sorted, made.values())) == [["b", "weights"]] * 2
    apart = leaf("h2", 5, 16)
    by_m = [build("matmul", build("transpose", x, permutation=(1, 0)), g) for x, g in zip((h, apart), (n for n in nodes if n.op == "tensor-product-joint" and n.type.shape == (5, 4 * 64)), strict=True)]
    sums = products_.products({"m": build("+", *by_m)})
    assert sums["m"].op == "+" and [x.op for x in sums["m"].inputs] == ["matmul-sum"] * 2


# --- settings ---

BAD = {
    "FLASHCART_KERNEL_L_MAX": "three", "FLASHCART_TP_SCATTER_KERNEL": "edges", "FLASHCART_TP_CSR_GROUP_BUDGET": "-1", "FLASHCART_TP_BWD_GROUP_BUDGET": "1e2",
    "FLASHCART_TP_DBWD_GROUP_BUDGET": "half", "FLASHCART_TP_BWD_CSR_MIN_DEG": "0", "FLASHCART_TP_BWD_CSR_SLOTS": "0", "FLASHCART_TP_BWD_SPLIT": "fuse",
    "FLASHCART_TP_DBWD_SPLIT": "ful",
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_settings(name):
    with pytest.raises(SexpErrors) as caught:
        from_environment({name: BAD[name]})
    (d,) = caught.value.diagnostics
    assert d.code == "E-ENV-001" and name in d.message
    if name in ("FLASHCART_TP_SCATTER_KERNEL", "FLASHCART_TP_BWD_SPLIT", "FLASHCART_TP_DBWD_SPLIT"):
        assert any(word in " ".join(d.help) for word in ("edge", "fused", "full"))


GOOD = [
    ("FLASHCART_KERNEL_L_MAX", "2", "l_max", 2), ("FLASHCART_CACHE_DIR", "/a", "folder", Path("/a")), ("XDG_CACHE_HOME", "/b", "folder", Path("/b/flashcart")),
    ("FLASHCART_TP_SCATTER_KERNEL", "edge", "scatter", "edge"), ("FLASHCART_TP_CSR_GROUP_BUDGET", "70", "csr_budget", 70),
    ("FLASHCART_TP_BWD_GROUP_BUDGET", "60", "bwd_budget", 60), ("FLASHCART_TP_DBWD_GROUP_BUDGET", "0", "fused_second", 0),
    ("FLASHCART_TP_CSR_GROUP_BUDGET", "31", "fused_second", 15), ("FLASHCART_TP_BWD_CSR_MIN_DEG", "9", "least_degree", 9),
    ("FLASHCART_TP_BWD_CSR_SLOTS", "1", "slots", 1), ("FLASHCART_TP_BWD_SPLIT", "full", "bwd_split", "full"),
    ("FLASHCART_TP_DBWD_SPLIT", "fused", "dbwd_split", "fused"), ("FLASHCART_TP_PEAK_AWARE_GROUPS", "no", "peak_aware", False),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_settings_take_effect(name, text, field, value):
    assert getattr(from_environment({name: text}), field) == value
    assert getattr(from_environment({}), field) != value


@pytest.mark.parametrize(("word", "on", "warned"), [("1", True, False), ("TRUE", True, False), ("Yes", True, False), ("t", True, False), ("on", False, True),
                                                    ("", False, False), ("0", False, False), ("maybe", False, True)])
def test_boolean_words(word, on, warned):
    settings = read({"FLASHCART_TP_PEAK_AWARE_GROUPS": word})
    assert settings.flashcart_tp_peak_aware_groups is on
    assert [d.code for d in settings.warnings] == ["E-ENV-016"] * warned


def test_unknown_name_is_a_warning_with_the_nearest():
    (d,) = read({"FLASHCART_TP_SCATER_KERNEL": "edge"}).warnings
    assert d.code == "E-ENV-010" and "FLASHCART_TP_SCATTER_KERNEL" in " ".join(d.help)
    assert not read({"FLASHCART_LAMMPS_DEBUG": "1"}).warnings


@pytest.mark.parametrize(("stated", "place"), [("", False), (":deterministic true", True), (":deterministic false", False)])
def test_atomics_and_deterministic(stated, place, tmp_path, capsys):
    text = (HERE.parent.parent / "examples" / "digits.lisp").read_text()
    file = tmp_path / "file.lisp"
    file.write_text(text.replace(":steps", f"{stated} :steps", 1))
    (run,) = load(str(file), Selection()).experiment.runs.values()
    assert (run.deterministic_at is not None) is place
    edge = read({"FLASHCART_TP_SCATTER_KERNEL": "edge", "SEXPGPU_DEVICE": "cuda"})
    device.check_scatter(read({"FLASHCART_TP_SCATTER_KERNEL": "edge"}), run.deterministic_at)  # on the CPU it changes nothing
    assert not capsys.readouterr().out
    if not place:
        device.check_scatter(edge, run.deterministic_at)
        said = capsys.readouterr()
        assert "not bit-exact: FLASHCART_TP_SCATTER_KERNEL=edge" in said.out + said.err
        return
    with pytest.raises(SexpError) as caught:
        device.check_scatter(edge, run.deterministic_at)
    (d,) = caught.value.diagnostics
    assert d.code == "E-DEV-009" and "FLASHCART_TP_SCATTER_KERNEL" in d.message and ":deterministic true" in d.message and d.span is not None


# --- the cache ---


def test_cache_keeps_and_checks(tmp_path):
    said = []
    cache = Cache(tmp_path / "new", said.append)
    assert cache.source("k", lambda: "one\n") == "one\n"
    assert Cache(tmp_path / "new", said.append).source("k", lambda: "two\n") == "one\n"
    (file,) = (tmp_path / "new").iterdir()
    assert file.read_text().startswith(MARK)
    file.write_text(file.read_text()[:-2])  # cut short
    assert Cache(tmp_path / "new", said.append).source("k", lambda: "two\n") == "two\n"
    assert "two" in file.read_text() and len(list((tmp_path / "new").iterdir())) == 1
    assert not said


def test_another_generator_writes_other_files(tmp_path, monkeypatch):
    """Whatever the text of a kernel may come from is in the key: blocks.py was not, and an edit of it ran the kernels from before."""
    root = Path(cache_.__file__).parents[4]
    folders = [Path(cache_.__file__).parent, Path(algebra.__file__).parent]
    for folder in folders:
        shutil.copytree(folder, tmp_path / folder.relative_to(root), ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache_, "__file__", str(tmp_path / Path(cache_.__file__).relative_to(root)))
    seen = {cache_.generation.__wrapped__(), cache_.generation()}
    assert len(seen) == 1
    written = [folders[0] / f"{name}.py" for name in ("blocks", "source", "lanes", "warp", "product")] + [folders[1] / "algebra.py", folders[1] / "product.py"]
    for file in written:
        with open(tmp_path / file.relative_to(root), "a") as copy:
            copy.write("# another\n")
        seen.add(cache_.generation.__wrapped__())
    assert len(seen) == 1 + len(written)


def test_cache_that_cannot_be_written(tmp_path):
    said = []
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "below", said.append)
    assert cache.source("k", lambda: "one") == cache.source("k", lambda: "one") == "one"
    assert [d.code for d in said] == ["E-DEV-007"] and "FLASHCART_CACHE_DIR" in " ".join(said[0].help)


def test_cache_that_others_may_write(tmp_path):
    tmp_path.chmod(0o777)
    said = []
    assert Cache(tmp_path, said.append).source("k", lambda: "one") == "one"
    assert [d.code for d in said] == ["E-DEV-007"] and not list(tmp_path.iterdir())


def test_many_processes_share_a_cache(tmp_path):
    code = "import sys; from pathlib import Path; from sexpgpu.backends.cuda.cartesian.cache import Cache\n" \
           "c = Cache(Path(sys.argv[1]), print)\nfor i in range(20): assert c.source(str(i), lambda: 'x' * 5000 + str(i)) == 'x' * 5000 + str(i)"
    others = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)]
    for other in others:
        assert other.wait(120) == 0, other.stderr.read()
    assert len(list(tmp_path.iterdir())) == 20


def test_kept_choices(tmp_path):
    cache, p = Cache(tmp_path, print), product((1, 1, 1), 64)["forward"]
    (launch,) = plan(p, Config())
    kept = Kept(cache, "a GPU")
    assert kept.tile(p, launch) is None
    kept.keep([(kept.key(p, launch), [2, 32, 2]), (kept.key(p, "walk"), ["receiver"])])
    again = Kept(cache, "a GPU")
    assert again.tile(p, launch) == Tile(2, 32, 2) and again.walk(p) == "receiver"
    kept.keep([(kept.key(p, launch), [4, 2, 1, 2, 168, 1])])
    assert Kept(cache, "a GPU").tile(p, launch) == lanes.Lanes(4, 2, 1, 2, 168, 1)
    assert Kept(cache, "another").tile(p, launch) is None
    for wrong in ([0, 32, 2], [2, 32, 0], [4, 2, 0, 2, 168, 1], [2, 32], ["2", 32, 2], "2"):
        kept.keep([(kept.key(p, launch), wrong)])
        assert Kept(cache, "a GPU").tile(p, launch) is None
    (tmp_path / "tune.json").write_text("[1]")
    assert Kept(cache, "a GPU").tile(p, launch) is None


@pytest.mark.parametrize("channels", [1, 3, 20, 64, 127, 128])
def test_tiles_are_of_powers_of_two_but_for_lanes_of_an_edge(channels):
    for p in product((1, 1, 1), channels).values():
        for launch in plan(p, Config()):
            for tile in candidates(p, launch):
                assert all(n & (n - 1) == 0 for n in tile[isinstance(tile, lanes.Lanes) : 4])
                if isinstance(tile, lanes.Lanes):
                    assert channels % 2 == 0 and tile.channels < 2 * channels + 8 and tile.lanes <= 32
                else:
                    assert tile.rows * tile.channels >= 32 * tile.warps or tile.warps == 1
            assert default(p, launch) == candidates(p, launch)[0]


def test_lanes_of_an_edge_leave_few_idle():
    """Sixteen where that leaves none idle; else at least eight of what the channels take, as many as leave the fewest."""
    assert [across_of(n) for n in (1, 4, 7, 8, 10, 14, 16, 20, 32, 36, 44, 64)] == [1, 4, 7, 8, 10, 14, 16, 10, 16, 8, 16, 16]


def test_channels_of_a_thread():
    """Four of bf16 where measured to be faster."""
    rank = lambda n, channels, dtype="bf16": wide_of(product((n, n, n), channels, dtype=dtype)["forward"])  # noqa: E731
    assert (rank(1, 20), rank(1, 64), rank(2, 64), rank(1, 20, "f32")) == (4, 4, 4, 2)
    assert (rank(2, 20), rank(1, 18), rank(3, 64), wide_of(product((2, 2, 2), 64, dtype="bf16")["second"])) == (2, 2, 2, 2)


def test_replaced_settings_are_another_plan():
    assert plan(product()["backward"], dataclasses.replace(Config(), scatter="edge"))[0].mode == "edge"

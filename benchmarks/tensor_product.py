"""The equivariant tensor product beside flashcart 0.1.0, cuEquivariance and OpenEquivariance: forward, forward + backward, and with
the double backward. One process; each side is replayed from a CUDA graph, from a cold L2, and sides take turns. One JSON line a
row: times in ms, the bytes floor (operands and results once) and its time at 4.27 TB/s, ratios over ours, errors against flashcart. With a folder $OUT the rows go there, and
a table to stdout.
A side that cannot be imported, or refuses a case, says so in the row. Before its rows every case is checked against float64 on a small
graph, by the same kernels (`check`). `--inner 64`: the weights are hidden rows [edges 64] times a matrix, and the product with it is timed too.

    python benchmarks/tensor_product.py --all --plan          # the cases, and what they are expected to take
    python benchmarks/tensor_product.py --all --compile 15    # their kernels, by 15 processes, into TRITON_CACHE_DIR; needs no GPU (no_gpu.py)
    python benchmarks/tensor_product.py --all                 # every row
    python benchmarks/tensor_product.py --inner 64 --products 3,3,3 --graphs diamond6,random --sides ours,flashcart
    TRITON_INTERPRET=1 python benchmarks/tensor_product.py --dry-run   # tiny sizes on the CPU, no GPU needed

`--tune` measures tiles and walks of our kernels first and keeps the choices in FLASHCART_CACHE_DIR. A side is replayed until it took
`--each` seconds a pass, nine times at least, in turns with the others. The last line counts kernels that were compiled in between.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import no_gpu
import numpy as np
import torch
from no_gpu import Counted

from sexpgpu.backends.cuda import tall
from sexpgpu.backends.cuda.cartesian import join
from sexpgpu.backends.cuda.cartesian.config import config
from sexpgpu.backends.cuda.cartesian.launch import TORCH, Edges, Runner, runner
from sexpgpu.backends.cuda.cartesian.plan import Launch, plan
from sexpgpu.backends.cuda.cartesian.product import Product, passes
from sexpgpu.backends.cuda.cartesian.tune import candidates
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import build, table
from sexpgpu.ops.cartesian.algebra import Path as Ranks
from sexpgpu.ops.cartesian.algebra import paths
from sexpgpu.ops.cartesian.product import Form
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.simplify import simplify

COPY = 4.27e12  # bytes/s of a device copy on the H200, read and written
SIDES = ("ours", "flashcart", "cuequivariance", "openequivariance")
MORE = ("flashcart-edge", "flashcart-compiled")  # with FLASHCART_TP_SCATTER_KERNEL=edge; with torch.compile, which differentiates once
PASSES = ("forward", "with backward", "with double backward")
DIAMOND = 3.567  # Å, the cubic cell


def say(**row: Any) -> None:
    """A row: to $OUT/tensor_product.jsonl where there is such a folder, and what is wrong to stdout as well; else to stdout."""
    folder = os.environ.get("OUT")
    if folder and Path(folder).is_dir():
        with open(Path(folder) / "tensor_product.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    if not folder or row.get("right") is False or {"failed", "skipped", "kernels"} & set(row):
        print(json.dumps(row), flush=True)


# --- graphs ---


def diamond(cells: int, cutoff: float) -> tuple[int, np.ndarray, np.ndarray]:
    """(atoms, senders, receivers) of a periodic crystal of cells³ cubic cells, receivers sorted."""
    corner = np.array([[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0]]) / 4
    base = np.concatenate([corner, corner + 0.25])
    grid = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), -1).reshape(-1, 3)
    places = ((grid[:, None] + base) % cells).reshape(-1, 3) * DIAMOND
    box, reach = cells * DIAMOND, math.ceil(cutoff / (cells * DIAMOND))
    shifts = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 3, indexing="ij"), -1).reshape(-1, 3) * box
    senders, receivers = [], []
    for atom, place in enumerate(places):
        far = np.linalg.norm(places[None] + shifts[:, None] - place, axis=-1)
        found = np.nonzero((far < cutoff) & (far > 1e-6))[1]
        senders.append(np.sort(found))
        receivers.append(np.full(len(found), atom))
    return len(places), np.concatenate(senders), np.concatenate(receivers)


def random_graph(nodes: int, edges: int) -> tuple[int, np.ndarray, np.ndarray]:
    """A symmetric random graph without repeats, receivers sorted."""
    rng = np.random.default_rng(0)
    upper = np.stack(np.triu_indices(nodes, 1))
    pick = upper[:, rng.permutation(upper.shape[1])[: edges // 2]]
    ends = np.concatenate([pick, pick[::-1]], 1)
    ends = ends[:, np.lexsort((ends[0], ends[1]))]
    return nodes, ends[0], ends[1]


@functools.cache
def graph_of(name: str, tiny: bool) -> tuple[int, np.ndarray, np.ndarray]:
    if name == "random":
        return random_graph(8, 24) if tiny else random_graph(2000, 100_000)
    if name == "rows":
        return (6 if tiny else 1000), np.empty(0, np.int64), np.empty(0, np.int64)
    return diamond(1, 2.0) if tiny else diamond(5, float(name.removeprefix("diamond")))


# --- a case and its operands ---


@dataclass(frozen=True)
class Case:
    graph: str
    ranks: tuple[int, int, int]
    channels: int
    dtype: str = "f32"
    inner: int = 0  # columns of the hidden rows whose product the weights are

    @property
    def form(self) -> Form:
        l1, l2, top = self.ranks
        return Form(l1, l2, self.channels, 1 if self.edges else self.channels, paths(l1, l2, top), False)

    @property
    def edges(self) -> bool:
        return self.graph != "rows"

    @property
    def shared(self) -> bool:
        """Products of an atom's features with themselves share their weights, as in the published model."""
        return not self.edges

    @property
    def name(self) -> str:
        l1, l2, top = self.ranks
        return f"{self.graph} {l1},{l2}->{top} c{self.channels}" + (f" of {self.inner}" if self.inner else "")


class Data:
    """Operands a, b, weights (or hidden rows and a matrix), cotangent, and tangents of all but the cotangent and the matrix, of a case on a
    device: random, seeded, [rows …] flat."""

    def __init__(self, case: Case, device: str, tiny: bool, graph: tuple[int, np.ndarray, np.ndarray] | None = None):
        self.case = case
        self.nodes, senders, receivers = graph or graph_of(case.graph, tiny)
        self.rows = len(senders) if case.edges else self.nodes
        self.senders, self.receivers = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (senders, receivers))
        form, generator = case.form, torch.Generator(device=device).manual_seed(0)
        first = (form.first + 1) ** 2 * form.channels_a
        second = (form.second + 1) ** 2 * form.channels_b
        weights, result = len(form.paths) * form.channels, form.resolved * form.channels
        weighted = [(self.rows, case.inner), (case.inner, weights)] if case.inner else [(weights,) if case.shared else (self.rows, weights)]
        shapes = [(self.nodes, first), (self.rows, second), *weighted, (self.nodes, result)]

        def draw(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=generator, device=device, dtype=torch.float32)).to(TORCH[case.dtype])

        self.operands = [draw(s, s[0] ** -0.5 if case.inner and i == 3 else 1.0) for i, s in enumerate(shapes)]
        self.tangents = [draw(s) for s in shapes[:3]]

    def floor(self, what: str) -> int:
        """Bytes of a pass if every operand is read once and every result written once; two i32 indices an edge. Factors are the operands
        where there are some: weights that stand between are not counted."""
        a, b, *rest, c = (x.numel() * x.element_size() for x in self.operands)
        w = sum(rest)
        index = 8 * self.rows if self.case.edges else 0
        forward = a + b + w + c + index
        backward = forward + a + b + w
        second = (a + b + w + c + index) + (a + b + w) + (a + b + w + c)
        return {"forward": forward, "with backward": forward + backward, "with double backward": forward + backward + second}[what]


# --- sides: a function that makes a pass and gives its results ---


Side = Callable[[], list[torch.Tensor]]


def launched(case: Case) -> dict[str, Product]:
    """The products of the three passes; of weights that are a product themselves where that is made inside."""
    return passes(case.form, case.shared, case.edges, case.dtype, 0 if join.INSIDE else case.inner)


def ours(data: Data, run: Runner) -> dict[str, Side]:
    """Indices are sorted before: a step does it once for all of its products."""
    case = data.case
    edges = Edges(data.senders, data.receivers, data.nodes) if case.edges else None
    if edges is not None:
        edges.by("sender")
        edges.by("receiver")
    made = launched(case)
    if case.inner:
        return _of_factors(data, run, made, edges)
    all_ = {"forward": data.operands[:3], "backward": data.operands, "second": [*data.operands, *data.tangents]}

    def steps(*names: str) -> Side:
        return lambda: [t for n in names for t in run.run(made[n], all_[n], edges, data.nodes)]

    return dict(zip(PASSES, (steps("forward"), steps("forward", "backward"), steps("forward", "backward", "second")), strict=True))


def operands_of(data: Data, run: Runner) -> list[Any]:
    """The operands of the second derivative, those of the other passes first; factors packed."""
    if not data.case.inner:
        return [*data.operands, *data.tangents]
    a, b, hidden, matrix, c = data.operands
    va, vb, vh = data.tangents
    if join.INSIDE:
        return [a, b, hidden @ matrix, c, va, vb, vh @ matrix]
    packed = run.packed_matrix(matrix, len(data.case.form.paths))
    return [a, b, (run.packed_rows(hidden), packed), c, va, vb, (run.packed_rows(vh), packed)]


def _of_factors(data: Data, run: Runner, made: dict[str, Product], edges: Edges | None) -> dict[str, Side]:
    """As a compiled graph has it: the weights made by a product of their own, or inside from factors packed once; their gradient in memory, and the
    products behind it."""
    a, b, hidden, matrix, c = data.operands
    count = len(data.case.form.paths)

    def weights(rows: torch.Tensor) -> Any:
        return (run.packed_rows(rows), run.packed_matrix(matrix, count)) if not join.INSIDE else product_of((rows, matrix))

    def forward() -> tuple[list[torch.Tensor], Any]:
        w = weights(hidden)
        return run.run(made["forward"], [a, b, w], edges, data.nodes), w

    def backward() -> tuple[list[torch.Tensor], Any, torch.Tensor]:
        out, w = forward()
        ga, gb, gw = run.run(made["backward"], [a, b, w, c], edges, data.nodes)
        gw = gw.reshape(len(hidden), -1)
        return [*out, ga, gb, product_of((gw, matrix.T)), product_of((hidden.T, gw))], w, gw

    def double() -> list[torch.Tensor]:
        found, w, gw = backward()
        va, vb, vh = data.tangents
        dc, da, db, dw = run.run(made["second"], [a, b, w, c, va, vb, weights(vh)], edges, data.nodes)
        dw = dw.reshape(len(hidden), -1)
        return [*found, dc, da, db, product_of((dw, matrix.T)), product_of((hidden.T, dw), (vh.T, gw))]

    return dict(zip(PASSES, (lambda: forward()[0], lambda: backward()[0], double), strict=True))


def product_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Σ x y of what stands around a tensor product, as a compiled graph makes it: `matmul-sum` by our kernels where they are meant for it, else by torch."""
    kind = {torch.float32: "f32", torch.bfloat16: "bf16"}[pairs[0][0].dtype]

    def leaf(x: torch.Tensor) -> Node:
        held = build("input", name=f"m{len(leaves)}", dtype=kind, shape=tuple(x.shape), batch=False)
        leaves.append(held)
        return held

    leaves: list[Node] = []
    nodes = [leaf(x) if x.is_contiguous() else build("transpose", leaf(x.T), permutation=(1, 0)) for pair in pairs for x in pair]
    node = build("matmul-sum", *nodes, scale=1.0, again=1)
    out = pairs[0][0].new_empty(node.type.shape)
    scratch = torch.empty(tall.tall_scratch(node), dtype=torch.uint8, device=out.device)
    tall.matmul_sum(node, [x for pair in pairs for x in pair], {0: out}, scratch)
    return out


def reference(data: Data) -> dict[str, list[torch.Tensor]]:
    """The three passes by the ops' definitions in float64."""
    case, device = data.case, data.operands[0].device
    values: dict[Node, torch.Tensor] = {}

    def leaf(name: str, x: torch.Tensor) -> Node:
        dtype = "f64" if x.dtype.is_floating_point else "i32"
        node = build("input", name=name, dtype=dtype, shape=tuple(x.shape), batch=False)
        values[node] = x.double() if dtype == "f64" else x.to(torch.int32)
        return node

    def shaped(x: torch.Tensor, top: int, channels: int) -> torch.Tensor:
        return x.reshape(len(x), (top + 1) ** 2, channels)

    form = case.form
    given = list(data.operands)
    tangents = list(data.tangents)
    for xs in (given, tangents):
        xs[0], xs[1] = shaped(xs[0], form.first, form.channels_a), shaped(xs[1], form.second, form.channels_b)
    *wrt, c = (leaf(f"x{i}", x) for i, x in enumerate(given))
    weights = build("matmul", wrt[2], wrt[3]) if case.inner else wrt[2]
    ends = (leaf("senders", data.senders), leaf("receivers", data.receivers)) if case.edges else ()
    out = build("tensor-product", wrt[0], wrt[1], weights, *ends, **{"l-max": form.top})

    def dot(x: Node, y: Node) -> Node:
        return build("sum", build("*", x, y))

    first = grad(dot(c, out), wrt)
    pushed = [dot(leaf(f"v{i}", t), g) for i, (t, g) in enumerate(zip(tangents, first[:3], strict=True))]
    second = grad(build("+", build("+", pushed[0], pushed[1]), pushed[2]), [c, *wrt])
    results = simplify({str(i): n for i, n in enumerate([out, *first, *second])})
    with torch.device(device):
        for node in postorder(results.values()):
            if node not in values:
                values[node] = table()[node.op].reference(torch, node, [values[x] for x in node.inputs])
    found = [values[n] for n in results.values()]
    return dict(zip(PASSES, (found[:1], found[: 1 + len(wrt)], found), strict=True))


def check(case: Case, run: Runner, device: str, tiny: bool) -> None:
    """The kernels of a case on a small graph beside float64: errors over the largest entry of each result."""
    few = (6, 24) if tiny else (48, 1500)
    nodes, senders, receivers = random_graph(*few) if case.edges else (few[0], *2 * [np.empty(0, np.int64)])
    data = Data(case, device, tiny, (nodes, senders, receivers))
    expected, got = reference(data)[PASSES[2]], ours(data, run)[PASSES[2]]()
    errors = [error(a, b) for a, b in zip(got, expected, strict=True)]
    bound = 0.03 if case.dtype == "bf16" else 2e-5
    say(name=f"check {case.name} {case.dtype}", errors=errors, worst=max(errors), bound=bound, right=max(errors) <= bound)


def by_autograd(function: Callable[..., torch.Tensor], data: Data) -> dict[str, Side]:
    """The three passes of a differentiable function of (a, b, w); where w has factors they are multiplied first, without TF32."""
    *wrt, c = (x.clone().requires_grad_() for x in data.operands)

    def value() -> torch.Tensor:
        a, b, *weights = wrt
        return function(a, b, weights[0] @ weights[1] if len(weights) > 1 else weights[0])

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [value()]

    def backward() -> list[torch.Tensor]:
        out = value()
        return [out.detach(), *torch.autograd.grad(out, wrt, c)]

    def double() -> list[torch.Tensor]:
        out = value()
        first = torch.autograd.grad(out, wrt, c, create_graph=True)
        return [out.detach(), *(g.detach() for g in first), *torch.autograd.grad(first[:3], (c, *wrt), data.tangents)]

    return dict(zip(PASSES, (forward, backward, double), strict=True))


def flashcart(data: Data, tiny: bool, compiled: bool = False) -> dict[str, Side]:
    """As its own users run it: its Triton kernels (its PyTorch path in a dry run), tuned."""
    from flashcart import o3

    no_gpu.narrow()
    if torch.cuda.is_available():
        no_gpu.tune_quickly(5, 20)

    case, form = data.case, data.case.form
    module = o3.TensorProduct(*case.ranks, form.channels_a, form.channels_b, use_triton=not tiny, shared_weights=case.shared)
    ends = (data.receivers, data.senders) if case.edges else ()
    found = by_autograd(lambda a, b, w: called(a, b, w, *ends), data)
    called = module
    if compiled:
        found[PASSES[1]]()
        no_gpu.settle()  # the kernels that its tuners choose
        torch._dynamo.reset()  # else the eighth case is refused
        called = torch.compile(module, fullgraph=True, dynamic=False)
    return found


def flashcart_edge(data: Data, tiny: bool) -> dict[str, Side]:
    """With FLASHCART_TP_SCATTER_KERNEL=edge, which it reads when it is imported: an edge a program, sums by atomics."""
    from flashcart.o3 import _tensor_product

    def by_edge(work: Side) -> Side:
        def run() -> list[torch.Tensor]:
            _tensor_product.TUNING.scatter_kernel = "edge"
            try:
                return work()
            finally:
                _tensor_product.TUNING.scatter_kernel = "csr"

        return run

    return {what: by_edge(work) for what, work in flashcart(data, tiny).items()}


def _parity(rank: int) -> str:
    return f"{rank}{'oe'[rank % 2 == 0]}"


def _irreps(count: int, ranks: range) -> str:
    return " + ".join(f"{count}x{_parity(rank)}" for rank in ranks)


def openequivariance(data: Data, tiny: bool) -> dict[str, Side]:
    """Its convolution with gather and scatter. Its basis is another one, so values are not compared."""
    import openequivariance as oeq

    case, form = data.case, data.case.form
    if not case.edges:
        raise NotImplementedError("no product by rows of as many channels on both sides")
    dtype = {"f32": np.float32, "f64": np.float64}[case.dtype]
    instructions = [(p.first, p.second, n, "uvu", True) for n, p in enumerate(form.paths)]
    problem = oeq.TPProblem(
        oeq.Irreps(_irreps(case.channels, range(form.first + 1))), oeq.Irreps(_irreps(1, range(form.second + 1))),
        oeq.Irreps(" + ".join(f"{case.channels}x{_parity(p.result)}" for p in form.paths)), instructions,
        shared_weights=False, internal_weights=False, irrep_dtype=dtype, weight_dtype=dtype,
    )
    convolution = oeq.TensorProductConv(problem, torch_op=True, deterministic=False)
    return by_autograd(lambda a, b, w: convolution.forward(a, b, w, data.receivers, data.senders), data)


def cuequivariance(data: Data, tiny: bool) -> dict[str, Side]:
    """Its uniform one-dimensional kernel with gather and scatter. Its normalisation differs, so values are not compared."""
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    case, form = data.case, data.case.form
    if not case.edges:
        raise NotImplementedError("no product by rows of as many channels on both sides")
    left, right = (cue.Irreps("O3", _irreps(n, range(top + 1))) for n, top in ((case.channels, form.first), (1, form.second)))
    kept = [ir for _, ir in cue.Irreps("O3", _irreps(1, range(form.top + 1)))]
    polynomial = cue.descriptors.channelwise_tensor_product(left, right, kept).flatten_coefficient_modes().squeeze_modes().polynomial
    product = cuet.SegmentedPolynomial(polynomial, method="naive" if tiny else "uniform_1d", math_dtype=TORCH[case.dtype]).to(data.operands[0].device)
    rows = torch.empty(data.nodes, 1, device=data.operands[0].device)
    return by_autograd(lambda a, b, w: product([w, a, b], {1: data.senders}, {0: rows}, {0: data.receivers})[0], data)


# --- timing ---


def captured(work: Side) -> Callable[[], None]:
    """The pass as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> None:
        graph.replay()

    replay.kept = kept  # type: ignore[attr-defined]
    return replay


def timed(sides: dict[str, Callable[[], None]], each: float, device: str) -> dict[str, list[float]]:
    """ms of every side, taking turns: as often as the slowest fits into `each` seconds, 9 to 101 times."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    if device == "cpu":
        for name, work in sides.items():
            start = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - start) * 1e3)
        return times
    cold = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    slowest = 1e-4
    for work in sides.values():
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        slowest = max(slowest, time.perf_counter() - start)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in sides}
    for number in range(max(9, min(101, int(each / slowest)))):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            cold.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            sides[name]()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in marks.items()}


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": statistics.median(times), "p10": ordered[len(times) // 10], "p90": ordered[-1 - len(times) // 10]}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.double().abs().max().clamp(min=1e-30)
    return float((got.double().reshape(-1) - expected.double().reshape(-1)).abs().max() / scale)


def makers(names: list[str], run: Runner, tiny: bool) -> dict[str, Callable[[Data], dict[str, Side]]]:
    known: dict[str, Callable[[Data], dict[str, Side]]] = {
        "ours": lambda data: ours(data, run),
        "flashcart": lambda data: flashcart(data, tiny),
        "flashcart-edge": lambda data: flashcart_edge(data, tiny),
        "flashcart-compiled": lambda data: flashcart(data, tiny, True),
        "cuequivariance": lambda data: cuequivariance(data, tiny),
        "openequivariance": lambda data: openequivariance(data, tiny),
    }
    return {name: known[name] for name in names}


def measure(case: Case, given: argparse.Namespace, run: Runner, device: str) -> None:
    """Every row of a case."""
    data = Data(case, device, given.dry_run)
    found: dict[str, dict[str, Side]] = {}
    lacks: dict[str, str] = {}
    for name, make in makers(given.sides, run, given.dry_run).items():
        try:
            found[name] = make(data)
        except Exception as problem:  # a library that refuses a case is recorded
            lacks[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    low = Data(Case(case.graph, case.ranks, case.channels, "bf16", case.inner), device, given.dry_run) if "bf16" in dtypes(case, given) and "ours" in found else None
    if low is not None:
        found["ours bf16"] = ours(low, run)
    for what in given.passes:
        ready: dict[str, Callable[[], None]] = {}
        values: dict[str, list[torch.Tensor]] = {}
        missing = dict(lacks)
        for name, side in found.items():
            try:
                values[name] = [t.detach().clone() for t in side[what]()]
                ready[name] = captured(side[what]) if device == "cuda" else (lambda work=side[what]: (work(), None)[1])  # type: ignore[misc]
            except Exception as problem:
                missing[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
                if device == "cuda":
                    torch.cuda.synchronize()
        times = timed(ready, given.each, device)
        row: dict[str, Any] = {"name": f"{case.name} {what}", "graph": case.graph, "ranks": case.ranks, "channels": case.channels, "inner": case.inner, "pass": what,
                               "nodes": data.nodes, "edges": data.rows if case.edges else 0, "floor_bytes": data.floor(what),
                               "floor_ms": data.floor(what) / COPY * 1e3, "ms": {n: spread(t) for n, t in times.items()}}
        if "ours" in times:
            mine = statistics.median(times["ours"])
            row["over_ours"] = {n: statistics.median(t) / mine for n, t in times.items() if n != "ours"}
            row["floor_share"] = row["floor_ms"] / mine
            if "flashcart" in values:
                row["errors"] = [error(a, b) for a, b in zip(values["ours"], values["flashcart"], strict=True)]
            if "ours bf16" in times:
                row["bf16_over_f32"] = mine / statistics.median(times["ours bf16"])
        if missing:
            row["lacks"] = missing
        say(**row)
        del ready, values
        if device == "cuda":
            torch.cuda.empty_cache()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of what others take over what we take, the least, and the rows in which they are faster; of f32 over bf16 by pass."""
    found: dict[str, Any] = {"rows": sum("over_ours" in r for r in rows)}

    def means(values: list[tuple[str, str, float]]) -> dict[str, Any]:
        mean = lambda xs: round(math.exp(statistics.fmean(map(math.log, xs))), 3) if xs else None  # noqa: E731
        by_pass = {what: mean([v for _, own, v in values if own == what]) for what in PASSES}
        return {"mean": mean([v for _, _, v in values]), **by_pass, "least": round(min(v for *_, v in values), 3), "below 1": [n for n, _, v in values if v < 1]}

    for side in dict.fromkeys(name for r in rows for name in r.get("over_ours", {}) if name != "ours bf16"):
        found[side] = means([(r["name"], r["pass"], r["over_ours"][side]) for r in rows if side in r.get("over_ours", {})])
    low = [(r["name"], r["pass"], r["bf16_over_f32"]) for r in rows if "bf16_over_f32" in r]
    return found | ({"f32 over bf16": means(low)} if low else {})


def as_table(rows: list[dict[str, Any]]) -> str:
    """A line a case: the worst error beside float64, and of each pass our ms, its share of the floor's time, and how much longer each other side takes."""
    short = {"flashcart": "f", "flashcart-edge": "e", "flashcart-compiled": "t", "cuequivariance": "c", "openequivariance": "o"}
    worst = {r["name"].removeprefix("check ").removesuffix(" f32"): r["worst"] for r in rows if "worst" in r}
    lines: dict[str, list[str]] = {}
    for r in rows:
        mine = r.get("ms", {}).get("ours")
        if mine is None:
            continue
        others = [f"{short[n]}{v:.2f}" for n, v in r["over_ours"].items() if n in short] + ([f"b{r['bf16_over_f32']:.2f}"] if "bf16_over_f32" in r else [])
        case = r["name"].removesuffix(" " + r["pass"])
        lines.setdefault(case, [f"{case:22} {worst.get(case, math.nan):.0e}"]).append(
            f"{mine['median']:.3f} {100 * r['floor_share']:.0f}% {' '.join(others)}")
    return "\n".join(" | ".join(line) for line in lines.values())


# --- tuning ---


def tune(case: Case, run: Runner, device: str, tiny: bool) -> None:
    """Measures tiles of each launch, and both walks of the gradients; keeps the best on disk."""
    data = Data(case, device, tiny)
    edges = Edges(data.senders, data.receivers, data.nodes) if case.edges else None
    operands = operands_of(data, run)
    chosen: list[tuple[str, list]] = []
    for product in launched(case).values():
        walks: dict[str, float] = {}
        for walk in ("sender", "receiver") if case.edges and len(product.outputs) > 1 else ("sender",):
            launches = plan(product, run.config, walk)
            total = 0.0
            for launch in launches:
                best = _best_tile(product, launch, launches, run, operands, edges, data, device)
                total += best[0]
                chosen.append((run.kept.key(product, launch), list(best[1])))
            walks[walk] = total
        walk = min(walks, key=walks.__getitem__)
        if len(walks) > 1:
            chosen.append((run.kept.key(product, "walk"), [walk]))
        say(name=f"tune {case.name}", outputs=[o.target for o in product.outputs], walks=walks)
    run.kept.keep(chosen)


def _best_tile(product: Product, launch: Launch, launches: list[Launch], run: Runner, operands: list[Any], edges: Edges | None, data: Data, device: str) -> Any:
    """(ms, tile) of the fastest tile of one launch; the other launches are left out of the time."""
    part, alone = single(product, launch, run)
    found = []
    for tile in candidates(product, launch)[: 2 if device == "cpu" else None]:
        run.tiles[part, alone] = tile
        work = lambda: run.run(part, operands[: len(part.slots)], edges, data.nodes, [alone])  # noqa: E731
        try:
            ready = captured(work) if device == "cuda" else work
            found.append((statistics.median(timed({"tile": ready}, 0.0, device)["tile"]), tile))
        except Exception as problem:  # a tile that needs more registers than there are
            say(name="tile refused", tile=tile, why=str(problem)[:120])
    run.tiles[product, launch] = min(found)[1]
    return min(found)


# --- the rows ---


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """The rows chosen, `rows` last."""
    for graph in given.graphs:
        products = [(1, 1, 1) if given.dry_run else (3, 3, 3)] if graph == "rows" else given.products
        for channels in given.channels:
            for ranks in products:
                yield Case(graph, ranks, channels, "f32", given.inner if graph != "rows" else 0)


def dtypes(case: Case, given: argparse.Namespace) -> tuple[str, ...]:
    """Those of ours."""
    return ("f32", "bf16") if given.bf16 and max(case.ranks) <= 2 else ("f32",)


EVERY = {"graphs": "diamond6,diamond5,random,rows", "products": "0,3,3;1,3,3;2,3,3;1,1,1;2,2,2;3,3,3", "channels": "20,64,128"}
FEW = {"graphs": "diamond6,random,rows", "products": "0,3,3;2,3,3;3,3,3", "channels": "64"}
TINY = {"graphs": "diamond1,random,rows", "products": "1,1,1", "channels": "3"}


def chosen(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", help=f"of {EVERY['graphs']}")
    parser.add_argument("--products", help=f"ranks, of {EVERY['products']}")
    parser.add_argument("--channels", help="of 20,64,128")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--each", type=float, default=0.1, help="seconds of replays of a side in a pass")
    parser.add_argument("--inner", type=int, default=0, help="the weights are hidden rows of so many columns times a matrix, which is timed too")
    parser.add_argument("--inside", action="store_true", help="those weights are made inside the product, and never reach memory")
    parser.add_argument("--bf16", action="store_true", help="ours with bf16 storage too, for ranks up to 2")
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--part", default="0/1", help="each n-th case, as 0/4")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="only compile the kernels, by so many processes; needs no GPU")
    parser.add_argument("--plan", action="store_true", help="only say which cases there are, and what they are expected to take")
    parser.add_argument("--seconds", type=float, default=420, help="no new case after so many")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU under TRITON_INTERPRET=1")
    given = parser.parse_args(arguments)
    defaults = EVERY if given.all else TINY if given.dry_run else FEW
    for key, value in defaults.items():
        if getattr(given, key) is None:
            setattr(given, key, value)
    given.graphs = given.graphs.split(",")
    given.products = [Ranks(*map(int, p.split(","))) for p in given.products.split(";")]
    given.channels = [int(c) for c in given.channels.split(",")]
    given.passes, given.sides = given.passes.split(","), given.sides.split(",")
    for name, allowed in (("passes", PASSES), ("sides", (*SIDES, *MORE)), ("graphs", ("diamond6", "diamond5", "diamond1", "random", "rows"))):
        wrong = [x for x in getattr(given, name) if x not in allowed]
        if wrong:
            parser.error(f"--{name}: {', '.join(wrong)} is none of {', '.join(allowed)}")
    return given


def tune_it(case: Case, given: argparse.Namespace, run: Runner, device: str) -> None:
    if given.tune:
        tune(case, run, device, given.dry_run)


def check_it(case: Case, given: argparse.Namespace, run: Runner, device: str) -> None:
    for dtype in dtypes(case, given) if "ours" in given.sides else ():
        check(Case(case.graph, case.ranks, case.channels, dtype, case.inner), run, device, given.dry_run)


def measure_it(case: Case, given: argparse.Namespace, run: Runner, device: str) -> None:
    measure(case, given, run, device)


# --- kernels compiled where there may be no GPU ---

Task = tuple[Case, str, str, int]  # a case, a side, a pass, and which of its kernels


def alike(case: Case) -> tuple[int, np.ndarray, np.ndarray]:
    """A small graph whose kernels are those of the case's graph: as many edges a node, which flashcart compiles in, and walks beside a node's first."""
    if case.graph == "random":
        return random_graph(56, 2800)
    return (24, *2 * [np.empty(0, np.int64)]) if case.graph == "rows" else diamond(1, float(case.graph.removeprefix("diamond")))


def tasks(chosen: list[Case], given: argparse.Namespace) -> list[Task]:
    """A task for each kernel that may be slow to compile, the slowest first. Kernels of ours are the same for every graph."""
    found: list[tuple[float, Task]] = []
    for case in chosen:
        first = case.graph in (given.graphs[0], "rows")
        size = len(case.form.paths) * (1 + sum(case.ranks))
        for dtype in dtypes(case, given) if "ours" in given.sides and first else ():
            low = Case(case.graph, case.ranks, case.channels, dtype, case.inner)
            for what, product in launched(low).items():
                count = len(plan(product, config()))
                found += [(size * {"forward": 1, "backward": 6, "second": 5}[what], (low, "ours", what, n)) for n in range(count)]
        plain = Case(case.graph, case.ranks, case.channels)
        for side in {"flashcart", "flashcart-edge"} & set(given.sides):
            if side == "flashcart" or (case.edges and first):
                for number in range(6 if side == "flashcart" and case.edges else 13):  # candidates of its tuners, at most
                    found.append((5 * size * (3 if number < 3 else 1), (plain, side, PASSES[2], number)))
    return list(dict.fromkeys(task for _, task in sorted(found, key=lambda one: -one[0])))


def _compiled(task: Task) -> tuple[str, dict[str, float], str]:
    """Compiles a task's kernels."""
    case, side, what, number = task
    counted = Counted()
    problem = ""
    try:
        data = Data(case, "cpu", False, alike(case))
        if side == "ours":
            _one_of_ours(data, what, number, runner(False, "NVIDIA H200"))
        else:
            no_gpu.flashcart()
            with no_gpu.candidate(number):
                makers([side], runner(False, "NVIDIA H200"), False)[side](data)[what]()
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{case.name} {case.dtype} {side} {what} {number}", counted.told(), problem


def _one_of_ours(data: Data, what: str, number: int, run: Runner) -> None:
    """The launch of this number of a pass, and the small kernels beside it."""
    case = data.case
    edges = Edges(data.senders, data.receivers, data.nodes) if case.edges else None
    product = launched(case)[what]
    part, alone = single(product, plan(product, run.config)[number], run)
    run.run(part, operands_of(data, run)[: len(part.slots)], edges, data.nodes, [alone])


def single(product: Product, launch: Launch, run: Runner) -> tuple[Product, Launch]:
    """The outputs of a launch as a product of its own, which has the same kernel."""
    part = product.only([product.outputs[n] for n in launch.outputs])
    alone = Launch(launch.mode, tuple(range(len(launch.outputs))), launch.ranks, launch.firsts)
    run.tiles[part, alone] = run.tile(product, launch)
    return part, alone


A_CASE = {"check": 1.5, "a side": 1.2, "a pass": 0.3}  # s: guesses until a GPU has told


def say_plan(chosen: list[Case], given: argparse.Namespace) -> None:
    """A line a case, and what all are expected to take once their kernels are compiled."""
    total = 0.0
    for case in chosen:
        seconds = A_CASE["check"] + len(given.sides) * (A_CASE["a side"] + len(given.passes) * (A_CASE["a pass"] + given.each)) + 1.5 * len(dtypes(case, given)[1:])
        total += seconds
        say(name=case.name, paths=len(case.form.paths), seconds=round(seconds, 1))
    say(name="plan", cases=len(chosen), rows=len(chosen) * len(given.passes), seconds=round(total), kernels=len(tasks(chosen, given)))


def main(arguments: list[str] | None = None) -> None:
    given = chosen(arguments)
    if given.inside:
        join.INSIDE = 0
    device = "cpu" if given.dry_run else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    number, parts = map(int, given.part.split("/"))
    wanted = list(cases(given))[number::parts]
    if given.plan or given.compile:
        if given.plan:
            say_plan(wanted, given)
        else:
            say(**no_gpu.spread(_compiled, tasks(wanted, given), given.compile, given.seconds))
        return
    run = runner(given.dry_run, "interpreted" if given.dry_run else torch.cuda.get_device_name())
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    counted = Counted()
    original = globals()["say"]

    def kept_say(**row: Any) -> None:
        rows.append(row)
        original(**row)

    globals()["say"] = kept_say
    for case in wanted:
        if time.perf_counter() - started > given.seconds:
            say(name=case.name, skipped=f"after {given.seconds:.0f} s")
            continue
        for work in (tune_it, check_it, measure_it):
            try:
                work(case, given, run, device)
            except Exception as problem:  # the other cases are worth their time still
                say(name=case.name, failed=f"{work.__name__}: {type(problem).__name__}: {str(problem)[:300]}")
    globals()["say"] = original
    if os.environ.get("OUT"):
        print(as_table(rows), flush=True)
    say(name="over ours", settings=str(config()), kernels=counted.told(), seconds=round(time.perf_counter() - started, 1), **summary(rows))


if __name__ == "__main__":
    main()

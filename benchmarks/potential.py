"""A whole potential beside flashcart 0.1.0: energy and forces, and a training step through the forces, at the sizes of the paper.

    python benchmarks/potential.py --flashcart .flashcart                      # every size, as far as --seconds reach
    python benchmarks/potential.py --sizes paper-1.1M --cells 4 --sides ours,graph
    python benchmarks/potential.py --plan                                      # launches and memory as lowered; needs no GPU
    python benchmarks/potential.py --compile 15                                # the kernels of both, into TRITON_CACHE_DIR; needs no GPU
    TRITON_INTERPRET=1 python benchmarks/potential.py --dry-run                # a tiny size on the CPU
    python benchmarks/potential.py --carried --each 60                         # with kernels that were compiled before: what is missing is left out

One process: both sides have the same crystal (diamond, displaced), species, neighbours, parameters (ours, carried over by name) and
labels, float32 with TF32 off, and AdamW. `eager` is flashcart as its users run it, with its Triton kernels; `graph` its whole call or step,
captured by hand into one CUDA graph; `compiled`, where it is asked for (`--sides`), its own `use_compile`: torch.compile of the prediction, with the
kernels that eager's tuners have chosen, which it compiles anew. Values are compared before anything is timed: f32 with f32, on the same device.

A side is measured alone, in a short block, as soon as it stands, and its row is printed; rows of a pass with all sides, in blocks that take
turns, come at the end of a size. On stderr each stage says how long it took, and what Triton found and compiled meanwhile; at `--seconds`, and
where `timeout` ends it, the stack.

`--carried`: flashcart's tuners measure the candidates whose kernels are in Triton's cache; rows say how many were left out. Without it they
compile what is missing one after another: up to 330 kernels a size, each 0.3 to 60 s.

JSON lines: ms, peak memory (MiB beyond what stood before), ratios over ours, errors (largest difference over the largest value), launches of
a step and the bytes that they move as lowered, and the floor: what a step must read and write (parameters, their moments and gradients, the
batch) with the weights of every edge kept out of memory. Times of both at 4.27 TB/s. `--flashcart` names a folder that
`pip install --target .flashcart --no-deps flashcart==0.1.0 lightning lightning-utilities torchmetrics torch-ema matscipy` made.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import no_gpu
import numpy as np
import torch
from no_gpu import Counted

from sexpgpu import compiler
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.cuda.report import graphs, lowered, rows
from sexpgpu.compiler import Selection
from sexpgpu.potential import Potential
from sexpgpu.run.bind import bind
from sexpgpu.run.data.extxyz import edges_of
from sexpgpu.run.measure import measured

PROGRAM = Path(__file__).parent / "programs" / "flashcart.lisp"
SIZES = ("paper-69k", "paper-1.1M", "paper-0.5M", "paper-3.0M")
SIDES = ("ours", "eager", "graph")
MORE = ("compiled",)  # only if named
PASSES = ("energy+forces", "training step")
COPY = 4.27e12  # bytes/s of a device copy on the H200, read and written
DIAMOND = 3.567  # Å, the cubic cell
ELEMENTS = "H C N O F P S Cl Br I".split()
TUNING = {"warmup": 1, "rep": 6}  # ms for a candidate of flashcart's tuner; Triton's 125 would take minutes


def say(**row: Any) -> None:
    """A row: to $OUT/potential.jsonl where there is such a folder, and the most of it to stdout; else to stdout."""
    folder = os.environ.get("OUT")
    if folder and Path(folder).is_dir():
        with open(Path(folder) / "potential.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        row = {key: value for key, value in row.items() if value and key not in ("device", "floor_bytes", "moved_bytes", "library", "losses", "atoms")}
        row = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.4g}"))
    print(json.dumps(row), flush=True)


class Clock:
    """Says on stderr what is done: the seconds since the start and since the word before, and what Triton found and compiled meanwhile."""

    def __init__(self, start: float, counted: Counted, until: float):
        self.start, self.counted, self.until = start, counted, until
        self.last, self.kernels = start, counted.told()

    def note(self, text: str) -> None:
        now, before, self.kernels = time.perf_counter(), self.kernels, self.counted.told()
        more = {key: round(self.kernels[key] - before[key], 2) for key in before}
        kernels = f", kernels: {more['found']} found, {more['compiled']} compiled in {more['compile_s']} s" if more["found"] or more["compiled"] else ""
        print(f"{now - self.start:7.1f} s  {text}: {now - self.last:.1f} s{kernels}", file=sys.stderr, flush=True)
        self.last = now

    @property
    def over(self) -> bool:
        return time.perf_counter() > self.until


# --- the crystal and our side ---


class Crystal:
    """Displaced diamond of cells³ cubic cells with random species, energy and forces, written beside a copy of the program."""

    def __init__(self, folder: Path, cells: int):
        rng = np.random.default_rng(0)
        corner = np.array([[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0]]) / 4
        grid = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
        places = (grid + np.concatenate([corner, corner + 0.25])).reshape(-1, 3) * DIAMOND
        self.positions = np.round(places + rng.normal(0, 0.05, places.shape), 6)
        self.cell = np.eye(3) * cells * DIAMOND
        self.species = rng.integers(0, len(ELEMENTS), len(places)).astype(np.int32)
        self.forces, self.energy = np.round(rng.normal(0, 1, places.shape), 6), float(len(places))
        lattice = " ".join(map(str, self.cell.reshape(-1)))
        lines = [str(len(places)), f'Lattice="{lattice}" Properties=species:S:1:pos:R:3:forces:R:3 energy={self.energy} pbc="T T T"']
        lines += [f"{ELEMENTS[s]} {' '.join(map(str, (*x, *f)))}" for s, x, f in zip(self.species, self.positions, self.forces, strict=True)]
        (folder / "atoms.extxyz").write_text("\n".join(lines) + "\n")
        self.file = folder / PROGRAM.name
        self.file.write_text(PROGRAM.read_text())


class Ours:
    """The program's training step and its potential, on one capacity."""

    def __init__(self, crystal: Crystal, variant: str):
        self.crystal, self.variant = crystal, variant
        self.loaded = compiler.load(str(crystal.file), Selection(variant=variant))
        self.run = measured(next(iter(self.loaded.experiment.runs.values())))
        self.staged = compiler.stages(self.loaded, self.run, "cuda")
        self.count = sum(spec.node.type.size for spec in self.staged.traced.params.values())
        self.cutoff = float(self.run.data.source.options["cutoff"])

    def knob(self, name: str) -> Any:
        return self.loaded.experiment.knobs[name].value

    def facts(self, program: CudaProgram) -> dict[str, Any]:
        """Of the step as lowered: launches, bytes, the plan; and the floor."""
        found = [row for _, compiled in graphs(program) for row in rows(compiled, program.traced.origins)]
        moved = sum(row.bytes for row in found)
        floor = _floor(self, program)
        return {"parameters": self.count, "launches": len(found), "library": sum(r.kind == "library" for r in found), "moved_bytes": moved,
                "moved_ms": moved / COPY * 1e3, "floor_bytes": floor, "floor_ms": floor / COPY * 1e3, "planned_mib": program.plan.total / 2**20}  # fmt: skip

    def lowered(self) -> dict[str, Any]:
        """The facts without a device."""
        start = time.perf_counter()
        program = lowered(self.staged)
        return self.facts(program) | {"lowering_s": round(time.perf_counter() - start, 2)}

    def trainer(self, device: str) -> tuple[CudaProgram, dict[str, np.ndarray]]:
        program = CudaProgram(self.staged, 1, device)
        program.initialise()
        batch = bind(self.run).feeds.train.batch(0)
        return program, {name: np.array(field) for name, field in batch.items()}

    def potential(self) -> Potential:
        return Potential(str(self.crystal.file), None, variant=self.variant, device="cuda")


def _floor(ours: Ours, program: CudaProgram) -> int:
    """Bytes that a step cannot spare: parameters and two moments read and written, gradients written and read, the batch read."""
    fields = sum(n.type.bytes for n in graphs(program)[0][1].leaves if n.op == "input")
    return 4 * ours.count * (2 * 3 + 2) + fields


# --- flashcart ---


def theirs(path: str) -> tuple[str, int | None]:
    """The name of flashcart's parameter for one of ours, and -1 where one of ours holds those of all ranks."""
    words = [w for w in path.split("/") if w not in ("site-energies",)]
    words = words[1:] if words[0].isdigit() else words
    last = words[-1]
    rank = last.removeprefix("weight-")
    if words[0] == "embedding":
        return "embedding.weight", None
    if words[0] == "readout":
        return f"readout.readout_mlp.{2 * int(words[2])}.weight", None
    layer = int(words[1])
    if words[0] == "gate":
        root = f"nonlinearities.{layer}."
        return (f"{root}gate_linear.{last}" if words[2] == "gate" else f"{root}{'value' if words[2] == 'value' else 'output'}_linear.weight.{rank}"), None
    root = f"interactions.{layer}." if words[0] == "interaction" else f"products.{layer}."
    if words[2] == "rank-norm":
        return f"{root}layer_norm.weights", -1
    if words[2] == "radial":
        return f"{root}radial_mlp.{2 * int(words[4])}.weight", None
    if words[2].startswith("path-weight-"):
        return f"{root}path_weights.{words[2][-1]}.delta", None
    if words[0] == "interaction" and words[2] == "skip" and layer == 0:
        return f"{root}skip_projection.weight", None
    if words[2].startswith("mix-"):
        return f"{root}product_linears.{words[2][-1]}.weight.{rank}", None
    name = {"first": "linear_first", "second": "linear_second", "skip": "skip_projection", "final": "final_linear"}[words[2]]
    return f"{root}{name}.weight.{rank}", None


def carry(model: Any, params: dict[str, torch.Tensor]) -> int:
    """Our parameters into flashcart's model; how many numbers. A name or shape that does not fit raises."""
    own, moved = dict(model.named_parameters()), 0
    with torch.no_grad():
        for path, value in params.items():
            name, every = theirs(path)
            targets = [own[f"{name}.{rank}"] for rank in range(len(value))] if every is not None else [own[name]]
            for target, part in zip(targets, value if every is not None else [value], strict=True):
                flat = part.T if target.dim() == 2 and not name.startswith("embedding") else part
                target.copy_(flat.reshape(target.shape) if flat.numel() == target.numel() else flat)
                moved += target.numel()
    return moved


class Steps:
    """Our steps as a run makes them: one is sent while the one before is still on the device."""

    def __init__(self, program: CudaProgram, batch: dict[str, np.ndarray]):
        self.program, self.batch = program, batch
        self.before: Any = None

    def __call__(self) -> None:
        flight = self.program.launch([self.batch], False)
        if self.before is not None:
            self.program.collect(self.before)
        self.before = flight


class Theirs:
    """flashcart's potential with our parameters (its own if None), on the crystal's edges as we find them. kernels: of Triton; cut: edges left out."""

    def __init__(self, ours: Ours, params: dict[str, torch.Tensor] | None, device: str, capturable: bool, kernels: bool | None = None, cut: int = 0, compiled: bool = False):
        from flashcart.model.flashcart import FlashCartPotential

        no_gpu.narrow()
        self.how = {"use_compile": True} if compiled else {}
        crystal, knob = ours.crystal, ours.knob
        self.model = FlashCartPotential(
            elements=ELEMENTS, r_max=ours.cutoff, n_hidden_feats=int(knob("channels")), l_max_hidden_feats=int(knob("l-hidden")),
            l_max_edge_attrs=int(knob("l-edge")), n_interactions=int(knob("layers")), correlation=int(knob("correlation")),
            path_reduced_product=bool(knob("reduced")), nonlinearity=True, gate_activation="silu", layer_norm=True, radial_mapping="cosine",
            hidden_radial=[int(knob("hidden"))] * 2, hidden_readout=[int(knob("hidden"))] * 2, avg_neighbors=float(knob("neighbours")),
            use_triton=device == "cuda" if kernels is None else kernels,
        ).to(device)  # fmt: skip
        names = self.model.elements if hasattr(self.model, "elements") else ELEMENTS
        assert [str(n) for n in names] == ELEMENTS or all(isinstance(n, int) for n in names), f"flashcart orders elements as {names}"
        if params is not None:
            moved, count = carry(self.model, params), sum(p.numel() for p in self.model.parameters())
            assert moved == count == ours.count, f"{moved} of {count} parameters carried, and we have {ours.count}"
        receivers, senders, offsets = (x[: len(x) - cut] if cut else x for x in edges_of(crystal.positions, crystal.cell, (True,) * 3, ours.cutoff))
        to = lambda array, dtype: torch.tensor(np.asarray(array), dtype=dtype, device=device)  # noqa: E731
        atoms = len(crystal.species)
        self.data = _Graph({
            "positions": to(crystal.positions, torch.float32), "edge_index": to(np.stack([receivers, senders]), torch.int64),
            "shifts": to(offsets, torch.float32), "cell": torch.eye(3, device=device)[None], "batch": torch.zeros(atoms, dtype=torch.int64, device=device),
            "n_atoms": torch.tensor([atoms], device=device), "atom_types": to(crystal.species, torch.int64), "use_shifts": True,
        })  # fmt: skip
        self.atoms, self.edges = atoms, len(receivers)
        self.energy, self.forces = to([crystal.energy], torch.float32), to(crystal.forces, torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0, fused=device == "cuda", capturable=capturable)

    def infer(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model.predict(self.data, compute_forces=True, **self.how)
        return out["energy"], out["forces"]

    def train(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        out = self.model.predict(self.data, compute_forces=True, create_graph=True, **self.how)
        loss = ((out["energy"] - self.energy) / self.atoms).square().mean() + (out["forces"] - self.forces).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class _Graph:
    """What flashcart's `predict` takes: something that gives its fields."""

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


def captured(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The call as a CUDA graph, and what it gives."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    return graph.replay, kept


# --- measuring ---


def peaked(build: Callable[[], Any], device: str) -> tuple[Any, float | None]:
    """What `build` gives, and the MiB that it held at most beyond what stood before."""
    if device != "cuda":
        return build(), None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = build()
    torch.cuda.synchronize()
    return out, (torch.cuda.max_memory_allocated() - before) / 2**20


def timed(sides: dict[str, Callable[[], Any]], seconds: float, device: str, rounds: int = 5) -> dict[str, list[float]]:
    """ms a call, in blocks that take turns."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    counts = {}
    for name, work in sides.items():
        work()
        wait()
        start = time.perf_counter()
        work()
        wait()
        counts[name] = max(1, min(200, int(seconds / rounds / len(sides) / max(1e-4, time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            start = time.perf_counter()
            for _ in range(counts[name]):
                sides[name]()
            wait()
            times[name].append((time.perf_counter() - start) * 1e3 / counts[name])
    return times


def error(got: Any, expected: Any) -> float:
    a, b = (np.asarray(torch.as_tensor(x).detach().cpu(), np.float64) for x in (got, expected))
    return float(np.abs(a - b).max() / max(1e-30, np.abs(b).max()))


def of_times(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


class Size:
    """One size. A side is built, its values compared with ours, and it is measured alone; each is said as soon as it is known. `rows`: all sides in turns."""

    def __init__(self, crystal: Crystal, variant: str, device: str, block: float, clock: Clock, tuners: no_gpu.Tuners | None):
        self.variant, self.device, self.block, self.clock, self.tuners = variant, device, block, clock, tuners
        self.work: dict[str, dict[str, Callable[[], Any]]] = {what: {} for what in PASSES}
        self.peaks: dict[str, dict[str, float]] = {what: {} for what in PASSES}
        self.errors: dict[str, dict[str, Any]] = {what: {} for what in PASSES}
        self.lacks: dict[str, str] = {}
        self.losses: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.params: dict[str, torch.Tensor] | None = None
        self.found: dict[str, np.ndarray] = {}
        self.kept: list[Any] = []  # what owns memory that a graph reads and writes when it is replayed
        self.base: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else device, "atoms": len(crystal.species)}
        self.ours = Ours(crystal, variant)
        clock.note(f"{variant}: read, differentiated")

    def measure(self, chosen: list[str]) -> None:
        """Builds ours, and then every side that is begun in time."""
        self.attempt("ours", PASSES[0], self._energies)
        self.attempt("ours", PASSES[1], self._steps)
        for side in (s for s in SIDES[1:] + MORE if s in chosen):
            if side == "compiled":
                self.attempt(side, "choices of its tuners", self._settle)
            model = self.attempt(side, "model", lambda side=side: Theirs(self.ours, self.params, self.device, side == "graph", compiled=side == "compiled"))
            if model is not None:
                self.kept.append(model)
                self.base["edges"] = model.edges
                self.attempt(side, PASSES[0], lambda model=model, side=side: self._their_energies(side, model))
                self.attempt(side, PASSES[1], lambda model=model, side=side: self._their_steps(side, model))

    def attempt(self, side: str, what: str, build: Callable[[], Any], late: bool = False) -> Any:
        """What `build` gives, or None: no time was left (and it is not done `late`), or it failed, and the other sides go on."""
        if self.clock.over and not late:
            self.lacks[f"{side} {what}"] = "no time was left"
            return None
        try:
            found = build()
        except Exception as problem:  # noqa: BLE001
            self.lacks[f"{side} {what}"] = f"{type(problem).__name__}: {problem}"[:300]
            self.clock.note(f"{self.variant} {side} {what} FAILED, {self.lacks[f'{side} {what}']}")
            return None
        self.clock.note(f"{self.variant} {side} {what}" + (" measured" if what in PASSES else ""))
        return found

    def _stands(self, side: str, what: str, work: Callable[[], Any], peak: float | None) -> None:
        """Measures a side alone, and says its row."""
        self.clock.note(f"{self.variant} {side} {what} built")
        if peak is not None:
            self.peaks[what][side] = peak
        self.work[what][side] = work
        times = timed({side: work}, self.block / 12, self.device, 3)[side]
        say(name=f"{self.variant} {what}, {side} alone", ms=of_times(times), peak_mib=peak, errors=self.errors[what].get(side), tuned=self.tuned)

    @property
    def tuned(self) -> dict[str, int] | None:
        return None if self.tuners is None else dict(self.tuners.told)

    def _energies(self) -> None:
        def called() -> Any:
            potential = self.ours.potential()
            crystal = self.ours.crystal
            return potential, potential(crystal.species, crystal.positions, crystal.cell, (True,) * 3)

        (potential, self.found), peak = peaked(called, self.device)
        self.kept.append(potential)
        self.params = {path: value for (kind, path), value in potential.known.items() if kind == "param"}
        self._stands("ours", PASSES[0], potential.compiled.replay.run, peak)

    def _steps(self) -> None:
        def trained() -> Any:
            program, batch = self.ours.trainer(self.device)
            self.clock.note(f"{self.variant} ours training step lowered")
            return program, batch, [program.step(batch, False).loss for _ in range(3)]

        (program, batch, self.losses["ours"]), peak = peaked(trained, self.device)
        self.facts = self.ours.facts(program)
        self._stands("ours", PASSES[1], Steps(program, batch), peak)

    def _their_energies(self, side: str, model: Theirs) -> None:
        model.infer()  # tunes: what a tuner takes is no part of the peak
        self._tuned(side)
        (work, value), peak = peaked(lambda: captured(model.infer) if side == "graph" else (model.infer, model.infer()), self.device)
        value = work() or value  # what torch.compile gave is overwritten by the next call
        self.kept.append(value)
        energy, forces = value
        theirs = {"energy": energy.reshape(-1)[0], "forces": forces}
        self.errors[PASSES[0]][side] = {name: error(ours, theirs[name]) for name, ours in self.found.items()}
        self._stands(side, PASSES[0], work, peak)

    def _their_steps(self, side: str, model: Theirs) -> None:
        self.losses[side] = [float(model.train())]
        self._tuned(side)

        def begun() -> Callable[[], Any]:
            self.losses[side] += [float(model.train()) for _ in range(2)]
            return captured(model.train)[0] if side == "graph" else model.train

        work, peak = peaked(begun, self.device)
        if "ours" in self.losses:
            self.errors[PASSES[1]][side] = [abs(a - b) / max(1e-30, abs(b)) for a, b in zip(self.losses["ours"], self.losses[side], strict=True)]
        self._stands(side, PASSES[1], work, peak)

    def _settle(self) -> bool:
        """What torch.compile compiles are the kernels that eager's tuners choose: all of their 169 candidates take it half as long again (decision 66)."""
        model = Theirs(self.ours, self.params, self.device, False)
        model.infer()
        model.train()
        no_gpu.settle()
        return True

    def _tuned(self, side: str) -> None:
        self.clock.note(f"{self.variant} {side} called once" + ("" if self.tuners is None else f", tuners so far {self.tuned}"))

    def rows(self) -> list[dict[str, Any]]:
        """A row of each pass, said as it is made."""
        found = []
        for what in PASSES:
            made = self.attempt("all sides", what, lambda what=what: self._row(what), True) if self.work[what] else None
            if made is not None:
                say(**made)
                found.append(made)
        if self.lacks:
            say(name=f"{self.variant} lacks", lacks=self.lacks)
        return found

    def _row(self, what: str) -> dict[str, Any]:
        times, peaks = timed(self.work[what], self.block / 2, self.device), self.peaks[what]
        row = {"name": f"{self.variant} {what}", "ms": {n: of_times(t) for n, t in times.items()}, **self.base, **self.facts, "peak_mib": peaks,
               "errors": self.errors[what], "tuned": self.tuned} | ({"losses": self.losses} if what == PASSES[1] else {})  # fmt: skip
        if "ours" in times:
            row["over_ours"] = {n: statistics.median(b / a for a, b in zip(times["ours"], t, strict=True)) for n, t in times.items() if n != "ours"}
        if peaks.get("ours"):
            row["peak_share"] = {n: peaks["ours"] / p for n, p in peaks.items() if n != "ours" and p}
        return row


# --- kernels compiled where there may be no GPU ---

Task = tuple[str, str, int, int]  # a size, a side, and which of its kernels: of ours each so-many-th, of flashcart's tuners the candidates of a number
PARTS, CANDIDATES = 6, 13


def tasks(sizes: list[str], sides: list[str], cells: int) -> list[Task]:
    """In the order of the sizes; a size's first candidates first, as tuners need one to begin with."""
    found = []
    for name in sizes:
        found += [(name, "ours", number, cells) for number in range(PARTS)] if "ours" in sides else []
        found += [(name, "flashcart", number, cells) for number in range(CANDIDATES)] if "eager" in sides or "graph" in sides else []
    return found


def compiled(task: Task) -> tuple[str, dict[str, float], str]:
    """Compiles a task's kernels."""
    name, side, number, cells = task
    counted, problem = Counted(), ""
    try:
        if side == "ours":
            for call in _calls(cells, name)[number::PARTS]:
                call()
        else:
            no_gpu.flashcart(cells**3)
            with tempfile.TemporaryDirectory() as folder, no_gpu.candidate(number):
                model = _alike(Path(folder), name, cells)
                model.infer()
                model.train()
    except Exception as error:  # noqa: BLE001 - the other kernels are of use
        problem = f"{type(error).__name__}: {str(error)[:300]}"
    return f"{name} {side} {number}", counted.told(), problem


def _alike(folder: Path, name: str, cells: int) -> Theirs:
    """flashcart's model on eight atoms that has the kernels of one on the whole crystal: it compiles in the edges of an atom, and whether numbers of
    atoms and edges are multiples of 16."""
    crystal = Crystal(folder, cells)
    many = len(edges_of(crystal.positions, crystal.cell, (True,) * 3, 6.0)[0])
    crystal = Crystal(folder, 1)
    few = len(edges_of(crystal.positions, crystal.cell, (True,) * 3, 6.0)[0])
    return Theirs(Ours(crystal, name), None, "cpu", False, True, (few - many) % 16)


def _calls(cells: int, variant: str) -> list[Callable[[], Any]]:
    """A call for each kernel of ours, of a step and of energies and forces. Nothing is computed: graphs are bound to memory that is never touched."""
    bounds = no_gpu.bounds()
    with tempfile.TemporaryDirectory() as folder:
        crystal = Crystal(Path(folder), cells)
        ours = Ours(crystal, variant)
        program, batch = ours.trainer("cpu")
        program.step(batch, False)
        ours.potential()(crystal.species, crystal.positions, crystal.cell, (True,) * 3)
    return no_gpu.calls(bounds)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the rows: how much longer flashcart takes, and our share of its memory."""
    out: dict[str, Any] = {"name": "flashcart over ours"}
    for key, bar in (("over_ours", {"eager": 4.0, "graph": 1.5}), ("peak_share", {"eager": 0.5, "graph": 0.5})):
        for side, limit in bar.items():
            values = [r[key][side] for r in found if side in r.get(key, {})]
            if values:
                mean = math.exp(statistics.fmean(map(math.log, values)))
                out[f"{key} {side}"] = {"geometric_mean": mean, "least": min(values), "most": max(values), "bar": limit,
                                        "holds": mean >= limit if key == "over_ours" else max(values) <= limit}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--cells", type=int, default=5, help="cubic cells on each axis, eight atoms each: 5 is 1,000 atoms, 158,000 edges")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing after these, and tell the stack")
    parser.add_argument("--each", type=float, default=120, help="seconds of a size after which none of its sides is begun, and a tuner gives up")
    parser.add_argument("--carried", action="store_true", help="flashcart's tuners leave out what Triton does not find in its cache")
    parser.add_argument("--block", type=float, default=6, help="seconds of timing for a size")
    parser.add_argument("--flashcart", help="a folder with flashcart and what it needs")
    parser.add_argument("--plan", action="store_true", help="only what the step is lowered to")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="only compile the kernels, by so many processes; needs no GPU")
    parser.add_argument("--dry-run", action="store_true", help="a tiny size on the CPU, under TRITON_INTERPRET=1")
    options = parser.parse_args()
    if options.flashcart:
        sys.path.append(options.flashcart)
    if options.compile:
        say(**no_gpu.spread(compiled, tasks(options.sizes.split(","), options.sides.split(","), options.cells), options.compile, options.seconds))
        return
    device, start = "cpu" if options.dry_run or options.plan else "cuda", time.perf_counter()
    faulthandler.dump_traceback_later(options.seconds)
    faulthandler.register(signal.SIGTERM, chain=True)
    counted, tuners = Counted(), None
    clock = Clock(start, counted, start)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.zeros(1, device="cuda")
        tuners = no_gpu.Tuners(**TUNING, carried=options.carried, over=lambda: clock.over)
        clock.note("the device")
    found: list[dict[str, Any]] = []
    for variant in ["tiny"] if options.dry_run else options.sizes.split(","):
        clock.until = min(start + options.seconds, time.perf_counter() + options.each)
        if clock.over:
            say(name=variant, lacks="no time was left: --sizes " + variant)
            continue
        if tuners is not None:
            tuners.told.clear()
        with tempfile.TemporaryDirectory() as folder:
            crystal, made = Crystal(Path(folder), 1 if options.dry_run else options.cells), None
            if options.plan:
                say(name=f"{variant} as lowered", **Ours(crystal, variant).lowered())
                continue
            try:
                made = Size(crystal, variant, device, options.block, clock, tuners)
                made.measure(options.sides.split(","))
                found += made.rows()
            except Exception as problem:  # noqa: BLE001 - the next size may do
                say(name=variant, lacks=f"{type(problem).__name__}: {problem}"[:500])
        del made
        if device == "cuda":
            torch.cuda.empty_cache()
    if device == "cuda":
        say(**summary(found), kernels=counted.told(), seconds=round(time.perf_counter() - start, 1))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()

"""What a run takes of a device's memory, whether that fits, and what would make it fit.

The plan of the interpreter is its own (`backends.interpreter.plan`); that of `cuda` is made from the launches alone: a few percent beside the
exact one, which `explain --after plan` and the start of a run have. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sexpgpu.backends.interpreter.plan import run_plan
from sexpgpu.backends.interpreter.report import parts_line, size
from sexpgpu.backends.leaves import schema
from sexpgpu.compiler import Loaded, Run, stages
from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.experiment.report import Large, Memory
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.explain.lowering import Lowered, lowered
from sexpgpu.ir import DTYPES, Node, Origins, postorder
from sexpgpu.passes.schedule.fuse import Call

LARGEST = 5  # tensors shown
#: bytes that a process takes on a GPU beside its tensors, as `backends.cuda.memory` has them: workspaces of products, and the rest
PRODUCTS, PROCESS = 64 << 20, 144 << 20
TRIES = 6  # plans of other batches that a question may cost


def cpu_memory(staged: Any, threads: int = 1, ranks: int = 1) -> Memory:
    """The plan of a run on the interpreter."""
    plan = run_plan(staged, threads, ranks)
    origins = staged.traced.origins
    found = [_large(value, count, origins) for count, value in plan.held.values]
    if plan.held.scratch:
        found.append(Large(plan.held.scratch, f"inside a call of {plan.held.call}", "", ""))
    found.sort(key=lambda t: -t.bytes)
    return Memory(plan.kept, plan.batch, plan.step, tuple(found[:LARGEST]), plan.evaluations)


def gpu_memory(staged: Any, graphs: Iterable[Lowered], ranks: int = 1) -> Memory:
    """The plan of a run on `cuda`, from its launches."""
    run, traced = staged.run, staged.traced
    graphs = list(graphs)
    calls = {launch.node.op for graph in graphs for launch in graph.schedule.launches if isinstance(launch, Call)}
    products = any(op.startswith(("matmul", "linear-cross-entropy", "einsum")) for op in calls)
    copied = graphs[0].copied if run.shard and ranks > 1 else frozenset()
    kept = {**_kept(traced, run, ranks, copied), "libraries and kernels": PROCESS + (PRODUCTS if products else 0)}
    largest = max(graphs, key=lambda graph: graph.arena)
    fields = sum(n.type.bytes for n in postorder(staged.micro(False).values()) if n.op == "input")
    stored = {node for launch in largest.schedule.launches for node in launch.stores}
    order = sorted(stored, key=lambda node: (-node.type.bytes, str(node.type)))
    shown = tuple(_large(node, node.type.bytes, traced.origins) for node in order[:LARGEST])
    return Memory(kept, fields * run.accumulate, largest.arena, shown)


def _kept(traced: TracedRun, run: Run, ranks: int, copied: Collection[str]) -> Mapping[str, int]:
    """copied: paths of parameters whose f32 values are divided over the ranks; their bf16 copies are whole."""
    apart = {f"param/{name}" for name, spec in traced.params.items() if spec.node.attrs["path"] in copied}
    names = {"param": "parameters", "state": "states", "opt": "optimizer", "ema": "averages"}
    found = {"parameters": 0, "states": 0, "gradients": 0, "optimizer": 0, "averages": 0}
    for name, (dtype, shape) in schema(traced, run.precision).items():
        kind, count = name.partition("/")[0], DTYPES[dtype]
        for n in shape:
            count *= n
        found[names[kind]] += -(-count // ranks) if (kind == "opt" and run.shard) or name in apart else count
        if kind == "param" and run.precision == "bf16":  # copies for the matrix products
            found["bf16 copies"] = found.get("bf16 copies", 0) + count // 2
    wide = 2 if run.precision == "f64" else 1
    found["gradients"] = sum(node.type.bytes for node in traced.gradients.values()) * wide
    if run.accumulate > 1:
        found["sums of gradients"] = found["gradients"]
    found["states"] += sum(n.type.bytes for n in traced.state_updates.values()) * run.accumulate * wide
    return {name: count for name, count in found.items() if count}


def _large(value: Any, count: int, origins: Origins) -> Large:
    node = value if isinstance(value, Node) else value[1]
    origin = origins.of(node)
    word = "" if isinstance(value, Node) else f"{value[0] if isinstance(value[0], str) else 'gradient'} of "
    phase = f", {origin.phase}" if origin.phase != "forward" else ""
    where = f" in {origin.paths[0]}" if origin.paths else ""
    return Large(count, f"{word}{node.op}{where}{phase}", str(node.type) if not word else "", origin.spans[0].place if origin.spans else "")


def planned(loaded: Loaded, run: Run, kind: str, threads: int = 1, ranks: int = 1) -> Memory:
    """The plan of a run for the backend `cpu` or `cuda`."""
    staged = stages(loaded, run, kind, ranks)
    return cpu_memory(staged, threads, ranks) if kind == "cpu" else gpu_memory(staged, lowered(staged, ranks), ranks)


# --- does it fit ---


@dataclass(frozen=True)
class Fits:
    """Whether a run fits. need, budget: bytes. batch: the largest one that does, 0 if none; accumulate: the least that does with the
    batch as it is, and what it needs then; remat: what the run needs with `:remat true`, None where that is on already."""

    need: int
    budget: int
    batch: int = 0
    accumulate: int | None = None
    accumulated: int = 0
    remat: int | None = None
    most: str = ""  # the part that the batch does not change, where that is too much

    @property
    def fits(self) -> bool:
        return self.need <= self.budget

    def line(self) -> str:
        """One line."""
        if self.fits:
            return f"fits: {size(self.need)} of {size(self.budget)}"
        return "; ".join([f"does not fit: it takes {size(self.need)}, and {size(self.budget)} are there", *self.advice()])

    def advice(self) -> list[str]:
        """What would make it fit."""
        found = [f"the largest batch that fits is {self.batch}: :batch {self.batch}"] if self.batch else []
        if self.accumulate:
            found.append(f"the same batch in parts: :accumulate {self.accumulate} takes {size(self.accumulated)}")
        if self.remat is not None and self.remat < self.need:
            does = "which fits" if self.remat <= self.budget else "which does not fit either"
            found.append(f":remat true takes {size(self.remat)}, {does}")
        if not self.batch:
            found.append(f"{self.most or 'a batch of 1'} is too much: a narrower model, or a device with more memory")
        return found

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {"fits": self.fits, "need": self.need, "budget": self.budget, "batch": self.batch, "accumulate": self.accumulate,
                "accumulated": self.accumulated, "remat": self.remat}  # fmt: skip


def fits(found: Memory, run: Run, budget: float, plan: Callable[[Run], Memory], ranks: int = 1) -> Fits:
    """Whether a plan fits into a budget; if not, what would, by planning it. `plan`: of another run."""
    limit = int(budget)
    if found.peak <= limit:
        return Fits(found.peak, limit)
    fixed = _fixed(found)
    batch, _ = _largest(found, run, limit, plan, ranks)
    accumulate, accumulated = _parts(run, limit, plan, ranks, batch)
    remat = None
    if not run.remat:
        remat = plan(replace(run, remat=True)).peak
    return Fits(found.peak, limit, batch, accumulate, accumulated, remat, f"what the batch does not change, {size(fixed)}," if fixed > limit else "")


def _fixed(found: Memory) -> int:
    """What the batch does not change."""
    return sum(count for name, count in found.kept.items() if not name.startswith("masks"))


def _with(run: Run, batch: int) -> Run:
    return replace(run, data=replace(run.data, batch=batch))


def _largest(found: Memory, run: Run, limit: int, plan: Callable[[Run], Memory], ranks: int) -> tuple[int, int]:
    """The largest batch that fits, and its bytes; (0, 0) if none does. Sizes grow nearly as a line with the batch: each guess is planned."""
    unit = run.accumulate * ranks
    low, high = (0, 0), (run.data.batch, found.peak)  # the most that is known to fit, the least that is known not to
    if run.data.source.structures:
        return low
    base = (0, _fixed(found))
    for _ in range(TRIES):
        if high[0] - low[0] <= unit:
            break
        below = low if low[0] else base
        slope = (high[1] - below[1]) / max(1, high[0] - below[0])
        guess = below[0] + int((limit - below[1]) / slope) if slope > 0 else (low[0] + high[0]) // 2
        guess = min(max(guess // unit * unit, low[0] + unit), high[0] - unit)
        made = plan(_with(run, guess)).peak
        if made <= limit:
            low = (guess, made)
        else:
            high = (guess, made)
    return low


def _parts(run: Run, limit: int, plan: Callable[[Run], Memory], ranks: int, batch: int) -> tuple[int | None, int]:
    """The least `:accumulate` with which the whole batch fits, and its bytes."""
    each = max(1, batch // (run.accumulate * ranks))  # samples of a micro-batch that fit
    whole = run.data.batch // ranks
    cuts = [n for n in range(run.accumulate + 1, whole + 1) if whole % n == 0 and whole // n <= each] if batch else []
    for cut in cuts[:TRIES]:
        made = plan(replace(run, accumulate=cut)).peak
        if made <= limit:
            return cut, made
    return None, 0


def refuse(found: Fits, memory: Memory, via: str) -> SexpError:
    """E-MEM-002 with the parts of the plan, the largest tensors, and what would fit. `via`: who said how much there is."""
    parts = {**memory.kept, "batch": memory.batch, "step": memory.step}
    notes = ["plan: " + parts_line(parts)]
    notes += [f"{size(t.bytes)}  {t.type + '  ' if t.type else ''}{t.what}" + (f", made at {t.place}" if t.place else "") for t in memory.largest]
    return problem("E-MEM-002", f"the run takes {size(found.need)} of memory, and {via} allows {size(found.budget)}", notes=notes, help=found.advice())

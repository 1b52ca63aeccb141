"""What a run takes of the device's memory, known before its first step, and what to do where it is too much (E-MEM-002).

Counted: parameters, gradients, optimizer state, averages, states; the arena of values between launches; what library calls
allocate themselves; one batch. Not counted: the driver's context and torch's own rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.cuda.library import CHUNK
from sexpgpu.diagnostics import fail
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ir import DTYPES, Node, Origins
from sexpgpu.passes.schedule.fuse import Call
from sexpgpu.passes.schedule.memory import Life, plan

GIB = 2**30
WORKSPACE = 64 << 20  # of the vendor's matrix products
NAMED = 5  # tensors that a message names

Schema = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Large:
    """A tensor of the plan: bytes, its type as text, and what makes it, by model path."""

    bytes: int
    type: str
    what: str


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. `samples`: of one micro-batch; `parts`: micro-batches a step."""

    parameters: int
    gradients: int
    optimizer: int
    averages: int
    states: int
    arena: int
    library: int
    batch: int
    samples: int
    parts: int
    largest: tuple[Large, ...]
    exchange: int = 0  # with other ranks
    ranks: int = 1

    @property
    def fixed(self) -> int:
        """What the size of the batch does not change."""
        return self.parameters + self.gradients + self.optimizer + self.averages + self.states + self.exchange + WORKSPACE

    @property
    def total(self) -> int:
        return self.fixed + self.arena + self.library + self.batch

    def fitting(self, budget: int) -> int:
        """Samples of a micro-batch that would fit, if what depends on the batch grows with it; 0: not one."""
        moving = self.arena + self.library + self.batch
        return max(0, int((budget - self.fixed) * self.samples // max(1, moving)))

    def lines(self) -> list[str]:
        """The parts and the largest tensors, a line each."""
        parts = {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer, "averages": self.averages,
            "states": self.states, "exchange": self.exchange, "values between launches": self.arena, "library calls": self.library + WORKSPACE, "batch": self.batch,
        }
        said = ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n)
        return [f"plan: {size(self.total)} ({said})", *(f"{size(t.bytes)}  {t.type}  {t.what}" for t in self.largest)]


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:,.2f} MiB"


def held(schema: Schema, divided: Collection[str] = (), ranks: int = 1) -> dict[str, int]:
    """Bytes of each state on one device; of `divided` ones its share."""
    whole = {name: prod(shape) * DTYPES[dtype] for name, (dtype, shape) in schema.items()}
    return {name: -(-count // ranks) if name in divided else count for name, count in whole.items()}


def memory_plan(traced: TracedRun, schema: Schema, forward: Compiled, update: Compiled, divided: Collection[str] = (), ranks: int = 1, exchange: int = 0) -> MemoryPlan:
    """The plan of a step from its compiled graphs. divided: states of which each of `ranks` has a share; exchange: bytes for sums over
    them."""
    kinds = dict.fromkeys(("param", "opt", "ema", "state"), 0)
    for name, count in held(schema, divided, ranks).items():
        kinds[name.partition("/")[0]] += count
    parts = traced.run.accumulate
    gradients = sum(node.type.bytes for node in traced.gradients.values()) * (2 if traced.run.precision == "f64" else 1)
    states = sum(prod(s.shape) * DTYPES[s.dtype] for n, s in traced.states.items() if n in traced.state_updates)
    if traced.run.precision == "bf16":  # copies for the matrix products
        kinds["param"] += kinds["param"] // 2
    fields = {n.attrs["name"]: n.type.bytes for n in forward.leaves if n.op == "input"}
    return MemoryPlan(
        kinds["param"], gradients * (2 if parts > 1 else 1), kinds["opt"], kinds["ema"], kinds["state"] + states * parts,
        max(forward.plan.size, update.plan.size), max(_library(forward), _library(update)), sum(fields.values()) * parts,
        traced.samples, parts, _largest(traced.origins, schema, forward), exchange, ranks,
    )


def _library(compiled: Compiled) -> int:
    """The most bytes of results that calls allocate at once, and the logits that a head makes in parts."""
    launches = compiled.schedule.launches
    last = {base: i for i, launch in enumerate(launches) for base in launch.reads}
    lives: dict[Node, Life] = {}
    heads = 0
    for i, launch in enumerate(launches):
        if isinstance(launch, Call) and not compiled._planned(launch.node):
            lives[launch.node] = Life(launch.node.type.bytes, i, last.get(launch.node, i))
            if launch.node.op.startswith("linear-cross-entropy"):
                x, weight = launch.node.inputs[:2]
                heads = max(heads, min(CHUNK, x.type.bytes // x.type.shape[-1] * weight.type.shape[1]))
    return plan(lives).peak + heads


def _largest(origins: Origins, schema: Schema, forward: Compiled) -> tuple[Large, ...]:
    found = [Large(prod(s) * DTYPES[d], f"{d}[{' '.join(map(str, s))}]", name) for name, (d, s) in schema.items()]
    for node in {n for launch in forward.schedule.launches for n in launch.stores}:
        paths = origins.of(node).paths
        found.append(Large(node.type.bytes, str(node.type), f"{node.op} in {paths[0]}" if paths else node.op))
    return tuple(sorted(found, key=lambda t: (-t.bytes, t.what))[:NAMED])


def check_state(schema: Schema, budget: int | None, divided: Collection[str] = (), ranks: int = 1) -> None:
    """E-MEM-002 where what the batch does not change is too much already: before any of it is allocated."""
    if budget is None:
        return
    total = sum(count * (2 if name.startswith("param/") else 1) for name, count in held(schema, divided, ranks).items())
    if total > budget:
        largest = sorted(((prod(s) * DTYPES[d], f"{d}[{' '.join(map(str, s))}]", n) for n, (d, s) in schema.items()), reverse=True)[:NAMED]
        fail(
            "E-MEM-002", f"parameters, gradients and optimizer state take {size(total)}, and {size(budget)} are there",
            notes=[f"{size(count)}  {kind}  {name}" for count, kind, name in largest], help="a narrower model, or a device with more memory",
        )


def check_plan(made: MemoryPlan, budget: int | None) -> None:
    """E-MEM-002 where the plan is over the budget, with the batch that would fit."""
    if budget is None or made.total <= budget:
        return
    fitting = made.fitting(budget)
    helps = ["a narrower model, or a device with more memory"]
    if fitting:
        whole = made.samples * made.parts
        cut = next((n for n in range(made.parts + 1, whole + 1) if whole % n == 0 and whole // n <= fitting), None)
        helps = [f"about {fitting} samples fit at once: :batch {fitting * made.parts * made.ranks}"]
        helps += [f"or the same batch in parts: :accumulate {cut}"] if cut else []
    fail("E-MEM-002", f"the program takes {size(made.total)} of device memory, and {size(budget)} are there", notes=made.lines(), help=helps)

"""What a run takes of the device's memory, known before its first step, and what to do where it is too much (E-MEM-002).

Counted: parameters with their bf16 copies, gradients, optimizer state, averages, states; one arena of values between launches, as large as
the largest graph of a run needs it, since graphs never run at once; what library calls take of torch's allocator (`called`); what
libraries, kernels and the allocator take however large a model is (`taken`); one batch, and a large one's stage beside it. Not counted:
the driver's context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from sexpgpu.backends.cuda.cublaslt import WORKSPACE
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.cuda.flight import on_device
from sexpgpu.diagnostics import fail
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ir import DTYPES, Node, Origins
from sexpgpu.passes.schedule.fuse import Call
from sexpgpu.passes.schedule.memory import Life, plan

GIB = 2**30
#: bytes that a process takes beside its tensors, by what takes them. Calibrate by `benchmarks/memory_plan.py`, which measures each
TAKEN = {
    "products": WORKSPACE,  # one workspace, whatever the algorithms
    "torch's products": 32 << 20,  # a handle's workspace on this generation (CUBLAS_WORKSPACE_CONFIG :4096:8), of the stream that captures
    "kernels": 96 << 20,  # code of the libraries that is loaded with its first call, of our kernels and of graphs
    "allocator": 48 << 20,  # segments are whole: of 20 MiB in each pool, of 2 MiB for what is small
}
CONVOLUTION = 64 << 20  # that cuDNN may ask for inside a convolution
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
    again: int = 0  # of `library`, once more while a further graph is made
    taken: int = sum(TAKEN.values())  # however large the model is

    @property
    def fixed(self) -> int:
        """What the size of the batch does not change."""
        return self.parameters + self.gradients + self.optimizer + self.averages + self.states + self.exchange + self.taken

    @property
    def total(self) -> int:
        return self.fixed + self.moving

    @property
    def moving(self) -> int:
        """What grows with the batch."""
        return self.arena + self.library + self.again + self.batch

    def fitting(self, budget: int) -> int:
        """Samples of a micro-batch that would fit, if what depends on the batch grows with it; 0: not one."""
        return max(0, int((budget - self.fixed) * self.samples // max(1, self.moving)))

    def lines(self) -> list[str]:
        """The parts and the largest tensors, a line each."""
        parts = {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer, "averages": self.averages,
            "states": self.states, "exchange": self.exchange, "values between launches": self.arena, "library calls": self.library + self.again, "libraries and kernels": self.taken, "batch": self.batch,
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


def memory_plan(
    traced: TracedRun, schema: Schema, forward: Compiled, update: Compiled, divided: Collection[str] = (), ranks: int = 1, exchange: int = 0,
    others: Iterable[Compiled] = (),
) -> MemoryPlan:  # fmt: skip
    """The plan of a step from its compiled graphs. divided: states of which each of `ranks` has a share; exchange: bytes for sums over
    them; others: further graphs of the run, which have the same arena and are made while the first is there."""
    kinds = dict.fromkeys(("param", "opt", "ema", "state"), 0)
    for name, count in held(schema, divided, ranks).items():
        kinds[name.partition("/")[0]] += count
    parts, others = traced.run.accumulate, list(others)
    gradients = sum(node.type.bytes for node in traced.gradients.values()) * (2 if traced.run.precision == "f64" else 1)
    states = sum(prod(s.shape) * DTYPES[s.dtype] for n, s in traced.states.items() if n in traced.state_updates)
    if traced.run.precision == "bf16":  # copies for the matrix products
        kinds["param"] += sum(count for name, count in held(schema).items() if name.startswith("param/")) // 2
    fields = {n.attrs["name"]: n.type.bytes for n in forward.leaves if n.op == "input"}
    return MemoryPlan(
        kinds["param"], gradients * (2 if parts > 1 else 1), kinds["opt"], kinds["ema"], kinds["state"] + states * parts,
        max(graph.plan.size for graph in (forward, update, *others)), max(called(forward), called(update)), on_device(sum(fields.values()) * parts),
        traced.samples, parts, _largest(traced.origins, schema, forward), exchange, ranks, max(map(called, others), default=0), taken((forward, update)),
    )


def taken(graphs: Iterable[Compiled]) -> int:
    """Bytes that a process takes for libraries, code and the allocator, of those of `TAKEN` that its graphs have a use for."""
    ops = {launch.node.op for graph in graphs for launch in graph.schedule.launches if isinstance(launch, Call)}
    products = any(op.startswith(("matmul", "linear-cross-entropy", "einsum")) for op in ops)
    return sum(count for what, count in TAKEN.items() if products or "products" not in what)


def called(compiled: Compiled) -> int:
    """The most bytes that a graph's library calls hold of torch's allocator at once: results that they allocate, what attention leaves
    for its gradient, and what a call takes for itself."""
    launches = compiled.schedule.launches
    last = {base: i for i, launch in enumerate(launches) for base in launch.reads}
    lives: dict[object, Life] = {}
    left: dict[Node, int] = {}  # attention -> the launch that left something for its gradient
    for i, launch in enumerate(launches):
        if not isinstance(launch, Call):
            continue
        node = launch.node
        if not compiled._planned(launch.stores[0]):
            for stored in launch.stores:
                lives[stored] = Life(stored.type.bytes, i, last.get(stored, i))
        if node.op == "attend":
            left[node] = i
        elif node.op.startswith("attend-grad") and node.inputs[4] in left:
            lives["left", node.inputs[4], left[node.inputs[4]]] = Life(_rows(node.inputs[4]), left[node.inputs[4]], i)
        inside = _inside(node)
        if inside:
            lives["inside", node, i] = Life(inside, i, i)
    return plan(lives).peak


def _rows(attention: Node) -> int:
    """Bytes of a sum in f32 for each row of an attention's scores."""
    return 4 * attention.type.size // max(1, attention.type.shape[-1])


def _inside(node: Node) -> int:
    """Bytes that a call takes for itself while it runs."""
    if node.op.startswith("attend-grad"):
        out = node.inputs[4].type
        if out.dtype not in ("bf16", "f16") or len(node.inputs) > 5 or node.attrs["window"] is not None:
            return 8 * out.bytes  # torch's own way: copies of the operands, the forward pass once more, all three gradients
        return _rows(node.inputs[4]) + (0 if node.op == "attend-grad-packed" else 2 * out.bytes)  # the two gradients beside the one that it gives
    return CONVOLUTION if node.op.startswith("convolve") else 0


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
    gradients = sum(count for name, count in held(schema).items() if name.startswith("param/"))
    total = gradients + sum(held(schema, divided, ranks).values())
    if total > budget:
        largest = sorted(((prod(s) * DTYPES[d], f"{d}[{' '.join(map(str, s))}]", n) for n, (d, s) in schema.items()), reverse=True)[:NAMED]
        fail(
            "E-MEM-002", f"parameters, gradients and optimizer state take {size(total)}, and {size(budget)} are there",
            notes=[f"{size(count)}  {kind}  {name}" for count, kind, name in largest], help="a narrower model, or a device with more memory",
        )


def check_plan(made: MemoryPlan, budget: int | None, remat: Callable[[], MemoryPlan] | None = None) -> None:
    """E-MEM-002 where the plan is over the budget, with the batch that would fit; `remat`: the plan with `:remat true`, where the run
    has none."""
    if budget is None or made.total <= budget:
        return
    fitting = made.fitting(budget)
    helps = ["a narrower model, or a device with more memory"]
    if fitting:
        whole = made.samples * made.parts
        cut = next((n for n in range(made.parts + 1, whole + 1) if whole % n == 0 and whole // n <= fitting), None)
        helps = [f"about {fitting} samples fit at once: :batch {_batch(made, fitting)}"]
        helps += [f"or the same batch in parts: :accumulate {cut}"] if cut else []
    other = remat() if remat is not None else made
    if other.total < made.total:
        more = other.fitting(budget)
        fits = "which fits" if other.total <= budget else "which does not fit either"
        helps.append(f":remat true takes {size(other.total)}, {fits}" + (f"; with it about :batch {_batch(other, more)} does" if more else ""))
    fail("E-MEM-002", f"the program takes {size(made.total)} of device memory, and {size(budget)} are there", notes=made.lines(), help=helps)


def _batch(made: MemoryPlan, fitting: int) -> int:
    return fitting * made.parts * made.ranks

"""What a program of the interpreter holds of memory, step by step, before it runs: its own lines, and what torch takes inside a call.

Exact where torch's allocator is asked once a value; scratch memory of calls is in `SCRATCH`, each with where its size is from
(torch 2.13). Leaves and the places of results are the caller's and count nothing. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from sexpgpu.backends.interpreter.fuse import Step, Value
from sexpgpu.backends.interpreter.lines import Writer, write
from sexpgpu.backends.interpreter.repeat import Repeat, repeating
from sexpgpu.backends.interpreter.scratch import call_of, scratch
from sexpgpu.backends.interpreter.shapes import Strides, bytes_of, contiguous, dense, dtype_of, shape_of, viewed
from sexpgpu.backends.leaves import Schema, flat_update, schema
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ir import DTYPES, Node, postorder
from sexpgpu.ops.leaves import BOUND
from sexpgpu.passes.flatten import Flat
from sexpgpu.passes.schedule.fuse import original

LEAST_AHEAD = 50_000  # elements of a step's masks: fewer are drawn when they are needed (`draws`)
#: ops of one operand whose value lies in its memory
_VIEWS = ("transpose", "broadcast", "slice", "reshape", "squeeze", "expand-dims", "variable", "stop-gradient", "cast")


@dataclass(frozen=True)
class Held:
    """The most bytes that a program holds at once, in which step, what values those are (bytes, value; the largest first), how many of
    them a call takes for itself, and which that is."""

    bytes: int
    step: int
    values: tuple[tuple[int, Value], ...]
    scratch: int
    call: str = ""


@dataclass
class Storages:
    """Storages by the value that they were made for; how many values lie in each; strides of values."""

    storage: dict[Value, Value | None]  # None: the caller's memory
    strides: dict[Value, Strides]
    users: dict[Value, int]
    size: dict[Value, int]
    now: int = 0

    def at(self, value: Value) -> Strides:
        return self.strides.get(value) or contiguous(shape_of(value))

    def make(self, value: Value, strides: Strides | None = None) -> None:
        self.size[value] = bytes_of(value)
        self.now += self.size[value]
        self.lie(value, value, strides)

    def lie(self, value: Value, storage: Value | None, strides: Strides | None) -> None:
        self.storage[value] = storage
        if storage is not None:
            self.users[storage] = self.users.get(storage, 0) + 1
        if strides is not None:
            self.strides[value] = strides

    def drop(self, value: Value) -> None:
        storage = self.storage.get(value)
        if storage is None:
            return
        self.users[storage] -= 1
        if not self.users[storage]:
            self.now -= self.size.pop(storage)


def held(written: Writer, threads: int = 1, drawn: bool = False) -> Held:
    """The peak of a program. `drawn`: its masks were drawn before it began, and lie there until they are read."""
    memory = Storages({}, {}, {}, {})
    if drawn:
        for step in written.steps:
            if step.needs[:1] == ("mask",):
                memory.make(step.outputs[0])
    best = Held(0, 0, (), 0)
    last = len(written.lines) - 1
    for number, line in enumerate(written.lines):
        step = line.step
        inside = scratch(step, memory.at, threads)
        for output in step.outputs:
            place(output, step, line.over, line.home, memory)
        if memory.now + inside > best.bytes or not number:
            values = sorted(((size, value) for value, size in memory.size.items()), key=lambda v: -v[0])
            call = step.needs[2].op if step.needs[:1] == ("reference",) else call_of(step)
            best = Held(memory.now + inside, number, tuple(values), inside, call)
        for output in step.outputs:
            if output not in written.needed:
                memory.drop(output)
        for value in line.dead:
            memory.drop(value)
    copies = sum(bytes_of(value) for value in written.copied)
    if memory.now + copies > best.bytes:
        values = sorted(((size, value) for value, size in memory.size.items()), key=lambda v: -v[0])
        best = Held(memory.now + copies, last, tuple(values), copies)
    return best


def place(output: Value, step: Step, over: int | None, home: bool, memory: Storages) -> None:
    """Where an output lies: over an operand, in the caller's memory, in what it views, or in memory of its own."""
    if output in memory.storage:  # drawn before
        return
    kind = original(output) if isinstance(output, Node) else output
    if home:
        memory.lie(output, None, None)
    elif over is not None:
        operand = step.inputs[over]
        memory.lie(output, memory.storage.get(operand), memory.at(operand))
    elif step.source.startswith("entropy_grad("):
        memory.lie(output, memory.storage.get(step.inputs[0]), None)
    elif isinstance(kind, Node) and kind.op in _VIEWS and len(step.inputs) == 1 and len(step.outputs) == 1:
        operand = step.inputs[0]
        strides = _through(kind, operand, memory.at(operand))
        if strides is None:
            memory.make(output, _layout(kind, step, memory))
        else:
            memory.lie(output, memory.storage.get(operand), strides)
    else:
        memory.make(output, _layout(kind, step, memory))


def _through(output: Node, operand: Value, strides: Strides) -> Strides | None:
    """Strides of a view, None where it is a copy."""
    shape, op = shape_of(operand), output.op
    if op == "transpose":
        return tuple(strides[a] for a in output.attrs["permutation"])
    if op == "broadcast":
        lead = output.type.rank - len(shape)
        return (*[0] * lead, *(0 if n == 1 and m != 1 else s for n, m, s in zip(shape, output.type.shape[lead:], strides, strict=True)))
    if op == "slice":
        axis = output.attrs["axis"]
        return tuple(s * output.attrs["step"] if a == axis else s for a, s in enumerate(strides))
    if op in ("reshape", "squeeze", "expand-dims"):
        return viewed(shape, strides, output.type.shape)
    if op == "cast" and dtype_of(operand) != output.type.dtype:
        return None
    return strides


def _layout(output: Value, step: Step, memory: Storages) -> Strides | None:
    """Strides of a fresh value: heads innermost but one after attention, those of the operands element by element; None: in order."""
    shape = shape_of(output)
    attention = step.source.startswith(("attend(", "attend_grad(")) or (isinstance(output, Node) and output.op == "attend")
    if attention and len(shape) == 4:
        b, h, t, d = shape
        return (t * h * d, d, h * d, 1)
    if isinstance(output, Node) and output.op in _ELEMENTWISE:
        for value in step.inputs:
            if shape_of(value) == shape:
                strides = memory.at(value)
                return strides if dense(shape, strides) else None
    return None


_ELEMENTWISE = frozenset(
    {"+", "-", "*", "/", "max", "min", "where", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "square", "sin", "cos",
     "gelu", "silu", "softplus", "relu-grad", "gelu-grad", "cast"}
)  # fmt: skip


# --- a run ---


@dataclass(frozen=True)
class RunPlan:
    """Bytes of a run on the interpreter. kept: what lies there between steps, by kind; batch: a micro-batch's fields; step: the
    most that a step holds beside them; held: where that is; evaluations: the same of each, its batch included."""

    kept: Mapping[str, int]
    batch: int
    step: int
    held: Held
    evaluations: Mapping[str, int]


def forward_program(results: Mapping[str, Node], traced: TracedRun | None = None) -> Writer:
    """From a batch to the loss and the gradients, which have places of their own; the layers run again that `traced` says."""
    again = None if traced is None else repeating(traced.remat, traced.origins)
    return _program(results, into={n: None for n in results if n.startswith("gradient/")}, again=again)


def update_program(flat: Flat) -> Writer:
    """From gradients to new parameters, over vectors: what `InterpreterProgram` runs."""
    into = {name: flat.homes.get(name) for name in flat.results if name.startswith(("param/", "opt/", "ema/"))}
    first = sorted((n for n in flat.results if n not in into), key=lambda name: name != "gradient-norm")
    return _program(flat.results, into, [*flat.homes.values(), *flat.gradients.values()], first)


def _program(
    results: Mapping[str, Node], into: Mapping[str, Node | None] | None = None, scratch: Iterable[Node] = (), first: Sequence[str] = (), again: Repeat | None = None,
) -> Writer:  # fmt: skip
    order = postorder(results.values())
    leaves = [n for n in order if n.op in BOUND and n.op != "step"] + [n for n in order if n.op == "step"]
    return write(results, leaves, into, scratch, first, again=again)


def run_plan(staged: Any, threads: int = 1, ranks: int = 1) -> RunPlan:
    """The plan of a run from its stages; `ranks`: how many, of which it is one's."""
    run, traced = staged.run, staged.traced
    shares = ranks if run.shard else 1
    flat = flat_update(staged, run.accumulate * ranks, shares)
    kept = _kept(flat, schema(traced, run.precision), run.accumulate)
    update = update_program(flat)
    states = sum(_state_bytes(traced, run.precision)) * run.accumulate  # each micro-batch's new ones, until all are merged
    forwards = [forward_program(staged.micro(False), traced)]
    if traced.metrics or traced.taps:
        forwards.append(forward_program(staged.micro(True), traced))
    masks = [step.outputs[0] for step in forwards[0].steps if step.needs[:1] == ("mask",)]
    early = sum(shape_size(value) for value in masks) >= LEAST_AHEAD
    ahead = sum(bytes_of(value) for value in masks) if early else 0
    peaks = [held(program, threads, early) for program in forwards]
    most = max(peaks, key=lambda found: found.bytes)
    after = held(update, threads)
    constants = sum(bytes_of(node) for program in (*forwards, update) for node in program.constants.values())
    found = {**kept, "constants": constants, "masks of the next step": ahead}
    step = max(most.bytes, after.bytes) + (states if run.accumulate > 1 else 0)
    return RunPlan(
        {name: count for name, count in found.items() if count}, _fields(staged.micro(False)), step,
        most if most.bytes >= after.bytes else after, {e.name: _evaluated(staged, e, threads) for e in run.evals},
    )  # fmt: skip


def shape_size(value: Value) -> int:
    """Elements of a value."""
    return prod(shape_of(value))


def _kept(flat: Flat, known: Schema, accumulate: int) -> dict[str, int]:
    """Parameters, gradients, optimizer state and the rest, as `arena.Arena` lays them out: vectors with gaps, and single tensors."""
    names = {"param": "parameters", "state": "states", "opt": "optimizer", "ema": "averages", "gradient": "gradients"}
    found = {name: 0 for name in ("parameters", "states", "gradients", "optimizer", "averages")}
    grouped = set()
    for group in flat.groups:
        for role in (*group.roles, "gradient"):
            kind = role.partition("/")[0]
            elements = group.share if kind == "opt" else group.size
            found[names[kind]] += elements * DTYPES[group.dtype]
            grouped |= {f"{role}/{name}" for name in group.names}
    for name, (dtype, shape) in known.items():
        if name not in grouped:
            found[names[name.partition("/")[0]]] += prod(shape) * DTYPES[dtype]
    vectors = {group.vector("gradient") for group in flat.groups}
    found["gradients"] += sum(leaf.type.bytes for name, leaf in flat.gradients.items() if name not in vectors)
    if accumulate > 1:
        found["sums of gradients"] = found["gradients"]
    return found


def _state_bytes(traced: TracedRun, precision: str) -> list[int]:
    wide = 2 if precision == "f64" else 1
    return [node.type.bytes * (wide if node.type.dtype == "f32" else 1) for node in traced.state_updates.values()]


def _fields(results: Mapping[str, Node]) -> int:
    return sum(n.type.bytes for n in postorder(results.values()) if n.op == "input")


def _evaluated(staged: Any, evaluation: Any, threads: int) -> int:
    """Bytes of an evaluation beside what a run keeps: its batch, and the most that its graph holds."""
    data = evaluation.data
    _, results = staged.evaluation(evaluation.name, data.capacity if data.source.structures else data.batch)
    return _fields(results) + held(_program(results), threads).bytes

"""What a step costs before it is made: operations, bytes moved, memory at its peak, and the time a device may need.

In: lowered graphs. Out: plain numbers. The memory is what the interpreter holds, by liveness in its order: views share the
memory of what they view, a tensor goes where it was used last. Times are a roofline: each op takes the longer of its
arithmetic and its traffic, and a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sexpgpu.backends.interpreter.fuse import FUSABLE, Step, fusions, matrix_product, scaled_draw
from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.report import Estimate, Large, Memory, Ranks
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND

LARGEST = 5  # tensors shown


@dataclass(frozen=True)
class Device:
    """Rates that a program reaches in practice, not those of a data sheet. flops by dtype, bandwidth in bytes, seconds a launch."""

    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    memory: float


#: name -> what is assumed of it; `--assume NAME=VALUE` changes a number
DEVICES = {
    "cpu": Device({"f32": 5e10, "f64": 2.5e10, "bf16": 1e10}, 1e10, 3e-6, 16e9),
    "h200": Device({"f32": 5e13, "tf32": 3.8e14, "bf16": 7e14, "f16": 7e14, "f64": 5e13}, 4e12, 2e-6, 141e9),
}
ALIASES = {"cuda": "h200"}
ASSUMED = ("flops", "bandwidth", "launch", "memory")


def device(name: str, assume: Mapping[str, float]) -> Device:
    """A device's numbers with those that were given instead."""
    name = ALIASES.get(name, name)
    if name not in DEVICES:
        fail("E-ENV-006", f"--device {name}: no such device", help=suggestion(name, (*DEVICES, *ALIASES), "devices"))
    found = DEVICES[name]
    flops = dict.fromkeys(found.flops, assume["flops"]) if "flops" in assume else found.flops
    plain = {key: value for key, value in assume.items() if key != "flops"}
    return replace(found, flops=flops, **plain)


def assumptions(texts: Iterable[str]) -> dict[str, float]:
    """`name=value` of each `--assume`."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in ASSUMED or not equals:
            fail("E-ENV-006", f"--assume {text}: expected name=value", help=(*suggestion(name, ASSUMED, "names"), "for example --assume bandwidth=2e10"))
        try:
            found[name] = float(value)
        except ValueError:
            fail("E-ENV-006", f"--assume {text}: `{value}` is no number", help=f"for example --assume {name}=2e10")
        if not 0 < found[name] < float("inf"):
            fail("E-ENV-006", f"--assume {text}: the number must be positive", help=f"for example --assume {name}=2e10")
    return found


def traffic(results: Iterable[Mapping[str, Node]]) -> int:
    """Bytes read and written by graphs if nothing is cached."""
    ops = table()
    return sum(ops[node.op].cost(node)[1] for graph in results for node in postorder(graph.values()))


def estimate(graphs: Iterable[tuple[int, Mapping[str, Node]]], name: str, assume: Mapping[str, float], precision: str) -> Estimate:
    """The time of a step: each graph so many times, op by op."""
    of, ops = device(name, assume), table()
    seconds = {"arithmetic": 0.0, "memory": 0.0, "launches": 0.0}
    slowest = min(of.flops.values())
    for times, results in graphs:
        for node in postorder(results.values()):
            flops, moved = ops[node.op].cost(node)
            if not flops and not moved:
                continue
            dtype = "tf32" if precision == "tf32" and ops[node.op].lowering.kind == "contraction" else _dtype(node)
            arithmetic, memory = flops / of.flops.get(dtype, slowest), moved / of.bandwidth
            seconds["arithmetic" if arithmetic > memory else "memory"] += times * max(arithmetic, memory)
            seconds["launches"] += times * of.launch
    total = sum(seconds.values())
    assumed = {f"flops {d}": v for d, v in of.flops.items()} | {"bandwidth": of.bandwidth, "launch": of.launch, "memory": of.memory}
    return Estimate(ALIASES.get(name, name), total, {k: v / total if total else 0.0 for k, v in seconds.items()}, assumed)


def _dtype(node: Node) -> str:
    """What the arithmetic is done in: the operands' dtype."""
    floats = [i.type.dtype for i in node.inputs if i.type.is_float]
    return floats[0] if floats else node.type.dtype


def ranks(traced: TracedRun, count: int) -> Ranks:
    """What `count` ranks exchange in a step. A sum over ranks in a ring sends 2(n-1)/n of its bytes, a scatter or a gather half of it."""
    run, way = traced.run, (count - 1) / count
    gradients, averages = _bytes(traced.gradients.values()), _bytes(traced.averages.values())
    trained = _bytes(traced.params[name].node for name in traced.gradients)
    states = _bytes(spec.node for name, spec in traced.states.items() if name in traced.state_updates)
    if run.shard:
        sent = {"gradients, reduce-scatter": way * gradients, "parameters, all-gather": way * trained, "averages, all-gather": way * averages}
    else:
        sent = {"gradients, all-reduce": 2 * way * gradients}
    sent["states, all-reduce"] = 2 * way * states
    return Ranks(count, run.data.batch // count, run.shard, {what: round(n) for what, n in sent.items() if n})


def memory(traced: TracedRun, step: Mapping[str, Node], shares: int = 1) -> Memory:
    """`step`: from a micro-batch to the loss and the gradients, lowered. `shares`: of the optimizer's state, one here."""
    trained = [spec.node for spec in traced.params.values()]
    kept = {
        "parameters": _bytes(trained),
        "states": _bytes(spec.node for spec in traced.states.values()),
        "gradients": _bytes(traced.gradients.values()),
        "optimizer": -(-_bytes(slot.leaf for slot in traced.slots.values()) // shares),
        "averages": _bytes(traced.averages.values()),
    }
    order = postorder(step.values())
    batch = _bytes(n for n in order if n.op == "input")
    peak, at_peak = liveness(step, [name for name in step if name.startswith("gradient/")])
    return Memory({k: v for k, v in kept.items() if v}, batch, peak, tuple(_large(n, traced.origins) for n in at_peak[:LARGEST]))


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(node.type.bytes for node in nodes)


def liveness(results: Mapping[str, Node], placed: Iterable[str] = ()) -> tuple[int, list[Node]]:
    """(bytes at the peak, the tensors of then by size) of the interpreter's program of a graph.

    placed: results that have memory elsewhere; one that its op cannot write there is copied at the end, and held until then.
    """
    calls = _calls(results)
    placed = set(placed)
    elsewhere = {results[name] for name in placed}
    home: dict[Any, Any] = {}
    strided: set[Any] = set()
    last: dict[Any, int] = {}
    for at, step in enumerate(calls):
        for output in step.outputs:
            source = _viewed(output, step, strided)
            home[output] = output if source is None else home.get(source, source)
        for value in step.inputs:
            last[home.get(value, value)] = at
    held = {home.get(n, n) for name, n in results.items() if name not in placed}
    last |= dict.fromkeys(held, len(calls))
    alive: dict[Any, int] = {}
    now = peak = 0
    best: list[Any] = []
    for at, step in enumerate(calls):
        for output in step.outputs:
            if home[output] is not output or (output in elsewhere and output not in held and step.into):
                continue
            if output in elsewhere:
                last[output] = len(calls)
            over = next((home.get(v, v) for n, v in enumerate(step.inputs) if (n in step.over or isinstance(v, tuple) and v[0] == "logs")
                         and v not in strided and last.get(home.get(v, v)) == at and home.get(v, v) in alive), None)  # fmt: skip
            alive[output] = _size(output)
            now += alive[output] - (alive.pop(over) if over is not None else 0)
        if now > peak:
            peak, best = now, [v for v in sorted(alive, key=lambda v: -alive[v]) if isinstance(v, Node)][:LARGEST]
        for value in (*dict.fromkeys(home.get(i, i) for i in step.inputs), *step.outputs):
            if last.get(value, -1) <= at:
                now -= alive.pop(value, 0)
    return peak, best


def _calls(results: Mapping[str, Node]) -> list[Step]:
    """The steps of a graph in the interpreter's order: fused calls where it has them, else an op each."""
    together = fusions(postorder(results.values()), results.values())
    calls: list[Step] = []
    done: set[Any] = set()
    flat: dict[Node, Node] = {}  # operand -> its first reshape, which the others reshape
    for root in results.values():
        stack: list[tuple[Any, Step | None]] = [(root, None)]
        while stack:
            value, step = stack.pop()
            if value in done:
                continue
            if step is not None:
                done.update(step.outputs)
                calls.append(step)
                continue
            if isinstance(value, Node) and (value.op in BOUND or value.op in ("constant", "iota")):
                done.add(value)
                continue
            step = together.get(value) or _alone(value)
            if isinstance(value, Node) and value.op == "reshape" and value.inputs[0].op == "transpose":
                base = flat.setdefault(value.inputs[0], value)
                step = step if base is value else Step((value,), (base,), "")
            stack.append((value, step))
            stack.extend((i, None) for i in reversed(step.inputs) if i not in done)
    return calls


def _alone(node: Node) -> Step:
    """One op by itself, as far as memory goes: what it may write over, and whether it writes where a result belongs."""
    if node.op == "random-bernoulli" or (node.op == "*" and node.type.dtype in FUSABLE and scaled_draw(node) is not None):
        return Step((node,), (), "", True)
    if node.op == "matmul" and (product := matrix_product(node)) is not None:
        return product
    over = {n: "" for n, i in enumerate(node.inputs) if node.op in _OVER and (i.type.shape, i.type.dtype) == (node.type.shape, node.type.dtype)}
    return Step((node,), node.inputs, "", True, over, "into" if node.op in (*_OVER, "sum") else "")


#: ops that write their value over a dead operand of its shape
_OVER = {"+", "-", "*", "/", "max", "min", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "square", "sin", "cos"}


def _viewed(output: Any, step: Step, strided: set[Any]) -> Any:
    """The value whose memory an output shares, or None; notes in `strided` those that do not fill theirs in order."""
    if not isinstance(output, Node) or len(step.inputs) != 1 or output is not step.outputs[0]:
        return None
    operand: Any = step.inputs[0]
    op = output.op
    if op in ("transpose", "broadcast", "slice", "flip"):
        strided.add(output)
        return operand if op != "flip" else None
    if op in ("squeeze", "expand-dims", "variable", "stop-gradient", "reshape"):
        if operand in strided and op == "reshape":
            return None  # its elements must be brought into order
        strided.update({output} if operand in strided else ())
        return operand
    if op == "cast" and output.type.dtype == operand.type.dtype:
        return operand
    return None


def _size(value: Any) -> int:
    """Bytes of a node, or of what a fused call saves beside one: sums over its last axis, or a tensor of its shape."""
    if isinstance(value, Node):
        return value.type.bytes
    word, node = value
    whole = node.inputs[0].type.bytes if word == "logs" else node.type.bytes
    return whole if word in ("logs", 0, 1, 2) else whole // max(node.type.shape[-1] if node.type.shape else 1, 1)


def _large(node: Node, origins: Origins) -> Large:
    origin = origins.of(node)
    phase = f", {origin.phase}" if origin.phase != "forward" else ""
    where = f" in {origin.paths[0]}" if origin.paths else ""
    return Large(node.type.bytes, f"{node.op}{where}{phase}", str(node.type), origin.spans[0].place if origin.spans else "")


def fits(found: Memory, budget: float, batch: int, accumulate: int) -> str:
    """One line: whether a run fits, and if not, the batch that does and the `:accumulate` that would do for this one."""
    gib = 2**30
    if found.peak <= budget:
        return f"fits: {found.peak / gib:.2f} of {budget / gib:.2f} GiB"
    micro, fixed = batch // accumulate, sum(found.kept.values())
    sample = (found.batch + found.step) / micro
    most = int((budget - fixed) / sample) if sample else 0
    need = f"does not fit: {found.peak / gib:.2f} of {budget / gib:.2f} GiB"
    if most < 1:
        return f"{need}; parameters and optimizer alone take {fixed / gib:.2f} GiB, so the model must be smaller"
    cut = next((k for k in range(accumulate + 1, batch + 1) if batch % k == 0 and batch // k <= most), batch)
    return f"{need}; about {most} samples at a time fit: :batch {most}, or :accumulate {cut} for the batch of {batch}"

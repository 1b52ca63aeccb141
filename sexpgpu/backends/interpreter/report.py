"""What a run's graphs became on the interpreter, as rows and text: its calls in their order, with shapes, bytes, operations, what each
computes together and why, and the plan of its memory. The other device's is `backends.cuda.report`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from sexpgpu.backends.interpreter.fuse import RULES, Graph, Step, matrix_product
from sexpgpu.backends.interpreter.lines import Line, Writer
from sexpgpu.backends.interpreter.plan import Held, RunPlan, forward_program, held, update_program
from sexpgpu.backends.interpreter.scratch import call_of
from sexpgpu.backends.interpreter.shapes import bytes_of, shape_of
from sexpgpu.backends.leaves import flat_update
from sexpgpu.diagnostics import printable
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import table
from sexpgpu.ops.random import DRAWS


@dataclass(frozen=True)
class Row:
    """A call. `gives`: types of its results; `path`: of the layer whose value it computes; bytes: of its operands and results, once
    each; `inside`: ops that it computes, beside what it gives; `where`: in which memory its result lies; `why`: what it was fused
    with, or why with nothing."""

    number: int
    name: str
    gives: str
    path: str
    phase: str
    bytes: int
    flops: int
    products: int  # of the flops, those of matrix products
    elements: int  # of what it gives
    pairs: int  # operations of attention, over all pairs of a query and a key
    inside: tuple[str, ...]
    where: str
    why: str


def programs(staged: Any, ranks: int = 1) -> list[tuple[str, int, Writer]]:
    """The graphs of a step: their names, how often a step runs each, and their lines."""
    run = staged.run
    flat = flat_update(staged, run.accumulate * ranks, ranks if run.shard else 1)
    name = "micro-batch" if run.accumulate > 1 else "forward and backward"
    return [(name, run.accumulate, forward_program(staged.micro(False))), ("update", 1, update_program(flat))]


def rows(written: Writer, origins: Origins) -> list[Row]:
    """Every call in its order."""
    graph = Graph(postorder(written.results.values()), written.results.values())
    return [_row(number, line, graph, origins) for number, line in enumerate(written.lines)]


def _row(number: int, line: Line, graph: Graph, origins: Origins) -> Row:
    step = line.step
    nodes = computed(step)
    last = next((o for o in step.outputs if isinstance(o, Node)), nodes[-1])
    origin = origins.of(last)
    costs = [table()[n.op].cost(n)[0] for n in nodes]
    products = sum(c for n, c in zip(nodes, costs, strict=True) if table()[n.op].lowering.kind == "contraction" or n.op.startswith("attend"))
    given = " ".join(str(o.type) for o in step.outputs if isinstance(o, Node))
    inside = tuple(n.op for n in nodes if n not in step.outputs)
    return Row(number, name_of(step), given, origin.paths[0] if origin.paths else "", origin.phase, moved(line), sum(costs), products,
               sum(o.type.size for o in step.outputs if isinstance(o, Node)), _pairs(step), inside, _where(line), _why(step, nodes, graph))


def _pairs(step: Step) -> int:
    """Of attention by one kernel: two products of each pair, five for the gradients; a block that is half masked is computed whole."""
    name = name_of(step)
    if name not in ("attend", "attend_grad"):
        return 0
    q, k = (shape_of(v) for v in (step.inputs[1:3] if name == "attend_grad" else step.inputs[:2]))
    return (10 if name == "attend_grad" else 4) * prod(q) * k[-2]


def name_of(step: Step) -> str:
    """The function of torch that a step calls; of an op by its definition, the op."""
    if step.needs[:1] == ("reference",):
        return str(step.needs[2].op)
    return call_of(step) or next(o.op for o in step.outputs if isinstance(o, Node))


def computed(step: Step) -> list[Node]:
    """The nodes that a step computes, operands first; views within it, and what an earlier call kept for it, are none."""
    ops = table()
    known = {v for v in step.inputs if isinstance(v, Node)}
    for value in step.inputs:
        if isinstance(value, Node):
            continue
        word, node = cast(tuple[Any, Node], value)
        known |= {node, *node.inputs}
        if word == "mean":
            known |= {i for n in (node, *node.inputs) for i in n.inputs if i.op == "normalize"}
    if len(step.outputs) == 1 and isinstance(step.outputs[0], Node) and step.outputs[0].op in _FREE:
        return [step.outputs[0]]  # of whatever it is a view
    drawn = step.needs[:1] == ("mask",)  # its factor is a constant
    found: dict[Node, None] = {}
    stack = [(o, False) for o in reversed(step.outputs) if isinstance(o, Node)]
    while stack:
        node, done = stack.pop()
        if done:
            if ops[node.op].lowering.kind != "view" or node in step.outputs:
                found.setdefault(node)
        elif node not in found and (node not in known or node in step.outputs) and (node.inputs or node in step.outputs or drawn and node is step.needs[2]):
            stack.append((node, True))
            stack += [(i, False) for i in reversed(node.inputs)] if step.inputs or drawn else []
    return list(found)


def is_view(line: Line) -> bool:
    """Whether a step gives its operand's memory under another shape."""
    step = line.step
    return not step.fresh and len(step.outputs) == 1 and isinstance(step.outputs[0], Node) and step.outputs[0].op in _FREE


_FREE = frozenset({"transpose", "broadcast", "slice", "reshape", "squeeze", "expand-dims", "variable", "stop-gradient"})


def moved(line: Line) -> int:
    """Bytes that a call reads and writes."""
    if is_view(line):
        return 0
    return sum(bytes_of(v) for v in dict.fromkeys(line.step.inputs)) + sum(bytes_of(o) for o in line.step.outputs)


def _where(line: Line) -> str:
    if line.home:
        return "in its place"
    if line.over is not None:
        operand = line.step.inputs[line.over]
        return f"over {operand.op if isinstance(operand, Node) else operand[0]}"  # type: ignore[index]
    if line.step.source.startswith("entropy_grad("):
        return "over logs"
    return "a view" if is_view(line) else "new"


def _why(step: Step, nodes: list[Node], graph: Graph) -> str:
    """Why these ops are one call, or this one alone."""
    outputs = [o for o in step.outputs if isinstance(o, Node)]
    if step.needs[:1] == ("mask",):
        return "drawn ahead of its step" + (", scaled as it is drawn" if outputs[0].op == "*" else "")
    taken = [str(v[0]) for v in step.inputs if not isinstance(v, Node)]  # type: ignore[index]
    if taken:
        return f"fused with its forward pass, of which it takes {', '.join(dict.fromkeys(taken))}: one call for {', '.join(n.op for n in nodes)}"
    beside = [str(o[0]) for o in step.outputs if not isinstance(o, Node) and not isinstance(o[0], int)]  # type: ignore[index]
    if len(nodes) > 1 or len(outputs) > 1 or beside:
        kept = f", and keeps {', '.join(beside)} for the gradient" if beside else ""
        return f"fused: one call for {', '.join(n.op for n in nodes)}{kept}"
    node = outputs[0]
    if node.op in _FREE:
        return "alone: a view"
    if node.op in DRAWS:
        return "alone: a draw"
    if node.op in (*RULES, "matmul") and node.type.dtype in ("bf16", "f16"):
        return f"alone: {node.type.dtype} is computed op by op, and rounded after each, as on a GPU"
    readers = graph.users[node]
    if node.op == "matmul":
        if matrix_product(node) is None:
            return "alone: no product by one matrix"
        if not any(r.op == "+" for r in readers):
            return "alone: nothing is added to it"
        return f"alone: {len(readers)} others read it" if len(readers) > 1 else "alone: what is added is no row and no tensor of its shape"
    if node.op in RULES:
        return "alone: torch has no one call for it and the neighbours that it has here"
    return "alone: torch has no call for it and its neighbours"


# --- text ---


def size(count: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit / 10:
            return f"{count / unit:,.2f} {name}"
    return f"{count:.0f} B"


def parts_line(parts: Mapping[str, int]) -> str:
    """The parts of a plan, those of less than a thousandth left out."""
    total = sum(parts.values())
    return ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n and 1000 * n >= total)


def table_lines(found: list[Row]) -> list[str]:
    """Rows for people; every text of a user's is escaped."""
    cells = [("", "call", "gives", "memory", "moved", "operations", "inside", "path")]
    cells += [(str(r.number), r.name, r.gives, r.where, size(r.bytes), f"{r.flops:,}", str(len(r.inside)), printable(r.path)) for r in found]
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def report_lines(staged: Any, ranks: int = 1) -> list[str]:
    """`SEXPGPU_EXPLAIN=kernels`: every call of the step's graphs, and below each why it was fused, or was not."""
    out: list[str] = []
    for name, _, written in programs(staged, ranks):
        found = rows(written, staged.traced.origins)
        fused = sum(len(r.inside) > 0 or r.why.startswith("fused") for r in found)
        out.append(f"{name}: {len(found)} calls, {fused} of them fused, {size(sum(r.bytes for r in found))} moved, {sum(r.flops for r in found):,} operations")
        table_, *lines = table_lines(found)
        out.append(table_)
        for line, row in zip(lines, found, strict=True):
            out += [line, f"        {row.why}"]
    return out


def documents(staged: Any, ranks: int = 1) -> list[dict[str, Any]]:
    """The same for `--json`."""
    return [{"graph": name, "times": times, "calls": [vars(row) | {"inside": list(row.inside)} for row in rows(written, staged.traced.origins)]}
            for name, times, written in programs(staged, ranks)]  # fmt: skip


def plan_lines(staged: Any, plan: RunPlan, threads: int = 1, ranks: int = 1) -> list[str]:
    """The parts of the plan, and of each graph what lies in memory at its peak and in which call that is."""
    parts: Mapping[str, int] = {**plan.kept, "batch": plan.batch, "step": plan.step}
    out = [f"plan: {size(sum(parts.values()))} ({parts_line(parts)})"]
    for name, _, written in programs(staged, ranks):
        found = held(written, threads)
        out.append(f"{name}: {size(found.bytes)} at the most, in call {found.step} of {len(written.lines)}" + _scratch(found, written))
        for count, value in found.values:
            node = value if isinstance(value, Node) else value[1]  # type: ignore[index]
            what = f"{node.op} {node.type}" if isinstance(value, Node) else f"{value[0]} of {node.op} {node.type}"  # type: ignore[index]
            paths = staged.traced.origins.of(node).paths
            out.append(f"  {count:>14,}  {what}{'  ' + printable(paths[0]) if paths else ''}")
    return out


def _scratch(found: Held, written: Writer) -> str:
    if not found.scratch or found.step >= len(written.lines):
        return ""
    return f", of which {name_of(written.lines[found.step].step)} takes {size(found.scratch)} for itself"


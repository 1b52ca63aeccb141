"""`explain FILE:LINE`: the forms, nodes, parameters and bytes that became of a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sexpgpu.backends.interpreter.report import computed, programs
from sexpgpu.backends.interpreter.report import rows as call_rows
from sexpgpu.compiler import stages
from sexpgpu.diagnostics import fail, problem
from sexpgpu.experiment.report import ParameterRow
from sexpgpu.explain.influence import influences
from sexpgpu.explain.lowering import lowered
from sexpgpu.explain.roofline import moved, values_inside
from sexpgpu.explain.stages import Traced, replaced
from sexpgpu.forms import Form, ListForm
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import table
from sexpgpu.passes.schedule.fuse import Call as LibraryCall
from sexpgpu.read.printer import print_form
from sexpgpu.source import Source, Span


@dataclass(frozen=True)
class Nodes:
    """Nodes of one phase of a step. `ops`: op -> how many; `bytes` of their results, `moved` if nothing is cached."""

    phase: str
    count: int
    ops: tuple[tuple[str, int], ...]
    flops: int
    bytes: int
    moved: int


@dataclass(frozen=True)
class Kernels:
    """Calls of the interpreter, or launches on `cuda`, of one graph of a step, that compute something of a line. `names`: of them, how
    many; `flops`, `moved`: of all of each, also what it computes of other lines."""

    graph: str
    count: int
    names: tuple[tuple[str, int], ...]
    flops: int
    moved: int


@dataclass(frozen=True)
class Line:
    """What became of a line in one run. `forms` begin on it (or hold it); `written`: nodes of ops that stand on it; `called`:
    those that calls from it led to, with the library's; `decides`: of a knob, what it does."""

    place: str
    run: str
    text: str
    forms: tuple[str, ...]
    expanded: tuple[str, ...]
    written: tuple[Nodes, ...]
    called: tuple[Nodes, ...]
    kernels: tuple[Kernels, ...]
    decides: tuple[str, ...]
    parameters: tuple[ParameterRow, ...]


def split(subject: str) -> tuple[str, int] | None:
    """(file, line) of `model.lisp:12` or `model.lisp:12:3`."""
    found = re.fullmatch(r"(.+?):([0-9]+)(?::[0-9]+)?", subject)
    return (found[1], int(found[2])) if found and found[1].endswith(".lisp") else None


def line(t: Traced, number: int) -> Line:
    """What became of a line of the main file."""
    source = t.loaded.ev.loader.main.source
    if not 1 <= number <= len(source.line_starts):
        fail("E-RUN-082", f"{source.name} has {len(source.line_starts)} lines, and no line {number}")
    here = begins(t.loaded.ev.loader.main.forms, source, number)
    if not here:
        raise problem("E-RUN-082", f"no form stands on line {number} of {source.name}", help=_nearest(t.loaded.ev.loader.main.forms, source, number))
    table_ = t.loaded.ev.expansions or {}
    graph, origins = t.graph("simplified"), t.traced.origins
    written: list[Any] = []
    called: list[Any] = []
    for node in postorder(graph.values()):
        if _stems(node, origins, source, number):
            own = origins.of(node).spans[0]
            at_home = own.source is source and source.line_column(own.start)[0] == number
            (written if at_home else called).append(node)
    rows = tuple(
        ParameterRow(name, spec.shape, spec.dtype, spec.kind == "state", _place(spec.span), str(spec.init))
        for name, spec in (t.traced.params | t.traced.states).items()
        if any(s.source is source and source.line_column(s.start)[0] == number for s in (*spec.calls, *filter(None, (spec.span,))))
    )
    texts = tuple(print_form(f) for f in here)
    became = tuple(print_form(replaced(f, table_)) for f in here)
    return Line(f"{source.name}:{number}", t.run.name, source.line_text(number).strip(), texts, became if became != texts else (),
                tuple(_phases(written, origins)), tuple(_phases(called, origins)), tuple(_kernels(t, source, number)), _decides(t, here), rows)  # fmt: skip


def _stems(node: Node, origins: Any, source: Source, number: int) -> bool:
    """Whether a node's op, or a call that led to it, stands on the line."""
    return any(s.source is source and source.line_column(s.start)[0] == number for s in origins.of(node).spans)


def _nearest(forms: list[Form], source: Source, number: int) -> str:
    """Where the next form begins, or the last one."""
    starts = sorted(source.line_column(f.span.start)[0] for f in forms if f.span is not None)
    after = [start for start in starts if start > number]
    place = after[0] if after else starts[-1] if starts else 0
    return f"a form begins on line {place}: {source.line_text(place).strip()[:80]}" if place else "the file has no forms"


def _decides(t: Traced, here: list[ListForm]) -> tuple[str, ...]:
    """What the knobs that a line defines do."""
    names = [getattr(form.items[1], "name", "") for form in here if form.head() == "defknob" and len(form.items) > 1]
    known = influences(t.loaded, {t.run.name: t.traced}) if names else {}
    return tuple(f"{name}: {text}" for name in names for text in known.get(name, ()) or ["nothing reads it"])


def _kernels(t: Traced, source: Source, number: int) -> Iterable[Kernels]:
    """The calls or launches that compute nodes of the line, by the graph that they are in."""
    staged = stages(t.loaded, t.run, t.kind)
    origins = staged.traced.origins
    for graph, pieces in _pieces(staged, t.kind):
        found = [(name, flops, moved) for nodes, name, flops, moved in pieces if any(_stems(node, origins, source, number) for node in nodes)]
        if found:
            names = tuple(sorted(Counter(name for name, _, _ in found).items(), key=lambda c: (-c[1], c[0])))
            yield Kernels(graph, len(found), names, sum(f for _, f, _ in found), sum(m for _, _, m in found))


def _pieces(staged: Any, kind: str) -> Iterable[tuple[str, Iterable[tuple[list[Node], str, int, int]]]]:
    """Of each graph of a step: what each call or launch computes, its name, operations and bytes; views are none."""
    if kind == "cpu":
        for graph, _, written in programs(staged):
            rows = zip(written.lines, call_rows(written, staged.traced.origins), strict=True)
            yield graph, [(computed(line.step), row.name, row.flops, row.bytes) for line, row in rows if row.where != "a view"]
        return
    ops = table()
    for low in lowered(staged):
        pieces = []
        for launch in low.schedule.launches:
            nodes = [launch.node] if isinstance(launch, LibraryCall) else values_inside(launch)
            name = f"library {launch.node.op}" if isinstance(launch, LibraryCall) else "kernel"
            pieces.append((nodes, name, sum(ops[n.op].cost(n)[0] for n in nodes), moved(launch, nodes)))
        yield low.name, pieces


def _place(span: Span | None) -> str:
    return span.place if span is not None else ""


def begins(forms: list[Form], source: Source, number: int) -> list[ListForm]:
    """The outermost lists that begin on a line; where none does, the innermost that holds it."""
    found: list[ListForm] = []
    holder: ListForm | None = None
    todo: list[Form] = list(reversed(forms))
    while todo:
        form = todo.pop()
        if not isinstance(form, ListForm) or form.span is None or form.span.source is not source or not form.items:
            continue
        first, last = source.line_column(form.span.start)[0], source.line_column(form.span.end - 1)[0]
        if first == number:
            found.append(form)
        elif first < number <= last:
            holder = form
            todo += reversed(form.items)
    return found or ([holder] if holder is not None else [])


def _phases(nodes: list[Any], origins: Any) -> list[Nodes]:
    ops = table()
    phases: dict[str, list[Any]] = {}
    for node in nodes:
        phases.setdefault(origins.of(node).phase, []).append(node)
    rows = []
    for phase, group in phases.items():
        counts = Counter(n.op for n in group)
        costs = [ops[n.op].cost(n) for n in group]
        kinds = tuple(sorted(counts.items(), key=lambda c: (-c[1], c[0])))
        made = sum(n.type.bytes for n in group if ops[n.op].lowering.kind not in ("view", "leaf"))
        rows.append(Nodes(phase, len(group), kinds, sum(c[0] for c in costs), made, sum(c[1] for c in costs)))
    return rows

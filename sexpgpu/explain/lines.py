"""`explain FILE:LINE`: the forms, nodes, parameters and bytes that became of a line."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.report import ParameterRow
from sexpgpu.explain.stages import Traced, replaced
from sexpgpu.forms import Form, ListForm
from sexpgpu.ir import postorder
from sexpgpu.ops import table
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
class Line:
    """What became of a line in one run. `forms` begin on it (or hold it); `written`: nodes of ops that stand on it; `called`:
    those that calls from it led to, with the library's."""

    place: str
    run: str
    text: str
    forms: tuple[str, ...]
    expanded: tuple[str, ...]
    written: tuple[Nodes, ...]
    called: tuple[Nodes, ...]
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
    table_ = t.loaded.ev.expansions or {}
    graph, origins = t.graph("simplified"), t.traced.origins
    written: list[Any] = []
    called: list[Any] = []
    for node in postorder(graph.values()):
        spans = [s for s in origins.of(node).spans if s.source is source]
        lines = [source.line_column(s.start)[0] for s in spans]
        if number in lines:
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
                tuple(_phases(written, origins)), tuple(_phases(called, origins)), rows)  # fmt: skip


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

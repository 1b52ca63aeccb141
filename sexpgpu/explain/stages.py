"""The stages of a run as text, and what changes between two of them."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.compiler import check_divides, graph_results, knob_notes, stages
from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.load import Loaded, Selection, load
from sexpgpu.experiment.model import Run
from sexpgpu.experiment.traced import TracedRun, trace_eval, trace_run
from sexpgpu.explain import launches
from sexpgpu.explain.origins import CallOrigins
from sexpgpu.forms import Form, ListForm
from sexpgpu.ir import Node, postorder
from sexpgpu.ir.text import document, graph_text
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.simplify import simplify
from sexpgpu.passes.train_step import whole_step
from sexpgpu.read.printer import print_form

WIDTH = 110  # columns of a printed form
Graph = Mapping[str, Node]


def watched(file: str, selection: Selection) -> Loaded:
    """The experiment, with the expansion of each macro call and the calls that led to each node."""

    def prepare(ev: Any) -> None:
        ev.expansions = {}
        ev.provenance.origins = CallOrigins(ev)

    return load(file, selection, prepare=prepare)


@dataclass
class Traced:
    """A run as the stages see it; graphs are made when they are asked for."""

    loaded: Loaded
    run: Run
    kind: str = "cpu"  # the backend whose lowering is asked about
    ranks: int = 1  # of which the lowering for `cuda` is one's
    graphs: dict[str, Graph] = field(default_factory=dict)
    _traced: TracedRun | None = None

    @property
    def traced(self) -> TracedRun:
        """The run traced at one micro-batch: what a step is made of."""
        if self._traced is None:
            self._traced = trace_run(self.loaded.ev, self.run, self.run.data.batch // self.run.accumulate)
            for evaluation in self.run.evals:  # macros that only an evaluation uses
                trace_eval(self.loaded.ev, evaluation, self._traced, evaluation.data.batch)
        return self._traced

    def graph(self, stage: str) -> Graph:
        """The graph after a stage of `GRAPHS`."""
        if stage not in self.graphs:
            self.graphs[stage] = GRAPHS[stage](self)
        return self.graphs[stage]


def _simplified(t: Traced) -> Graph:
    return simplify(t.graph("precision"), t.traced.origins)


#: stage -> the graph after it; each from the one before
GRAPHS: dict[str, Callable[[Traced], Graph]] = {
    "ir": lambda t: graph_results(t.traced),
    "differentiated": lambda t: whole_step(t.traced, logged=False),
    "precision": lambda t: apply_precision(t.graph("differentiated"), t.run.precision, t.traced.origins),
    "simplified": _simplified,
}


def forms(t: Traced) -> str:
    """The forms of the main file, as they were read."""
    return "\n\n".join(pretty(form) for form in t.loaded.ev.loader.main.forms) + "\n"


def expanded(t: Traced) -> str:
    """The same with each macro call replaced by what it became; one that was never evaluated stands as it is."""
    assert t.traced is not None  # bodies are expanded when they are first called
    table = t.loaded.ev.expansions or {}
    return "\n\n".join(pretty(replaced(form, table)) for form in t.loaded.ev.loader.main.forms) + "\n"


def replaced(form: Form, table: Mapping[Form, Form]) -> Form:
    """A form with the calls of a table replaced, inside what they became too. A loop: forms are deep."""
    done: list[list[Form]] = [[]]
    stack: list[tuple[ListForm, Any]] = []
    pending: Any = iter((form,))
    while True:
        for item in pending:
            while item in table:
                item = table[item]
            if isinstance(item, ListForm) and item.items:
                stack.append((item, pending))
                pending = iter(item.items)
                done.append([])
                break
            done[-1].append(item)
        else:
            if not stack:
                return done[0][0]
            outer, pending = stack.pop()
            made = ListForm(tuple(done.pop()), outer.bracket, span=outer.span, trail=outer.trail)
            done[-1].append(made)


def pretty(form: Form, indent: int = 0) -> str:
    """A form on as many lines as it needs: its head and first item stay together, the rest is indented by two."""
    line = print_form(form)
    if len(line) + indent <= WIDTH or not isinstance(form, ListForm) or len(form.items) < 2 or indent > WIDTH // 2:
        return line
    first = 1 if form.bracket else 2
    opening, closing = ("[", "]") if form.bracket else ("(", ")")
    head = opening + " ".join(print_form(item) for item in form.items[:first])
    step = indent + (1 if form.bracket else 2)
    if len(head) + indent > WIDTH:
        head, first = opening + print_form(form.items[0]), 1
    return "\n".join([head, *(" " * step + pretty(item, step) for item in form.items[first:])]) + closing


def graph_stage(name: str) -> Callable[[Traced], str]:
    def text(t: Traced) -> str:
        return document(t.graph(name), t.traced.origins, knob_notes(t.loaded))

    return text


#: a stage of the lowering -> the function of `backends.cuda.report` that writes it for that device; brings torch, and needs no GPU
LOWERED = {"fused": "fused_text", "plan": "plan_text", "triton": "triton_text"}


def lowered_stage(name: str) -> Callable[[Traced], str]:
    def text(t: Traced) -> str:
        if t.kind == "cpu" and name != "triton":
            staged = stages(t.loaded, t.run)
            return "\n".join(launches.report_lines(staged) if name == "fused" else launches.plan(staged))
        check_divides(t.run, t.ranks)
        return str(launches.cuda(LOWERED[name], stages(t.loaded, t.run, "cuda", t.ranks), t.ranks))

    return text


#: what `--after` and `--diff` take -> its text
STAGES: dict[str, Callable[[Traced], str]] = {
    "forms": forms, "expanded": expanded, **{name: graph_stage(name) for name in GRAPHS}, **{name: lowered_stage(name) for name in LOWERED},
}


def after(t: Traced, stage: str) -> str:
    """The text of a stage."""
    return _known(stage)(t)


def _known(stage: str) -> Callable[[Traced], str]:
    if stage.lower() not in STAGES:
        fail("E-ENV-006", f"there is no stage `{stage}`", help=(*suggestion(stage.lower(), STAGES, "stages"), f"stages: {', '.join(STAGES)}"))
    return STAGES[stage.lower()]


def changed(t: Traced, before: str, later: str) -> str:
    """What differs between two stages: lines of text, or nodes of graphs."""
    before, later = before.lower(), later.lower()
    texts = (_known(before), _known(later))
    if before in GRAPHS and later in GRAPHS:
        return graph_difference(before, t.graph(before), later, t.graph(later))
    a, b = (text(t).splitlines() for text in texts)
    return "\n".join(difflib.unified_diff(a, b, before, later, lineterm="", n=1))


def graph_difference(before: str, a: Graph, later: str, b: Graph) -> str:
    """Nodes that went (-) and came (+), by the numbers of the graph each is in; nodes that stayed are counted only."""
    old, new = _lines(a), _lines(b)
    gone = [n for n in old if n not in new]
    come = [n for n in new if n not in old]
    moved = [name for name in sorted(set(a) | set(b)) if a.get(name) is not b.get(name)]
    out = [f"--- {before}: {len(old)} nodes", f"+++ {later}: {len(new)} nodes", f"@@ {len(old) - len(gone)} nodes are the same @@"]
    for sign, nodes in (("-", gone), ("+", come)):
        counts = Counter(n.op for n in nodes)
        if counts:
            out.append(f"@@ {sign}{len(nodes)}: " + ", ".join(f"{count} {op}" for op, count in sorted(counts.items(), key=lambda c: (-c[1], c[0]))) + " @@")
    out += [f"-{old[n]}" for n in gone] + [f"+{new[n]}" for n in come]
    if moved:
        out.append(f"@@ {len(moved)} results are other nodes: {', '.join(moved[:20])}{' …' if len(moved) > 20 else ''} @@")
    return "\n".join(out)


def _lines(graph: Graph) -> dict[Node, str]:
    """Each node with its line of the text form, in its order."""
    lines = graph_text(graph).splitlines()[1:]
    return dict(zip(postorder(graph[name] for name in sorted(graph)), lines, strict=False))



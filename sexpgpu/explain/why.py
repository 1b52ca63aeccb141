"""`--why PATH`: which knobs and lines decide a parameter's shape, its initial value, that it exists, and its schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sexpgpu.compiler import train_graph
from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.globs import matches
from sexpgpu.experiment.load import Loaded
from sexpgpu.experiment.model import Run
from sexpgpu.experiment.optimizers import Optimizer, group_of
from sexpgpu.experiment.trace import Spec
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.explain.influence import knobs_below
from sexpgpu.forms import Form, ListForm
from sexpgpu.lisp.values import Native, Tensor, knobs_of, show
from sexpgpu.source import Span

#: forms that bind or follow one another: what stands beside a call in one of them does not decide the call
_SEQUENCES = {"let", "let*", "progn", "defun", "deflayer", "lambda", "destructuring-bind", "flet", "defmacro", "defparameter", "quasiquote"}


@dataclass(frozen=True)
class Why:
    """Everything about one parameter or state of a run. Places are `file:line:column`."""

    run: str
    path: str
    kind: str  # param or state
    type: str
    axes: tuple[tuple[int, tuple[str, ...]], ...]  # size, the knobs that it comes from
    init: str
    init_knobs: tuple[str, ...]
    made: str  # where `param` stands
    calls: tuple[str, ...]  # the calls that led there, outermost first
    exists: tuple[tuple[str, str], ...]  # knob, place: decisions that the calls depend on
    group: str
    optimizer: str
    optimizer_place: str
    settings: tuple[tuple[str, str, tuple[str, ...]], ...]  # key, value, knobs
    frozen: str  # the glob that freezes it

    @property
    def knobs(self) -> tuple[str, ...]:
        """Every knob that has a say, by name."""
        found = {k for _, ks in self.axes for k in ks} | set(self.init_knobs) | {k for k, _ in self.exists}
        return tuple(sorted(found | {k for _, _, ks in self.settings for k in ks}))


def why(loaded: Loaded, run: Run, path: str, traced: TracedRun | None = None) -> Why:
    """`path`: an outward path, or the end of one that only one tensor has; `traced`: the run, if it is traced already."""
    traced = train_graph(loaded, run) if traced is None else traced
    specs = traced.params | traced.states
    name = _named(path, specs)
    spec = specs[name]
    ev: Any = loaded.ev  # `load` gave it its provenance
    axes = ev.provenance.axes.get(spec.node, ())
    knobs = [tuple(sorted(axes[i])) if i < len(axes) else () for i in range(len(spec.shape))]
    frozen = next((g for g in run.frozen if spec.kind == "param" and matches(g, name)), "")
    trained = spec.kind == "param" and not frozen
    group, optimizer = (group_of(run.optimizer, name) if trained else None) or ("", None)
    spans = [*spec.calls, *([spec.span] if spec.span else [])]
    return Why(
        run.name, name, spec.kind, str(spec.node.type), tuple(zip(spec.shape, knobs, strict=True)), str(spec.init),
        tuple(sorted(getattr(spec.init, "knobs", ()))), _place(spec.span), tuple(dict.fromkeys(map(_place, spec.calls))),
        tuple(decisions(loaded, spans)), group, optimizer.definition.name if optimizer else "", _place(optimizer.span) if optimizer else "",
        tuple(_settings(loaded, traced, optimizer)) if optimizer else (), frozen,
    )  # fmt: skip


def _named(path: str, specs: dict[str, Spec]) -> str:
    path = path.removeprefix("param/").removeprefix("state/")
    if path in specs:
        return path
    ends = [name for name in specs if name.endswith("/" + path)]
    if len(ends) == 1:
        return ends[0]
    if ends:
        fail("E-RUN-082", f"several tensors end in `{path}`", help=f"one of {', '.join(ends[:6])}{' …' if len(ends) > 6 else ''}")
    fail("E-RUN-082", f"no parameter and no state is called `{path}`", help=suggestion(path, specs, "tensors"))


def _place(span: Span | None) -> str:
    return span.place if span is not None else ""


def _settings(loaded: Loaded, traced: TracedRun, optimizer: Optimizer) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """The optimizer's settings as the file gives them; a schedule is what it is made of."""
    for key, value in optimizer.settings.items():
        if isinstance(value, Tensor):
            yield key, "a schedule of the step", tuple(sorted(knobs_below([value.node], traced.origins.table)))
        else:
            yield key, show(value, 60), tuple(sorted(knobs_of(value)))


def decisions(loaded: Loaded, calls: Iterable[Span]) -> Iterable[tuple[str, str]]:
    """(knob, place) of decisions about structure that one of the calls depends on.

    A call depends on a decision that encloses it (`(if deep …)`), and on one among the arguments of a form that encloses it
    (`(reduce (lambda (x i) (block x)) (range layers))`), but not on one in another binding or line of a body.
    """
    found: dict[tuple[str, str], None] = {}
    trees = {id(file.source): file.forms for file in loaded.ev.loader.all_files()}
    by_place: dict[str, list[str]] = {}
    for name, places in loaded.decided.items():
        for place in places:
            by_place.setdefault(place, []).append(name)
    for call in calls:
        around = _around(trees.get(id(call.source), []), call)
        for form in around:
            for decision in _decisions_of(loaded, form, around, by_place):
                for knob in by_place[decision]:
                    found.setdefault((knob, decision), None)
    return list(found)


def _decisions_of(loaded: Loaded, form: ListForm, around: list[ListForm], by_place: dict[str, list[str]]) -> Iterable[str]:
    """Places of decisions at a form around a call, or in its arguments if it is no sequence of things.

    The arguments of the call itself decide what it is given, not whether it is made, unless it is a builtin's: `mapcar`.
    """
    if form.span is not None and form.span.place in by_place:
        yield form.span.place
    head = form.head()
    if head is None or head in _SEQUENCES or (form is around[-1] and not isinstance(loaded.ev.builtins.get(head), Native)):
        return
    todo: list[Form] = [item for item in form.items if item not in around]
    while todo:
        one = todo.pop()
        if isinstance(one, ListForm):
            if one.span is not None and one.span.place in by_place:
                yield one.span.place
            todo += one.items


def _around(forms: Iterable[Form], call: Span) -> list[ListForm]:
    """The lists that hold a span, outermost first; the last one is the call itself."""
    found: list[ListForm] = []
    todo: Any = forms
    while True:
        inner = next((f for f in todo if isinstance(f, ListForm) and f.span is not None and f.span.start <= call.start and call.end <= f.span.end), None)
        if inner is None:
            return found
        found.append(inner)
        todo = inner.items

"""`sexpgpu check`: every run, evaluation and variant of a file short of running it, and what is suspicious in it.

In: a path and what the command line chose. Out: `Checked`, errors first. A warning is reported when every variant that
could be traced shows it: what one variant leaves out on purpose is no mistake. Opens no data and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, note_warning
from sexpgpu.experiment.load import Loaded, Selection, load
from sexpgpu.experiment.model import Batches, Eval, Metric, Run
from sexpgpu.experiment.trace import Trace, text
from sexpgpu.experiment.traced import Entry, TracedRun, parameter_place, trace_entry, trace_run
from sexpgpu.forms import Form, ListForm, Symbol
from sexpgpu.ir import Node, postorder
from sexpgpu.lisp.modules import Loader

#: what is done with a traced run besides tracing: the passes, and the data if it was asked for
Further = Callable[[Loaded, Run, TracedRun], None]


@dataclass(frozen=True)
class Checked:
    """What was found, and how much was looked at. `variants` leaves out the file's own values."""

    file: str
    runs: tuple[str, ...]
    evals: tuple[str, ...]
    variants: tuple[str, ...]
    findings: tuple[Diagnostic, ...]

    def count(self, severity: str) -> int:
        return sum(d.severity == severity for d in self.findings)


@dataclass
class _Look:
    """What one variant showed."""

    errors: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)
    runs: tuple[str, ...] = ()
    evals: tuple[str, ...] = ()
    traced: bool = False


@dataclass
class _Use:
    """What the entries of all runs read: which evaluations run, and which fields of a source reach a result."""

    fields: set[tuple[str, str]] = field(default_factory=set)
    taken: set[tuple[str, str]] = field(default_factory=set)  # by a parameter, read or not
    sources: set[str] = field(default_factory=set)
    evals: set[str] = field(default_factory=set)


def check(path: str, selection: Selection, further: Further = lambda loaded, run, traced: None) -> Checked:
    """Raises only if the file itself cannot be opened (E-READ-014)."""
    try:
        names = (None,) if selection.variant is not None else (None, *variants_of(path))
    except SexpError as mistake:
        if mistake.diagnostic.code == "E-READ-014" and mistake.diagnostic.span is None:
            raise
        return Checked(path, (), (), (), mistake.diagnostics)
    looks = [_look(path, selection if name is None else replace(selection, variant=name), further) for name in names]
    errors: dict[tuple, Diagnostic] = {}
    for name, look in zip(names, looks, strict=True):
        for d in look.errors:
            note = () if name is None else (f"with --variant {name}",)
            errors.setdefault((d.code, d.message, d.span), replace(d, notes=(*d.notes, *note)))
    first = looks[0]
    findings = (*errors.values(), *_agreed([look for look in looks if look.traced]))
    return Checked(path, first.runs, first.evals, tuple(n for n in names if n is not None), findings)


def variants_of(path: str) -> Iterator[str]:
    for file in Loader(path).all_files():
        for form in file.forms:
            if isinstance(form, ListForm) and form.head() == "defvariant" and len(form.items) > 1:
                if isinstance(form.items[1], Symbol):
                    yield form.items[1].name


def _agreed(looks: list[_Look]) -> tuple[Diagnostic, ...]:
    """The warnings of the first look that all others have too; where nothing could be traced, there are none."""
    if not looks:
        return ()
    others = [{(d.code, d.span) for d in look.warnings} for look in looks[1:]]
    unique: dict[tuple, Diagnostic] = {}
    for d in looks[0].warnings:
        if all((d.code, d.span) in other for other in others):
            unique.setdefault((d.code, d.span, d.message), d)
    return tuple(sorted(unique.values(), key=lambda d: (d.span.source.name, d.span.start) if d.span else ("", 0)))


def _look(path: str, selection: Selection, further: Further) -> _Look:
    look, use = _Look(), _Use()
    try:
        loaded = load(path, selection)
    except SexpError as mistake:
        look.errors += mistake.diagnostics
        return look
    experiment = loaded.experiment
    look.runs, look.evals = tuple(experiment.runs), tuple(experiment.evals)
    for run in experiment.runs.values():
        _run(loaded, run, look, use, further)
    look.traced = not look.errors
    if look.traced:
        look.warnings += [*_knobs(loaded), *_parameters(loaded), *_shadowed(loaded), *_unused(loaded, use)]
    return look


def _run(loaded: Loaded, run: Run, look: _Look, use: _Use, further: Further) -> None:
    """Traces a run and, on its parameters, every evaluation of the file, so that one that never runs is checked too."""
    use.sources |= {run.data.source.name, *(e.data.source.name for e in run.evals)}
    use.evals |= {e.name for e in run.evals if e.every}
    try:
        traced = trace_run(loaded.ev, run, run.data.batch)
    except SexpError as mistake:
        look.errors += mistake.diagnostics
        return
    look.warnings += [d for d in traced.warnings if isinstance(d, Diagnostic)]
    look.warnings += [*_untrained(traced), *_ignored(run, traced)]
    _read(run.data, run.loss, traced.loss, use)
    for metric in run.metrics:
        _entry(loaded, run.data, metric, run.data.batch, traced, look, use)
    for evaluation in loaded.experiment.evals.values():
        for metric in evaluation.metrics:
            _entry(loaded, evaluation.data, metric, evaluation.data.batch, traced, look, use)
    try:
        if run.accumulate > 1:
            trace_run(loaded.ev, run, run.data.batch // run.accumulate)
        further(loaded, run, traced)
    except SexpError as mistake:
        look.errors += mistake.diagnostics


def _entry(loaded: Loaded, data: Batches, metric: Metric, samples: int, traced: TracedRun, look: _Look, use: _Use) -> None:
    try:
        entry, trace = trace_entry(loaded.ev, metric, data, samples, traced.registry, False, False)
    except SexpError as mistake:
        look.errors += mistake.diagnostics
        return
    _read(data, metric, entry, use)
    look.warnings += _unreachable_taps(trace, traced, metric)


def _inputs(entry: Entry) -> set[str]:
    results = [entry.total] if entry.count is None else [entry.total, entry.count]
    return {node.attrs["name"] for node in postorder(results) if node.op == "input"}


def _read(data: Batches, metric: Metric, entry: Entry, use: _Use) -> None:
    name = data.source.name
    use.fields |= {(name, f) for f in _inputs(entry)}
    use.taken |= {(name, p) for p in _names(metric)}


def _names(metric: Metric) -> list[str]:
    return [p if isinstance(p, str) else p.name for p in metric.function.parameters.names]


# --- what one variant warns of -----------------------------------------------------


def _knobs(loaded: Loaded) -> Iterator[Diagnostic]:
    for knob in loaded.experiment.knobs.values():
        if not knob.used and knob.source != "override":
            yield note_warning("W-KNOB-001", f"nothing reads the knob `{knob.name}`", knob.span, label="defined here",
                               help=f"use `{knob.name}`, or remove its defknob")  # fmt: skip


def _parameters(loaded: Loaded) -> Iterator[Diagnostic]:
    """Parameters of functions and layers of the user's own files that their bodies never mention."""
    evals = loaded.experiment.evals.values()
    spans = {f.span for run in loaded.experiment.runs.values() for f in _functions(run, evals)}
    for file in [loaded.ev.loader.main, *loaded.ev.loader.files.values()]:
        if file.library:
            continue
        for form in _definitions(file.forms):
            if form.span in spans:
                continue  # of a loss or metric: its parameters are fields, which have warnings of their own
            read = {s.name for part in form.items[3:] for s in _symbols(part)}
            for parameter in form.items[2].items if isinstance(form.items[2], ListForm) else ():
                name = parameter.items[0] if isinstance(parameter, ListForm) and parameter.items else parameter
                if not isinstance(name, Symbol) or name.name[:1] in ("&", "_") or name.name in read:
                    continue
                yield note_warning(
                    "W-EVAL-001", f"`{form.items[1].name}` never reads its parameter `{name.name}`", name.span,
                    help=f"use it, remove it, or call it `_{name.name}` if callers must give it",
                )


def _functions(run: Run, evals: Iterable[Eval]) -> Iterator[Any]:
    for metric in (run.loss, *run.metrics, *(m for e in evals for m in e.metrics)):
        yield metric.function


def _definitions(forms: Iterable[Form]) -> Iterator[ListForm]:
    todo = list(forms)
    while todo:
        form = todo.pop()
        if not isinstance(form, ListForm) or form.head() in ("quote", "quasiquote"):
            continue
        if form.head() in ("defun", "deflayer") and len(form.items) > 3 and isinstance(form.items[1], Symbol):
            yield form
        todo += form.items


def _symbols(form: Form) -> Iterator[Symbol]:
    todo = [form]
    while todo:
        one = todo.pop()
        if isinstance(one, Symbol):
            yield one
        elif isinstance(one, ListForm):
            todo += one.items


def _shadowed(loaded: Loaded) -> Iterator[Diagnostic]:
    main = loaded.ev.main
    for module, _span in main.imports:
        for name in main.env.vars:
            if name in module.env.vars and name in main.places:
                place = module.places.get(name)
                yield note_warning(
                    "W-EVAL-003", f"`{name}` of this file hides the one that `{module.name}` gives", main.places[name],
                    related=[Related(place, "the imported one")] if place is not None else [],
                    help=f'give it another name, or (import "{module.name.removesuffix(".lisp")}" :as m) and say m/{name} where you mean the other',
                )


def _unused(loaded: Loaded, use: _Use) -> Iterator[Diagnostic]:
    """Evaluations that never run, sources without use, fields that nobody reads."""
    if not loaded.experiment.runs:
        return
    for e in loaded.experiment.evals.values():
        if e.name not in use.evals:
            why = "its :every is 0" if not e.every else "no run has it in its :evals"
            yield note_warning("W-RUN-003", f"the evaluation `{e.name}` never runs: {why}", e.span,
                               help="say :every 100, or remove it" if not e.every else f"add {e.name} to the :evals of a run")  # fmt: skip
    used = use.sources | {e.data.source.name for e in loaded.experiment.evals.values()}
    for source in loaded.experiment.data.values():
        if source.name not in used:
            yield note_warning("W-DATA-002", f"nothing uses the data source `{source.name}`", source.span,
                               help="remove it, or name it in the :data of a run")  # fmt: skip
            continue
        for f in source.fields:
            if (source.name, f.name) not in use.fields | use.taken:
                yield note_warning(
                    "W-DATA-001", f"nothing reads the field `{f.name}` of `{source.name}`", f.span,
                    help=f"give the loss or a metric a parameter `{f.name}`, or remove the field",
                )


def _untrained(traced: TracedRun) -> Iterator[Diagnostic]:
    results = [traced.loss.total] if traced.loss.count is None else [traced.loss.total, traced.loss.count]
    reached: set[Node] = set(postorder(results))
    for name, spec in traced.params.items():
        if spec.node not in reached:
            inside = [Related(spec.span, "made here")] if spec.span is not None and spec.span != spec.call else []
            yield note_warning("W-EVAL-002", f"the loss of `{traced.run.name}` does not depend on the parameter `{name}`",
                               spec.call, label="its gradient is always 0", related=inside,
                               help="use what this makes, or remove it")  # fmt: skip


def _ignored(run: Run, traced: TracedRun) -> Iterator[Diagnostic]:
    reached = _inputs(traced.loss)
    known = {f.name for f in run.data.fields}
    for name in _names(run.loss):
        if name in known and name not in reached and name[:1] != "_":
            place = parameter_place(run.loss.function.span, name)
            yield note_warning(
                "W-DATA-003", f"the loss of `{run.name}` takes the field `{name}` and does not depend on it", place,
                help=f"use `{name}` in the loss, or remove the parameter",
            )


def _unreachable_taps(trace: Trace, traced: TracedRun, metric: Metric) -> Iterator[Diagnostic]:
    for path, name, _node, span in trace.taps:
        full = "/".join(filter(None, [traced.registry.outward(path), name]))
        if full not in traced.tap_names:
            shown = "/".join(filter(None, [text(path), name]))
            yield note_warning(
                "W-RUN-001", f"no glob can select the tap `{shown}`: only `{metric.name}` makes it", span,
                help="taps are recorded from a run's loss; make the tap there, or make it a metric",
            )


__all__ = ["Checked", "check"]

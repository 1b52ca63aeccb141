"""Reads a file and evaluates it into an `Experiment`; registers the def-forms, which `lisp` does not know."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, one_or_all, problem, suggestion
from sexpgpu.experiment import layers, optimizers, runs
from sexpgpu.experiment.data import defdata, folder_of
from sexpgpu.experiment.knobs import collect, parse_sets, resolve
from sexpgpu.experiment.model import DataSource, Eval, Experiment, Knob, Run, SourceText
from sexpgpu.experiment.structures import statistic
from sexpgpu.forms import Form, ListForm, Symbol
from sexpgpu.lisp import tensors
from sexpgpu.lisp.builtins import BUILTINS
from sexpgpu.lisp.evaluator import Evaluator
from sexpgpu.lisp.modules import Loader
from sexpgpu.lisp.scope import Module
from sexpgpu.lisp.values import with_knobs
from sexpgpu.source import Source


@dataclass(frozen=True)
class Selection:
    """What a command line chose of a file."""

    variant: str | None = None
    sets: tuple[str, ...] = ()
    steps: int | None = None
    eval_every: int | None = None
    diagnostics: tuple[str, ...] | None = None
    diagnostics_via: str = "--diagnostics"
    limit: int = 10_000_000


@dataclass
class Loaded:
    """An experiment with the evaluator that can still trace its entries."""

    experiment: Experiment
    ev: Evaluator
    decided: dict[str, list[str]] = field(default_factory=dict)  # knob -> places where it decided structure, so far


class _Forms:
    """Collects def-forms while the files are evaluated; they are read afterwards, in any order."""

    def __init__(self, folder: str):
        self.folder = folder
        self.sources: dict[str, DataSource] = {}
        self.evals: dict[str, tuple[ListForm, Any]] = {}
        self.runs: dict[str, tuple[ListForm, Any]] = {}
        self.knobs: dict[str, Knob] = {}

    def defknob(self, ev: Any, form: ListForm, env: Any) -> Any:
        name = form.items[1].name if len(form.items) > 1 and isinstance(form.items[1], Symbol) else ""
        knob = self.knobs.get(name)
        if knob is None or knob.span != form.span:
            raise ev.error("E-EVAL-105", "defknob stands at the top level of a file", form, help="move it out of the form around it")
        value = with_knobs(knob.value, frozenset([name]))
        env.define(name, value, form.span)
        return value

    def defvariant(self, ev: Any, form: ListForm, env: Any) -> Any:
        return ()

    def defdata(self, ev: Any, form: ListForm, env: Any) -> Any:
        source = defdata(ev, form, env, self.folder)
        if source.name in self.sources:
            raise ev.error("E-EVAL-105", f"two data sources are named `{source.name}`", form, help="give one of them another name",
                           related=[Related(self.sources[source.name].span, "the first one")])
        self.sources[source.name] = source
        return ()

    def statistic(self, ev: Any, form: ListForm, env: Any) -> Any:
        return statistic(ev, form, env, self.sources)

    def defeval(self, ev: Any, form: ListForm, env: Any) -> Any:
        return self._later(ev, form, env, self.evals)

    def defrun(self, ev: Any, form: ListForm, env: Any) -> Any:
        return self._later(ev, form, env, self.runs)

    def _later(self, ev: Any, form: ListForm, env: Any, table: dict[str, tuple[ListForm, Any]]) -> Any:
        if len(form.items) < 2 or not isinstance(form.items[1], Symbol):
            raise ev.error("E-EVAL-104", f"{form.head()} needs a name first", form, help=f"write ({form.head()} name :data …)")
        name = form.items[1].name
        if name in table:
            raise ev.error("E-EVAL-105", f"two {form.head()}s are named `{name}`", form, help="give one of them another name",
                           related=[Related(table[name][0].span, "the first one")])
        table[name] = (form, env)
        return ()


def load(path: str | Source, selection: Selection, stdlib: str | None = None, prepare: Callable[[Evaluator], None] | None = None) -> Loaded:
    """The experiment of a file, or of a text beside no file. Raises coded errors; opens nothing but the file and its imports.

    prepare: sees the evaluator before anything is evaluated.
    """
    loader = Loader(path, Path(stdlib)) if stdlib else Loader(path)
    if isinstance(path, Source):
        path = path.name
    forms = _Forms(folder_of(path))
    op_natives = tensors.natives()
    specials = {name: getattr(forms, name) for name in ("defknob", "defvariant", "defdata", "defeval", "defrun", "statistic")}
    specials |= {way: _misplaced for way in ("batches", "windows", "graphs")}
    specials |= {"deflayer": layers.deflayer, "defoptimizer": optimizers.defoptimizer, "by-path": optimizers.by_path}
    natives = {**op_natives, **layers.natives(op_natives)}
    own = {name: function for name, function in natives.items() if name not in BUILTINS}  # a builtin hands tensors to the op
    ev = Evaluator(loader, selection.limit, specials, own)
    ev.provenance = tensors.Provenance()
    ev.tensor_op = lambda name, args, kwargs, span: tensors.apply_op(ev, name, args, kwargs, span)
    ev.trace = None
    if prepare is not None:
        prepare(ev)
    decided: dict[str, list[str]] = {}
    ev.on_decide = lambda value, form: _decide(decided, value, form)

    files = [file.forms for file in loader.all_files()]
    knobs, variants = collect(ev, files)
    forms.knobs = resolve(ev, knobs, variants, selection.variant, parse_sets(list(selection.sets)), _builtins_only(ev))
    ev.provenance.knob_places = {k.name: f"{k.source}{' ' + k.via if k.source == 'variant' else ''}, {k.place}" for k in forms.knobs.values()}
    errors: list[Diagnostic] = []
    try:
        ev.load_main()
    except SexpError as mistake:
        if any(d.code == "E-EVAL-041" for d in mistake.diagnostics):
            raise  # nothing more can be evaluated
        errors += mistake.diagnostics
    evals, run_table, overrides = _read(ev, forms, selection, errors)
    read = _symbols(files)
    final = {n: replace(k, used=read.get(n, 0) > 0, decides=tuple(decided.get(n, ()))) for n, k in forms.knobs.items()}
    texts = tuple(SourceText(name, text) for name, text in loader.texts)
    experiment = Experiment(path, texts, final | overrides, forms.sources, run_table, evals, selection.variant)
    return Loaded(experiment, ev, decided)


def _misplaced(ev: Any, form: ListForm, env: Any) -> Any:
    raise ev.error("E-EVAL-105", f"`{form.head()}` stands as the :data of a defrun or a defeval, and is no value", form)


def _builtins_only(ev: Evaluator) -> Any:
    """A scope that sees the language and no file: where knobs are computed, before any file is evaluated."""
    return Module("knobs", ev.main.source, ev.builtins, ev.reserved, main=True).env


def choose_run(experiment: Experiment, name: str | None) -> Run:
    """The run of this name, or the only one."""
    runs_ = experiment.runs
    if name is None:
        if len(runs_) == 1:
            return next(iter(runs_.values()))
        if not runs_:
            raise problem("E-RUN-103", f"{experiment.file} has no defrun", help="add (defrun train :data … :loss … :optimizer … :steps …)")
        raise problem("E-RUN-101", f"{experiment.file} has several runs: {', '.join(runs_)}", help=f"name one after the file: {shlex.quote(experiment.file)} {next(iter(runs_))}")
    if name not in runs_:
        raise problem("E-RUN-102", f"{experiment.file} has no run `{name}`", help=suggestion(name, runs_, "runs"))
    return runs_[name]


def _read(ev: Any, forms: _Forms, selection: Selection, errors: list[Diagnostic]) -> tuple[dict[str, Eval], dict[str, Run], dict[str, Knob]]:
    """Evaluations, runs and the overrides' records; raises with their mistakes those that were found before."""
    evals: dict[str, Eval] = {}
    table: dict[str, Run] = {}
    overrides: dict[str, Knob] = {}

    def override(key: str, value: Any, stated: Any, via: str, form: ListForm) -> None:
        place = form.span.place if form.span else ""
        overrides[key] = Knob(key, value, "override", stated, place, file_value=stated, via=via, used=True, span=form.span)

    for name, (form, env) in forms.evals.items():
        try:
            evals[name] = runs.read_eval(ev, form, env, forms.sources, selection.eval_every)
            if selection.eval_every is not None:
                override(f"eval/{name}/every", selection.eval_every, runs.stated(ev, form, env, "every"), "--eval-every", form)
        except SexpError as e:
            errors += ev.news(e)
            ev.lost.add(name)
    for name, (form, env) in forms.runs.items():
        try:
            table[name] = runs.read_run(ev, form, env, forms.sources, evals, selection.steps, selection.diagnostics)
            if selection.steps is not None:
                override(f"run/{name}/steps", selection.steps, runs.stated(ev, form, env, "steps"), "--steps", form)
            if selection.diagnostics is not None:
                stated = runs.stated(ev, form, env, "diagnostics")
                override(f"run/{name}/diagnostics", selection.diagnostics, stated, selection.diagnostics_via, form)
                table[name] = replace(table[name], diagnostics_via=selection.diagnostics_via)
        except SexpError as e:
            errors += ev.news(e)
    if errors:
        raise one_or_all(errors)
    return evals, table, overrides


def _decide(decided: dict[str, list[str]], value: Any, form: Any) -> None:
    span = getattr(form, "span", form)  # a special form hands its form, a builtin (`range`) its span
    place = span.place if span is not None else ""
    for knob in sorted(tensors.knobs_of(value)):
        places = decided.setdefault(knob, [])
        if place and place not in places:
            places.append(place)


def _symbols(files: list[list[Form]]) -> dict[str, int]:
    """How often each symbol is read: knobs nobody reads are unused. Definitions of knobs do not count."""
    counts: dict[str, int] = {}
    for forms in files:
        stack: list[Form] = []
        for form in forms:
            if isinstance(form, ListForm):
                skip = 2 if form.head() == "defknob" else len(form.items) if form.head() == "defvariant" else 0
                stack.extend(form.items[skip:])
        while stack:
            form = stack.pop()
            if isinstance(form, Symbol):
                counts[form.name] = counts.get(form.name, 0) + 1
            elif isinstance(form, ListForm):
                stack.extend(form.items)
    return counts

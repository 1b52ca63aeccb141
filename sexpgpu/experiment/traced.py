"""Traces the entries of a run into graphs: loss, metrics, taps, state updates, and the optimizer's update.

In: an evaluated experiment. Out: `TracedRun`, which later stages use without knowing Lisp. Fields reach
functions by parameter name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, nearest, note_warning, one_or_all, problem, suggestion
from sexpgpu.experiment.globs import matches
from sexpgpu.experiment.layers import Initial
from sexpgpu.experiment.model import Batches, Eval, Field, Metric, Run, renames
from sexpgpu.experiment.optimizers import ByPath, Optimizer, group_of, trace_update
from sexpgpu.experiment.trace import Registry, Spec, Trace, text
from sexpgpu.ir import Node, Origins
from sexpgpu.lisp.tensors import as_node
from sexpgpu.lisp.values import Tensor, knobs_of
from sexpgpu.ops import build, constant
from sexpgpu.source import Span

AVERAGE = "ema"  # the slot of a moving average; no optimizer's slot is bound by it


@dataclass(frozen=True)
class Entry:
    """One traced entry. A mean has `count` None and weighs by samples; else the value is total over count."""

    name: str
    total: Node
    count: Node | None
    samples: int


@dataclass(frozen=True)
class TapNode:
    """A selected diagnostic: metric name (`attention/norm`), full outward path, value."""

    name: str
    path: str
    node: Node


@dataclass(frozen=True)
class SlotSpec:
    name: str  # slot/outward path
    leaf: Node
    init: Initial


@dataclass
class TracedRun:
    """Graphs of one run at one micro-batch size. Names are outward names."""

    run: Run
    samples: int
    params: dict[str, Spec]
    states: dict[str, Spec]
    loss: Entry
    state_updates: dict[str, Node]
    metrics: tuple[Entry, ...]
    taps: tuple[TapNode, ...]
    tap_names: tuple[str, ...]  # every tap of the loss, selected or not
    gradients: dict[str, Node]  # leaves of the update
    new_params: dict[str, Node]
    slots: dict[str, SlotSpec]
    new_slots: dict[str, Node]
    averages: dict[str, Node]  # trained parameter -> leaf of its moving average
    new_averages: dict[str, Node]
    learning_rates: dict[str, Node]  # group -> rate; the only group is ""
    origins: Origins
    registry: Registry
    warnings: tuple[Diagnostic, ...] = ()
    remat: tuple[str, ...] = ()  # paths of the calls whose values the backward pass makes again
    layers: tuple[str, ...] = ()  # those that `:remat true` names


def trace_entry(ev: Any, metric: Metric, data: Batches, samples: int, registry: Registry, training: bool, decides: bool) -> tuple[Entry, Trace]:
    """Calls the entry's function on fields of `samples` rows."""
    trace = Trace(metric.name, registry, training, decides)
    known = {f.name: f for f in data.fields}
    parameters = getattr(metric.function, "parameters", None)
    if not hasattr(parameters, "required"):
        raise problem(
            "E-EVAL-103", f"`{metric.name}` is the builtin `{metric.function.name}`, which says no fields by its parameters", metric.span,
            help=f"define a function of fields that calls it: (defun f (x) ({metric.function.name} x))",
        )
    args = []
    for parameter in parameters.required:
        name = parameter if isinstance(parameter, str) else parameter.name
        if name not in known:
            raise problem(
                "E-EVAL-109", f"`{metric.name}` takes a field `{name}`, and the source `{data.source.name}` has none",
                parameter_place(metric.function.span, name) or metric.span, help=suggestion(name, known, f"fields of {data.source.name}"),
                related=[Related(data.source.span, f"the source `{data.source.name}` is defined here", quoted=False)],
            )
        args.append(_field(ev, known[name], samples, data))
    given = len(parameters.required) == len(args)
    for name, _default in parameters.optional:  # a parameter with a default takes the field of its name where there is one
        given = given and name in known
        if given:
            args.append(_field(ev, known[name], samples, data))
    kwargs = {name: _field(ev, known[name], samples, data) for name, _default in parameters.keys if name in known}
    before, ev.trace = ev.trace, trace
    try:
        value = ev.call(metric.function, args, kwargs, metric.span)
        trace.close()
    except SexpError as mistake:
        raise _with_fields(mistake, (*args, *kwargs.values()), known) from None
    finally:
        ev.trace = before
    return _entry(metric, value, samples), trace


def parameter_place(span: Span | None, name: str) -> Span | None:
    """Where a function's text first has the name after its own: the parameter."""
    if span is None:
        return None
    found = re.compile(rf"(?<![^\s()\[\]]){re.escape(name)}(?![^\s()\[\]])").search(span.text, max(span.text.find("(", 1), 0))
    return Span(span.source, span.start + found.start(), span.start + found.end()) if found else span


def _with_fields(mistake: SexpError, given: tuple[Tensor, ...], fields: dict[str, Field]) -> SexpError:
    """A mistake of shapes may begin where a field's shape is said: shows those places."""
    if not mistake.diagnostic.code.startswith("E-SHAPE"):
        return mistake
    names = [tensor.node.attrs["name"] for tensor in given]
    return mistake.with_related(*(
        Related(fields[name].span, f"field `{name}` is {tensor.node.type}, as said here", quoted=False)
        for name, tensor in zip(names, given, strict=True) if fields[name].span is not None
    ))


def _field(ev: Any, field_: Field, samples: int, data: Batches) -> Tensor:
    """A field's tensor; its axes remember the knobs of `:batch` and `:context`."""
    rows = samples if field_.rows is None else field_.rows
    node = build("input", name=field_.name, dtype=field_.dtype, shape=(rows, *field_.shape), batch=field_.rows is None)
    knobs: list[frozenset[str]] = [data.knobs.get("batch", frozenset()) if field_.rows is None else frozenset()]
    knobs += [knobs_of(size) if data.context is None else data.knobs.get("context", frozenset()) for size in field_.shape]
    ev.provenance.axes.setdefault(node, tuple(knobs))
    return Tensor(node)


def _entry(metric: Metric, value: Any, samples: int) -> Entry:
    if isinstance(value, tuple) and len(value) == 2:
        total, count = (as_node(v, "f32", metric.name, metric.span) for v in value)
        if not count.type.is_float:
            count = build("cast", count, dtype="f32")
        _scalar(metric, total, metric.span)
        _scalar(metric, count, metric.span)
        return Entry(metric.name, total, count, samples)
    if not isinstance(value, Tensor):
        raise problem("E-EVAL-110", f"`{metric.name}` must return a scalar tensor, or (list sum count)", metric.span)
    _scalar(metric, value.node, metric.span)
    return Entry(metric.name, value.node, None, samples)


def _scalar(metric: Metric, node: Node, span: Span | None) -> None:
    if node.type.shape or not node.type.is_float:
        raise problem("E-EVAL-110", f"`{metric.name}` must return a float scalar, and returned {node.type}", span,
                      related=[Related(metric.function.span, f"`{metric.function.name}` is defined here")] if metric.function.span else [],
                      help="reduce it with `mean` or `sum`: (mean …)")


def trace_run(ev: Any, run: Run, samples: int) -> TracedRun:
    """Everything a training step needs, at `samples` rows a micro-batch."""
    registry = Registry()
    loss, trace = trace_entry(ev, run.loss, run.data, samples, registry, training=True, decides=True)
    metrics = trace_all(ev, run.metrics, run.data, samples, registry)
    outward = {key: registry.outward(spec.path) for key, spec in registry.specs.items()}
    params = {outward[k]: s for k, s in registry.specs.items() if s.kind == "param"}
    states = {outward[k]: s for k, s in registry.specs.items() if s.kind == "state"}
    if not params:
        raise problem("E-EVAL-110", f"the loss of run `{run.name}` has no parameter to train", run.loss.span)
    _check_frozen(run, params)
    _check_init(run, params | states)
    gradients, new_params, slots, new_slots, groups = {}, {}, {}, {}, {}
    averages, new_averages = {}, {}
    for name, spec in params.items():
        if any(matches(g, name) for g in run.frozen):
            continue
        found = group_of(run.optimizer, name)
        if found is None:
            raise problem(
                "E-EVAL-107", f"no group of by-path matches the parameter `{name}`", run.optimizer.span,
                help='add (else (adamw :lr 1e-3)), or freeze the parameter by :frozen',
            )
        group, optimizer = found
        groups.setdefault(group, optimizer)
        gradients[name] = build("gradient", path=name, shape=spec.shape, dtype="f32")
        update = trace_update(ev, optimizer, spec.node, gradients[name], name)
        new_params[name] = update.param
        for slot, leaf, node, init in update.slots:
            slots[f"{slot}/{name}"] = SlotSpec(f"{slot}/{name}", leaf, init)
            new_slots[f"{slot}/{name}"] = node
        if run.ema is not None:
            averages[name] = build("slot", path=name, slot=AVERAGE, shape=spec.shape, dtype="f32")
            kept = build("*", averages[name], constant(run.ema, "f32"))
            new_averages[name] = build("+", kept, build("*", update.param, constant(1.0 - run.ema, "f32")))
    if not gradients:
        raise problem("E-EVAL-110", f":frozen of run `{run.name}` leaves no parameter to train", run.span)
    taps, tap_names, warnings = _select_taps(run, trace, registry)
    warnings += _idle_globs(run, params)
    return TracedRun(
        run, samples, params, states, loss, {outward[k]: n for k, n in trace.updates.items()}, metrics, taps, tap_names,
        gradients, new_params, slots, new_slots, averages, new_averages, _learning_rates(ev, groups), ev.provenance.origins, registry, warnings, _remat(run, trace), _outer(trace),
    )


def _remat(run: Run, trace: Trace) -> tuple[str, ...]:
    """The paths of the calls that `:remat` names: with true those of every layer that the loss's outermost layers call, or of
    these where they call none; with names, every call of such a layer that lies in no other one of them."""
    if run.remat is True:
        return _outer(trace)
    names = run.remat or ()
    called = dict.fromkeys([*trace.layers.values(), *(path[-1].name for path in trace.layers)])
    for name in names:
        if name not in called:
            raise problem("E-EVAL-107", f":remat: the loss calls no layer `{name}`", run.span, help=suggestion(name, called, "layers of the loss"))
    chosen = {path for path, layer in trace.layers.items() if layer in names or path[-1].name in names}
    return tuple(text(path) for path in trace.layers if path in chosen and not any(path[:n] in chosen for n in range(len(path))))


def _outer(trace: Trace) -> tuple[str, ...]:
    depth = min((len(path) for path in trace.layers if len(path) == 2), default=1)
    return tuple(text(path) for path in trace.layers if len(path) == depth)


def _check_frozen(run: Run, params: dict[str, Spec]) -> None:
    for glob in run.frozen:
        if not any(matches(glob, name) for name in params):
            raise problem("E-EVAL-107", f":frozen: the glob `{glob}` matches no parameter", run.span, help=suggestion(glob, params, "parameters"))


def _idle_globs(run: Run, params: dict[str, Spec]) -> tuple[Diagnostic, ...]:
    """A glob of by-path that names nothing: what it meant follows another optimizer, without a word."""
    groups = run.optimizer.groups if isinstance(run.optimizer, ByPath) else ()
    return tuple(
        note_warning("W-EVAL-004", f"by-path: the glob `{glob}` matches no parameter of `{run.name}`", run.optimizer.span,
                     help=suggestion(glob, params, "parameters"))
        for _, globs, _ in groups for glob in globs if not any(matches(glob, name) for name in params)
    )


def _check_init(run: Run, tensors: dict[str, Spec]) -> None:
    for new, _ in run.init.renames if run.init else ():
        if not any(renames(new, name) for name in tensors):
            raise problem("E-EVAL-107", f":init: `{new}` of :map names no parameter", run.init and run.init.span, help=suggestion(new, tensors, "parameters"))


def _learning_rates(ev: Any, groups: dict[str, Optimizer]) -> dict[str, Node]:
    """Group -> its rate, for those optimizers that have an `lr`."""
    rates = {}
    for group, optimizer in groups.items():
        definition = optimizer.definition
        default = dict(definition.parameters.keys).get("lr")
        rate = optimizer.settings.get("lr", None if default is None else ev.eval(default, definition.env))
        if rate is not None:
            rates[group] = as_node(rate, "f32", "lr", optimizer.span)
    return rates


def _select_taps(run: Run, trace: Trace, registry: Registry) -> tuple[tuple[TapNode, ...], tuple[str, ...], tuple[Diagnostic, ...]]:
    chosen: dict[str, TapNode] = {}
    names: list[str] = []
    used: set[str] = set()
    for path, name, node, _span in trace.taps:
        full = "/".join(filter(None, [registry.outward(path), name]))
        plain = "/".join([*(s.name for s in path), name])
        names.append(full)
        for glob in run.diagnostics:
            if matches(glob, full) or matches(glob, plain) or matches(glob, "/".join(filter(None, [text(path), name]))):
                used.add(glob)
                layer = path[-1].name if path else ""
                chosen[full] = TapNode("/".join(filter(None, [layer, name])), full, node)
    via = run.diagnostics_via
    warnings = tuple(
        note_warning(
            "W-RUN-002", f"the diagnostics glob `{g}` {f'of {via} ' if via else ''}matches no tap of `{run.name}`",
            None if via else run.span,
            help=[f"did you mean `{close}`?" for close in nearest(g, [*names, *(f"{n.rpartition('/')[0]}/*" for n in names if "/" in n)])], notes=[f"taps: {', '.join(sorted(set(names))) or 'none'}"],
        )
        for g in run.diagnostics if g not in used
    )
    return tuple(chosen.values()), tuple(names), warnings


def trace_eval(ev: Any, evaluation: Eval, traced: TracedRun, samples: int) -> tuple[Entry, ...]:
    """The metrics of an evaluation at one batch size."""
    return trace_all(ev, evaluation.metrics, evaluation.data, samples, traced.registry)


def trace_all(ev: Any, metrics: tuple[Metric, ...], data: Batches, samples: int, registry: Registry) -> tuple[Entry, ...]:
    """Metrics, each an entry of its own; the mistakes of all are reported together."""
    entries, errors = [], []
    for metric in metrics:
        try:
            entries.append(trace_entry(ev, metric, data, samples, registry, False, False)[0])
        except SexpError as mistake:
            errors += mistake.diagnostics
    if errors:
        raise one_or_all(errors)
    return tuple(entries)

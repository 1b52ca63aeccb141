"""The whole pipeline, phase by phase:

    file --load--> experiment --trace--> graphs --train_step--> one step --precision, simplify--> program

`load` and `trace` open no data and import no torch; `program` reaches a backend through `BACKENDS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from typing import Any

from sexpgpu import __version__
from sexpgpu.diagnostics import Diagnostic, SexpError, note_warning, one_or_all, problem, suggestion
from sexpgpu.experiment import check as checking
from sexpgpu.experiment.check import Checked
from sexpgpu.experiment.load import Loaded, Selection, choose_run, load
from sexpgpu.experiment.model import Batches, Eval, Run
from sexpgpu.experiment.traced import Entry, TracedRun, trace_eval, trace_run
from sexpgpu.ir import Node, postorder
from sexpgpu.ir.text import graph_hash
from sexpgpu.lisp.values import show
from sexpgpu.ops import table
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.join import join_large
from sexpgpu.passes.mixing import mixing
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.simplify import simplify
from sexpgpu.passes.train_step import (
    entry_results,
    forward_results,
    micro_step,
    update_step,
    whole_step,
)
from sexpgpu.source import Span

#: device -> "module:class" of its program
BACKENDS = {
    "cpu": "sexpgpu.backends.interpreter.program:InterpreterProgram",
    "cuda": "sexpgpu.backends.cuda.program:CudaProgram",
}


@dataclass(frozen=True)
class Stages:
    """What a backend compiles: functions that give the final graphs, so that unused ones are never built."""

    run: Run
    traced: TracedRun  # at one micro-batch
    whole: Callable[[bool], dict[str, Node]]  # logged -> the step of an uncut batch
    micro: Callable[[bool], dict[str, Node]]
    update: Callable[..., dict[str, Node]]  # divided (by the sum of counts) -> from gradients to new parameters
    evaluation: Callable[[str, Any], tuple[tuple[Entry, ...], dict[str, Node]]]  # (eval, samples or capacity) -> its metrics
    at: Callable[[tuple[int, int, int]], Stages]  # the same of a packed batch of another capacity


def stages(loaded: Loaded, run: Run, device: str = "cpu", ranks: int = 1, traced: TracedRun | None = None) -> Stages:
    """Traces the run at its micro-batch, one rank's, and says how each graph is made from it. `traced`: the run as it was traced before,
    taken where it is of such a batch."""
    samples = run.data.batch // (run.accumulate * ranks)
    if traced is None or traced.run is not run or traced.samples != samples:
        traced = trace_run(loaded.ev, run, samples)
    check_statistics(traced, graph_results(traced))
    evals = {e.name: e for e in run.evals}

    def lower(results: dict[str, Node]) -> dict[str, Node]:
        expanded = expand_gradients(results, traced.origins)
        if device == "cuda":
            expanded = join_large(expanded, traced.origins)
        return simplify(apply_precision(expanded, run.precision, traced.origins), traced.origins)

    def evaluation(name: str, size: Any) -> tuple[tuple[Entry, ...], dict[str, Node]]:
        chosen = evals[name]
        if isinstance(size, tuple):
            chosen = replace(chosen, data=replace(chosen.data, capacities=(size,)))
        entries = trace_eval(loaded.ev, chosen, traced, chosen.data.batch if isinstance(size, tuple) else size)
        return entries, lower(entry_results(entries))

    return Stages(
        run,
        traced,
        lambda logged: lower(whole_step(traced, logged)),
        lambda logged: lower(micro_step(traced, logged)),
        lambda divided=True: lower(update_step(traced, divided)),
        evaluation,
        lambda capacity: stages(loaded, replace(run, data=replace(run.data, capacities=(capacity,))), device, ranks),
    )


def step_graphs(staged: Stages, capacity: tuple[int, int, int] | None = None) -> Any:
    """What decides whether a step is finite, with origins kept through every pass, for a replay op by op. capacity: of the step's
    packed batch."""
    if capacity is not None and capacity != staged.run.data.capacity:
        staged = staged.at(capacity)
    traced, run = staged.traced, staged.run

    def placed(results: dict[str, Node], *names: str) -> dict[str, Node]:
        chosen = {n: node for n, node in results.items() if n in ("loss", "count", "gradient-norm") or n.startswith(names or "gradient-norm")}
        expanded = expand_gradients(chosen, traced.origins)
        return simplify(apply_precision(expanded, run.precision, traced.origins), traced.origins)

    graphs = import_module("sexpgpu.backends.interpreter.replay").StepGraphs  # brings torch
    if run.accumulate == 1:
        return graphs(traced, whole=placed(whole_step(traced, logged=False)))
    return graphs(traced, micro=placed(micro_step(traced, logged=False), "gradient/"), update=placed(update_step(traced, divided=True)))


def check_divides(run: Run, ranks: int) -> None:
    """A batch is cut into equal micro-batches, each rank's and each of `:accumulate`; E-RUN-104 where it cannot be."""
    if run.data.batch % (ranks * run.accumulate):
        cut = f" and :accumulate {run.accumulate}" if run.accumulate > 1 else ""
        raise problem("E-RUN-104", f"{ranks} ranks{cut} do not divide :batch {run.data.batch} of the run `{run.name}`", run.data.span or run.span,
                      help=f"choose a batch that is a multiple of {ranks * run.accumulate}, or another number of devices")


def mixes(traced: TracedRun, run: Run, ranks: int = 1) -> list[Diagnostic]:
    """A note where a cut batch is not the same as a whole one: what takes samples together sees one micro-batch."""
    parts = run.accumulate * ranks
    found = mixing(traced.loss.total, traced.origins) if parts > 1 else []
    if not found:
        return []
    many = f" and {len(found) - 1} more" if len(found) > 1 else ""
    path, span = found[0]
    return [note_warning("W-RUN-004", f"{path or 'the loss'}{many} takes samples together, and sees each micro-batch of {run.data.batch // parts} alone", span,
                         help="the numbers depend on ranks times :accumulate")]


def check_statistics(traced: TracedRun, results: dict[str, Node]) -> None:
    """Every statistic is of data that the run or its evaluations use, and is there: other data is not looked at."""
    known, run = traced.run.statistics, traced.run
    for node in postorder(results.values()):
        if known and node.op == "statistic" and node.attrs["name"] not in known:
            spans, source = traced.origins.of(node).spans, node.attrs["data"]
            there = [name.removeprefix(f"{source}/") for name in known if name.startswith(f"{source}/")]
            if there:
                asked = node.attrs["name"].removeprefix(f"{source}/")
                raise problem("E-EVAL-107", f"the manifest of `{source}` says no number `{asked}`", spans[0] if spans else run.span,
                              help=suggestion(asked, there, "numbers"))
            raise problem(
                "E-EVAL-107", f"the run `{run.name}` does not use the source `{source}`, of which it takes a statistic", spans[0] if spans else run.span,
                help=f"an evaluation on it will do: (defeval … :data (graphs {source} …))",
            )


def check_evals(loaded: Loaded, run: Run, traced: TracedRun) -> None:
    """Traces every evaluation once at its own batch, so that mistakes in it are found before the first step."""
    errors: list[Diagnostic] = []
    for evaluation in run.evals:
        try:
            check_statistics(traced, entry_results(trace_eval(loaded.ev, evaluation, traced, evaluation.data.batch)))
        except SexpError as mistake:
            errors += mistake.diagnostics
    if errors:
        raise one_or_all(errors)


def train_graph(loaded: Loaded, run: Run) -> TracedRun:
    """The run traced at the whole batch, before any pass: what hashes are taken of (contracts.md, Exactness)."""
    return trace_run(loaded.ev, run, run.data.batch)


def graph_results(traced: TracedRun) -> dict[str, Node]:
    """Loss, state updates and the optimizer's update; no taps and no metrics."""
    new = {f"param/{n}": node for n, node in traced.new_params.items()}
    new |= {f"opt/{n}": node for n, node in traced.new_slots.items()}
    return forward_results(traced, logged=False) | new


def trajectory(traced: TracedRun, run: Run) -> dict[str, str]:
    """Component -> what decides the numbers of a run (contracts.md, Exactness): a graph's hash, or a value as JSON.

    Equal values have one spelling (a scale of 1/16 and of 0.0625), and a value stays readable, so that a resume can say
    what differs.
    """
    results = graph_results(traced)
    loss = {k: n for k, n in results.items() if not k.startswith(("param/", "opt/"))}
    update = {k: n for k, n in results.items() if k.startswith(("param/", "opt/"))}
    inits = {name: str(spec.init) for name, spec in (traced.params | traced.states).items()}
    data = run.data
    parts: dict[str, Any] = {
        "graph": graph_hash(loss),
        "optimizer": graph_hash(update),
        "initial values": inits | {name: str(slot.init) for name, slot in traced.slots.items()},
        "data": _data_words(data),
        "seed": run.seed,
        "precision": run.precision,
        "deterministic": run.deterministic,
        "accumulate": run.accumulate,
        "clip-norm": run.clip_norm,
        "ema": run.ema,
        "frozen": run.frozen,
    }
    if run.init is not None:  # the file's digest is added where it is read, as those of the data are
        parts["init"] = run.init.renames
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in parts.items()}


def _data_words(data: Batches) -> dict[str, Any]:
    """What decides which numbers a batch has, beside the file's content. A scale multiplies as a float64."""
    source = data.source
    words: dict[str, Any] = {
        "format": source.format,
        "fields": {f.name: {"dtype": f.dtype, "shape": f.shape, "scale": float(1 if f.scale is None else f.scale)}
                   | ({} if f.pad is None else {"pad": f.pad}) for f in source.fields},
        "field order": [f.name for f in source.fields],
        "split": {name: str(share) for name, share in source.split},
        "part": data.split,
        "batch": data.batch,
        "shuffle": data.shuffle,
    }
    if data.context is not None:
        words |= {"context": data.context, "stride": data.stride or data.context}
    return words | {f"option {name}": value for name, value in source.options.items()}


def label_bounds(traced: TracedRun) -> list[tuple[str, int, int, Span | None, str]]:
    """(field, low, high, place, why) of integer fields that an op indexes with directly: found in bind, not in a step."""
    place = traced.run.loss.function.span
    bounds = []
    for node in postorder(graph_results(traced).values()):
        if node.op == "softmax-cross-entropy" and node.inputs[1].op == "input":
            classes = node.inputs[0].type.shape[-1]
            bounds.append((node.inputs[1].attrs["name"], 0, classes - 1, place, f"softmax-cross-entropy has {classes} classes"))
        elif node.op == "gather" and node.inputs[1].op == "input":
            rows = node.inputs[0].type.shape[node.attrs["axis"]]
            bounds.append((node.inputs[1].attrs["name"], 0, rows - 1, place, f"gather takes one of {rows} rows"))
        elif node.op == "embed" and node.inputs[1].op == "input":
            rows = node.inputs[0].type.shape[0]
            bounds.append((node.inputs[1].attrs["name"], 0, rows - 1, place, f"embed takes one of {rows} rows"))
    return bounds


def with_largest(error: SexpError, traced: TracedRun) -> SexpError:
    """A mistake of memory with the largest tensors of a step: what they are, and where they are made."""
    if error.diagnostic.code != "E-MEM-001":
        return error
    leaves = [spec.node for spec in (traced.params | traced.states).values()]
    nodes = sorted(dict.fromkeys([*postorder(whole_step(traced, logged=False).values()), *leaves]), key=lambda n: -n.type.bytes)
    notes = ["largest tensors of a step:"]
    for node in [n for n in nodes[:3] if 10 * n.type.bytes > nodes[0].type.bytes]:
        origin = traced.origins.of(node)
        spans, name = origin.spans, node.attrs.get("path", node.attrs.get("name", ""))
        what = f"{node.op} `{name}`" if name else f"{node.op}{f' in `{origin.paths[0]}`' if origin.paths else ''}"
        notes.append(f"  {node.type.bytes / 2**30:,.1f} GiB  {what} {node.type}" + (f", made at {spans[0].place}" if spans else ""))
    return SexpError(replace(error.diagnostic, notes=(*error.diagnostic.notes, *notes)))


def flops(results: dict[str, Node]) -> int:
    """Floating operations of one evaluation of the results."""
    ops = table()
    return sum(ops[node.op].cost(node)[0] for node in postorder(results.values()))


#: (run, bounds) -> what is read of its data; for `check --data`
BIND = "sexpgpu.run.bind:bind"
BOUND = "sexpgpu.run.data.dataset:FieldBound"


def check(file: str, selection: Selection, data: bool = False) -> Checked:
    """Every run, evaluation and variant of a file, traced and lowered; with `data`, its rows are read too."""

    def further(loaded: Loaded, run: Run, traced: TracedRun) -> None:
        staged = stages(loaded, run)
        staged.whole(True)
        for evaluation in run.evals:
            staged.evaluation(evaluation.name, evaluation.data.batch)
        if data:
            _imported(BIND)(run, tuple(_imported(BOUND)(*bound) for bound in label_bounds(traced)))

    return checking.check(file, selection, further)


def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)


def knob_notes(loaded: Loaded) -> list[str]:
    """Knobs and overrides for the header of the IR's text: name, value, source, place."""
    return [f"knob {k.name} {show(k.value)} ({k.source}{' ' + k.via if k.via else ''}, {k.place})" for k in loaded.experiment.knobs.values()]


def program(staged: Stages, device: str, threads: int | None, **options: Any) -> Any:
    """The compiled program of a run, for `run.session`. options: what the device's program takes more (`cuda`: `opened`, the
    open device, and `budget`, bytes or None; `cpu`: `team`, `backends.ranks.Team`)."""
    module, name = BACKENDS[device].split(":")
    return getattr(import_module(module), name)(staged, threads, **options)


def versions() -> dict[str, str]:
    """Versions that a manifest records; read from package metadata, so nothing is imported."""
    found = {"sexpgpu": __version__}
    for package in ("torch", "triton", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


__all__ = [
    "BACKENDS", "Eval", "Loaded", "Selection", "Stages", "check", "check_evals", "choose_run", "flops", "graph_results", "label_bounds", "load",
    "program", "stages", "step_graphs", "train_graph", "trajectory", "versions", "with_largest",
]

"""The whole pipeline, phase by phase:

    file --load--> experiment --trace--> graphs --train_step--> one step --precision, simplify--> program

`load` and `trace` open no data and import no torch; `program` reaches a backend through `BACKENDS`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from sexpgpu import __version__
from sexpgpu.experiment.load import Loaded, Selection, choose_run, load
from sexpgpu.experiment.model import Eval, Run
from sexpgpu.experiment.report import ParameterRow, Report, RunReport
from sexpgpu.experiment.traced import Entry, TracedRun, trace_eval, trace_run
from sexpgpu.ir import Node, postorder
from sexpgpu.ir.text import document, graph_hash
from sexpgpu.lisp.values import show
from sexpgpu.ops import table
from sexpgpu.passes.expand import expand_gradients
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
BACKENDS = {"cpu": "sexpgpu.backends.interpreter.program:InterpreterProgram"}


@dataclass(frozen=True)
class Stages:
    """What a backend compiles: functions that give the final graphs, so that unused ones are never built."""

    run: Run
    traced: TracedRun  # at one micro-batch
    whole: Callable[[bool], dict[str, Node]]  # logged -> the step of an uncut batch
    micro: Callable[[bool], dict[str, Node]]
    update: Callable[[], dict[str, Node]]
    evaluation: Callable[[str, int], tuple[tuple[Entry, ...], dict[str, Node]]]  # (eval, samples) -> its metrics


def stages(loaded: Loaded, run: Run) -> Stages:
    """Traces the run at its micro-batch and says how each graph is made from it."""
    traced = trace_run(loaded.ev, run, run.data.batch // run.accumulate)
    evals = {e.name: e for e in run.evals}

    def lower(results: dict[str, Node]) -> dict[str, Node]:
        return simplify(apply_precision(expand_gradients(results, traced.origins), run.precision))

    def evaluation(name: str, samples: int) -> tuple[tuple[Entry, ...], dict[str, Node]]:
        entries = trace_eval(loaded.ev, evals[name], traced, samples)
        return entries, lower(entry_results(entries))

    return Stages(
        run,
        traced,
        lambda logged: lower(whole_step(traced, logged)),
        lambda logged: lower(micro_step(traced, logged)),
        lambda: lower(update_step(traced, divided=True)),
        evaluation,
    )


def check_evals(loaded: Loaded, run: Run, traced: TracedRun) -> None:
    """Traces every evaluation once at its own batch, so that mistakes in it are found before the first step."""
    for evaluation in run.evals:
        trace_eval(loaded.ev, evaluation, traced, evaluation.data.batch)


def train_graph(loaded: Loaded, run: Run) -> TracedRun:
    """The run traced at the whole batch, before any pass: what hashes are taken of (contracts.md, Exactness)."""
    return trace_run(loaded.ev, run, run.data.batch)


def graph_results(traced: TracedRun) -> dict[str, Node]:
    """Loss, state updates and the optimizer's update; no taps and no metrics."""
    new = {f"param/{n}": node for n, node in traced.new_params.items()}
    new |= {f"opt/{n}": node for n, node in traced.new_slots.items()}
    return forward_results(traced, logged=False) | new


def trajectory(traced: TracedRun, run: Run) -> dict[str, str]:
    """Component -> hash of everything that decides the numbers of a run (contracts.md, Exactness)."""
    results = graph_results(traced)
    loss = {k: n for k, n in results.items() if not k.startswith(("param/", "opt/"))}
    update = {k: n for k, n in results.items() if k.startswith(("param/", "opt/"))}
    inits = {name: str(spec.init) for name, spec in (traced.params | traced.states).items()}
    data = run.data
    source = data.source
    parts: dict[str, Any] = {
        "graph": graph_hash(loss),
        "optimizer": graph_hash(update),
        "initial values": inits | {name: str(slot.init) for name, slot in traced.slots.items()},
        "data": [source.format, [[f.name, f.dtype, f.shape, str(f.scale)] for f in source.fields],
                 [[n, str(s)] for n, s in source.split], data.split, data.batch, data.shuffle,
                 *([data.context, data.stride, source.options] if data.context or source.options else [])],
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
    return {name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in parts.items()}


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


def flops(results: dict[str, Node]) -> int:
    """Floating operations of one evaluation of the results."""
    ops = table()
    return sum(ops[node.op].cost(node)[0] for node in postorder(results.values()))


def explain(file: str, run: str | None, selection: Selection) -> Report:
    """What a file means: knobs, runs, parameters, costs and graphs, without data and without torch."""
    loaded = load(file, selection)
    names = [run] if run is not None else list(loaded.experiment.runs)
    return Report(loaded.experiment, tuple(_explain_run(loaded, choose_run(loaded.experiment, name)) for name in names))


def _explain_run(loaded: Loaded, run: Run) -> RunReport:
    traced = train_graph(loaded, run)
    check_evals(loaded, run, traced)
    results = graph_results(traced)
    step = whole_step(traced, logged=False)
    rows = tuple(
        ParameterRow(name, spec.shape, spec.dtype, spec.kind == "state", spec.span.place if spec.span else "", str(spec.init))
        for name, spec in (traced.params | traced.states).items()
    )
    nodes = len(postorder(step.values()))
    return RunReport(run.name, rows, flops(step), nodes, graph_hash(results), document(results, traced.origins, knob_notes(loaded)), traced.tap_names, traced.warnings)


def knob_notes(loaded: Loaded) -> list[str]:
    """Knobs and overrides for the header of the IR's text: name, value, source, place."""
    return [f"knob {k.name} {show(k.value)} ({k.source}{' ' + k.via if k.via else ''}, {k.place})" for k in loaded.experiment.knobs.values()]


def program(staged: Stages, device: str, threads: int | None) -> Any:
    """The compiled program of a run, for `run.session`."""
    module, name = BACKENDS[device].split(":")
    return getattr(import_module(module), name)(staged, threads)


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
    "BACKENDS", "Eval", "Loaded", "Selection", "Stages", "check_evals", "choose_run", "flops", "graph_results", "label_bounds", "load",
    "program", "stages", "train_graph", "trajectory", "versions",
]

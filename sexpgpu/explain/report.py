"""The report of a file: its knobs and what they decide, each run's tensors, and what a step costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sexpgpu.backends.interpreter.report import programs, rows
from sexpgpu.compiler import check_divides, check_evals, flops, graph_results, knob_notes, mixes, stages, train_graph
from sexpgpu.experiment.load import Loaded, Selection, choose_run, load
from sexpgpu.experiment.model import Run
from sexpgpu.experiment.report import Estimate, ParameterRow, Report, RunReport
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.explain import cost
from sexpgpu.explain.cost import kind, on_cpu, on_gpu, traffic
from sexpgpu.explain.influence import influences
from sexpgpu.explain.lowering import lowered
from sexpgpu.explain.memory import cpu_memory, fits, gpu_memory, planned
from sexpgpu.ir import postorder
from sexpgpu.ir.text import document, graph_hash
from sexpgpu.passes.train_step import whole_step


def explain(
    file: str, run: str | None, selection: Selection, device: str = "cpu", assume: Mapping[str, float] | None = None,
    budget: float | None = None, measured: Callable[[Run], Run] = lambda run: run, ranks: int = 1, threads: Callable[[int], int] = lambda operations: 1,
) -> Report:  # fmt: skip
    """What a file means, without torch and, unless `measured` opens it, without data."""
    return report(load(file, selection), run, device, assume, budget, measured, ranks, threads)


def report(
    loaded: Loaded, run: str | None = None, device: str = "cpu", assume: Mapping[str, float] | None = None,
    budget: float | None = None, measured: Callable[[Run], Run] = lambda run: run, ranks: int = 1, threads: Callable[[int], int] = lambda operations: 1,
) -> Report:  # fmt: skip
    """The report of what is loaded. budget: bytes that a run may take; assume: a device's numbers that were given; ranks: how many
    devices, of which memory and step time are one's; threads: operations of a step -> CPU threads of a run."""
    names = [run] if run is not None else list(loaded.experiment.runs)
    runs = {name: measured(choose_run(loaded.experiment, name)) for name in names}
    traced = {name: train_graph(loaded, one) for name, one in runs.items()}
    rows = tuple(_run(loaded, one, traced[name], device, assume or {}, budget, ranks, threads) for name, one in runs.items())
    return Report(loaded.experiment, rows, influences(loaded, traced))


def _run(
    loaded: Loaded, run: Run, traced: TracedRun, device: str, assume: Mapping[str, float], budget: float | None, ranks: int,
    threads: Callable[[int], int],
) -> RunReport:  # fmt: skip
    check_divides(run, ranks)
    check_evals(loaded, run, traced)
    results = graph_results(traced)
    step = whole_step(traced, logged=False)
    parameters = tuple(
        ParameterRow(name, spec.shape, spec.dtype, spec.kind == "state", spec.span.place if spec.span else "", str(spec.init))
        for name, spec in (traced.params | traced.states).items()
    )
    backend, operations = kind(device), flops(step)
    staged = stages(loaded, run, backend, ranks)
    micro, update = staged.micro(False), staged.update(traced.loss.count is not None or run.accumulate * ranks > 1)
    count = threads(operations // ranks)
    copied: frozenset[str] = frozenset()
    if backend == "cpu":
        held = cpu_memory(staged, count, ranks)
        time = _on_cpu(staged, device, assume, ranks)
    else:
        graphs = lowered(staged, ranks)
        copied = graphs[0].copied if run.shard else copied
        held, time = gpu_memory(staged, graphs, ranks), on_gpu(graphs, device, assume, run.precision)
    fitting = None if budget is None else fits(held, run, budget, lambda other: planned(loaded, other, backend, count, ranks), ranks)
    remat = (len(staged.traced.remat), planned(loaded, replace(run, remat=False), backend, count, ranks).peak) if staged.traced.remat else None
    return RunReport(
        run.name, parameters, operations, run.accumulate * traffic([micro]) + traffic([update]), len(postorder(step.values())),
        graph_hash(results), document(results, traced.origins, knob_notes(loaded)), held, time, fitting,
        traced.tap_names, (*traced.warnings, *mixes(traced, run, ranks)), cost.ranks(traced, ranks, copied) if ranks > 1 else None, remat,
    )  # fmt: skip


def _on_cpu(staged: Any, device: str, assume: Mapping[str, float], ranks: int = 1) -> Estimate:
    graphs = [(times, rows(written, staged.traced.origins)) for _, times, written in programs(staged, ranks)]
    return on_cpu(graphs, device, assume, staged.run.precision)


def estimated(staged: Any, device: str = "cpu", assume: Mapping[str, float] | None = None) -> Estimate:
    """The time of a step of a run from its stages, which are those of the device's backend."""
    if kind(device) == "cpu":
        return _on_cpu(staged, device, assume or {})
    return on_gpu(lowered(staged), device, assume or {}, staged.run.precision)

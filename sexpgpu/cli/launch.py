"""From a checked command line to a running session: evaluate, trace, choose threads, import torch, train.

torch reads the OpenMP variables when it is imported, so everything before `threads.prepare` works without it.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib import import_module
from typing import Any

from sexpgpu import compiler
from sexpgpu.cli import output, threads
from sexpgpu.compiler import Loaded, Selection
from sexpgpu.diagnostics import note_warning
from sexpgpu.experiment.model import Run
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.settings import Settings

SESSION = "sexpgpu.run.session"  # brings torch


def selection(
    variant: str | None,
    sets: tuple[tuple[str, str], ...],
    settings: Settings,
    steps: int | None = None,
    eval_every: int | None = None,
) -> Selection:
    """What the command line chose, as the compiler takes it."""
    diagnostics = settings.of("diagnostics")
    given = diagnostics.value if diagnostics.source != "default" else None
    return Selection(
        variant,
        tuple(f"{name}={value}" for name, value in sets),
        steps,
        eval_every,
        None if given is None else tuple(given),
        diagnostics.via if hasattr(diagnostics, "via") else "--diagnostics",
        settings.eval_limit,
    )


def launch(
    file: str, run_name: str | None, chosen: Selection, settings: Settings, max_time: str | None, accept: bool
) -> int:
    """Runs the file; the exit code."""
    loaded = compiler.load(file, chosen)
    run = compiler.choose_run(loaded.experiment, run_name)
    traced = compiler.train_graph(loaded, run)
    compiler.check_evals(loaded, run, traced)
    output.report(note_warning("E-RUN-105", text, run.span) for text in traced.warnings)
    staged = compiler.stages(loaded, run)
    stored = threads.stored_threads(settings.resume, settings.checkpoint_dir)
    count = threads.prepare(
        os.environ,
        compiler.flops(staged.whole(False)) if run.accumulate == 1 else compiler.flops(staged.micro(False)),
        stored,
    )
    session = import_module(SESSION)
    options = session.RunOptions(
        metrics=settings.metrics,
        status=settings.status,
        checkpoint_dir=settings.checkpoint_dir,
        resume=settings.resume,
        max_time=max_time,
        accept=accept,
        folder=os.getcwd(),
        slug_base=settings.run_slug,
        command=shlex.join(["sexpgpu", *sys.argv[1:]]),
    )
    return session.execute(options, _plan(session, loaded, run, traced, staged, settings.device, count))


def _plan(session: Any, loaded: Loaded, run: Run, traced: TracedRun, staged: Any, device: str, count: int) -> Any:
    return session.RunPlan(
        experiment=loaded.experiment,
        run=run,
        compile=lambda: compiler.program(staged, device, count),
        ir_hash=compiler.graph_hash(compiler.graph_results(traced)),
        trajectory=compiler.trajectory(traced, run),
        versions=compiler.versions(),
        several_runs=len(loaded.experiment.runs) > 1,
        bounds=tuple(
            session.FieldBound(field, low, high, None, why) for field, low, high, why in compiler.label_bounds(traced)
        ),
    )

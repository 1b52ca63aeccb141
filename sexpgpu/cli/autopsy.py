"""`sexpgpu autopsy FOLDER`: replays the step of a reproducer op by op and names the first op that was not finite."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import output, threads
from sexpgpu.cli.run import plan, selection
from sexpgpu.diagnostics import fail
from sexpgpu.settings import load, require

STAGES = {
    "compiler": "sexpgpu.compiler",
    "read": "sexpgpu.run.autopsy.reproducer:read",
    "search": "sexpgpu.run.autopsy.search:search",
    "describe": "sexpgpu.run.autopsy.examine:describe",
    "bind": "sexpgpu.run.bind:bind",
    "measured": "sexpgpu.run.measure:measured",
    "capacity": "sexpgpu.backends.interpreter.program:capacity_of",
    "grant": "sexpgpu.run.storage:grant",
}


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@click.command()
@click.argument("folder")
@click.option("--data-folder", metavar="FOLDER", help="Where the data's relative paths go from; else where they went from.")
@output.json_messages
def command(folder: str, data_folder: str | None) -> int:
    """Replay the step that FOLDER, which a failed run left, holds. 0: not finite again; 1: finite here."""
    settings = load(os.environ, {})
    output.report(settings.warnings)
    require(settings)
    stage("grant")(settings)
    threads.prepare(os.environ, None, None)
    found, compiler = stage("read")(Path(folder)), stage("compiler")
    facts = found.facts
    loaded = compiler.load(str(found.program), selection(settings, facts.variant, facts.sets))
    run = stage("measured")(_from(compiler.choose_run(loaded.experiment, facts.run), data_folder or facts.folder), output.say)
    traced = compiler.train_graph(loaded, run)
    chosen = plan(loaded, run, traced, 1, settings, facts.sets)
    if chosen.ir_hash != facts.ir_hash:
        output.say(f"the graph is another than that of the failed run (hash {chosen.ir_hash[:12]}, was {facts.ir_hash[:12]}): the library differs")
    _fit(found, traced)
    feed = stage("bind")(chosen.run, chosen.bounds, output.say).feeds.train if found.batch is None else None
    batch = feed.batch(facts.step - 1) if feed is not None else found.batch
    graphs = chosen.step_graphs(stage("capacity")(batch, run.accumulate) if run.data.source.structures else None)
    finding = stage("search")(graphs, found.state, facts.step - 1, batch)
    if finding is None:
        output.show(f"step {facts.step} is finite here")
        return 1
    output.show(f"step {facts.step} of run {facts.run}: the {finding.fell} is not finite")
    for line in stage("describe")(finding, chosen, feed, facts.step):
        output.show(f"  {line}")
    return 0


def _from(run: Any, folder: str) -> Any:
    """The run with its sources' relative paths going from `folder`, and without evaluations."""
    return replace(run, data=replace(run.data, source=replace(run.data.source, folder=folder)), evals=())


def _fit(found: Any, traced: Any) -> None:
    """E-RUN-040 where the state is of another program than the texts beside it."""
    specs = {f"param/{n}": s for n, s in traced.params.items()} | {f"state/{n}": s for n, s in traced.states.items()}
    wrong = [name for name, spec in specs.items() if name not in found.state or tuple(found.state[name].shape) != spec.shape]
    if wrong:
        fail("E-RUN-040", f"the state of the reproducer does not fit its program: {', '.join(wrong[:5])}")

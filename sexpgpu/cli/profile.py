"""`sexpgpu profile FILE`: what each launch of a training step takes on the GPU, and how near it is to what the GPU can do."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import device, output, threads
from sexpgpu.cli.run import plan, selection
from sexpgpu.settings import load, require

#: what a profile calls -> where it is; the last two bring torch
STAGES = {
    "compiler": "sexpgpu.compiler",
    "measured": "sexpgpu.run.measure:measured",
    "grant": "sexpgpu.run.storage:grant",
    "bind": "sexpgpu.run.bind:bind",
    "profile": "sexpgpu.backends.cuda.profile",
}
SHOWN = 40  # lines of the table without --all


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@click.command()
@click.argument("file")
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be repeated.")
@click.option("--all", "every", is_flag=True, help="Every line of the table.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(file: str, run: str | None, variant: str | None, sets: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Time the launches of a training step of FILE on the GPU, from its first batch and its initial weights."""
    settings, compiler = load(os.environ, {"device": "cuda"}), stage("compiler")
    output.report(settings.warnings)
    require(settings)
    stage("grant")(settings)
    loaded = compiler.load(file, selection(settings, variant, sets))
    output.report(loaded.experiment.warnings)
    chosen = stage("measured")(compiler.choose_run(loaded.experiment, run), output.say)
    traced = compiler.train_graph(loaded, chosen)
    threads.prepare(os.environ, None, None)
    opened = device.begin(settings, chosen.deterministic)
    planned = plan(loaded, chosen, traced, 1, settings, sets, opened)
    data = stage("bind")(planned.run, planned.bounds, output.say)
    program = planned.compile()
    try:
        program.initialise()
        found = stage("profile").profile(program, data.feeds.train.batch(0))
    finally:
        program.close()
    if as_json:
        output.show_json(found.document())
    else:
        output.show("\n".join(stage("profile").lines(found, None if every else SHOWN)))
    return 0

"""What the commands that use a checkpoint share: its flags, the file's run, and the checkpoint itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import device, output, threads
from sexpgpu.cli.run import plan, selection
from sexpgpu.diagnostics import fail
from sexpgpu.settings import load, require

#: what these commands call -> where it is; the last two bring torch
STAGES = {
    "compiler": "sexpgpu.compiler",
    "choose": "sexpgpu.run.checkpoints.find:choose",
    "wanted": "sexpgpu.run.checkpoints.find:Wanted",
    "head": "sexpgpu.run.slug:slug_head",
    "grant": "sexpgpu.run.storage:grant",
    "evaluations": "sexpgpu.run.trained:evaluations",
    "restore": "sexpgpu.run.trained:restore",
    "measured": "sexpgpu.run.measure:measured",
    "remembered": "sexpgpu.run.measure:remembered",
}


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose a program and a checkpoint for it."""
    for option in (
        click.option("--accept", is_flag=True, help="Go on although the program's numbers differ."),
        click.option("--device", metavar="DEVICE", help="cpu (the default) or cuda."),
        click.option("--checkpoint-dir", metavar="LOCATION", help="The location in which --resume latest looks."),
        click.option("--resume", metavar="CHECKPOINT", help="A checkpoint's folder, s3://bucket/prefix/step-N, or latest."),
        click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be repeated."),
        click.option("--variant", metavar="NAME", help="Knob values of a defvariant."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Chosen:
    """A run of a file, its checkpoint (verified), and the plan; threads are set, and torch may be imported."""

    loaded: Any
    traced: Any
    found: Any
    plan: Any


def choose(
    what: str, file: str, run: str | None, variant: str | None, sets: tuple[str, ...], given: dict[str, str | None]
) -> Chosen:
    """Every mistake in file, run and checkpoint is found here, before torch. `given`: flags that are settings."""
    settings, compiler = load(os.environ, given), stage("compiler")
    output.report(settings.warnings)
    require(settings)
    stage("grant")(settings)
    loaded = compiler.load(file, selection(settings, variant, sets))
    output.report(loaded.experiment.warnings)
    chosen = compiler.choose_run(loaded.experiment, run)
    if what == "eval":  # the others open no data
        chosen = stage("measured")(chosen, output.say)
    found = checkpoint(what, settings, file, chosen.name)
    chosen = stage("remembered")(chosen, found.manifest.data)
    traced = compiler.train_graph(loaded, chosen)
    compiler.check_evals(loaded, chosen, traced)
    operations = compiler.flops(compiler.whole_step(traced, logged=False))
    count = threads.prepare(os.environ, operations, found.manifest.threads)
    opened = device.begin(settings, chosen.deterministic, chosen.deterministic_at)
    return Chosen(loaded, traced, found, plan(loaded, chosen, traced, count, settings, opened=opened))


def checkpoint(what: str, settings: Any, file: str, run: str) -> Any:
    """The checkpoint that --resume or its variable names. Nothing is written, so any location may hold it."""
    if not settings.resume:
        fail("E-CKPT-032", f"`{what}` needs a checkpoint, and none is named",
             help=("--resume PATH/step-100", "--resume latest --checkpoint-dir PATH"))  # fmt: skip
    base = settings.run_slug or os.path.splitext(os.path.basename(file))[0]
    heads = tuple(stage("head")(base, run, several) for several in (False, True))
    location = settings.checkpoint_dir if settings.resume == "latest" else None
    choice = stage("choose")(stage("wanted")(settings.resume, location, os.getcwd(), heads, run))
    if choice.found is None:
        fail("E-CKPT-001", f"there is no checkpoint in {location}", notes=choice.notes[:-1])
    for line in choice.notes:
        output.say(line)
    if choice.found.manifest.health != "healthy":
        output.report([f"{choice.found.folder} is suspect: not every number in it is finite"])
    return choice.found


def differences(comparison: Any) -> None:
    """What differs from the program that wrote the checkpoint, on stderr."""
    for line in comparison.harmless + comparison.changing:
        output.say(f"  {line}")
    if comparison.inexact:
        output.say(f"not bit-exact: {'; '.join(comparison.inexact)}")

"""`sexpgpu run`: flags into settings and options, then `start` hands over to the compiler and the run loop."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output, threads
from sexpgpu.diagnostics import fail
from sexpgpu.settings import Settings, load, natural, positive, require

#: what `start` calls -> where it is: imported only when a run begins, because torch comes with it
STAGES = {
    "compile": "sexpgpu.compiler:load",
    "execute": "sexpgpu.run.session:execute",
}


@dataclass(frozen=True)
class Arguments:
    """A command line of `run`, checked. `sets`: (name, text) as written; `max_time` in seconds."""

    file: str
    run: str | None
    variant: str | None
    sets: tuple[tuple[str, str], ...]
    steps: int | None
    eval_every: int | None
    max_time: int | None
    accept: bool
    settings: Settings


def stage(name: str) -> Callable[..., Any]:
    """A stage by its name in the table."""
    module, attribute = STAGES[name].split(":")
    return getattr(import_module(module), attribute)


def start(arguments: Arguments) -> int:
    """Compile, choose threads, import torch, train. The exit code."""
    settings = arguments.settings
    plan = stage("compile")(
        arguments.file,
        variant=arguments.variant,
        sets=arguments.sets,
        settings=settings,
        run=arguments.run,
        steps=arguments.steps,
        eval_every=arguments.eval_every,
    )
    threads.prepare(
        os.environ,
        getattr(plan, "operations", None),
        threads.stored_threads(settings.resume, settings.checkpoint_dir),
    )
    return stage("execute")(arguments, plan)


@click.command()
@click.argument("file")
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@click.option("--device", metavar="DEVICE", help="cpu (the default).")
@click.option("--metrics", metavar="TARGETS", help="jsonl:PATH or stdout, several by comma.")
@click.option("--status", metavar="PATH", help="A JSON file that always says how the run stands.")
@click.option("--checkpoint-dir", metavar="FOLDER", help="Where checkpoints go; {slug} stands for the run's slug.")
@click.option("--resume", metavar="CHECKPOINT", help="A checkpoint's folder, or latest.")
@click.option("--steps", metavar="N", help="Stop after step N; changes nothing else.")
@click.option("--eval-every", metavar="N", help="Evaluate every N steps; 0 is never.")
@click.option("--diagnostics", metavar="GLOBS", help="Taps to record, such as 'attention/*'.")
@click.option("--max-time", metavar="TIME", help="Stop with a checkpoint after this long: 90s, 30m, 3h, 1h30m.")
@click.option("--accept", is_flag=True, help="Resume although the program's numbers will change.")
def command(
    file: str,
    run: str | None,
    variant: str | None,
    sets: tuple[str, ...],
    steps: str | None,
    eval_every: str | None,
    max_time: str | None,
    accept: bool,
    **flags: str | None,
) -> int:
    """Train the run RUN of FILE (RUN may be left out when there is one)."""
    settings = load(os.environ, flags)
    output.report(settings.warnings)
    require(settings)
    return start(
        Arguments(
            file,
            run,
            variant,
            tuple(assignment(text) for text in sets),
            _number("--steps", steps, positive),
            _number("--eval-every", eval_every, natural),
            None if max_time is None else duration(max_time),
            accept,
            settings,
        )
    )


def assignment(text: str) -> tuple[str, str]:
    """`name=value` at its first `=`; the value is read by the knob it is for."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        fail("E-ENV-001", f"--set is `{text}`; it takes name=value", help=f"--set {name.strip() or 'name'}=1")
    return name.strip(), value


def duration(text: str) -> int:
    """`3h`, `30m`, `90s`, `1h30m` in seconds."""
    parts = re.fullmatch(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,8})m)?(?:([0-9]{1,9})s)?", text)
    seconds = sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else 0
    if seconds == 0:
        guess = f"--max-time {text}s" if text.isascii() and text.isdecimal() and int(text) else "--max-time 3h"
        fail("E-ENV-001", f"--max-time is `{text}`; it takes a time such as 90s, 30m, 3h or 1h30m", help=guess)
    return seconds


def _number(flag: str, text: str | None, kind: Callable[[str], int]) -> int | None:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError as error:
        fail("E-ENV-001", f"{flag} is `{text}`; it takes {error}")

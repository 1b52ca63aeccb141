"""`sexpgpu repl`: try forms out; tensors are computed at once on the CPU."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output, threads
from sexpgpu.settings import load

SESSION = "sexpgpu.repl.session:Session"
#: whether stdin and stdout are a terminal -> how inputs come
TALK = {True: "sexpgpu.repl.terminal:converse", False: "sexpgpu.repl.pipe:obey"}


@click.command()
@click.argument("file", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@output.json_messages
def command(file: str | None, variant: str | None, sets: tuple[str, ...]) -> int:
    """Evaluate forms as they are typed, after FILE if one is given; `,help` lists the commands.

    In a pipe each form is evaluated as it ends; exit code 1 says that one of them was wrong.
    """
    settings = load(os.environ)
    output.report(settings.warnings)
    threads.prepare(os.environ, None)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    session = _found(SESSION)(output.show, output.report, settings.eval_limit)
    if file is not None:
        session.begin(file, sets, variant)
    talk = _found(TALK[terminal])
    if terminal:
        output.show("SexpGPU: ,help lists the commands, Ctrl-D ends")
        return int(talk(session))
    return int(talk(session, sys.stdin))


def _found(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)

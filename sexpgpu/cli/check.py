"""`sexpgpu check`: everything short of running, for all runs, evaluations and variants of a file, in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output
from sexpgpu.cli.run import selection
from sexpgpu.diagnostics import document, printable, render
from sexpgpu.settings import load

#: the compiler's side: (file, selection, whether data is read) -> Checked
CHECK = "sexpgpu.compiler:check"


@click.command()
@click.argument("file")
@click.option("--variant", metavar="NAME", help="Check with this variant's knobs only; without it, with each.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@click.option("--data", is_flag=True, help="Also open the data and check its rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with every finding.")
def command(file: str, variant: str | None, sets: tuple[str, ...], data: bool, as_json: bool) -> int:
    """Find mistakes and suspicious places of FILE without running it. Exit code 1 if there are any."""
    settings = load(os.environ)
    output.report(settings.warnings)
    module, attribute = CHECK.split(":")
    check: Callable[..., Any] = getattr(import_module(module), attribute)
    found = check(file, selection(settings, variant, sets), data)
    if as_json:
        output.show_json(as_document(found))
    else:
        output.show("\n".join([*(render(d) + "\n" for d in found.findings), summary(found)]))
    return 1 if found.findings else 0


def summary(found: Any) -> str:
    """One line: what was found, and in how much."""
    looked = [_plural(len(found.runs), "run"), _plural(len(found.evals), "evaluation"),
              _plural(len(found.variants), "variant")]  # fmt: skip
    errors, warnings = found.count("error"), found.count("warning")
    what = f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}" if found.findings else "nothing found"
    return f"{printable(found.file)}: {what} ({', '.join(looked)})"


def as_document(found: Any) -> dict[str, Any]:
    """The document of a program."""
    return {
        "file": found.file,
        "runs": list(found.runs),
        "evals": list(found.evals),
        "variants": list(found.variants),
        "errors": found.count("error"),
        "warnings": found.count("warning"),
        "findings": [document(d) for d in found.findings],
    }


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"

"""`sexpgpu doctor`: versions and settings, each with its source. Exit 1 when it finds something to mend."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from sexpgpu import __version__
from sexpgpu.cli import output, threads
from sexpgpu.diagnostics import Diagnostic, note_warning, render
from sexpgpu.settings import VARIABLES, Secret, Settings, Value, not_yet, read, shown

PACKAGES = ("torch", "triton", "numpy", "lark", "safetensors", "click", "rich", "boto3", "requests")
NEEDED = frozenset(PACKAGES) - {"triton"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(as_json: bool) -> int:
    """Show versions, settings and where each came from."""
    settings = read(os.environ)
    found = [*settings.problems, *not_yet(settings), *settings.warnings, *_absent()]
    if as_json:
        output.show_json(document(settings, found))
    else:
        output.show("\n".join(lines(settings, found)))
    return 1 if found else 0


def versions() -> dict[str, str | None]:
    """Versions of us, Python and the libraries, none of which is imported."""
    named: dict[str, str | None] = {"sexpgpu": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            named[name] = version(name)
        except PackageNotFoundError:
            named[name] = None
    return named


def _absent() -> list[Diagnostic]:
    return [
        note_warning(
            "E-ENV-011", f"the package {name} is not installed", help=f"{sys.executable} -m pip install {name}"
        )
        for name, number in versions().items()
        if number is None and (name in NEEDED or (name == "triton" and sys.platform == "linux"))
    ]


def rows(settings: Settings) -> list[tuple[str, Value]]:
    """Every setting by the name of its variable."""
    values = list(settings.values.values())
    return [(v.name, value) for v, value in zip(VARIABLES, values, strict=True)]


def lines(settings: Settings, found: list[Diagnostic]) -> list[str]:
    """The report as text."""
    out = ["versions", *output.table((name, number or "not installed") for name, number in versions().items())]
    out += ["", "machine", *output.table([("system", platform.platform()), ("cores", str(threads.cores()))])]
    out += ["", "settings"]
    defaults = {v.name: v.shown_default for v in VARIABLES}
    table = []
    for name, value in rows(settings):
        text = defaults[name] if value.source == "default" else shown(value.value)
        table.append((name, text, value.source if value.source == "default" else f"{value.source} {value.via}"))
    out += output.table(table)
    out += ["", "findings" if found else "nothing to mend"]
    for diagnostic in found:
        out += ["  " + line for line in render(diagnostic).split("\n")]
    return out


def document(settings: Settings, found: list[Diagnostic]) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": threads.cores()},
        "settings": {
            name: {"value": _plain(value.value), "source": value.source, "via": value.via or None}
            for name, value in rows(settings)
        },
        "findings": [
            {"code": d.code, "severity": d.severity, "message": d.message, "help": list(d.help)} for d in found
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return "***"
    if isinstance(value, tuple):
        return list(value)
    return shown(value) if isinstance(value, str) else value

"""`sexpgpu metrics push FILE`: completes what a run could not deliver."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import click

from sexpgpu.cli import output
from sexpgpu.diagnostics import problem
from sexpgpu.settings import load


@click.group()
def command() -> None:
    """Send metrics files to the service."""


@command.command()
@click.argument("file")
@click.option("--folder", metavar="ID", help="The service's folder; default is the run's own, then SYVAIN_METRICS_FOLDER_ID.")
@click.option("--all", "everything", is_flag=True, help="Every run of the file; default is the last one and those begun.")
@output.json_messages
def push(file: str, folder: str | None, everything: bool) -> int:
    """Send what is not there yet of the metrics file or spool FILE."""
    settings = load(os.environ)
    output.report(settings.warnings)
    service = import_module("sexpgpu.run.metrics.target").service_of(settings)
    done = import_module("sexpgpu.run.metrics.push").push(Path(file), service, folder, everything, output.say)
    for run in done:
        output.show(f"{run.slug}: {run.sent} records sent" if run.sent else f"{run.slug}: nothing was left to send")
        for line in run.lines:
            output.show(f"  {line}")
    left = sum(run.left for run in done)
    if left:
        output.report([problem("E-NET-046", f"{left} records of {file} did not reach the service",
                               help=f"again later: sexpgpu metrics push {file}", exit_code=3).diagnostic])
    return 3 if left else 0

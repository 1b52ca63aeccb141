"""`sexpgpu export`: the weights of a checkpoint as one safetensors file."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import output, threads
from sexpgpu.diagnostics import fail, printable
from sexpgpu.settings import load

#: what an export calls -> where it is; `export` brings torch
STAGES = {
    "at path": "sexpgpu.run.checkpoints.find:at_path",
    "whole": "sexpgpu.run.checkpoints.find:whole",
    "absolute": "sexpgpu.run.checkpoints.find:absolute",
    "grant": "sexpgpu.run.storage:grant",
    "open storage": "sexpgpu.run.storage:open_storage",
    "export": "sexpgpu.run.checkpoints.export:export",
}


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    return getattr(import_module(module), attribute)


@click.command()
@click.argument("checkpoint")
@click.argument("out", metavar="OUT.safetensors")
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
@click.option("--weights", type=click.Choice(["raw", "ema"]), default="raw", help="ema: the averaged weights (:ema).")
@output.json_messages
def command(checkpoint: str, out: str, force: bool, weights: str) -> int:
    """Write the parameters and states of CHECKPOINT, a folder step-N, to a safetensors file."""
    settings = load(os.environ)
    output.report(settings.warnings)
    stage("grant")(settings)
    found = named(checkpoint, out)
    if found.manifest.health != "healthy":
        output.report([f"{found.folder} is suspect: not every number in it is finite"])
    threads.prepare(os.environ, None, found.manifest.threads)
    done = stage("export")(found, Path(os.getcwd()) / out, force, weights == "ema")
    where = f"{found.manifest.slug}, step {found.manifest.step}"
    output.show(f"{printable(out)}: {done.tensors} tensors, {done.values:,} values, of {where}")
    return 0


def named(checkpoint: str, out: str) -> Any:
    """The checkpoint of that path, its files verified. A location is refused with its newest checkpoint named."""
    path = stage("absolute")(checkpoint, os.getcwd())
    if stage("open storage")(path, "checkpoint").head("manifest.json") is None:
        if checkpoint == "latest":
            fail("E-CKPT-001", "`export` takes the folder of one checkpoint, and `latest` says not of which run",
                 help=f"sexpgpu export PATH/step-100 {out}")  # fmt: skip
        found, _ = stage("whole")(path)
        newest = next((f for f in found if f.manifest.health == "healthy"), None)
        if newest is not None:
            fail("E-CKPT-001", f"{checkpoint} is a location with checkpoints, not one checkpoint",
                 help=f"the newest: sexpgpu export {newest.folder} {out}")  # fmt: skip
    return stage("at path")(path)

"""`sexpgpu plot run.jsonl …`: a PNG of one or several runs."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import output
from sexpgpu.diagnostics import fail

SMOOTH = 0.9


@click.command()
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@click.option("-o", "--output", "target", metavar="PNG", help="Where the picture goes; default beside the first file, named as it is.")
@click.option("--smooth", metavar="W", help=f"Weight of the past in smoothed lines, from 0 (none) up to 1; default {SMOOTH}.")
@click.option("--all", "everything", is_flag=True, help="Every run of each file; default is the last one.")
@output.json_messages
def command(files: tuple[str, ...], target: str | None, smooth: str | None, everything: bool) -> int:
    """Draw losses, evaluations, learning rate, gradient norm, rate and taps of metrics files."""
    weight = _weight(smooth)
    place = Path(target) if target else Path(f"{Path(files[0]).with_suffix('') if Path(files[0]).name else 'run'}.png")
    if place.suffix.lower() != ".png":
        fail("E-ENV-001", f"--output is `{place}`; it takes the name of a .png file")
    if not place.parent.is_dir():
        fail("E-ENV-001", f"--output is `{place}`, and there is no folder {place.parent}", help="name a file in a folder that is there")
    runs, labels = _runs(files, everything)
    if find_spec("matplotlib") is None:
        fail("E-ENV-014", "`sexpgpu plot` needs matplotlib, which is not installed", help=f"{sys.executable} -m pip install 'sexpgpu[plot]'")
    figure = import_module("sexpgpu.plot.figure").draw(runs, labels, weight)
    try:
        figure.savefig(place, format="png")
    except OSError as error:
        fail("E-ENV-001", f"--output is `{place}`, which cannot be written: {error.strerror or error}", help="name a file that you may write")
    output.show(str(place))
    return 0


def _weight(text: str | None) -> float:
    if text is None:
        return SMOOTH
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < 1:
        fail("E-ENV-001", f"--smooth is `{text}`; it takes a number from 0 up to, but not, 1")
    return weight


def _runs(files: tuple[str, ...], everything: bool) -> tuple[list[Any], list[str]]:
    """The runs that have numbers, and what to call them: the slug, with the file where two are of one slug."""
    read = import_module("sexpgpu.run.metrics.read").read_runs
    found = []
    for file in files:
        runs = [run for run in read(file).values() if run.metrics]
        found += [(file, run) for run in (runs if everything else runs[-1:])]
    if not found:
        fail("E-RUN-016", f"{', '.join(files)}: no run has logged a step yet", help="plot it again after its first logged step")
    slugs = [run.slug for _, run in found]
    labels = [run.slug if slugs.count(run.slug) == 1 else f"{run.slug} ({file})" for file, run in found]
    return [run for _, run in found], labels

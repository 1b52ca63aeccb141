"""`sexpgpu predict`: a function of the file, on a checkpoint's weights, over the rows of an npz file."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import output, trained
from sexpgpu.diagnostics import printable

#: what a prediction calls -> where it is
STAGES = {
    "function": "sexpgpu.experiment.predicted:find_function",
    "trace": "sexpgpu.experiment.predicted:trace_function",
    "files": "sexpgpu.run.prediction",
    "refuse taken": "sexpgpu.run.checkpoints.export:refuse_taken",
    "predictor": "sexpgpu.backends.interpreter.prediction:Predictor",
    "predictor on cuda": "sexpgpu.backends.cuda.prediction:Predictor",
}


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@click.command()
@click.argument("file")
@click.argument("function")
@click.option("--run", metavar="RUN", help="The run of the checkpoint, where FILE has several.")
@trained.flags
@click.option("--input", "source", metavar="X.npz", required=True, help="An array for each parameter of FUNCTION.")
@click.option("--out", metavar="Y.npz", required=True, help="Where the results go.")
@click.option("--force", is_flag=True, help="Replace Y.npz where it exists.")
@output.json_messages
def command(
    file: str,
    function: str,
    run: str | None,
    variant: str | None,
    sets: tuple[str, ...],
    accept: bool,
    source: str,
    out: str,
    force: bool,
    **given: str | None,
) -> int:
    """Call FUNCTION of FILE, a function or a layer, on the rows of an npz file."""
    chosen = trained.choose("predict", file, run, variant, sets, given)
    ev, settings = chosen.loaded.ev, chosen.plan.run
    called = stage("function")(ev, function)
    place, files = Path(os.getcwd()) / out, stage("files")
    stage("refuse taken")(place, force)
    arrays = files.read_input(Path(os.getcwd()) / source, called.parameters.required, settings.data.fields)
    types, rows = files.row_types(arrays), len(next(iter(arrays.values())))

    def trace(samples: int) -> Any:
        return stage("trace")(ev, called, types, samples, chosen.traced.registry)

    files.check_indices(trace(min(rows, settings.data.batch)), arrays)
    # the data is not opened: its part of the trajectory is taken as the checkpoint says
    data = {k: v for k, v in chosen.found.manifest.trajectory.items() if k.startswith("data ")}
    restored = trained.stage("restore")(chosen.found, chosen.plan, data, accept)
    trained.differences(restored.comparison)
    predictor = stage("predictor" if restored.program.device == "cpu" else "predictor on cuda")
    results = files.predict(predictor(restored.program, trace), arrays, settings.data.batch)
    said = files.write_output(place, results, force)
    output.show(f"{printable(out)}: {', '.join(said)}, by {chosen.found.manifest.slug}, step {chosen.found.manifest.step}")
    return 0

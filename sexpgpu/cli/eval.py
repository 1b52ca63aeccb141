"""`sexpgpu eval`: the evaluations of a file on a checkpoint, without training."""

from __future__ import annotations

import math
from typing import Any

import click

from sexpgpu.cli import output, trained
from sexpgpu.diagnostics import fail, printable


@click.command()
@click.argument("file")
@click.argument("run", required=False)
@trained.flags
@click.option("--json", "as_json", is_flag=True, help="One JSON document, its numbers exact.")
def command(
    file: str,
    run: str | None,
    variant: str | None,
    sets: tuple[str, ...],
    accept: bool,
    as_json: bool,
    **given: str | None,
) -> int:
    """Evaluate a checkpoint of the run RUN of FILE (RUN may be left out when there is one)."""
    chosen = trained.choose("eval", file, run, variant, sets, given)
    if not chosen.plan.run.evals:
        fail("E-CKPT-033", f"{file} has no defeval to run", chosen.plan.run.span,
             help="add (defeval valid :data … :metrics …)")  # fmt: skip
    comparison, done = trained.stage("evaluations")(chosen.found, chosen.plan, accept, output.say)
    trained.differences(comparison)
    if as_json:
        output.show_json(document(chosen.found, done))
    else:
        output.show("\n".join(lines(chosen.found, done)))
    return 0


def lines(found: Any, done: list[Any]) -> list[str]:
    """The table of a person."""
    rows = [(e.name if i == 0 else "", printable(name), f"{value:.6g}")
            for e in done for i, (name, value) in enumerate(e.metrics.items())]  # fmt: skip
    return [f"{found.manifest.slug}, run {found.manifest.run}, step {found.manifest.step}", *output.table(rows)]


def document(found: Any, done: list[Any]) -> dict[str, Any]:
    """The document of a program; what is not finite is null."""
    m = found.manifest
    evals = {e.name: {n: v if math.isfinite(v) else None for n, v in e.metrics.items()} for e in done}
    return {"checkpoint": str(found.folder), "slug": m.slug, "run_id": m.run_id, "run": m.run, "step": m.step,
            "evals": evals}  # fmt: skip

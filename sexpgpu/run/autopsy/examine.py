"""The autopsy of one step of a run: the search, what it says, and the folder that shows it again.

It stands on the way to E-RUN-001, so a mistake of its own becomes a line and hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sexpgpu.backends.interpreter.program import capacity_of
from sexpgpu.run.autopsy.reproducer import Facts, state_folder, write
from sexpgpu.run.autopsy.search import Finding, samples_line, search
from sexpgpu.run.data.feed import Feed
from sexpgpu.run.options import RunPlan
from sexpgpu.run.plain import plain_knobs


@dataclass(frozen=True)
class Case:
    """Update `step` was not finite; `state` is the program's, which that update did not change."""

    plan: RunPlan
    slug: str
    step: int
    state: Mapping[str, torch.Tensor]
    feed: Feed
    with_data: bool


def examine(case: Case, places: Sequence[Path]) -> tuple[str, ...]:
    """Lines for a person. The reproducer goes into the first of `places` that takes it, or the user's state folder."""
    try:
        batch = case.feed.batch(case.step - 1)  # again, by its global index
        assert case.plan.step_graphs is not None
        run = case.plan.run
        capacity = capacity_of(batch, run.accumulate) if run.data.source.structures else None
        finding = search(case.plan.step_graphs(capacity), case.state, case.step - 1, batch)
        lines = describe(finding, case.plan, case.feed, case.step)
        return (*lines, *_save(case, batch, lines, places))
    except Exception as error:
        return (f"the autopsy of the step failed: {type(error).__name__}: {str(error)[:200]}",)


def describe(finding: Finding | None, plan: RunPlan, feed: Feed | None, step: int) -> list[str]:
    """What was found, with the numbers of the samples in their source."""
    if finding is None:
        return ["the interpreter's replay of the step is finite: the step was not, on this device"]
    lines = finding.lines()
    if finding.op == "param" and step > 1:
        lines.append(f"  the update of step {step - 1} made it so, from a loss and a gradient norm that were finite: is the learning rate too large?")
    if finding.samples:
        lines.append("  " + samples_line(finding.samples, _rows(feed, step), plan.run.data.source.name, plan.run.data.source.structures))
    return lines


def _rows(feed: Feed | None, step: int) -> list[int] | None:
    """Numbers in the source of the batch's samples, from 0; None where only the batch is known."""
    if feed is None:
        return None
    return [int(number) for number in feed.numbers(step - 1)]


def _save(case: Case, batch: Mapping[str, np.ndarray], lines: Sequence[str], places: Sequence[Path]) -> list[str]:
    plan = case.plan
    texts = {t.name: t.text for t in plan.experiment.texts}
    facts = Facts(
        file=plan.experiment.texts[0].name, run=plan.run.name, step=case.step, seed=plan.run.seed, precision=plan.run.precision,
        variant=plan.selection.get("variant"), sets=tuple(plan.selection.get("sets", ())), knobs=plain_knobs(plan.experiment.knobs),
        ir_hash=plan.ir_hash, versions=dict(plan.versions), folder=plan.run.data.source.folder, said=tuple(lines))
    kept = {name: tensor for name, tensor in case.state.items() if name.startswith(("param/", "state/"))}
    trouble = ""
    for place in [*places, state_folder()]:
        folder = place / f"{case.slug}-not-finite-step-{case.step}"
        try:
            write(folder, facts, texts, kept, batch if case.with_data else None)
        except OSError as error:
            trouble = f"{folder}: {error.strerror or error}"
            continue
        what = "with the batch" if case.with_data else "without data; --with-data adds the batch"
        return [f"reproducer ({what}): {folder}", f"to see it again: sexpgpu autopsy {folder}"]
    return [f"no reproducer could be saved: {trouble}"]


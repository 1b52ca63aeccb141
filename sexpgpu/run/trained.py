"""A checkpoint in the program of a file: compared as a resume compares, then evaluated without a step of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sexpgpu.run.bind import BoundData, bind
from sexpgpu.run.checkpoints.compare import Comparison, Identity, compare, refuse
from sexpgpu.run.checkpoints.find import Found
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.checkpoints.store import load
from sexpgpu.run.events import EvalDone
from sexpgpu.run.initial import component
from sexpgpu.run.loop import evaluate
from sexpgpu.run.options import RunPlan
from sexpgpu.run.plain import plain_knobs
from sexpgpu.run.program import Program


@dataclass(frozen=True)
class Trained:
    """A program that holds the checkpoint's weights; `comparison` says where the two differ."""

    program: Program
    comparison: Comparison


def evaluations(found: Found, plan: RunPlan, accept: bool, say: Callable[[str], None]) -> tuple[Comparison, list[EvalDone]]:
    """Every evaluation of the run on the checkpoint's weights, in the file's order.

    Raises E-CKPT-020 or E-CKPT-021 where the program is another, as a resume does.
    """
    data = bind(plan.run, plan.bounds, say, first=None)
    trained = restore(found, plan, _digests(data), accept, data.digests())
    step, feeds = found.manifest.step, data.feeds.evals
    try:
        done = [evaluate(trained.program, e, feeds[e.name], step) for e in plan.run.evals]
    finally:
        trained.program.close()
        data.close()
    return trained.comparison, done


def restore(found: Found, plan: RunPlan, data: Mapping[str, str], accept: bool, contents: Mapping[str, Any] | None = None) -> Trained:
    """The compiled program with the checkpoint's tensors. `data`: the data's part of the trajectory; `contents`: what a
    manifest says of them."""
    program = plan.compile()
    texts = {text.name: hashlib.sha256(text.text.encode()).hexdigest() for text in plan.experiment.texts}
    now = Identity(plan.run.name, dict(plan.trajectory) | dict(data) | component(plan.run, None, found.manifest),
                   plain_knobs(plan.experiment.knobs), texts,
                   plan.versions, program.device, 1, program.threads, data=contents or {},
                   sources={text.name: text.text for text in plan.experiment.texts})
    comparison = compare(found.manifest, now, saved_schema(found), program.schema())
    refuse(comparison, found.folder, accept)
    program.load(load(found), found.manifest.step)
    return Trained(program, comparison)


def _digests(data: BoundData) -> dict[str, str]:
    return {f"data {name}": dataset.digest for name, dataset in data.datasets.items()}

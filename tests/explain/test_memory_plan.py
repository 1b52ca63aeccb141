"""The planned memory of a step against what torch's allocator reports for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from sexpgpu import compiler
from sexpgpu.experiment.load import Selection
from sexpgpu.explain.cost import memory
from sexpgpu.run.bind import bind

ROOT = Path(__file__).resolve().parents[2]


def planned_and_measured(example: str, *sets: str) -> tuple[int, int]:
    """Bytes that a step holds at its peak beside what lies there between steps: by the plan, and by the allocator."""
    loaded = compiler.load(str(ROOT / f"examples/{example}.lisp"), Selection(sets=sets))
    run = compiler.choose_run(loaded.experiment, None)
    staged = compiler.stages(loaded, run)
    program = compiler.program(staged, "cpu", 1)
    program.initialise()
    feeds = bind(run).feeds.train
    program.step(feeds.batch(0), False)
    batch = feeds.batch(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        program.step(batch, False)
    program.close()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return memory(staged.traced, staged.micro(False)).step, peak


@pytest.mark.parametrize(("example", "sets", "within"), [
    ("digits", (), 0.001),
    ("vae", (), 0.001),
    ("own_optimizer", (), 0.05),
    ("char_lm", ("drop-rate=0",), 0.05),  # masks of dropout are drawn ahead, so the allocator gives them out in the step before
])  # fmt: skip
def test_the_plan_is_what_the_allocator_says(example: str, sets: tuple[str, ...], within: float) -> None:
    planned, measured = planned_and_measured(example, *sets)
    assert measured > 0 and planned == pytest.approx(measured, rel=within)

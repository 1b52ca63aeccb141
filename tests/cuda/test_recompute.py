"""What is computed again in the backward pass: choices, and steps under Triton's interpreter beside steps that keep everything."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support_cuda import interpreted

from sexpgpu.backends.cuda.memory import TAKEN, called, taken
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.cuda.report import again_lines, graphs, lowered
from sexpgpu.compiler import Selection, choose_run, load, stages
from sexpgpu.diagnostics import SexpError
from sexpgpu.passes.schedule.recompute import SHARE, lives_of, recompute, seconds_of

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def test_the_head_in_parts() -> None:
    failures, count = interpreted("recompute_in_triton.py", "heads")
    assert not failures and count == 5, "\n".join(failures)


@pytest.mark.parametrize("case", ["watched-gpt2", "again-gpt2-bf16", "gelu-gpt2-bf16", "remat-gpt2-bf16", "remat-char-lm"])
def test_steps_are_the_same_with_less_memory(case: str) -> None:
    failures, count = interpreted("recompute_in_triton.py", case)
    assert not failures, "\n".join(failures)
    assert count == 3


def planned(*sets: str, remat: bool = False) -> CudaProgram:
    """The program of examples/gpt2.lisp without a device."""
    loaded = load(str(ROOT / "examples/gpt2.lisp"), Selection(sets=sets))
    run = choose_run(loaded.experiment, None)
    run = replace(run, remat=remat)
    return lowered(stages(loaded, run, "cuda"))


def test_memory_of_gpt2() -> None:
    """At most 0.65 of what torch.compile takes (28.5 GiB at batch 64), within the time that may be spent on it."""
    program = planned("batch=64")
    forward = graphs(program)[0][1]
    found = forward.recomputed
    assert program.plan.total <= 0.65 * 28.5 * GIB
    assert found.choices and sum(c.seconds for c in found.choices) <= SHARE * seconds_of(forward.schedule)
    assert all(c.saved > 0 for c in found.choices)
    said = "\n".join(again_lines(forward, program.traced.origins))
    assert "computed again, not kept: 12 x " in said and "bf16[*64 1024 3072] in gpt2/block/feed-forward/out: 4.50 GiB less at the peak" in said
    again = planned("batch=64", remat=True)
    assert again.plan.total < 0.6 * program.plan.total
    assert ":remat runs" in "\n".join(again_lines(graphs(again)[0][1], again.traced.origins))


def test_what_library_calls_take() -> None:
    """Attention's values [32 12 1024 64] in bf16 and sums of its rows in f32, of all blocks at once, and the sums of one gradient."""
    forward, update = (compiled for _, compiled in graphs(planned("batch=32")))
    value, sums = 32 * 12 * 1024 * 64 * 2, 32 * 12 * 1024 * 4
    assert called(forward) == 12 * (value + sums) + sums and called(update) == 0
    again = graphs(planned("batch=32", remat=True))[0][1]
    assert called(again) < called(forward) // 3
    assert taken([forward]) == sum(TAKEN.values()) and taken([update]) == TAKEN["kernels"] + TAKEN["allocator"]


def test_a_small_step_computes_nothing_again() -> None:
    program = planned("layers=2", "heads=2", "d-model=32", "context=32", "vocabulary=512", "batch=4")
    forward = graphs(program)[0][1]
    assert not forward.recomputed.choices
    plain = recompute(forward.results, forward.into)
    assert plain.results == forward.results and len(plain.schedule.launches) == len(forward.schedule.launches)


def test_what_is_made_again_waits_for_the_backward_pass() -> None:
    """No launch of a second computation comes before the last early reader of the value, and every value is there when it is read."""
    program = planned("layers=3", "batch=32")
    forward = graphs(program)[0][1]
    assert forward.recomputed.choices
    made: set[object] = set()
    for launch in forward.schedule.launches:
        for base in launch.reads:
            assert base in made or base.op in ("param", "input", "state", "constant", "statistic"), base
        made.update(launch.stores)
    lives = lives_of(forward.schedule, set())
    backward = next(i for i, launch in enumerate(forward.schedule.launches) if any(program.traced.origins.of(n).phase == "backward" for n in launch.stores))
    gone = [lives[c.node].last for c in forward.recomputed.choices if c.node in lives]
    assert gone and max(gone) < len(forward.schedule.launches) // 2 and min(gone) < backward


def test_a_step_that_does_not_fit_is_told_what_remat_would_take() -> None:
    """On a device with 8 GiB free, planned on none."""
    loaded = load(str(ROOT / "examples/gpt2.lisp"), Selection(sets=("batch=32",)))
    staged = stages(loaded, choose_run(loaded.experiment, None), "cuda")
    with pytest.raises(SexpError) as caught:
        CudaProgram(staged, 1, device="meta", budget=8 * GIB)
    d = caught.value.diagnostic
    assert (d.code, d.exit_code) == ("E-MEM-002", 2) and "8.00 GiB are there" in d.message
    without = re.search(r"about (\d+) samples fit at once: :batch \1$", d.help[0])
    remat = re.search(r"^:remat true takes [\d.]+ GiB, which fits; with it about :batch (\d+) does$", d.help[-1])
    assert without and remat and 16 < int(without[1]) < 32 < int(remat[1])
    run = replace(staged.run, remat=True, data=replace(staged.run.data, batch=int(remat[1]) * 9 // 10))
    assert CudaProgram(stages(loaded, run, "cuda"), 1, device="meta", budget=8 * GIB).plan.total <= 8 * GIB

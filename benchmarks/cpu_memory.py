"""Does a run on the CPU take the memory that `explain` plans? One JSON line a case: planned bytes, those that torch's allocator
reports, their ratio.

Torch's CPU allocator keeps no statistics, but tells its profiler every block that it gives out and takes back; the running sum of these
is exact, in their order. A case is measured from before its program is made to the end of its fourth step, one of them logged, so that
parameters, gradients and optimizer state are in it as well as what a step holds. Masks of dropout, which a thread draws while a step runs,
are drawn at once here: the most that there can be. The batch is not in it: its fields are NumPy's memory.

    python benchmarks/cpu_memory.py [--case NAME …] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from sexpgpu import compiler
from sexpgpu.backends.interpreter import draws
from sexpgpu.backends.interpreter.plan import RunPlan, run_plan
from sexpgpu.experiment.load import Selection
from sexpgpu.run.bind import bind
from sexpgpu.run.measure import measured

ROOT = Path(__file__).resolve().parent.parent
MARK = 777_000_001  # bytes of a block that no program asks for: where the measured steps begin


@dataclass(frozen=True)
class Case:
    """An example, or the text of a program beside `x.npz` with images [3 32 32], vectors [512] and labels."""

    file: str = ""
    sets: tuple[str, ...] = ()
    text: str = ""


PERCEPTRON = """(import "nn" "optim" "loss")
(defknob wide 8192) (defknob batch 64) (defknob parts 1)
(defdata d (npy "x.npz" :fields ((vector f32 [512]) (label i32))))
(deflayer net (x) (linear (relu (linear (relu (linear x wide :name "a")) wide :name "b")) 10 :name "c"))
(defun the-loss (vector label) (cross-entropy (net vector) label))
(defrun r :data (batches d :batch batch) :loss the-loss :steps 4 :clip-norm 1.0 :accumulate parts :optimizer (adamw :lr 1e-3) :seed 0)
"""
IMAGES = """(import "nn" "optim" "loss")
(defknob c 32) (defknob batch 32) (defknob k 3) (defknob stride 1) (defknob precision f32) (defknob parts 1)
(defdata d (npy "x.npz" :fields ((image f32 [3 32 32]) (label i32))))
(deflayer net (x)
  (let* ((h (relu (convolution x c k :padding 1)))
         (h (gelu (convolution h (* 2 c) k :padding 1 :stride stride)))
         (h (max-pool h 2))
         (h (relu (convolution h (* 2 c) k :padding 1)))
         (h (mean h :axis [2 3])))
    (linear h 10)))
(defun the-loss (image label) (cross-entropy (net image) label))
(defrun r :data (batches d :batch batch) :loss the-loss :steps 4 :precision precision :accumulate parts :optimizer (adam :lr 1e-3) :seed 0)
"""
CASES = {
    "digits": Case("digits.lisp"),
    "char LM at default knobs": Case("char_lm.lisp"),
    "char LM, f32": Case("char_lm.lisp", ("precision=f32",)),
    "a perceptron of 1.2 GB": Case(text=PERCEPTRON),
    "a perceptron of 0.3 GB in 2 parts": Case(text=PERCEPTRON, sets=("wide=4096", "parts=2")),
    "conv net": Case(text=IMAGES),
    "conv net, 128 channels, batch 128": Case(text=IMAGES, sets=("c=128", "batch=128")),
    "conv net, bf16": Case(text=IMAGES, sets=("precision=bf16",)),
    "conv net, f64": Case(text=IMAGES, sets=("precision=f64",)),
    "conv_digits": Case("conv_digits.lisp"),
    "vae": Case("vae.lisp"),
    "pinn": Case("pinn.lisp"),
    "own_optimizer": Case("own_optimizer.lisp"),
    "potential": Case("potential.lisp"),
}


class _AtOnce:
    """An executor that does its work when it is asked for."""

    def __init__(self, *settings: Any):
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self, wait: bool = False) -> None:
        pass


@contextmanager
def drawn_at_once() -> Iterator[None]:
    """Masks are drawn where they are asked for, and not beside the step."""
    kept = draws.ThreadPoolExecutor
    draws.ThreadPoolExecutor = _AtOnce  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        draws.ThreadPoolExecutor = kept  # type: ignore[misc]


def blocks(work: Callable[[], None]) -> list[int]:
    """What torch's CPU allocator gave out (+) and took back (-) during the work, in bytes and in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def peak_after_mark(found: list[int]) -> tuple[int, int]:
    """(bytes at the mark, the most after it)."""
    now = base = peak = 0
    for count in found:
        if abs(count) == MARK:
            base, peak = (now, now) if count > 0 else (base, peak)
            continue
        now += count
        peak = max(peak, now)
    return base, peak


def planned_and_measured(file: str, sets: tuple[str, ...] = (), threads: int = 1) -> tuple[RunPlan, int]:
    """The plan, and the most that the allocator had given out."""
    loaded = compiler.load(file, Selection(sets=sets))
    run = measured(compiler.choose_run(loaded.experiment, None))
    staged = compiler.stages(loaded, run)
    feed = bind(run).feeds.train
    batches = [feed.batch(i) for i in range(4)]

    def work() -> None:
        program = compiler.program(staged, "cpu", threads)
        program.initialise()
        torch.empty(MARK, dtype=torch.uint8)
        for i, batch in enumerate(batches):
            program.step(batch, i == 1)
        program.close()

    with drawn_at_once():
        return run_plan(staged, threads), peak_after_mark(blocks(work))[1]


def total(plan: RunPlan) -> int:
    """Bytes of a plan, the batch left out."""
    return sum(plan.kept.values()) + plan.step


def place(case: Case, folder: Path) -> str:
    """The file of a case; what is not an example is written into the folder."""
    if case.file:
        return str(ROOT / "examples" / case.file)
    path = folder / "program.lisp"
    path.write_text(case.text, "utf-8")
    random = np.random.default_rng(0)
    np.savez(folder / "x.npz", image=random.standard_normal((512, 3, 32, 32), np.float32), vector=random.standard_normal((512, 512), np.float32),
             label=random.integers(0, 10, 512).astype(np.int32))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    for name in chosen.case:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name]
            plan, measured_bytes = planned_and_measured(place(case, Path(folder)), case.sets, chosen.threads)
        print(json.dumps({"case": name, "planned_bytes": total(plan), "measured_bytes": measured_bytes, "ratio": round(total(plan) / measured_bytes, 5),
                          "batch_bytes": plan.batch, "threads": chosen.threads}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

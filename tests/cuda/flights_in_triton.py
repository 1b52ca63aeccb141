"""Launches of several steps, with and without what a logged step computes more: the bits of the state depend on neither.

`python flights_in_triton.py CASE`; `TESTED_DEVICE=cuda` takes a GPU instead of Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from harness import DEVICE, tell  # first: it chooses the interpreter

# isort: split
import numpy as np
import torch
from steps_in_triton import CASES, INDEX, MORE, NORMAL, SMALL, Case, Pair, equal, kept

from sexpgpu.backends.cuda import flight as on_the_way
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.cuda.report import graphs
from sexpgpu.diagnostics import SexpError
from sexpgpu.run import flights
from sexpgpu.run.data.order import batch_indices
from sexpgpu.run.events import StepDone
from sexpgpu.run.loop import Feeds, train

TAPPED = SMALL.format(
    """(let* ((x (tanh (linear image 12 :name "in"))) (y (dropout (layer-norm x) 0.3)))
    (tap "in/size" (mean (square x))) (tap "drop/top" (reduce-max y)) (tap "far" (sum (exp (- 0.0 (square (linear y 3 :name "aside"))))))
    (linear y 5 :name "out"))""",
    "(adam :lr 1e-2)",
).replace("seed seed", 'seed 3 :diagnostics ("**") :metrics ((again f)) :clip-norm 0.5')
COUNTED = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((image f32 [12]) (label i32))))
(defun f (image label)
  (let* ((each (softmax-cross-entropy (linear image 5 :name "out") label)) (kept (cast (> label 1) f32))
         (all (sum (* each kept))) (many (sum kept)))
    (tap "share" (/ many 9.0)) (tap "twice" (* 2.0 all)) (tap "all" all)
    (list all many)))
(defun off (image label) (list (sum (square (mean image :axis 1))) (sum (cast (> label 1) f32))))
(defrun train :data (batches d :batch 8) :loss f :optimizer (sgd :lr 0.1 :momentum 0.9) :steps 4 :accumulate 2 :diagnostics ("**")
  :metrics ((again f) (off off)))
"""
KINDS = {
    "digits": CASES["digits"],
    "digits-parts": dataclasses.replace(CASES["digits"], more=MORE),
    "char-lm-bf16": Case("char_lm", sets=("layers=1", "heads=2", "d-model=16", "context=12", "batch=4", "steps=40", "precision=bf16")),
    "batch-norm": Case(text=SMALL.format(NORMAL, "(adam :lr 1e-2)").replace("seed seed", "seed 3 :metrics ((again f))"), ranges={"label": 5}),
    "tapped": Case(text=TAPPED, ranges={"label": 5}),
    "counted": Case(text=COUNTED, ranges={"label": 5}),
}
STEPS = 5


def made(pair: Pair, batches: list, sizes: tuple[int, ...], logged: tuple[bool, ...], start: int = 0, state: dict | None = None) -> tuple[dict, list, CudaProgram]:
    """State and results after launches of these sizes, two of them in the air."""
    program = pair.cuda()
    if state is not None:
        program.load(state, start)
    air: list = []
    results: list = []
    for size in sizes:
        air.append(program.launch(batches[start : start + size], logged[start : start + size]))
        start += size
        if len(air) == 2:
            results += program.collect(air.pop(0))
    for flight in air:
        results += program.collect(flight)
    return kept(program), results, program


def bits(pair: Pair) -> list[str]:
    batches = [pair.batch() for _ in range(STEPS)]
    never, always = (False,) * STEPS, (True,) * STEPS
    wanted, quiet, program = made(pair, batches, (1,) * STEPS, never)
    halves, _, _ = made(pair, batches, (1, 1), never)
    wrong = [] if program.apart else ["this case logs nothing"]
    losses = [(r.loss, r.gradient_norm) for r in quiet]
    for name, sizes, logged in (
        ("every step logged", (1,) * STEPS, always), ("one launch", (STEPS,), never),
        ("two and three", (2, 3), (False, True, False, False, True)), ("mixed", (1, 3, 1), (False, False, False, True, True)),
    ):  # fmt: skip
        state, results, _ = made(pair, batches, sizes, logged)
        if not equal(state, wanted):
            wrong.append(f"{name}: other bits of {[n for n in wanted if not torch.equal(state[n], wanted[n])][:3]}")
        if [(r.loss, r.gradient_norm) for r in results] != losses:
            wrong.append(f"{name}: other losses")
        if [bool(r.metrics or r.taps) for r in results] != list(logged):
            wrong.append(f"{name}: metrics and taps at other steps")
    resumed, _, _ = made(pair, batches, (3,), (True, False, True, True, False), 2, halves)
    return wrong + ([] if equal(resumed, wanted) else ["a resume at the second step gives other bits"]) + same_functions(program)


def same_functions(program: CudaProgram) -> list[str]:
    """Every launch of a step that is not logged is one of a logged step, to the letter of its source; the order of those that do not wait
    for each other may be another."""
    for (name, plain), (_, more) in zip(graphs(program, False), graphs(program, True), strict=True):
        told = [[_said(compiled, launch) for launch in compiled.schedule.launches] for compiled in (plain, more)]
        if any(told[0].count(said) > told[1].count(said) for said in told[0]):
            return [f"{name}: a logged step runs other functions"]
        if plain.late - more.late or plain.parts.items() - more.parts.items():
            return [f"{name}: sums are put together otherwise"]
        stored = [node for launch in more.schedule.launches for node in launch.stores]
        if len(stored) != len(set(stored)):
            return [f"{name}: two launches store {[n.op for n in set(stored) if stored.count(n) > 1]}"]
    return []


def _said(compiled, launch) -> tuple:
    found = compiled.emitted.get(launch)
    if found is None:
        return type(launch).__name__, getattr(launch, "node", None), launch.stores
    return found.source, str(found.grid), found.warps, launch.stores


def plans() -> list[str]:
    """Of graphs at their real sizes, where reductions take many programs: nothing runs, their launches are compared."""
    wrong = []
    for name, case in {
        "digits": Case("digits", sets=("hidden=1024", "batch=512")),
        "tapped": Case(text=TAPPED.replace(":batch 8", ":batch 1048576").replace("12 :name", "96 :name"), ranges={"label": 5}),
        "counted": Case(text=COUNTED.replace(":batch 8", ":batch 1048576"), ranges={"label": 5}),
        "char_lm": Case("char_lm", sets=("layers=1",)),
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            program = Pair(case, Path(folder)).cuda()
            program.target = "cuda"  # the kernels of a GPU
            program._compiled.clear()
            wrong += [f"{name}: {text}" for text in same_functions(program)]
    return wrong


def falls(pair: Pair) -> list[str]:
    """A step in the middle of a launch that is not finite: nothing after it changes anything, in its launch and in the next."""
    field = next(n for n, t in pair.fields.items() if t.dtype.startswith("f"))
    batches = [pair.batch() for _ in range(6)]
    before, told, _ = made(pair, batches, (1,), (False,) * 6)
    bad = [dict(b) for b in batches]
    bad[1][field] = np.full_like(bad[1][field], np.nan)
    program, wrong = pair.cuda(), []
    first, second = program.launch(bad[:3], (False, True, False)), program.launch(bad[3:5], (False, False))
    results = program.collect(first)
    if [r.finite for r in results] != [True, False] or results[1].fell != "loss" or results[0].loss != told[0].loss:
        wrong.append(f"a launch with a NaN gives {results}")
    if not equal(kept(program), before) or program.updates != 1:
        wrong.append("steps after one that is not finite wrote")
    if any(r.finite for r in program.collect(second)) or not equal(kept(program), before):
        wrong.append("the launch behind it wrote")
    program.collect(program.launch(batches[1:3], (False, False)))
    wanted, _, _ = made(pair, batches, (1, 2), (False,) * 6)
    return wrong + ([] if equal(kept(program), wanted) else ["what is launched afterwards differs"])


def index() -> list[str]:
    """An index out of range in a launch is not raised by it: the step falls, and its batch says which it was."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Case(text=INDEX, ranges={"label": 3}), Path(folder))
        program, wrong = pair.cuda(), []
        batches = [pair.batch() for _ in range(3)]
        batches[1]["label"][2] = 7
        batches[2]["label"][0] = 8  # never looked at
        results = program.collect(program.launch(batches, (False,) * 3))
        if [(r.finite, r.fell) for r in results] != [(True, ""), (False, "index")] or program.updates != 1:
            wrong.append(f"{results}")
        try:
            program.blame(batches[1], False)
            wrong.append("nothing is blamed")
        except SexpError as error:
            if error.diagnostic.code != "E-RUN-031" or "14" not in error.diagnostic.message:
                wrong.append(str(error))
        return wrong


class Memory:
    """A feed over arrays."""

    def __init__(self, pair: Pair, rows: int = 40):
        self.rows, self.size = pair.batch(rows), pair.run.data.batch

    def batch(self, step: int) -> dict[str, np.ndarray]:
        index = batch_indices(len(next(iter(self.rows.values()))), 5, self.size, step, True)
        return {name: values[index] for name, values in self.rows.items()}


def loop(pair: Pair) -> list[str]:
    """The run's own loop, whatever it logs, however many steps go together, and from where it is resumed."""
    feed = Memory(pair)

    def run(log_every: int, most: int, start: int = 0, stop: int = 14, state: dict | None = None) -> tuple[dict, dict]:
        flights.MOST = most
        program = pair.cuda()
        if state is not None:
            program.load(state, start)
        chosen = dataclasses.replace(pair.run, log_every=log_every, evals=())
        events = [e for e in train(program, chosen, Feeds(feed), start, stop) if isinstance(e, StepDone)]
        counts = {len(flags) for flags, _ in program._steps}
        if max(counts) != (most if stop - start > 8 else 1):
            raise AssertionError(f"launches of {counts} steps")
        return kept(program), {e.step: (e.result.loss, e.result.gradient_norm) for e in events}

    flights.TARGET, flights.SLOW, flights.PAYS = 1e9, 1e9, 1
    on_the_way.STAGED = 0  # batches take the way of large ones, on a GPU
    wanted, losses = run(100, 1)
    half, _ = run(3, 1, stop=5)
    wrong = []
    for name, (state, found) in {
        "by threes": run(3, 3), "by twos, all logged": run(1, 2), "resumed after 5, by twos": run(2, 2, start=5, state=half),
    }.items():  # fmt: skip
        if not equal(state, wanted) or any(losses[step] != values for step, values in found.items()):
            wrong.append(f"{name}: other bits")
    return wrong


def main(name: str) -> None:
    if name == "all":
        for each in (*KINDS, "falls", "index", "loop", "plans"):
            print(each, flush=True)
            main(each)
        return
    if name in ("index", "plans"):
        tell(index() if name == "index" else plans(), 1)
        return
    with tempfile.TemporaryDirectory() as folder:
        if name in KINDS:
            tell(bits(Pair(KINDS[name], Path(folder))), 8)
        else:
            tell({"falls": falls, "loop": loop}[name](Pair(KINDS["tapped"], Path(folder))), 3)


if __name__ == "__main__":
    print(f"on {DEVICE}", file=sys.stderr)
    try:
        main(sys.argv[1])
    except SexpError as error:  # what the device said stands in the notes
        print(error, *error.diagnostic.notes, sep="\n", file=sys.stderr)
        raise

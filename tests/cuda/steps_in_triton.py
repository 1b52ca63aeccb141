"""Whole programs, their steps as Triton kernels beside the interpreter's: `python steps_in_triton.py CASE`."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from harness import tell  # first: it chooses the interpreter

# isort: split
import numpy as np
import torch

from sexpgpu import compiler
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.interpreter.program import InterpreterProgram
from sexpgpu.compiler import Selection, load
from sexpgpu.diagnostics import SexpError
from sexpgpu.ir import postorder

ROOT = Path(__file__).resolve().parents[2]
SMALL = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((image f32 [36]) (label i32))))
(deflayer model (image)
  {})
(defun f (image label) (cross-entropy (model image) label))
(defrun train :data (batches d :batch 8) :loss f :optimizer {} :steps 4 :seed seed)
(defeval valid :data (batches d :batch 8) :every 2 :metrics ((loss f)))
"""
NORMAL = """(let* ((x (reshape image [(dim image 0) 1 6 6]))
         (x (relu (batch-norm (convolution x 3 3 :padding 1 :bias false)))))
    (linear (dropout (reshape x [(dim x 0) -1]) 0.2) 5 :name "out"))"""
MATRICES = '(linear (tanh (linear image 12 :name "in")) 5 :name "out")'
COUNTED = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((image f32 [12]) (label i32))))
(defun f (image label)
  (let ((each (softmax-cross-entropy (linear image 5 :name "out") label)) (kept (cast (> label 1) f32)))
    (list (sum (* each kept)) (sum kept))))
(defrun train :data (batches d :batch 8) :loss f :optimizer (sgd :lr 0.1 :momentum 0.9) :steps 4 :accumulate 2)
(defeval valid :data (batches d :batch 8) :every 2 :metrics ((loss f)))
"""


@dataclass(frozen=True)
class Case:
    """`file` of examples/, or a program `text`; `more`: keys that the run gets; `loose`: relative tolerance of a loss."""

    file: str = ""
    text: str = ""
    variant: str | None = None
    sets: tuple[str, ...] = ()
    more: str = ""
    loose: float = 1e-5
    ranges: dict[str, int] = field(default_factory=dict)  # integer field -> count of values


TINY = ("layers=2", "heads=2", "d-model=16", "context=12", "batch=4", "steps=40")
MORE = ":accumulate 2 :clip-norm 0.5 :ema 0.9"
CASES = {
    "digits": Case("digits", sets=("hidden=16", "batch=16")),
    "digits-parts": Case("digits", sets=("hidden=16", "batch=16"), more=MORE),
    "digits-f64": Case("digits", sets=("hidden=8", "batch=8", "precision=f64"), loose=1e-12),
    "char-lm": Case("char_lm", sets=(*TINY, "precision=f32")),
    "char-lm-parts": Case("char_lm", sets=(*TINY, "precision=f32"), more=":accumulate 2"),
    "char-lm-bf16": Case("char_lm", sets=(*TINY, "precision=bf16", "drop-rate=0"), loose=5e-3),
    "gpt2-bf16": Case("gpt2", sets=("layers=2", "heads=1", "d-model=16", "context=12", "vocabulary=64", "batch=4", "steps=40", "warmup=1"), loose=5e-3),
    "conv-digits": Case("conv_digits", sets=("channels=2", "batch=8")),
    "vae": Case("vae", sets=("hidden=16", "batch=8")),
    "pinn": Case("pinn", sets=("hidden=8", "batch=8")),
    "own-optimizer": Case("own_optimizer", sets=("hidden=8", "batch=8")),
    "batch-norm": Case(text=SMALL.format(NORMAL, "(adam :lr 1e-2)").replace("seed seed", "seed 3"), ranges={"label": 5}),
    "batch-norm-parts": Case(text=SMALL.format(NORMAL, "(adam :lr 1e-2)").replace("seed seed", "seed 3 :accumulate 2"), ranges={"label": 5}),
    "muon": Case(text=SMALL.format(MATRICES, "(muon :lr 1e-2)").replace("seed seed", "seed 3"), ranges={"label": 5}),
    "counted": Case(text=COUNTED, ranges={"label": 5}),
}


class Pair:
    """The stages of a case with batches for them; programs are made of them again and again."""

    def __init__(self, case: Case, folder: Path):
        text = case.text or (ROOT / "examples" / f"{case.file}.lisp").read_text("utf-8")
        if case.more:
            text = text.replace("  :seed seed", f"  :seed seed {case.more}")
            assert case.more in text
        file = folder / "p.lisp"
        file.write_text(text, "utf-8")
        loaded = load(str(file), Selection(variant=case.variant, sets=case.sets))
        self.run = next(iter(loaded.experiment.runs.values()))
        self.staged = compiler.stages(loaded, self.run, "cuda")
        found = postorder([*self.staged.micro(True).values()])
        self.fields = {n.attrs["name"]: n.type for n in found if n.op == "input"}
        self.ranges = case.ranges
        self.random = np.random.default_rng(4)

    def batch(self, size: int | None = None) -> dict[str, np.ndarray]:
        made = {}
        for name, kind in self.fields.items():
            shape = (self.run.data.batch if size is None else size, *kind.shape[1:])
            if kind.dtype.startswith("f"):
                made[name] = self.random.random(shape).astype(np.float32)
            else:
                made[name] = self.random.integers(0, self.ranges.get(name, 10), shape).astype({"u8": np.uint8}.get(kind.dtype, np.int32))
        return made

    def cuda(self) -> CudaProgram:
        program = CudaProgram(self.staged, 1)
        program.initialise()
        return program


def near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(1e-3, abs(a))


def kept(program: CudaProgram) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in program.state().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def follow(pair: Pair, case: Case) -> list[str]:
    """Five steps beside the interpreter, a resume at the third, evaluations with a remainder, a step that is not finite."""
    wrong: list[str] = []
    reference, program = InterpreterProgram(pair.staged, 1), pair.cuda()
    reference.initialise()
    if not equal(dict(reference.state()), kept(program)):
        wrong.append("initial values differ")
    batches = [pair.batch() for _ in range(5)]
    middle = None
    for i, batch in enumerate(batches):
        if i == 2:
            middle = kept(program)
        a, b = reference.step(batch, i % 2 == 0), program.step(batch, i % 2 == 0)
        told = [("loss", a.loss, b.loss, 1), ("norm", a.gradient_norm, b.gradient_norm, 20)]
        told += [(n, a.metrics[n], b.metrics[n], 20) for n in a.metrics] + [(n, a.taps[n], b.taps[n], 20) for n in a.taps]
        told += [(f"rate {n}", a.learning_rates[n], b.learning_rates[n], 1) for n in a.learning_rates]
        wrong += [f"step {i + 1} {n}: {x} and {y}" for n, x, y, more in told if not near(x, y, case.loose * more)]
        if (a.finite, a.tokens, sorted(a.metrics), sorted(a.taps)) != (b.finite, b.tokens, sorted(b.metrics), sorted(b.taps)):
            wrong.append(f"step {i + 1}: {a} and {b}")
    end = kept(program)
    for name, tensor in reference.state().items():
        if not torch.allclose(tensor.double(), end[name].double(), atol=max(2e-3, 20 * case.loose), rtol=max(1e-3, case.loose)):
            wrong.append(f"{name} is off by {(tensor.double() - end[name].double()).abs().max():.1e}")
    wrong += resume(pair, middle or {}, batches, end) + evaluations(pair, reference, program, case) + falls(pair, program)
    return wrong


def resume(pair: Pair, middle: dict[str, torch.Tensor], batches: list, end: dict[str, torch.Tensor]) -> list[str]:
    """From the state after two steps, bit for bit; the last three again as a replay of two and one."""
    again = pair.cuda()
    again.load(middle, 2)
    for i, batch in enumerate(batches[2:], 2):
        again.step(batch, i % 2 == 0)
    wrong = [] if equal(kept(again), end) else ["a resume gives other bits"]
    together = pair.cuda()
    together.load(middle, 2)
    together.collect(together.launch(batches[2:4], False))
    together.step(batches[4], True)
    return wrong + ([] if equal(kept(together), end) else ["two steps of one replay give other bits"])


def evaluations(pair: Pair, reference: InterpreterProgram, program: CudaProgram, case: Case) -> list[str]:
    """A whole batch and a remainder; twice, as the second one runs what the first has made."""
    wrong = []
    reference.load(program.state(), program.updates)
    for evaluation in pair.run.evals:
        for size in (6, 5, 6):
            batch = pair.batch(size)
            a, b = reference.evaluate(evaluation.name, batch), program.evaluate(evaluation.name, batch)
            if a.keys() != b.keys() or not all(near(x, b[n][0], case.loose * 20) and y == b[n][1] for n, (x, y) in a.items()):
                wrong.append(f"evaluation of {size}: {a} and {b}")
    return wrong


def falls(pair: Pair, program: CudaProgram) -> list[str]:
    """A step that is not finite changes nothing, and the next one goes on as if it had not been."""
    floats = [n for n, t in pair.fields.items() if t.dtype.startswith("f")]
    if not floats:
        return []
    before, updates = kept(program), program.updates
    batch, bad = pair.batch(), pair.batch()
    bad[floats[0]][-1] = np.nan
    result = program.step(bad, False)
    wrong = [] if not result.finite and result.fell == "loss" else [f"a NaN went through: {result}"]
    if not equal(before, kept(program)) or program.updates != updates:
        wrong.append("a step that is not finite wrote")
    other = pair.cuda()
    other.load(before, updates)
    other.step(batch, False)
    program.step(batch, False)
    return wrong + ([] if equal(kept(program), kept(other)) else ["the step after one that is not finite differs"])


INDEX = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((image f32 [4]) (label i32))))
(defun f (image label)
  (let ((table (param "table" [5 3] :init (normal :std 1))))
    (mean (square (* (mean image) (gather table (* label 2)))))))
(defrun train :data (batches d :batch 4) :loss f :optimizer (sgd :lr 0.1) :steps 4)
(defeval valid :data (batches d :batch 4) :every 2 :metrics ((loss f)))
"""


def index() -> list[str]:
    """An index computed in the step that is out of range: E-RUN-031 names it, nothing is written; in an evaluation too."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Case(text=INDEX, ranges={"label": 3}), Path(folder))
        program = pair.cuda()
        good = pair.batch()
        if not program.step(good, False).finite:
            wrong.append("indices in range were refused")
        before = kept(program)
        for value in (3, -1, 1 << 29):
            bad = pair.batch()
            bad["label"][2] = value
            for what, call in (("step", lambda bad=bad: program.step(bad, True)), ("evaluation", lambda bad=bad: program.evaluate("valid", bad))):
                try:
                    call()
                    wrong.append(f"{what}: index {2 * value} went through")
                except SexpError as error:
                    d = error.diagnostic
                    if (d.code, d.exit_code) != ("E-RUN-031", 3) or str(2 * value) not in d.message or "gather" not in d.message:
                        wrong.append(f"{what}: {d}")
        if not equal(before, kept(program)):
            wrong.append("a step with a wrong index wrote")
        if not program.step(good, False).finite:
            wrong.append("the step after it is refused")
    return wrong


def main(name: str) -> None:
    if name == "index":
        tell(index(), 1)
        return
    with tempfile.TemporaryDirectory() as folder:
        tell(follow(Pair(CASES[name], Path(folder)), CASES[name]), 5)


if __name__ == "__main__":
    main(sys.argv[1])

"""Steps of several ranks as Triton kernels, the ranks as threads of one process that take turns: `python ranks_in_triton.py CASE`.

Each case is trained by one rank and by several, plain and divided; what a rank must not read is far off here.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import tell  # first: it chooses the interpreter

# isort: split
import numpy as np
import torch

from sexpgpu import compiler
from sexpgpu.backends.cuda import exchange
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.compiler import Selection, load
from sexpgpu.diagnostics import SexpError
from sexpgpu.ir import postorder

TEXT = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((x f32 [{width}]) (label i32) (n f32))))
(deflayer net (x) {net})
(defun each (x label) (softmax-cross-entropy (net x) label))
(defun weighed (x label n) (tap "size" (mean (square x))) (list (sum (* n (each x label))) (sum n)))
(defun plain (x label) (mean (each x label)))
(defun picked (x label) (mean (square (* (mean x) (gather (param "table" [5 3] :init (normal :std 1)) (* label 2))))))
(defrun train :data (batches d :batch 8) :loss {loss} :optimizer {optimizer} :seed 3 :steps 9 {metrics} :diagnostics (**) {keys})
"""
DEEP = '(linear (dropout (tanh (linear (tanh (linear x 6 :name "a")) 6 :name "b")) 0.2) 5 :name "c")'
NORMAL = """(let ((y (relu (batch-norm (convolution (reshape x [(dim x 0) 1 3 4]) 2 3 :padding 1 :bias false)))))
    (linear (reshape y [(dim y 0) -1]) 5 :name "out"))"""


@dataclass(frozen=True)
class Case:
    """`alone`: keys of the run on one rank; `loose`: relative tolerance of a loss beside it; `together`: steps of a launch; `whole`: also
    twice, and a resume."""

    net: str = DEEP
    loss: str = "weighed"
    optimizer: str = "(adamw :lr 0.02)"
    keys: str = ""
    metrics: str = ":metrics ((plain plain))"
    alone: str = ""
    ranks: tuple[int, ...] = (2,)
    loose: float = 1e-5
    together: int = 1
    whole: bool = False


CASES = {
    "weighed": Case(keys=":clip-norm 0.5 :ema 0.9", ranks=(2, 4), whole=True),
    "parts": Case(loss="plain", keys=":accumulate 2 :clip-norm 0.5"),
    "several": Case(keys=":clip-norm 0.5", together=2),
    "states": Case(NORMAL, "plain", alone=":accumulate 2"),
    "matrices": Case(loss="plain", optimizer="(muon :lr 1e-2)"),
    "bf16": Case(keys=":precision bf16", loose=2e-2),
}


STEPS = 4


class Table:
    """Where ranks meet. One of them computes at a time: Triton's interpreter is one for a process."""

    def __init__(self, ranks: int):
        self.ranks, self.turn, self.rounds = ranks, threading.Condition(), {}
        self.ended = False

    def meet(self, rank: int, number: int, value: Any) -> list[Any]:
        """Every rank's value of this round; `turn` is held."""
        there = self.rounds.setdefault(number, {})
        there[rank] = value
        self.turn.notify_all()
        self.turn.wait_for(lambda: len(there) == self.ranks or self.ended)
        if self.ended:
            raise RuntimeError("another rank ended")
        return [there[r] for r in range(self.ranks)]


class Seat:
    """`backends.ranks.Team` of one thread."""

    def __init__(self, table: Table, rank: int):
        self.table, self.rank, self.ranks, self.wire = table, rank, table.ranks, "f32"
        self.number = 0
        self.said: list[str] = []

    def _meet(self, what: str, value: Any) -> list[Any]:
        self.number += 1
        self.said.append(what)
        return self.table.meet(self.rank, self.number, value)

    def sum_(self, tensor: torch.Tensor) -> None:
        values = self._meet(f"sum {tensor.numel()}", tensor.clone())
        tensor.copy_(torch.stack(values).sum(0))

    def part_(self, part: torch.Tensor, owner: int | None = None) -> None:
        values = self._meet(f"part {part.numel()} {owner}", part.clone())
        if owner in (None, self.rank):
            part.copy_(torch.stack(values).sum(0))
        else:
            part.mul_(1e30)

    def join_(self, vector: torch.Tensor) -> None:
        share = vector.numel() // self.ranks
        vector.copy_(torch.cat(self._meet(f"join {share}", vector[self.rank * share : (self.rank + 1) * share].clone())))

    def copy_(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._meet("copy", tensor.clone())[root])

    def on_host(self, share: torch.Tensor) -> torch.Tensor | None:
        whole = torch.cat(self._meet("host", share.clone()))
        return whole if self.rank == 0 else None

    def sum_floats(self, values: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self._meet("floats", values), strict=True)]

    def tell(self, text: str) -> str:
        return str(self._meet("tell", text)[0])

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def making(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def waited(self, seconds: float) -> None:
        assert seconds == 0.0  # nobody waits for a device here


def together(ranks: int, work: Callable[[Seat], Any]) -> list[Any]:
    """What `work` gives on each of so many ranks; the first error of one is raised here."""
    table = Table(ranks)
    found: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        with table.turn:
            try:
                found[number] = work(Seat(table, number))
            except BaseException as error:
                errors.append(error)
                table.ended = True
                table.turn.notify_all()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


class Runs:
    """A case's file and batches."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder
        random = np.random.default_rng(5)
        width = 12
        self.width = width
        self.batches = [{"x": random.random((8, width)).astype(np.float32), "label": random.integers(0, 5, 8).astype(np.int32),
                         "n": random.integers(0, 4, 8).astype(np.float32)} for _ in range(STEPS)]

    def staged(self, ranks: int, keys: str = "", device: str = "cuda") -> Any:
        file = self.folder / "p.lisp"
        file.write_text(TEXT.format(width=self.width, net=self.case.net, loss=self.case.loss, optimizer=self.case.optimizer, keys=f"{self.case.keys} {keys}", metrics=self.case.metrics))
        loaded = load(str(file), Selection())
        run = next(iter(loaded.experiment.runs.values()))
        return compiler.stages(loaded, run, device, ranks)

    def part(self, staged: Any, batch: dict[str, np.ndarray], rank: int, ranks: int) -> dict[str, np.ndarray]:
        names = {n.attrs["name"] for n in postorder(staged.micro(True).values()) if n.op == "input"}
        each = 8 // ranks
        return {n: a[rank * each : (rank + 1) * each] for n, a in batch.items() if n in names}

    def train(self, ranks: int, keys: str = "", first: int = 0, saved: dict[str, torch.Tensor] | None = None, last: int = STEPS) -> Any:
        """(results of each step, the state after the last) on rank 0, and what every rank met in."""
        staged = self.staged(ranks, keys)

        def one(seat: Seat) -> Any:
            program = CudaProgram(staged, 1, team=seat if ranks > 1 else None)  # type: ignore[arg-type]
            program.initialise()
            if saved is not None:
                program.share(saved if seat.rank == 0 else None, first) if ranks > 1 else program.load(saved, first)
            found = []
            for i in range(first, last, self.case.together):
                batches = [self.part(staged, b, seat.rank, ranks) for b in self.batches[i : i + self.case.together]]
                found += program.collect(program.launch(batches, [(i + k) % 2 == 0 for k in range(len(batches))]))
            state = {n: t.clone() for n, t in program.state().items()}
            return found, state, seat.said

        return together(ranks, one)


def near(a: float, b: float, loose: float) -> bool:
    return abs(a - b) <= loose * max(1e-2, abs(a))


def differences(what: str, a: list[Any], b: list[Any], loose: float) -> list[str]:
    wrong = []
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        told = [("loss", x.loss, y.loss, 1), ("norm", x.gradient_norm, y.gradient_norm, 20), ("tokens", x.tokens or 0.0, y.tokens or 0.0, 1)]
        told += [(n, x.metrics[n], y.metrics[n], 1) for n in x.metrics] + [(n, x.taps[n], y.taps[n], 1) for n in x.taps]
        wrong += [f"{what}, step {step}: {n} is {p} and {q}" for n, p, q, more in told if not near(p, q, loose * more)]
        if x.metrics.keys() != y.metrics.keys() or x.taps.keys() != y.taps.keys():
            wrong.append(f"{what}, step {step}: others are recorded")
    return wrong


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def follow(runs: Runs) -> tuple[list[str], int]:
    """One rank, several, divided; twice the same bits; a resume of the divided run by two, and by one."""
    case, wrong, count = runs.case, [], 0
    ((alone, state, _),) = runs.train(1, case.alone)
    for ranks in case.ranks:
        keys: dict[str, list[Any]] = {}
        names = {"plain": "", "divided": ":shard optimizer"} | ({"again": ""} if case.whole and ranks == 2 else {})
        for name, more in names.items():
            found = keys[name] = runs.train(ranks, more)
            wrong += differences(f"{name} on {ranks}", alone, found[0][0], case.loose)
            count += len(found[0][0])
            if any(said != found[0][2] for _, _, said in found):
                wrong.append(f"{name} on {ranks}: the ranks met in other sums: {[f[2] for f in found]}")
            loose = max(case.loose, 1e-4) * (100 if case.loose > 1e-4 else 1)
            for key, value in state.items():
                if not torch.allclose(value.double(), found[0][1][key].double(), rtol=loose, atol=loose):
                    wrong.append(f"{name} on {ranks}: {key} is off by {(value - found[0][1][key]).abs().max():.1e}")
        if "bf16" in case.keys and not equal(keys["plain"][0][1], keys["divided"][0][1]):  # nothing but the norm is summed otherwise
            wrong.append("divided weights: other bits")
        if "again" in keys and (not equal(keys["plain"][0][1], keys["again"][0][1]) or keys["plain"][0][0] != keys["again"][0][0]):
            wrong.append(f"{ranks} ranks twice: other bits")
        if "again" in keys:
            half = runs.train(2, ":shard optimizer", last=2)[0]
            rest = runs.train(2, ":shard optimizer", 2, half[1])[0]
            if not equal(rest[1], keys["divided"][0][1]):
                wrong.append("a resume on two: other bits")
            wrong += differences("a resume by one", alone[2:], runs.train(1, case.alone, 2, half[1])[0][0], case.loose)
    return wrong, count


def index(folder: Path) -> list[str]:
    """An index out of range on one of two ranks: that one says so, and the other waits for it."""
    runs = Runs(Case(loss="picked", metrics=""), folder)
    staged = runs.staged(2)
    waited: list[int] = []

    def one(seat: Seat) -> None:
        program = CudaProgram(staged, 1, team=seat)  # type: ignore[arg-type]
        program.initialise()
        batch = runs.part(staged, runs.batches[0], seat.rank, 2)
        batch["label"] %= 3
        if seat.rank == 1:
            batch["label"][2] = 4
        try:
            program.step(batch, False)
        except SexpError:
            waited.append(seat.rank)
            raise

    try:
        together(2, one)
    except SexpError as error:
        d = error.diagnostic
        return [] if d.code == "E-RUN-031" and waited == [1] else [f"{waited}: {d}"]
    return ["a wrong index went through"]


def rehearsal(folder: Path) -> list[str]:
    """Before the first capture rank 0 is through alone, and the other takes its choices; later ones leave the sums out, and ask nothing, as
    another rank may make no graph then."""
    runs = Runs(Case(loss="plain"), folder)
    staged = runs.staged(2)
    order: list[tuple[int, bool]] = []

    def one(seat: Seat) -> list[str]:
        program = CudaProgram(staged, 1, team=seat)  # type: ignore[arg-type]
        exchange = program.exchange
        assert exchange is not None
        exchange._stream = "there"  # type: ignore[assignment]  # as on a GPU
        for _ in range(2):
            exchange.follow()
            exchange.rehearsal(lambda: order.append((seat.rank, exchange.silent)))()
        return seat.said

    said = together(2, one)
    first = order[0] == (0, True) and [quiet for rank, quiet in order if rank == 0] == [True, False, True] and [q for r, q in order if r == 1] == [False, True]
    return [] if first and said == [["tell", "tell"]] * 2 else [f"{order}, {said}"]


def main(*names: str) -> None:
    exchange.BUCKET = 256  # several buckets, small as these models are
    wrong, count = [], 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            found, made = (ALONE[name](Path(folder)), 1) if name in ALONE else follow(Runs(CASES[name], Path(folder)))
        wrong += [f"{name}: {text}" for text in found]
        count += made
    tell(wrong, count)


ALONE = {"index": index, "rehearsal": rehearsal}

if __name__ == "__main__":
    main(*sys.argv[1:])

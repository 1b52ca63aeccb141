"""What the host does for a step while a device is at work: the loop, batches of 128 x 784 from memory, listeners, on a program whose
device takes no time. A step shorter than this keeps no device busy. JSON lines, times in µs a step (`cpu`: of the processor, over
all threads: the least of the rounds); no GPU.

    python benchmarks/host_step.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sexpgpu.backends.cuda.flight import ROOMS, InFlight, Report, Room
from sexpgpu.backends.interpreter.program import Result
from sexpgpu.compiler import Selection, load
from sexpgpu.experiment.model import Run
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.feed import train_feed
from sexpgpu.run.loop import Feeds, train
from sexpgpu.run.metrics import open_targets, parse_targets
from sexpgpu.run.metrics.listener import MetricsListener
from sexpgpu.run.progress import PlainProgress, Tally
from sexpgpu.run.status import StatusFile

ROWS = 20_000
SCALARS = ("loss", "gradient-norm", "ok", "learning-rate/", "part/loss", "part/metric/accuracy/total")


class Nothing:
    """Takes launches as `CudaProgram` does, with its memory and its reports; `seconds`: what it says a step takes."""

    device, threads, apart = "nothing", 1, True

    def __init__(self, seconds: float):
        self.seconds, self.reports, self.rooms, self.shapes = seconds, {}, {}, {}

    def launch(self, batches: Sequence[Mapping[str, Any]], logged: Sequence[bool]) -> InFlight:
        import torch

        if len(batches) not in self.reports:
            report = self.reports[len(batches)] = Report(torch.device("cpu"), torch.float32)
            for step in range(len(batches)):
                for name in SCALARS:
                    report.place(f"{step}/{name}").fill_(1.0)
            self.shapes = {n: (a.shape, torch.from_numpy(a).dtype) for n, a in batches[0].items()}
        report = self.reports[len(batches)]
        flight = report.send(0, 0.0, report.readings(1))
        flight._ended = self.seconds * len(batches)
        return flight

    def collect(self, flight: InFlight) -> list[Result]:
        return flight.results()

    def room(self, count: int) -> Room:
        rooms = self.rooms.setdefault(count, [])
        rooms.append(rooms.pop(0) if len(rooms) == ROOMS else Room(count, self.shapes, False))
        return rooms[-1]


def data(run: Run) -> Dataset:
    rng = np.random.default_rng(0)
    fields = {"x": rng.standard_normal((ROWS, 784)).astype(np.float32), "label": rng.integers(0, 10, ROWS).astype(np.int32)}
    return Dataset(run.data.source, fields, "0", ROWS)


def measure(seconds: float, steps: int, rounds: int, listening: bool, folder: Path, prepared: bool) -> dict[str, Any]:
    run = next(iter(load(str(Path(__file__).parent / "programs/perceptron.lisp"), Selection()).experiment.runs.values()))
    run = replace(run, evals=(), steps=steps)
    feed: Any = train_feed(data(run), replace(run.data, split=None, shuffle=True), 0)
    if prepared:
        feed = Prepared(feed)
    times, work, together = [], [], 0
    for number in range(rounds):
        program: Any = Nothing(seconds)
        listeners: list[Any] = []
        if listening:
            name = f"{seconds}-{prepared}-{number}"
            identity = {"run_id": "r", "slug": "s", "run": "train", "knobs": {}, "ir_hash": "0", "versions": {}}
            targets = open_targets(parse_targets(f"jsonl:{name}.jsonl", str(folder)), "r", None)
            listeners = [Tally(), StatusFile(folder / f"{name}.json"), MetricsListener(targets, identity), PlainProgress(open(folder / name, "w"))]  # noqa: SIM115
        begin, used = time.perf_counter(), time.process_time()
        for event in train(program, run, Feeds(feed), 0, steps):
            for listener in listeners:
                listener.on(event)
        times.append((time.perf_counter() - begin) * 1e6 / steps)
        work.append((time.process_time() - used) * 1e6 / steps)
        for listener in listeners:
            listener.close()
        together = max(program.reports)
    return {"together": together, "us": round(statistics.median(times), 1), "least": round(min(times), 1), "cpu": round(min(work), 1)}


class Prepared:
    """Batches that lie there: what is left is the loop's own."""

    def __init__(self, feed: Any):
        self._batch = feed.batch(0)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return self._batch

    def fill(self, step: int, out: Mapping[str, np.ndarray]) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds in (("one by one", 1.0e-2), ("together", 8e-5)):
            for listening in (False, True):
                for prepared in (True, False):
                    found = measure(seconds, given.steps, given.rounds, listening, Path(folder), prepared)
                    print(json.dumps({"name": name, "listeners": listening, "batches": not prepared, **found}), flush=True)


if __name__ == "__main__":
    main()

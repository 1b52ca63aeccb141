"""What a checkpoint costs the steps around it: JSON lines, on the device that there is.

A program whose state has so many GiB, through the real session, loop, writer and a local folder. Printed: the median step, the
measured copy of the state to the host, and how much longer each step with a checkpoint was than both together.

    python benchmarks/checkpoint_step.py [--gib 1] [--steps 60] [--every 20] [--step-ms 50]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "run"))
from fake_run import make_plan, options

from sexpgpu.run.checkpoints.tensors import HostCopy
from sexpgpu.run.program import StepResult
from sexpgpu.run.session import execute

TENSORS = 32


class Program:
    """`TENSORS` tensors of equal size; a step changes each, and multiplies matrices for about `step_ms`."""

    threads = 1

    def __init__(self, gib: float, step_ms: float):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.size, self.step_ms = int(gib * 2**30 / 4 / TENSORS), step_ms
        self.ends: list[float] = []
        self.matrix = torch.randn(4096, 4096, device=self.device) / 64
        self.times = 1

    def initialise(self) -> None:
        self.tensors = {f"param/{i:02d}": torch.full((self.size,), float(i), device=self.device) for i in range(TENSORS)}
        once, self.times = [], 1
        for _ in range(20):  # the first ones are slow
            begin = time.perf_counter()
            self._work()
            once.append(time.perf_counter() - begin)
        self.times = max(1, round(self.step_ms / 1e3 / min(once)))

    def _work(self) -> float:
        x = self.matrix
        for _ in range(self.times):
            x = x @ self.matrix
        return float(x[0, 0])

    def step(self, batch, logged: bool) -> StepResult:
        for tensor in self.tensors.values():
            tensor.mul_(1.0001)
        self._work()
        self.ends.append(time.perf_counter())
        return StepResult(0.5, 0.1, {"": 0.1}, True, {}, {})

    def evaluate(self, name, batch):
        return {"loss": (0.0, 1.0)}

    def state(self):
        return dict(self.tensors)

    def load(self, state, step: int) -> None:
        self.tensors = {n: t.to(self.device) for n, t in state.items()}

    def schema(self):
        return {name: ("f32", (self.size,)) for name in self.tensors}

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    program = Program(arguments.gib, arguments.step_ms)
    program.initialise()
    copy = HostCopy()
    copies = []
    for _ in range(4):  # the first one allocates
        begin = time.perf_counter()
        copy.take(program.state())
        copies.append((time.perf_counter() - begin) * 1e3)
    del copy
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), steps=arguments.steps, program=program, every=0, checkpoint_every=arguments.every, keep=1)
        plan = replace(plan, run=replace(plan.run, evals=()))
        code = execute(options(Path(folder), checkpoint_dir="ck", status="s.json", metrics="jsonl:m.jsonl", quiet=True), plan)
    steps = [(b - a) * 1e3 for a, b in zip(program.ends, program.ends[1:], strict=False)]
    saves = {i for i in range(arguments.every - 1, len(steps), arguments.every)}  # the step after the boundary of a save
    plain = median(ms for i, ms in enumerate(steps) if i not in saves)
    device = torch.cuda.get_device_name() if program.device == "cuda" else "cpu"
    print(json.dumps({"benchmark": "checkpoint-step", "device": device, "exit": code, "gib": arguments.gib, "median_step_ms": round(plain, 2),
                      "copy_ms": round(min(copies), 2), "first_copy_ms": round(copies[0], 1),
                      "extra_ms": [round(steps[i] - plain - min(copies), 2) for i in sorted(saves)],
                      "slowest_other_step_ms": round(max(ms for i, ms in enumerate(steps) if i not in saves), 2)}))


if __name__ == "__main__":
    main()

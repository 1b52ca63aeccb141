"""A tiny program (linear regression with Adam, torch) and everything around it, for the tests of `sexpgpu.run`.

As a script it is one process of a run: `python fake_run.py FOLDER key=value …`, for signals and kill -9.
"""

from __future__ import annotations

import math
import os
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from sexpgpu.diagnostics import SexpError, render
from sexpgpu.experiment.model import Batches, DataSource, Eval, Experiment, Field, Knob, Metric, Run, SourceText
from sexpgpu.run.options import RunOptions, RunPlan
from sexpgpu.run.program import StepResult
from sexpgpu.run.session import execute

LINEAR = Metric("loss", None)


class FakeProgram:
    """`nan_at`: the update (from 1) whose loss is NaN; `delay`: seconds a step."""

    device, threads = "cpu fake", 1

    def __init__(self, width: int = 3, nan_at: int | None = None, delay: float = 0.0, lr: float = 0.05):
        self.width, self.nan_at, self.delay, self.lr = width, nan_at, delay, lr
        self.closed = False
        self.trace: list[int] = []

    def initialise(self) -> None:
        values = torch.arange(self.width, dtype=torch.float32) / 10
        self.tensors = {"param/linear/weight": values.clone()}
        for slot in ("m", "v"):
            self.tensors[f"opt/{slot}/linear/weight"] = torch.zeros(self.width)
        self.count = 0

    def step(self, batch, logged: bool) -> StepResult:
        time.sleep(self.delay)
        x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
        weight = self.tensors["param/linear/weight"]
        error = x @ weight - y
        loss = float((error * error).mean())
        if self.nan_at == self.count + 1:
            loss = math.nan
        gradient = 2 * (x.T @ error) / len(y)
        if not math.isfinite(loss):
            return StepResult(loss, float(gradient.norm()), {"": self.lr}, False, {}, {}, fell="loss")
        self.count += 1
        self.trace.append(self.count)
        m, v = self.tensors["opt/m/linear/weight"], self.tensors["opt/v/linear/weight"]
        m.mul_(0.9).add_(gradient, alpha=0.1)
        v.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        weight.sub_(self.lr * m / (v.sqrt() + 1e-6))
        metrics = {"error": float(error.abs().mean())} if logged else {}
        taps = {"net/block/3/linear/norm": float(weight.norm())} if logged else {}
        return StepResult(loss, float(gradient.norm()), {"": self.lr}, True, metrics, taps)

    def evaluate(self, name: str, batch) -> dict[str, tuple[float, float]]:
        x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
        error = x @ self.tensors["param/linear/weight"] - y
        return {"loss": (float((error * error).sum()), float(len(y)))}

    def state(self):
        return dict(self.tensors)

    def load(self, state, step: int) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in state.items()}
        self.count = step

    def schema(self):
        return {name: ("f32", (self.width,)) for name in
                ("param/linear/weight", "opt/m/linear/weight", "opt/v/linear/weight")}

    def close(self) -> None:
        self.closed = True


def write_data(folder: Path, rows: int = 57, width: int = 3) -> None:
    path = Path(folder) / "data.csv"
    if path.exists():
        return
    values = np.random.default_rng(0).normal(size=(rows, width))
    lines = [",".join([*(f"x_{i}" for i in range(width)), "y"])]
    lines += [",".join(f"{v:.6f}" for v in (*row, row.sum())) for row in values]
    path.write_text("\n".join(lines) + "\n")


def make_plan(folder: Path, *, steps: int = 60, width: int = 3, nan_at=None, delay: float = 0.0, lr: float = 0.05,
              program=None, **keys) -> RunPlan:
    write_data(folder, width=width)
    source = DataSource("points", "csv", "data.csv", str(folder),
                        (Field("x", "f32", (width,)), Field("y", "f32")),
                        split=(("train", Fraction(4, 5)), ("valid", Fraction(1, 5))))
    evals = keys.pop("evals", (Eval("valid", Batches(source, "valid", 5), keys.pop("every", 20), (LINEAR,)),))
    settings = {"checkpoint_every": 7, "log_every": 10, "seed": 3} | keys
    run = Run("train", Batches(source, "train", 8, shuffle=True), LINEAR, None, steps, evals=evals, **settings)
    knobs = {"lr": Knob("lr", lr, "default", 0.05, "fake.lisp:1:1"),
             "scale": Knob("scale", Fraction(1, 16), "set", 1, "--set")}
    experiment = Experiment("fake.lisp", (SourceText("fake.lisp", "(fake)"),), knobs, {"points": source},
                            {"train": run}, {})
    return RunPlan(experiment, run, lambda: program or FakeProgram(width, nan_at, delay, lr), "ab" * 32,
                   {"graph": "g", "optimizer": f"adam {lr}", "seed": str(run.seed)}, {"sexpgpu": "0"})


def options(folder: Path, **keys) -> RunOptions:
    return RunOptions(**({"folder": str(folder), "stream": open(os.devnull, "w")} | keys))  # noqa: SIM115


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    words = dict(word.split("=", 1) for word in arguments[1:])
    delay, program = float(words.pop("delay", 0)), None
    if words.pop("flying", ""):
        from flying import FlyingProgram

        program = FlyingProgram(delay=delay)
    plan = make_plan(folder, steps=int(words.pop("steps", 60)), delay=delay, program=program,
                     every=int(words.pop("every", 20)), checkpoint_every=int(words.pop("cadence", 7)))
    try:
        return execute(RunOptions(folder=str(folder), **words), plan)
    except SexpError as error:
        print(render(error.diagnostic), file=sys.stderr)
        return error.diagnostic.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

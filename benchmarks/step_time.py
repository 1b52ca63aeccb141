"""How near is the step time that `explain` estimates? One JSON line a case: estimated, measured, their ratio.

On the CPU the steps are made here, on one thread; `measured_ms` is of processor time, which other work on the machine changes less than
the clock, and `wall_ms` of the clock. Those of the H200 were measured before (docs/decisions/0047): the lowering has changed
since, so a ratio is of this program's estimate and that program's time. `--rates` measures what `--assume` takes of this machine.

    python benchmarks/step_time.py [--steps 20] [--rates]
    python benchmarks/step_time.py --gpu [--seconds 6]     # measures the H200's cases, and which launches are off

With `--gpu` a case is a line with the step, in the steady state and replayed ten at a time, and then a line for each kind of launch, those
whose estimate is the furthest off first. A case that fails is a line with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sexpgpu import compiler
from sexpgpu.experiment.load import Selection
from sexpgpu.explain.report import estimated

ROOT = Path(__file__).resolve().parent.parent
#: case -> (file, knobs)
ON_CPU = {
    "digits": ("examples/digits.lisp", ()),
    "conv digits": ("examples/conv_digits.lisp", ()),
    "char LM, f32, no dropout": ("examples/char_lm.lisp", ("precision=f32", "drop-rate=0")),
    "char LM": ("examples/char_lm.lisp", ()),
}
#: case -> (file, knobs, measured ms, what that was)
ON_H200 = {
    "GPT-2 124M, batch 32": ("examples/gpt2.lisp", ("batch=32",), 61.88, "ours, steady, :deterministic false"),
    "GPT-2 124M, batch 64": ("examples/gpt2.lisp", ("batch=64",), 118.96, "ours, steady, :deterministic false"),
    "perceptron 784-512-512-10, batch 128, TF32": ("benchmarks/programs/perceptron.lisp", (), 0.0568, "ours, steady, ten steps a replay"),
}
#: what --gpu measures besides
ALSO = {
    "transformer of 4 layers, d 128, bf16": ("benchmarks/programs/transformer.lisp", ()),
    "char LM at default knobs": ("examples/char_lm.lisp", ()),
    "digits": ("examples/digits.lisp", ()),
}
TOGETHER = 10  # steps of a replay


def estimate(file: str, sets: tuple[str, ...], device: str) -> float:
    """Milliseconds."""
    loaded = compiler.load(str(ROOT / file), Selection(sets=sets))
    run = compiler.choose_run(loaded.experiment, None)
    return estimated(compiler.stages(loaded, run, "cuda" if device != "cpu" else "cpu"), device).seconds * 1e3


def measure(file: str, sets: tuple[str, ...], steps: int) -> tuple[float, float]:
    """Milliseconds of a step: of processor time, and by the clock. Medians; the first steps are left out."""
    from sexpgpu.run.bind import bind

    loaded = compiler.load(str(ROOT / file), Selection(sets=sets))
    run = compiler.choose_run(loaded.experiment, None)
    program = compiler.program(compiler.stages(loaded, run), "cpu", 1)
    program.initialise()
    feed = bind(run).feeds.train
    work, wall = [], []
    for number in range(steps + 3):
        batch = feed.batch(number)
        begin, worked = time.perf_counter(), time.process_time()
        program.step(batch, False)
        work.append(time.process_time() - worked)
        wall.append(time.perf_counter() - begin)
    program.close()
    return statistics.median(work[3:]) * 1e3, statistics.median(wall[3:]) * 1e3


def random_batch(loaded: Any, run: Any) -> dict[str, Any]:
    """Fields of a batch: integers below what the program indexes with them, and normal numbers."""
    import numpy as np

    random = np.random.default_rng(0)
    bounds = {name: high for name, _, high, _, _ in compiler.label_bounds(compiler.train_graph(loaded, run))}
    found = {}
    for field in run.data.fields:
        shape = (run.data.batch, *field.shape)
        integers = field.dtype in ("i32", "i64", "u8", "u16")
        found[field.name] = random.integers(0, bounds.get(field.name, 1) + 1, shape).astype(np.int32) if integers else random.standard_normal(shape).astype(np.float32)
    return found


def on_gpu(case: str, file: str, sets: tuple[str, ...], seconds: float) -> None:
    """One case on the GPU: its step, and its launches by what they compute."""
    from sexpgpu.backends.cuda.device import open_device
    from sexpgpu.backends.cuda.profile import measured
    from sexpgpu.explain.cost import H200
    from sexpgpu.explain.lowering import last_of
    from sexpgpu.explain.roofline import launch_time

    loaded = compiler.load(str(ROOT / file), Selection(sets=sets))
    run = replace(compiler.choose_run(loaded.experiment, None), deterministic=False)
    staged = compiler.stages(loaded, run, "cuda")
    program = compiler.program(staged, "cuda", None, opened=open_device(), budget=None)
    program.initialise()
    batch = random_batch(loaded, run)
    first = program.step(batch, False)
    assert first.finite, "the first step is not finite: nothing is timed"
    ahead = [batch] * TOGETHER
    program.collect(program.launch(ahead, False))
    done, flight, begin, middle = 0, program.launch(ahead, False), time.perf_counter(), 0.0
    while time.perf_counter() - begin < seconds:
        after = program.launch(ahead, False)
        program.collect(flight)
        flight = after
        if not middle and time.perf_counter() - begin > seconds / 2:  # the clock has settled
            middle, done = time.perf_counter(), 0
        done += TOGETHER
    took = (time.perf_counter() - middle) / max(1, done - TOGETHER)
    program.collect(flight)
    found = estimated(staged, "h200").seconds
    print(json.dumps({"case": case, "device": "h200", "estimated_ms": round(found * 1e3, 4), "measured_ms": round(took * 1e3, 4), "ratio": round(found / took, 3)}), flush=True)
    groups: dict[str, list[float]] = {}
    for compiled, timed in measured(program, batch)[1]:
        for row, spent in timed:
            launch = compiled.schedule.launches[row.number]
            group = groups.setdefault(f"{row.kind} {last_of(launch).op}", [0, 0.0, 0.0])
            group[0] += 1
            group[1] += launch_time(launch, H200, run.precision).seconds
            group[2] += spent
    for name, (count, guess, spent) in sorted(groups.items(), key=lambda g: -abs(g[1][1] - g[1][2])):
        print(json.dumps({"case": case, "launch": name, "count": count, "estimated_ms": round(guess * 1e3, 4), "measured_ms": round(spent * 1e3, 4)}), flush=True)
    program.close()


def rates() -> None:
    """What one thread of this machine reaches, as `--assume` takes it."""
    import torch

    torch.set_num_threads(1)
    a, big, small = torch.randn(1024, 1024), torch.randn(1 << 21), torch.randn(16)

    def best(work: Callable[[], object], repeat: int) -> float:
        found = []
        for _ in range(10):
            begin = time.process_time()
            for _ in range(repeat):
                work()
            found.append((time.process_time() - begin) / repeat)
        return min(found)

    with torch.inference_mode():
        flops = 2 * 1024**3 / best(lambda: torch.mm(a, a), 1)
        bandwidth = 3 * big.nbytes / best(lambda: torch.add(big, big), 4)
        launch = best(lambda: torch.add(small, small), 2000)
    print(json.dumps({"case": "rates", "flops": f"{flops:.3g}", "bandwidth": f"{bandwidth:.3g}", "launch": f"{launch:.3g}"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0)
    chosen = parser.parse_args()
    if chosen.rates:
        rates()
    if chosen.gpu:
        for case, (file, sets) in ({name: known[:2] for name, known in ON_H200.items()} | ALSO).items():
            try:
                on_gpu(case, file, sets, chosen.seconds)
            except Exception as error:  # noqa: BLE001 - the other cases go on
                print(json.dumps({"case": case, "error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    for case, (file, sets, measured, what) in ON_H200.items():
        found = estimate(file, sets, "h200")
        print(json.dumps({"case": case, "device": "h200", "estimated_ms": round(found, 4), "measured_ms": measured, "ratio": round(found / measured, 3), "measured": what}), flush=True)
    for case, (file, sets) in ON_CPU.items():
        found = estimate(file, sets, "cpu")
        work, wall = measure(file, sets, chosen.steps)
        print(json.dumps({"case": case, "device": "cpu", "estimated_ms": round(found, 3), "measured_ms": round(work, 3), "wall_ms": round(wall, 3),
                          "ratio": round(found / work, 3), "load": round(os.getloadavg()[0], 1)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

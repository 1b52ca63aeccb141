"""How near is the step time that `explain` estimates? One JSON line a case: estimated, measured, their ratio.

On the CPU the steps are made here, on one thread; `measured_ms` is of processor time, which other work on the machine changes less than
the clock, and `wall_ms` of the clock. Those of the H200 were measured before (docs/decisions/0030 and 0047): the lowering has changed
since, so a ratio is of this program's estimate and that program's time. `--rates` measures what `--assume` takes of this machine.

    python benchmarks/step_time.py [--steps 20] [--rates]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

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
    "GPT-2 124M, batch 32": ("examples/gpt2.lisp", ("batch=32",), 61.97, "ours, steady, :deterministic false"),
    "GPT-2 124M, batch 64": ("examples/gpt2.lisp", ("batch=64",), 119.7, "ours, steady, :deterministic false"),
    "perceptron 784-512-512-10, batch 128, TF32": ("benchmarks/programs/perceptron.lisp", (), 0.083, "torch.compile's step in a graph; ours was not measured"),
}


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
    chosen = parser.parse_args()
    if chosen.rates:
        rates()
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

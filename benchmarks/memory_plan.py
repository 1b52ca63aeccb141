"""Does a run on a GPU take the memory that was planned for it? A process a case, one after another, since the driver's count of free
memory is the device's; JSON lines: planned bytes by part, growth of device memory with the context subtracted, torch's reserved and
allocated bytes, and what lies outside torch (code of libraries and kernels: `backends/cuda/memory.TAKEN`). Needs a GPU alone.

    python benchmarks/memory_plan.py [--case NAME …] [--seconds 85]

On a CPU, as a check of this script: TRITON_INTERPRET=1 python benchmarks/memory_plan.py --tiny --case perceptron
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Case:
    """A file with knobs. logged: a step with metrics and taps is made too; evaluated: an evaluation as well."""

    file: str
    sets: tuple[str, ...] = ()
    remat: bool = False
    logged: bool = True
    evaluated: bool = False


GPT2, CHARS, SMALL = "examples/gpt2.lisp", "examples/char_lm.lisp", "benchmarks/programs/perceptron.lisp"
CASES = {  # the order in which they are measured: what matters most first
    "gpt2-64": Case(GPT2, ("batch=64", "warmup=0")),
    "gpt2-32": Case(GPT2, ("batch=32", "warmup=0")),
    "char-lm": Case(CHARS, evaluated=True),
    "char-lm-large": Case(CHARS, ("batch=256",), evaluated=True),
    "perceptron": Case(SMALL),
    "perceptron-large": Case(SMALL, ("batch=16384",)),
    "gpt2-64-remat": Case(GPT2, ("batch=64", "warmup=0"), remat=True),
    "conv-digits": Case("examples/conv_digits.lisp"),
}
TINY = {GPT2: ("layers=2", "heads=2", "d-model=16", "context=16", "vocabulary=64", "batch=4"), CHARS: ("layers=2", "heads=2", "d-model=16", "context=12", "batch=4"), SMALL: ("batch=4",)}


def batch_of(program: Any, rows: int) -> dict[str, Any]:
    """Random numbers in the shapes of the step's inputs; integers below what every example's labels and tokens may be."""
    import numpy as np

    from sexpgpu.ir import postorder

    random, found = np.random.default_rng(0), {}
    for node in postorder(program.staged.micro(True).values()):
        if node.op == "input":
            shape = (rows, *node.type.shape[1:])
            floats = node.type.dtype.startswith("f")
            found[node.attrs["name"]] = random.random(shape, dtype=np.float32) if floats else random.integers(0, 10, shape).astype({"u8": np.uint8}.get(node.type.dtype, np.int32))
    return found


def measured(case: Case, tiny: bool) -> dict[str, Any]:
    """One case, in this process."""
    from sexpgpu.cli import device as cli
    from sexpgpu.cli import threads

    on_gpu = os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
    threads.prepare(os.environ, None)
    cli.prepare(os.environ, "cuda", False)
    import torch

    from sexpgpu import compiler
    from sexpgpu.backends.cuda.program import CudaProgram
    from sexpgpu.compiler import Selection, load

    loaded = load(str(ROOT / case.file), Selection(sets=TINY.get(case.file, ()) if tiny else case.sets))
    run = replace(next(iter(loaded.experiment.runs.values())), deterministic=False, remat=case.remat)
    staged = compiler.stages(loaded, run, "cuda")
    free = {}

    def look(name: str) -> None:
        if on_gpu:
            torch.cuda.synchronize()
            free[name] = torch.cuda.mem_get_info()[0]

    if on_gpu:
        torch.cuda.init()
        free["start"] = torch.cuda.mem_get_info()[0]  # with the context
        torch.zeros(1, device="cuda").add_(1)  # with torch's own kernels
    look("context")
    program = CudaProgram(staged, 1)
    program._restart(0)  # weights are zeros: the memory is the same, and no time goes to drawing them
    look("state")
    rows = run.data.batch
    batch = batch_of(program, rows)
    seconds = time.perf_counter()
    first = program.step(batch, False)
    look("first step")
    if case.logged:
        program.step(batch, True)
    look("logged step")
    if case.evaluated and run.evals:
        program.evaluate(run.evals[0].name, {n: a[: max(1, min(rows, run.evals[0].data.batch))] for n, a in batch.items()})
    for _ in range(3):
        program.step(batch, False)
    look("steps")
    plan = program.plan
    row: dict[str, Any] = {
        "finite": first.finite, "seconds": round(time.perf_counter() - seconds, 2), "planned": plan.total, "plan": plan.lines()[0],
        "again": len(program._graphs(False)[0].recomputed.choices), "arena": plan.arena, "library": plan.library, "taken": plan.taken,
    }  # fmt: skip
    if not on_gpu:
        return row
    growth = free["context"] - min(free.values())
    reserved = torch.cuda.memory_reserved()
    row |= {
        "growth": growth, "within": abs(plan.total - growth) <= 0.05 * growth + 300 * MIB, "planned_over_growth": round(plan.total / growth, 4),
        "planned_less_growth_mib": round((plan.total - growth) / MIB, 1), "growth_gib": round(growth / GIB, 3),
        "by": {name: round((free["context"] - count) / MIB, 1) for name, count in free.items()},
        "reserved": reserved, "most_reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.memory_allocated(),
        "most_allocated": torch.cuda.max_memory_allocated(), "outside_torch_mib": round((growth - reserved) / MIB, 1),
        "torch_less_planned_mib": round((reserved - (plan.total - plan.taken)) / MIB, 1),
    }  # fmt: skip
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="these alone")
    parser.add_argument("--seconds", type=float, default=85.0, help="no case is begun that would end later than this")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(CASES[given.one], given.tiny)), flush=True)
        return 0
    start, ok = time.monotonic(), True
    longest = 0.0
    for name in given.case or CASES:
        left = given.seconds - (time.monotonic() - start)
        row: dict[str, Any] = {"name": f"memory {name}"}
        if left < longest / 2:
            print(json.dumps(row | {"error": "no time left"}), flush=True)
            continue
        began = time.monotonic()
        try:
            words = [sys.executable, __file__, "--one", name, *(["--tiny"] if given.tiny else [])]
            done = subprocess.run(words, capture_output=True, text=True, timeout=max(5.0, left))
            found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr.strip().splitlines()[-4:]}
        except subprocess.TimeoutExpired:
            found = {"error": "no time left"}
        except (OSError, ValueError, IndexError):
            found = {"error": traceback.format_exc().splitlines()[-1]}
        longest = max(longest, time.monotonic() - began)
        ok = ok and found.get("within", "error" not in found)
        print(json.dumps(row | found | {"process_seconds": round(time.monotonic() - began, 1)}), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""Does examples/potential.lisp become a potential? JSON lines: the held-out error by step, the laws, and the drift of NVE.

    python benchmarks/potential_example.py [--steps 2000] [--checkpoint runs/ethanol/step-2000]
    python benchmarks/potential_example.py --device cuda --twice         # on a GPU; two runs of 100 steps have the same bits
    python benchmarks/potential_example.py --compile --twice             # the kernels of that into TRITON_CACHE_DIR; needs no GPU (no_gpu.py)

The bars: the mean error of a force component below 15 % of the mean component on the held-out trajectory, in under 10 minutes
on a CPU; every law of `sexpgpu doctor`; below 1 meV an atom and ps over 1,000 steps of 0.5 fs. On a GPU the training takes seconds. Every check is on its own: one that
fails says so, and the others go on. Needs `pip install 'sexpgpu[ase]'`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples"
FILE = str(EXAMPLES / "potential.lisp")


def show(**row: object) -> None:
    print(json.dumps(row), flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(folder: Path, steps: int, device: str) -> str:
    """Trains, shows the curve, and gives the last checkpoint's folder."""
    start, metrics, error = time.perf_counter(), folder / "metrics.jsonl", float("nan")
    run(folder / "ck", steps, device, "--metrics", f"jsonl:{metrics}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in records:
        if record["type"] == "metric" and record["metadata"].get("eval") == "held-out":
            show(check="held-out", step=record["step"], name=record["name"], value=record["value"])
            error = record["value"] if record["name"] == "relative-force-error" else error
    show(check="training", device=device, seconds=round(time.perf_counter() - start, 1), relative_force_error=error, holds=error < 0.15)
    return str(folder / "ck" / f"step-{steps}")


def run(folder: Path, steps: int, device: str, *more: str) -> None:
    words = ["run", FILE, "--device", device, "--set", f"steps={steps}", "--checkpoint-dir", str(folder), *more]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "sexpgpu", *words], stderr=subprocess.PIPE, text=True)
    note(f"{steps} steps on {device} in {time.perf_counter() - start:.1f} s")
    if done.returncode:
        raise RuntimeError(f"sexpgpu ended with {done.returncode}: {done.stderr[-300:]}")


def twice(folder: Path, device: str, steps: int = 100) -> None:
    """Two runs with one seed: are their states equal to the last bit?"""
    digests = []
    for name in ("a", "b"):
        run(folder / name, steps, device)
        digests.append(json.loads((folder / name / f"step-{steps}" / "manifest.json").read_text())["digest"])
    show(check="twice", device=device, steps=steps, digests=digests, holds=digests[0] == digests[1])


def laws(checkpoint: str, sets: tuple[str, ...], device: str) -> None:
    from sexpgpu.potential import Potential, check

    for f in check(lambda precision: Potential(FILE, checkpoint, sets=sets, precision=precision, device=device)):
        show(check="law", law=f.law, deviation=f.deviation, bound=f.bound, holds=f.holds)


def drift(checkpoint: str, sets: tuple[str, ...], precision: str, device: str) -> None:
    """1,000 steps of velocity Verlet from the first held-out frame at 300 K; the slope of the total energy."""
    import ase.io
    from ase import units
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
    from ase.md.verlet import VelocityVerlet

    from sexpgpu.ase import Calculator

    atoms = ase.io.read(EXAMPLES / "data" / "ethanol_300K.extxyz.gz", 0).copy()
    atoms.calc = Calculator(FILE, checkpoint, device, sets=sets, precision=precision)
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(1))
    Stationary(atoms)
    ZeroRotation(atoms)
    energies: list[float] = []
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()), interval=1)
    start = time.perf_counter()
    dynamics.run(1000)
    slope = 1000 * float(np.polyfit(np.arange(len(energies)) * 0.5e-3, energies, 1)[0]) / len(atoms)
    show(check="nve", device=device, precision=precision, mev_per_atom_and_ps=slope, lists=atoms.calc.lists,
         seconds=round(time.perf_counter() - start, 1), holds=abs(slope) < 1)  # fmt: skip


def attempt(check: str, work: Callable[[], Any]) -> Any:
    """What the check gives, or None and a line that says why not."""
    try:
        return work()
    except Exception as problem:  # noqa: BLE001 - the other checks go on
        show(check=check, holds=False, problem=f"{type(problem).__name__}: {problem}"[:400])
        return None


def kernels(runs: tuple[int, ...]) -> None:
    """Compiles what runs of so many steps, the laws and NVE launch, where there may be no GPU. Nothing is computed."""
    import ase.io
    import no_gpu

    no_gpu.install()
    bounds, counted, start = no_gpu.bounds(), no_gpu.Counted(), time.perf_counter()
    from sexpgpu import compiler
    from sexpgpu.ase import Calculator
    from sexpgpu.backends.cuda.program import CudaProgram
    from sexpgpu.potential import Potential, check
    from sexpgpu.run.bind import bind
    from sexpgpu.run.measure import measured

    for steps in runs:
        loaded = compiler.load(FILE, compiler.Selection(sets=(f"steps={steps}",)))
        config = measured(next(iter(loaded.experiment.runs.values())))
        program = CudaProgram(compiler.stages(loaded, config, "cuda"), 1, "cpu")
        program.initialise()
        feeds = bind(config).feeds
        for logged in (False, True):
            program.launch([feeds.train.batch(0)], logged)
        for name, batches in feeds.evals.items():
            for batch in batches:
                program.evaluate(name, batch)
        note(f"{time.perf_counter() - start:.1f} s: a run of {steps} steps")
    check(lambda precision: Potential(FILE, None, precision=precision, device="cuda"))
    atoms = ase.io.read(EXAMPLES / "data" / "ethanol_300K.extxyz.gz", 0).copy()
    for precision in ("f32", "f64"):
        atoms.calc = Calculator(FILE, None, "cuda", precision=precision)
        atoms.get_potential_energy()
    calls = no_gpu.calls(bounds)
    note(f"{time.perf_counter() - start:.1f} s: {len(calls)} launches")
    failed = sum(attempt("compile", lambda call=call: (call(), True)[1]) is None for call in calls)
    show(name="compiled", launches=len(calls), failed=failed, **counted.told(), seconds=round(time.perf_counter() - start, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint", help="of an earlier training with as many steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--twice", action="store_true", help="first train 100 steps twice, and compare every bit")
    parser.add_argument("--compile", action="store_true", help="only compile the kernels of a GPU's runs")
    options = parser.parse_args()
    if options.compile:
        kernels((100, options.steps) if options.twice else (options.steps,))
        return
    faulthandler.register(signal.SIGTERM, chain=True)
    sets, device = (f"steps={options.steps}",), options.device
    with tempfile.TemporaryDirectory() as folder:
        if options.twice:
            attempt("twice", lambda: twice(Path(folder) / "twice", device))
        checkpoint = options.checkpoint or attempt("training", lambda: train(Path(folder), options.steps, device))
        if checkpoint is None:
            return
        attempt("laws", lambda: laws(checkpoint, sets, device))
        for precision in ("f32", "f64"):
            attempt("nve", lambda precision=precision: drift(checkpoint, sets, precision, device))


if __name__ == "__main__":
    main()

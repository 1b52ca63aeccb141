"""Does examples/potential.lisp become a potential? JSON lines: the held-out error by step, the laws, and the drift of NVE.

    python benchmarks/potential_example.py [--steps 2000] [--checkpoint runs/ethanol/step-2000]

The bars: the mean error of a force component below 15 % of the mean component on the held-out trajectory, in under 10 minutes
on a CPU; every law of `sexpgpu doctor`; below 1 meV an atom and ps over 1,000 steps of 0.5 fs. Needs `pip install 'sexpgpu[ase]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples"
FILE = str(EXAMPLES / "potential.lisp")


def show(**row: object) -> None:
    print(json.dumps(row), flush=True)


def train(folder: Path, steps: int) -> str:
    """Trains, shows the curve, and gives the last checkpoint's folder."""
    start, metrics, error = time.perf_counter(), folder / "metrics.jsonl", float("nan")
    words = ["run", FILE, "--set", f"steps={steps}", "--checkpoint-dir", str(folder / "ck"), "--metrics", f"jsonl:{metrics}"]
    subprocess.run([sys.executable, "-m", "sexpgpu", *words], check=True, stderr=subprocess.DEVNULL)
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metric" and record["metadata"].get("eval") == "held-out":
            show(check="held-out", step=record["step"], name=record["name"], value=record["value"])
            error = record["value"] if record["name"] == "relative-force-error" else error
    show(check="training", seconds=round(time.perf_counter() - start, 1), relative_force_error=error, holds=error < 0.15)
    return str(folder / "ck" / f"step-{steps}")


def laws(checkpoint: str, sets: tuple[str, ...]) -> None:
    from sexpgpu.potential import Potential, check

    for f in check(lambda precision: Potential(FILE, checkpoint, sets=sets, precision=precision)):
        show(check="law", law=f.law, deviation=f.deviation, bound=f.bound, holds=f.holds)


def drift(checkpoint: str, sets: tuple[str, ...], precision: str) -> None:
    """1,000 steps of velocity Verlet from the first held-out frame at 300 K; the slope of the total energy."""
    import ase.io
    from ase import units
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
    from ase.md.verlet import VelocityVerlet

    from sexpgpu.ase import Calculator

    atoms = ase.io.read(EXAMPLES / "data" / "ethanol_300K.extxyz.gz", 0).copy()
    atoms.calc = Calculator(FILE, checkpoint, sets=sets, precision=precision)
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(1))
    Stationary(atoms)
    ZeroRotation(atoms)
    energies: list[float] = []
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()), interval=1)
    start = time.perf_counter()
    dynamics.run(1000)
    slope = 1000 * float(np.polyfit(np.arange(len(energies)) * 0.5e-3, energies, 1)[0]) / len(atoms)
    show(check="nve", precision=precision, mev_per_atom_and_ps=slope, lists=atoms.calc.lists,
         seconds=round(time.perf_counter() - start, 1), holds=abs(slope) < 1)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint", help="of an earlier training with as many steps")
    options = parser.parse_args()
    sets = (f"steps={options.steps}",)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or train(Path(folder), options.steps)
        laws(checkpoint, sets)
        for precision in ("f32", "f64"):
            drift(checkpoint, sets, precision)


if __name__ == "__main__":
    main()

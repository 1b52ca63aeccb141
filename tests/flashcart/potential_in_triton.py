"""A potential on device `cuda` under Triton's interpreter, beside the CPU interpreter; a JSON line a check. Triton's interpreter is
chosen before Triton is imported, so this is a process of its own: test_potential_runs.py starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tempfile
from pathlib import Path

import numpy as np
from test_potential import WATER
from test_potential_runs import FILE, GRID, failed

from sexpgpu import compiler
from sexpgpu.backends.cuda import program as cuda
from sexpgpu.backends.interpreter.program import capacity_of
from sexpgpu.cli.main import perform
from sexpgpu.compiler import Selection, load
from sexpgpu.run.bind import bind
from sexpgpu.run.measure import measured

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "potential.lisp"
TINY = ("channels=2", "l-edge=1", "layers=1", "correlation=2", "hidden=4", "radial-functions=3", "batch=1", "steps=20")


def say(**row: object) -> None:
    print(json.dumps(row), flush=True)


def programs(file: Path, sets: tuple[str, ...], *devices: str):
    """(program, its feed) of each device."""
    found = []
    for device in devices:
        loaded = load(str(file), Selection(sets=sets))
        run = measured(next(iter(loaded.experiment.runs.values())))
        run = dataclasses.replace(run, evals=())
        made = compiler.program(compiler.stages(loaded, run, device), device, 1)
        made.initialise()
        found.append((made, bind(run).feeds.train))
    return found


def losses() -> None:
    (a, feed), (b, _) = programs(EXAMPLE, TINY, "cpu", "cuda")
    rows = [(a.step(feed.batch(i), False).loss, b.step(feed.batch(i), False).loss) for i in range(3)]
    say(name="losses", cpu=[x for x, _ in rows], cuda=[y for _, y in rows])


def capacities(folder: Path) -> None:
    """Batches of two capacities, twice over: each is lowered when it first comes, and nothing later."""
    built: list[object] = []
    replay = cuda.Replay

    class Counted(replay):
        def __init__(self, *args, **keys):
            built.append(args)
            super().__init__(*args, **keys)

    cuda.Replay = Counted
    try:
        ((program, feed),) = programs(folder / "p.lisp", ("channels=2",), "cuda")
        rounds, seen = [], set()
        for _ in range(2):
            before = len(built)
            for i in range(3):
                batch = feed.batch(i)
                seen.add(capacity_of(batch))
                program.step(batch, False)
            rounds.append(len(built) - before)
    finally:
        cuda.Replay = replay
    say(name="capacities", capacities=sorted(seen), **{"first round": rounds[0], "further rounds": sum(rounds[1:])})


def twice(folder: Path) -> None:
    """Two runs of one seed."""
    states = []
    for _ in range(2):
        ((program, feed),) = programs(folder / "p.lisp", ("channels=2",), "cuda")
        start = {n: t.clone() for n, t in program.state().items()}
        for i in range(3):
            program.step(feed.batch(i), False)
        states.append({n: t.clone() for n, t in program.state().items()})
    first, second = states
    say(name="twice", equal=all(bool((first[n] == second[n]).all()) for n in first),
        moved=any(bool((first[n] != start[n]).any()) for n in first if n.startswith("param/")))


def calculator(folder: Path) -> None:
    """Energy, forces and stress on both devices while atoms move, then with a further atom."""
    import ase

    from sexpgpu.ase import Calculator

    file = folder / "stress.lisp"
    assert perform(["run", str(file), "--checkpoint-dir", str(folder / "ck"), "--steps", "1"]) == 0
    make = lambda device: Calculator(str(file), str(folder / "ck" / "step-1"), device, skin=0.5, sets=("channels=2",))  # noqa: E731
    worst = {"energy": 0.0, "forces": 0.0, "stress": 0.0}
    atoms = ase.Atoms("OH2O", positions=[[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0.1], [2.2, 2.1, 2.0]], cell=[4.0, 4.2, 4.4], pbc=True)
    both = [atoms.copy(), atoms.copy()]
    for x, device in zip(both, ("cpu", "cuda"), strict=True):
        x.calc = make(device)
    calls = 4
    for _ in range(calls):
        a, b = both
        worst["energy"] = max(worst["energy"], abs(a.get_potential_energy() - b.get_potential_energy()))
        worst["forces"] = max(worst["forces"], float(np.abs(a.get_forces() - b.get_forces()).max()))
        worst["stress"] = max(worst["stress"], float(np.abs(a.get_stress() - b.get_stress()).max()))
        for x in both:
            x.positions[1, 0] += 0.02
    calc = both[1].calc
    builds, lists = calc.potential.builds, calc.lists
    larger = both[1] + ase.Atoms("O9", positions=0.5 + 1.3 * np.indices((3, 3, 1)).reshape(3, -1).T)
    larger.calc = calc
    larger.get_potential_energy()
    say(name="calculator", **worst, builds=builds, lists=lists, calls=calls, grown=calc.potential.builds)


def autopsy(folder: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = perform([*failed(folder, "cuda"), "--set", "channels=2"])
    say(name="autopsy", code=code, said=said.getvalue())


def main() -> None:
    from test_potential import PROGRAM

    losses()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "a.extxyz").write_text(GRID + WATER * 9)
        (folder / "p.lisp").write_text(FILE.replace(":batch 2 :shuffle true", ":batch 1 :buckets 3"))
        (folder / "stress.lisp").write_text(PROGRAM.replace("(defknob channels 4)", "(defknob channels 2)"))
        capacities(folder)
        twice(folder)
        calculator(folder)
        autopsy(folder)


if __name__ == "__main__":
    main()

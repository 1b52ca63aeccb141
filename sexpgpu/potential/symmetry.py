"""What every potential must obey, tried on random structures: symmetries in float32, derivatives in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sexpgpu.potential.model import Potential

Structure = tuple[np.ndarray, np.ndarray, np.ndarray | None, tuple[bool, bool, bool]]  # species, positions, cell, periodic
BEYOND = "neighbours beyond the cutoff add nothing"
STEP = 1e-4  # Å of a difference quotient of the fourth order


@dataclass(frozen=True)
class Finding:
    """One law: the largest deviation found, and the bound it must stay under."""

    law: str
    deviation: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.deviation < self.bound


def structures(potential: Potential, atoms: int = 8, seed: int = 0) -> list[Structure]:
    """A cluster and a crystal of random atoms, none closer than a fifth of the cutoff (but at most 1 Å)."""
    rng = np.random.default_rng(seed)
    near = min(1.0, potential.cutoff / 5)
    cell = np.eye(3) * near * 3.2 + rng.uniform(-0.1, 0.1, (3, 3)) * near
    found = []
    for periodic in (False, True):
        placed: list[np.ndarray] = []
        while len(placed) < atoms:
            new = rng.random(3) @ cell * (1.0 if periodic else 1.3)
            shifts = np.array([(a, b, c) for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1)]) @ cell if periodic else np.zeros((1, 3))
            if all(np.linalg.norm(new - p + shifts, axis=1).min() > near for p in placed):
                placed.append(new)
        species = rng.integers(0, len(potential.elements), atoms).astype(np.int32)
        found.append((species, np.array(placed), cell if periodic else None, (periodic,) * 3))
    return found


def check(make: Callable[[str], Potential]) -> list[Finding]:
    """`make` gives the potential in a precision. Energies are compared relative to the sum of the atoms' sizes of it."""
    single, double = make("f32"), make("f64")
    laws: dict[str, tuple[float, float]] = {}

    def note(law: str, deviation: float, bound: float) -> None:
        laws[law] = (max(deviation, laws.get(law, (0.0, 0.0))[0]), bound)

    for structure in structures(single)[::-1]:  # the crystal first: its capacity holds the cluster too
        _reach(double, structure, note)
        for name, (moved, back) in _motions(structure).items():
            _compare(single, structure, moved, back, name, note)
        _differences(double, structure, note)
    return [Finding(law, *values) for law, values in laws.items()]


def _motions(structure: Structure) -> dict[str, tuple[Structure, Any]]:
    """Name -> the moved structure, and how its forces are brought back."""
    species, x, cell, periodic = structure
    rng = np.random.default_rng(1)
    turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    turn *= np.sign(np.linalg.det(turn))
    order = rng.permutation(len(x))
    turned = lambda r: (species, x @ r.T, None if cell is None else cell @ r.T, periodic)  # noqa: E731
    mirror = turn @ np.diag([1.0, 1.0, -1.0])
    return {
        "rotation": (turned(turn), lambda f: f @ turn),
        "reflection": (turned(mirror), lambda f: f @ mirror),
        "translation": ((species, x + rng.uniform(-3, 3, 3), cell, periodic), lambda f: f),
        "permutation": ((species[order], x[order], cell, periodic), lambda f: f[np.argsort(order)]),
    }


def _reach(potential: Potential, structure: Structure, note: Any) -> None:
    """A neighbour beyond the source's cutoff changes nothing: radial functions that reach farther end in a step there, and forces in none."""
    species, x, cell, periodic = structure
    box = np.zeros((3, 3)) if cell is None else cell
    energies = [potential.evaluate(potential.structure(species, x, box, potential.neighbours(x, box, periodic, far * potential.cutoff)))["energy"] for far in (1.15, 1.0)]
    note(BEYOND, abs(float(energies[0] - energies[1])) / max(abs(float(energies[1])), 1e-3 * len(x)), 1e-6)


def _compare(potential: Potential, structure: Structure, moved: Structure, back: Any, name: str, note: Any) -> None:
    first, second = potential(*structure), potential(*moved)
    scale = max(abs(float(first["energy"])), 1e-3 * len(structure[0]))
    note(f"{name}: energy", abs(float(first["energy"] - second["energy"])) / scale, 1e-5)
    size = max(float(np.abs(first["forces"]).max()), 1e-3)
    note(f"{name}: forces", float(np.abs(back(second["forces"]) - first["forces"]).max()) / size, 1e-3)


def _differences(potential: Potential, structure: Structure, note: Any) -> None:
    """Forces by differences along random directions, and the stress by those of random strains; relative to the largest."""
    species, x, cell, periodic = structure
    out = potential(*structure)
    rng = np.random.default_rng(2)
    size = max(float(np.abs(out["forces"]).max()), 1e-3)
    for _ in range(4):
        along = rng.standard_normal(x.shape)

        def moved(h: float, along: np.ndarray = along) -> Any:
            return potential(species, x + h * along, cell, periodic)["energy"]

        slope = _quotient(moved)
        note("forces are minus the energy's gradient", abs(float(slope + (along * out["forces"]).sum())) / (size * len(x)), 1e-6)
    if "stress" not in out or cell is None:
        return
    xx, yy, zz, yz, xz, xy = out["stress"]
    full = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    strain = rng.standard_normal((3, 3))
    strain = (strain + strain.T) / 2

    def energy(h: float) -> Any:
        f = np.eye(3) + h * strain
        return potential(species, x @ f, cell @ f, periodic)["energy"]

    slope = float(_quotient(energy)) / abs(float(np.linalg.det(cell)))
    note("stress is the energy's gradient by strain", abs(slope - float((full * strain).sum())) / max(float(np.abs(full).max()), 1e-6), 1e-5)


def _quotient(f: Callable[[float], Any]) -> Any:
    return (8 * (f(STEP) - f(-STEP)) - (f(2 * STEP) - f(-2 * STEP))) / (12 * STEP)

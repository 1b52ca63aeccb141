"""A trained potential as an ASE calculator: energy, forces and stress of atoms, from a file and its checkpoint.

    from sexpgpu.ase import Calculator
    atoms.calc = Calculator("examples/potential.lisp", "checkpoints/step-2000")
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sexpgpu.potential.model import FUNCTIONS, Potential
from sexpgpu.run.data.extxyz import edges_of
from sexpgpu.run.data.structures import Structures

try:
    from ase.calculators.calculator import Calculator as _Calculator
    from ase.calculators.calculator import PropertyNotImplementedError, all_changes
except ImportError as error:
    raise ImportError("sexpgpu.ase needs ASE: pip install 'sexpgpu[ase]'") from error


class Calculator(_Calculator):
    """Further keywords of `Potential`: run, variant, sets, function, weights, precision. device: "cpu" or "cuda".

    skin: Å beyond the cutoff in which neighbours are kept, so that a list serves until an atom has moved half of it.
    The compiled graph is reused while atoms and edges fit it.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def __init__(self, file: str, checkpoint: str, device: str = "cpu", *, skin: float = 0.3, **keys: Any):
        own = {k: keys.pop(k) for k in ("run", "variant", "sets", "function", "weights", "precision") if k in keys}
        super().__init__(**keys)
        self.potential, self.skin = Potential(file, checkpoint, device=device, **own), float(skin)
        self.lists = 0  # neighbour lists made so far
        self._list: tuple[Any, ...] | None = None

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms
        out = self.potential.evaluate(self._structure(atoms, self.potential.species(atoms.get_chemical_symbols())))
        self.results = {"energy": float(out["energy"]), "free_energy": float(out["energy"]), "forces": out["forces"]}
        if "stress" in out and atoms.cell.rank == 3:
            self.results["stress"] = out["stress"]
        if "stress" in properties and "stress" not in self.results:
            raise PropertyNotImplementedError(f"stress needs {'a cell of three vectors' if 'stress' in out else f'`{FUNCTIONS[0]}` in the file'}")

    def _structure(self, atoms: Any, species: np.ndarray) -> Structures:
        """The atoms with their neighbours within cutoff and skin; the list is kept while nothing moved half the skin."""
        positions, cell = atoms.get_positions(), np.array(atoms.cell.array, np.float64)
        periodic = tuple(bool(p) for p in atoms.pbc)
        key, kept = (len(species), periodic, cell.tobytes()), self._list
        if kept is None or kept[0] != key or np.linalg.norm(positions - kept[1], axis=1).max(initial=0.0) >= self.skin / 2:
            kept = (key, positions, edges_of(positions, cell, periodic, self.potential.cutoff + self.skin))
            self._list, self.lists = (kept if self.skin > 0 else None), self.lists + 1
        return self.potential.structure(species, positions, cell, kept[2])

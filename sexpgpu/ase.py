"""A trained potential as an ASE calculator: energy, forces and stress of atoms, from a file and its checkpoint.

    from sexpgpu.ase import Calculator
    atoms.calc = Calculator("examples/potential.lisp", "checkpoints/step-2000")
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.potential.model import FUNCTIONS, Potential
from sexpgpu.run.data.structures import Structures

try:
    from ase.calculators.calculator import Calculator as _Calculator
    from ase.calculators.calculator import PropertyNotImplementedError, all_changes
except ImportError as error:
    raise ImportError("sexpgpu.ase needs ASE: pip install 'sexpgpu[ase]'") from error


OWN = ("run", "variant", "sets", "function", "weights", "precision")
ASES = ("restart", "label", "atoms", "directory")


class Calculator(_Calculator):
    """Further keywords of `Potential`: run, variant, sets, function, weights, precision, and ASE's own label, directory and atoms. device: "cpu" or "cuda".

    skin: Å beyond the cutoff in which neighbours are kept, so that a list serves until an atom has moved half of it.
    The compiled graph is reused while atoms and edges fit it. Pickled, it is its arguments: file and checkpoint are read again where it arrives.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def __init__(self, file: str, checkpoint: str, device: str = "cpu", *, skin: float = 0.3, **keys: Any):
        for key in keys:
            if key not in OWN + ASES:
                fail("E-RUN-055", f"a calculator has no keyword `{key}`", help=suggestion(key, ("skin", *OWN, *ASES), "keywords"))
        if not 0 <= skin < float("inf"):
            fail("E-RUN-055", f"skin is Å beyond the cutoff, 0 or more, and not {skin}")
        if checkpoint is None:
            fail("E-RUN-055", "a calculator needs a checkpoint", help='Calculator("potential.lisp", "checkpoints/step-2000")')
        file, checkpoint = os.fspath(file), os.fspath(checkpoint)
        own = {k: keys.pop(k) for k in OWN if k in keys}
        super().__init__(**keys)
        self.potential, self.skin = Potential(file, checkpoint, device=device, **own), float(skin)
        self._arguments = (os.path.abspath(file), checkpoint if "://" in checkpoint else os.path.abspath(checkpoint), device), {"skin": skin, **own, "directory": self.directory}
        for line in self.potential.warnings:
            warnings.warn(line, UserWarning, stacklevel=2)
        self.lists = 0  # neighbour lists made so far
        self._list: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        given, keys = self._arguments
        return partial(type(self), **keys), given

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
        if kept is None or kept[0] != key or not np.linalg.norm(positions - kept[1], axis=1).max(initial=0.0) < self.skin / 2:
            kept = (key, positions, self.potential.neighbours(positions, cell, periodic, self.potential.cutoff + self.skin))
            self._list, self.lists = (kept if self.skin > 0 else None), self.lists + 1
        return self.potential.structure(species, positions, cell, kept[2])

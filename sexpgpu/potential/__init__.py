"""A trained potential as a function of atoms: what `sexpgpu.ase` and `sexpgpu doctor` compute with."""

from sexpgpu.potential.model import Potential
from sexpgpu.potential.symmetry import Finding, check

__all__ = ["Finding", "Potential", "check"]

"""Labels for examples/potential.lisp: molecular dynamics of ethanol with GFN2-xTB, energies in eV and forces in eV/Å.

    pip install ase tblite
    python examples/make_ethanol.py

Two trajectories with a Langevin thermostat (0.5 fs a step, friction 0.02 /fs), each from its own seed and after 2,000 steps
of equilibration; a frame every 40 steps (20 fs). The one at 500 K is for training, the one at 300 K is held out.
"""

import gzip
from io import StringIO
from pathlib import Path

import numpy as np
from ase import units
from ase.build import molecule
from ase.io import write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
from tblite.ase import TBLite

DATA = Path(__file__).parent / "data"


def trajectory(kelvin: float, count: int, seed: int) -> list:
    """Frames of the molecule, in its centre-of-mass frame, with energy and forces."""
    rng = np.random.default_rng(seed)
    atoms = molecule("CH3CH2OH")
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    MaxwellBoltzmannDistribution(atoms, temperature_K=kelvin, rng=rng)
    Stationary(atoms)
    ZeroRotation(atoms)
    dynamics = Langevin(atoms, 0.5 * units.fs, temperature_K=kelvin, friction=0.02 / units.fs, rng=rng)
    dynamics.run(2000)
    frames = []
    for _ in range(count):
        dynamics.run(40)
        frame = atoms.copy()
        del frame.arrays["momenta"]
        frame.positions -= frame.get_center_of_mass()
        frame.info["energy"] = float(atoms.get_potential_energy())
        frame.arrays["forces"] = atoms.get_forces()
        frames.append(frame)
    return frames


def save(name: str, frames: list) -> None:
    text = StringIO()
    write(text, frames, format="extxyz", columns=["symbols", "positions", "forces"], write_results=False)
    packed = gzip.compress(text.getvalue().encode(), 9, mtime=0)
    (DATA / name).write_bytes(packed)
    print(f"{name}: {len(frames)} frames, {len(packed):,} bytes")


if __name__ == "__main__":
    save("ethanol_500K.extxyz.gz", trajectory(500, 600, 1))
    save("ethanol_300K.extxyz.gz", trajectory(300, 100, 2))

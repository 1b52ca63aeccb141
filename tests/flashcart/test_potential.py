"""A trained potential in use: laws, the ASE calculator, `doctor FILE`."""

import copy
import importlib
import json
import pickle
import re
import sys
import warnings

import numpy as np
import pytest
import torch

import sexpgpu
from sexpgpu.cli.main import perform
from sexpgpu.diagnostics import SexpError, SexpErrors
from sexpgpu.potential import Finding, Potential, check

CRYSTAL = """2
Lattice="2.0 0 0 0.3 2.2 0 0 0.1 2.4" Properties=species:S:1:pos:R:3:forces:R:3 energy=-3.2 pbc="T T T"
O 0 0 0 1 1 2
H 1 1 1.1 -1 -1 -2
"""
WATER = """3
Properties=species:S:1:pos:R:3:forces:R:3 energy=-10.5 pbc="F F F"
O 0 0 0 0.1 0 0
H 0.96 0 0 -0.1 0.25 0
H -0.24 0.93 0 0 -0.25 0
"""
PROGRAM = """
(import "nn" "optim" "flashcart")
(defknob channels 4)
(defdata set (extxyz "a.extxyz" :elements (H O) :cutoff 2.5))
(deflayer model (vectors species senders receivers)
  (let* ((lengths (vector-lengths vectors))
         (radial (* (chebyshev lengths :count 4 :r-max 2.5) (reshape (polynomial-cutoff lengths :r-max 2.5) [(dim lengths 0) 1])))
         (x (reshape (embedding species 2 channels) [(dim species 0) 1 channels]))
         (y (interaction x (edge-attributes vectors lengths 2) radial senders receivers channels :l-max 2 :hidden [8]
                         :neighbours (statistic set "neighbours"))))
    (+ (per-element (statistic set "shifts") species)
       (reshape (scalar-mlp (scalars (product-layer y :l-max 0 :correlation 2)) [8 1]) [(dim species 0)]))))
(defun energy-forces-stress (positions offsets cell volume species senders receivers graph graph-mask)
  (let* ((strain (free-strain cell))
         (vectors (strained (edge-vectors positions offsets senders receivers) strain graph receivers))
         (e (* graph-mask (sum-by (model vectors species senders receivers) graph (dim graph-mask 0)))))
    (list e (forces-of e positions) (stress-of e strain volume))))
(defun loss (positions offsets cell volume species senders receivers graph graph-mask atom-mask atoms energy forces)
  (destructuring-bind (e f s) (energy-forces-stress positions offsets cell volume species senders receivers graph graph-mask)
    (list (+ (masked-sum (huber-terms (/ (- e energy) atoms) 0.1) graph-mask) (masked-sum (square (- f forces)) atom-mask))
          (sum graph-mask))))
(defrun train :data (graphs set :batch 2 :shuffle true) :loss loss
  :optimizer (adam :lr (warmup-hold-shaped :peak 1e-2 :warmup 2 :decay 2 :steps 6)) :ema 0.9 :steps 6)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a program, its data, and a checkpoint of six steps."""
    folder = tmp_path_factory.mktemp("potential")
    (folder / "a.extxyz").write_text(WATER * 3 + CRYSTAL * 2)
    (folder / "p.lisp").write_text(PROGRAM)
    assert perform(["run", str(folder / "p.lisp"), "--checkpoint-dir", str(folder / "ck")]) == 0
    return folder


def potential(folder, precision="f64", **keys):
    return Potential(str(folder / "p.lisp"), str(folder / "ck" / "step-6"), precision=precision, **keys)


def test_laws_hold_and_a_broken_one_is_found(trained):
    found = check(lambda precision: potential(trained, precision))
    assert {f.law.split(":")[0] for f in found} >= {"rotation", "reflection", "translation", "permutation"} and len(found) == 11
    assert all(f.holds for f in found), found
    assert not Finding("rotation: energy", 1e-4, 1e-5).holds and not Finding("rotation: energy", float("nan"), 1e-5).holds


def test_doctor_of_a_file(trained, capsys):
    capsys.readouterr()
    assert perform(["doctor", str(trained / "p.lisp"), "--weights", str(trained / "ck" / "step-6"), "--json"]) == 0
    assert all(law["holds"] for law in json.loads(capsys.readouterr().out)["laws"])
    broken = trained / "broken.lisp"
    broken.write_text(PROGRAM.replace("(lengths (vector-lengths vectors))", "(lengths (+ (vector-lengths vectors) (square (reshape (slice vectors :axis 1 :stop 1) [(dim vectors 0)]))))"))
    assert perform(["doctor", str(broken)]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert any("rotation: energy" in row and row.endswith("broken") for row in rows) and any("E-RUN-056" in row for row in rows)
    assert not any("translation" in row and row.endswith("broken") for row in rows)


def test_a_cutoff_that_cuts_is_found(trained, capsys):
    """Edges end at the source's cutoff where the radial functions have not."""
    short = trained / "short.lisp"
    short.write_text(PROGRAM.replace(":cutoff 2.5", ":cutoff 2.0"))
    capsys.readouterr()
    assert perform(["doctor", str(short)]) == 1
    out = capsys.readouterr().out
    assert "neighbours beyond the cutoff add nothing is off by" in out and "one knob for both" in out


def test_statistics_and_averages_come_from_the_checkpoint(trained):
    raw, ema = potential(trained, weights="raw"), potential(trained)
    structure = (np.array([1, 0, 0]), np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0.1]]))
    a, b = raw(*structure), ema(*structure)
    assert a["energy"] != b["energy"]
    assert float(ema.known["statistic", "set/neighbours"]) != 1 and ema.known["statistic", "set/shifts"].numel() == 2
    first = potential(trained, precision="f32")(*structure)
    assert abs(first["energy"] - b["energy"]) < 1e-4


def test_an_atom_alone(trained):
    out = potential(trained)(np.array([1]), np.zeros((1, 3)))
    assert np.isfinite(out["energy"]) and not out["forces"].any()


def test_from_python_with_the_statistics_of_the_checkpoint(trained, recwarn):
    model = sexpgpu.load(trained / "p.lisp", checkpoint=trained / "ck" / "step-6", weights="ema")
    assert not recwarn.list, [str(w.message) for w in recwarn.list]
    x = torch.tensor([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0.1]])
    receivers, senders = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32), torch.tensor([1, 2, 0, 2, 0, 1], dtype=torch.int32)
    species = torch.tensor([1, 0, 0], dtype=torch.int32)
    energy, forces, _ = model["energy-forces-stress"](
        x, torch.zeros(6, 3), torch.zeros(1, 3, 3), torch.ones(1), species, senders, receivers, torch.zeros(3, dtype=torch.int32), torch.ones(1))
    out = potential(trained, precision="f32")(species.numpy(), x.double().numpy())
    assert float(energy[0]) == pytest.approx(float(out["energy"]), abs=1e-5)
    np.testing.assert_allclose(forces.detach().numpy(), out["forces"], atol=1e-4)
    untrained = sexpgpu.load(trained / "p.lisp")
    assert {float(v) for v in untrained._statistics["set/shifts"]} == {0.0}


ase = pytest.importorskip("ase")


def atoms(periodic=True):
    cell = [[4.0, 0, 0], [0.3, 4.2, 0], [0, 0.1, 4.4]] if periodic else None
    x = [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0.1], [2.2, 2.1, 2.0]]
    return ase.Atoms("OH2O", positions=x, cell=cell, pbc=periodic)


def calculator(folder, **keys):
    from sexpgpu.ase import Calculator

    return Calculator(str(folder / "p.lisp"), str(folder / "ck" / "step-6"), **keys)


def test_the_calculator_gives_energy_forces_and_stress(trained):
    from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress

    a = atoms()
    a.calc = calculator(trained, precision="f64")
    np.testing.assert_allclose(a.get_forces(), calculate_numerical_forces(a, eps=1e-4), atol=1e-6)
    np.testing.assert_allclose(a.get_stress(), calculate_numerical_stress(a, eps=1e-5), atol=1e-6)
    assert a.get_stress().shape == (6,)


def test_a_skin_changes_nothing_and_saves_lists(trained):
    a, b = atoms(), atoms()
    a.calc, b.calc = calculator(trained, precision="f64", skin=0.5), calculator(trained, precision="f64", skin=0.0)
    compiled = None
    for i in range(6):
        assert a.get_potential_energy() == pytest.approx(b.get_potential_energy(), abs=1e-10)
        np.testing.assert_allclose(a.get_forces(), b.get_forces(), atol=1e-10)
        compiled = compiled or a.calc.potential.compiled
        assert a.calc.potential.compiled is compiled
        for x in (a, b):
            x.positions[1, 0] += 0.1
            x.positions[0, 1] -= 0.02 * i
    assert a.calc.lists in (2, 3) and b.calc.lists >= 6


def test_what_the_calculator_refuses(trained):
    from ase.calculators.calculator import PropertyNotImplementedError

    a = atoms()
    a.symbols[3] = "He"
    a.calc = calculator(trained)
    with pytest.raises(SexpError, match="He"):
        a.get_potential_energy()
    molecule = atoms(periodic=False)
    molecule.calc = calculator(trained)
    assert np.isfinite(molecule.get_potential_energy())
    with pytest.raises(PropertyNotImplementedError):
        molecule.get_stress()
    with pytest.raises(SexpError) as caught:
        calculator(trained, device="gpu")
    assert caught.value.diagnostic.code == "E-RUN-055"
    if not torch.cuda.is_available():
        with pytest.raises(SexpError) as caught:
            calculator(trained, device="cuda")
        assert caught.value.diagnostic.code.startswith("E-DEV-")
    with pytest.raises(SexpError) as caught:
        calculator(trained, sets=("channels=8",))
    assert caught.value.diagnostic.code == "E-CKPT-021"
    for code, keys in (("E-RUN-055", {"precision": "f16"}), ("E-RUN-055", {"function": "loss"}), ("E-CKPT-034", {"function": "energies"})):
        with pytest.raises(SexpError) as caught:
            calculator(trained, **keys)
        assert caught.value.diagnostic.code == code


NOWHERE = {  # atoms that no structure has -> what is said of them
    "atoms 0 and 2 stand at one place": lambda a: a.positions.__setitem__(2, a.positions[0]),
    "atoms 0 and 3 stand at one place": lambda a: a.positions.__setitem__(3, a.positions[0] + a.cell[1]),
    "the position of atom 1 is not finite": lambda a: a.positions.__setitem__((1, 2), np.nan),
    "their cell has no volume": lambda a: a.set_cell(None),
}


@pytest.mark.parametrize("words", NOWHERE)
def test_atoms_that_have_no_energy(trained, words):
    a = atoms()
    a.calc = calculator(trained)
    before = a.get_potential_energy()
    places, cell = a.positions.copy(), a.cell.copy()
    NOWHERE[words](a)
    with pytest.raises(SexpError) as caught:
        a.get_potential_energy()
    assert caught.value.diagnostic.code == "E-RUN-057" and words in caught.value.diagnostic.message
    a.set_cell(cell)
    a.positions[:] = places
    assert a.get_potential_energy() == before


def test_a_slab_needs_no_third_vector(trained):
    high, flat = atoms(), atoms()
    high.set_cell([[4.0, 0, 0], [0.3, 4.2, 0], [0, 0, 30]])
    flat.set_cell([[4.0, 0, 0], [0.3, 4.2, 0], [0, 0, 0]])
    for a in (high, flat):
        a.pbc, a.calc = (True, True, False), calculator(trained, precision="f64")
    assert flat.get_potential_energy() == high.get_potential_energy()
    np.testing.assert_array_equal(flat.get_forces(), high.get_forces())


def test_keywords_of_a_calculator(trained):
    with pytest.raises(SexpError) as caught:
        calculator(trained, skinn=0.5)
    assert caught.value.diagnostic.code == "E-RUN-055" and "did you mean `skin`?" in caught.value.diagnostic.help
    for skin in (-0.1, float("nan"), float("inf")):
        with pytest.raises(SexpError, match="0 or more"):
            calculator(trained, skin=skin)


def test_a_calculator_travels(trained, monkeypatch, tmp_path):
    """Pickled and copied, as where ASE sends images to processes; paths hold from elsewhere."""
    monkeypatch.chdir(trained)
    from sexpgpu.ase import Calculator

    first, a = Calculator("p.lisp", "ck/step-6", skin=0.5, precision="f64"), atoms()
    a.calc = first
    expected = a.get_potential_energy()
    monkeypatch.chdir(tmp_path)
    for made in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        b = atoms()
        b.calc = made
        assert b.get_potential_energy() == expected and made.skin == 0.5


def test_a_checkpoint_of_another_program_is_told(trained):
    """The shapes are the same; the numbers mean something else."""
    from sexpgpu.ase import Calculator

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calculator(trained)
        Calculator(trained / "p.lisp", trained / "ck" / "step-6")  # paths are paths
    for name, old, new, words in (("elements", "(H O)", "(O H)", "option elements"), ("radius", "polynomial-cutoff lengths :r-max 2.5", "polynomial-cutoff lengths :r-max 2.0", "graph: differs")):
        assert old in PROGRAM
        (trained / f"{name}.lisp").write_text(PROGRAM.replace(old, new))
        with pytest.warns(UserWarning, match=words):
            Calculator(str(trained / f"{name}.lisp"), str(trained / "ck" / "step-6"))


def test_weights_that_there_are_none_of(trained):
    for weights in ("rwa", 3):
        with pytest.raises(SexpError, match="ema or raw") as caught:
            calculator(trained, weights=weights)
        assert caught.value.diagnostic.code == "E-RUN-055"
    (trained / "plain.lisp").write_text(re.sub(r":ema [0-9.]+", "", PROGRAM))
    with pytest.raises(SexpError, match="keeps no averaged weights"):
        Potential(str(trained / "plain.lisp"), None, weights="ema")
    from sexpgpu.ase import Calculator

    with pytest.raises(SexpError, match="needs a checkpoint"):
        Calculator(str(trained / "p.lisp"), None)


@pytest.mark.parametrize("positions, cell", [
    ([[0, 0, 0], [1.1, 0, 0], [2000, 2000, 0]], None), ([[0, 0, 0], [1.1, 0, 0], [20, 20, 0]], [2000, 2000, 6]), ([[0, 0, 0], [1.1, 0, 0], [9, 9, 9]], [np.inf] * 3),
], ids=["exploded", "a thin cell", "no cell"])  # fmt: skip
def test_atoms_that_are_spread_too_far(trained, positions, cell):
    """vesin 0.6.2 ends the process for the first two (SIGFPE)."""
    a = ase.Atoms("OHH", positions=positions, cell=cell, pbc=cell is not None)
    a.calc = calculator(trained)
    with pytest.raises(SexpError) as caught:
        a.get_potential_energy()
    assert caught.value.diagnostic.code == "E-RUN-057"


def test_an_error_travels(trained):
    """Between the processes of a pool."""
    with pytest.raises(SexpError) as caught:
        calculator(trained, device="gpu")
    there = pickle.loads(pickle.dumps(caught.value))
    assert type(there) is type(caught.value) and there.diagnostic == caught.value.diagnostic
    several = SexpErrors([caught.value.diagnostic, caught.value.diagnostic])
    assert copy.deepcopy(several).diagnostics == several.diagnostics


def test_without_ase_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ase.calculators.calculator", None)
    monkeypatch.delitem(sys.modules, "sexpgpu.ase", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'sexpgpu\[ase\]'"):
        importlib.import_module("sexpgpu.ase")


def test_evaluation_reads_the_same_data(trained, capsys):
    text = PROGRAM + "(defeval all :data (graphs set :batch 3) :every 0 :metrics ((loss loss)))"
    (trained / "e.lisp").write_text(text)
    capsys.readouterr()
    assert perform(["eval", str(trained / "e.lisp"), "--resume", str(trained / "ck" / "step-6"), "--accept", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evals"]["all"]["loss"] > 0


def test_a_resume_is_exact(trained, tmp_path):
    file, folder = str(trained / "p.lisp"), tmp_path / "ck"
    for words in (["--steps", "3"], ["--resume", "latest"]):
        assert perform(["run", file, "--checkpoint-dir", str(folder), *words]) == 0
    digest = lambda f: json.loads((f / "step-6" / "manifest.json").read_text())["digest"]  # noqa: E731
    assert digest(folder) == digest(trained / "ck")

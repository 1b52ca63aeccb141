"""Runs of a potential: profiles by phase, a step that is not finite, and the device's kernels under Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_potential import CRYSTAL, PROGRAM, WATER

from sexpgpu.cli.main import perform
from sexpgpu.passes.phases import Item, inferred, phases

HERE = Path(__file__).parent
TOGETHER = WATER.replace("H -0.24 0.93 0 0 -0.25 0", "H 0.96 0 0 0 -0.25 0")  # two atoms at one place: no gradient of their distance
GRID = "12\nProperties=species:S:1:pos:R:3:forces:R:3 energy=-4\n" + "".join(f"H {1.1 * (i % 3)} {1.1 * (i // 3)} 0 0.1 0 0\n" for i in range(12))
FILE = PROGRAM.replace("energy-forces-stress (positions", "energy-forces (positions").replace("(energy-forces-stress", "(energy-forces")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.extxyz").write_text(WATER * 3 + CRYSTAL * 2)
    (tmp_path / "p.lisp").write_text(FILE)
    return tmp_path


# --- phases ---


def test_phases_follow_what_depends_on_what():
    """energy e, its gradient g, a loss of both, and the gradient of that."""
    items = [
        Item((), ("x",), False), Item(("x",), ("e",), False), Item(("x", "e"), ("g",), True), Item(("g", "e"), ("loss",), False),
        Item(("g", "loss"), ("dw",), True), Item(("dw",), ("scaled",), False),
    ]  # fmt: skip
    assert phases(items, ["loss"]) == ["forward", "forward", "first backward", "loss", "double backward", "double backward"]
    plain = [Item((), ("x",), False), Item(("x",), ("loss",), False), Item(("x",), ("dw",), True)]
    assert phases(plain, ["loss"]) == ["forward", "forward", "backward"]
    assert inferred(phases(items[:4], ["loss"])) == ["forward", "forward", "first backward", "first backward"]


def test_profile_by_phase_on_the_cpu(folder, capsys):
    assert perform(["profile", str(folder / "p.lisp"), "--phases", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    inference, training = found["parts"]
    assert found["device"] == "cpu" and [s["phase"] for s in inference["phases"]] == ["forward", "first backward"]
    assert [s["phase"] for s in training["phases"]] == ["forward", "first backward", "loss", "double backward", "update"]
    for part in found["parts"]:
        kernels = {phase: sum(k["calls"] for k in part["kernels"] if k["phase"] == phase) for phase in ("forward", "first backward", "loss", "double backward", "update")}
        assert {s["phase"]: s["count"] for s in part["phases"]} == {phase: n for phase, n in kernels.items() if n}
        assert part["seconds"] > 0 and all(s["seconds"] > 0 for s in part["phases"])
    products = {k["phase"] for k in training["kernels"] if k["name"] == "tensor-product"}
    assert "forward" in products and "double backward" in products and "update" not in products
    assert perform(["profile", str(folder / "p.lisp"), "--phases", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "training: " in shown and "double backward" in shown and "launches" in shown


def test_settings_are_compared(folder):
    command = [sys.executable, "-m", "sexpgpu", "profile", "p.lisp", "--phases", "--device", "cpu", "--json", "--set", "channels=2"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASHCART_")}
    done = subprocess.run([*command, "--try", "FLASHCART_TP_BWD_SPLIT=full,FLASHCART_TP_BWD_CSR_SLOTS=2"], cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["profiles"]
    assert first["settings"] == {} and second["settings"] == {"FLASHCART_TP_BWD_CSR_SLOTS": "2", "FLASHCART_TP_BWD_SPLIT": "full"}
    assert [p["name"] for p in first["parts"]] == [p["name"] for p in second["parts"]] == ["inference", "training"]


@pytest.mark.parametrize("words", [["--try", "A=1"], ["--device", "cpu"], ["--phases", "--device", "cpu", "--try", "nothing"]])
def test_what_a_profile_refuses(folder, capsys, words):
    assert perform(["profile", str(folder / "p.lisp"), *words]) == 2
    assert "E-ENV-001" in capsys.readouterr().err


# --- a step that is not finite ---


def failed(folder, device="cpu", extra=""):
    """A run over a grid and over waters, in the fourth frame of which two atoms are at one place: a batch of the smaller of two capacities."""
    (folder / "a.extxyz").write_text(GRID + WATER * 2 + TOGETHER + WATER * 6)
    (folder / "b.lisp").write_text(FILE.replace(":batch 2 :shuffle true", ":batch 1 :buckets 3") + extra)
    return ["run", str(folder / "b.lisp"), "--device", device, "--status", str(folder / "status.json")]


def test_an_autopsy_of_a_packed_batch_names_the_frame(folder, capsys):
    assert perform(failed(folder)) == 3
    said = capsys.readouterr().err
    assert "structures of the batch: 0 (frame 4 of data set)" in said and "(sqrt (sum (* vectors vectors) :axis -1))" in said, said
    reproducer = next(folder.glob("*-not-finite-step-4"))
    assert perform(["autopsy", str(reproducer)]) == 0
    assert "structures of the batch: 0 (frame 4 of data set)" in capsys.readouterr().out


# --- the device's kernels ---


@pytest.fixture(scope="module")
def on_device():
    """What potential_in_triton.py found, by name."""
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(HERE / "potential_in_triton.py")], cwd=HERE, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_the_example_follows_the_interpreter(on_device):
    cpu, cuda = on_device["losses"]["cpu"], on_device["losses"]["cuda"]
    assert len(cpu) == 3 and all(abs(a - b) <= 1e-5 * max(1, abs(a)) for a, b in zip(cpu, cuda, strict=True)), (cpu, cuda)


def test_every_capacity_is_compiled_once(on_device):
    row = on_device["capacities"]
    assert len(row["capacities"]) > 1 and row["first round"] == len(row["capacities"]) and row["further rounds"] == 0


def test_two_runs_have_the_same_bits(on_device):
    assert on_device["twice"]["equal"] and on_device["twice"]["moved"]


def test_the_calculator_on_the_device(on_device):
    row = on_device["calculator"]
    assert row["energy"] < 1e-5 and row["forces"] < 1e-4 and row["stress"] < 1e-4
    assert row["builds"] == 1 and row["lists"] < row["calls"] and row["grown"] == 2


def test_an_autopsy_of_a_step_on_the_device(on_device):
    assert on_device["autopsy"]["code"] == 3 and "(frame 4 of data set)" in on_device["autopsy"]["said"]


def test_forces_make_no_gradient_by_a_weight(folder):
    """Energies and forces of a potential with trainable weights: what only a training step needs is not in the graph."""
    from sexpgpu.ir import postorder
    from sexpgpu.passes.rank_maps import rank_maps
    from sexpgpu.potential import Potential

    results = Potential(str(folder / "p.lisp"), None).graph((2, 8, 64))
    ops = [n.op for n in postorder(rank_maps(results).values())]
    assert ops.count("rank-map") >= 6 and not {"rank-weights", "equivariant-linear-weight"} & set(ops)

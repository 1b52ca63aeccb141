"""The commands with `SEXPGPU_DEVICE=cuda` under Triton's interpreter: a run, its resume bit for bit, eval, predict, profile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support_cuda import ROOT, environment

pytest.importorskip("triton")
SMALL = ["--set", "hidden=8", "--set", "batch=32"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "examples/data/digits.csv.gz", tmp_path / "data")
    text = (ROOT / "examples/digits.lisp").read_text("utf-8")
    text = text.replace(":steps 500", ":steps 6\n  :log-every 2").replace(":checkpoint-every 100", ":checkpoint-every 3").replace(":every 50", ":every 6")
    (tmp_path / "e.lisp").write_text(text, "utf-8")
    return tmp_path


def sexpgpu(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    named = {"SEXPGPU_DEVICE": "cuda", "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state"), **more}
    return subprocess.run(
        [sys.executable, "-m", "sexpgpu", *words], cwd=folder, env=environment(**named), capture_output=True, text=True, timeout=240
    )


def state(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for part in sorted(folder.glob("*.safetensors")) for name, array in load_file(part).items()}


def test_a_run_its_resume_and_what_uses_it(folder: Path) -> None:
    whole = sexpgpu(folder, "run", "e.lisp", *SMALL, "--checkpoint-dir", "whole", "--metrics", "jsonl:m.jsonl", "--status", "s.json", SEXPGPU_EXPLAIN="kernels")
    assert whole.returncode == 0, whole.stderr
    assert "Warning" not in whole.stderr and "done at step 6 of 6" in whole.stderr
    assert "library matmul" in whole.stderr and "plan: " in whole.stderr  # the report of SEXPGPU_EXPLAIN
    assert json.loads((folder / "s.json").read_text())["device"] == "cuda (interpreted)"
    assert json.loads((folder / "whole/step-6/manifest.json").read_text())["device"] == "cuda (interpreted)"

    cut = sexpgpu(folder, "run", "e.lisp", *SMALL, "--checkpoint-dir", "cut", "--steps", "3")
    assert cut.returncode == 0, cut.stderr
    rest = sexpgpu(folder, "run", "e.lisp", *SMALL, "--checkpoint-dir", "cut", "--resume", "latest")
    assert rest.returncode == 0 and "not bit-exact" not in rest.stderr, rest.stderr
    a, b = state(folder / "whole/step-6"), state(folder / "cut/step-6")
    assert a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)

    evaluated = sexpgpu(folder, "eval", "e.lisp", *SMALL, "--resume", "whole/step-6", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    told = json.loads(evaluated.stdout)["evals"]["valid"]
    last = [r for r in map(json.loads, (folder / "m.jsonl").read_text().splitlines()) if r["type"] == "metric" and r["metadata"].get("eval") == "valid"]
    assert {r["name"]: r["value"] for r in last} == told

    image = np.random.default_rng(0).random((5, 64)).astype(np.float32)
    np.savez(folder / "x.npz", image=image)
    for name, device in (("cuda", "cuda"), ("cpu", "cpu")):
        done = sexpgpu(folder, "predict", "e.lisp", "perceptron", *SMALL, "--resume", "whole/step-6", "--input", "x.npz", "--out", f"{name}.npz", "--device", device)
        assert done.returncode == 0, done.stderr
    found, expected = (np.load(folder / f"{name}.npz")["output"] for name in ("cuda", "cpu"))
    assert found.shape == (5, 10) and np.allclose(found, expected, atol=1e-6)


def test_a_device_is_no_part_of_the_trajectory(folder: Path) -> None:
    """A checkpoint of the CPU goes on here, which is said."""
    assert sexpgpu(folder, "run", "e.lisp", *SMALL, "--checkpoint-dir", "c", "--steps", "2", "--device", "cpu").returncode == 0
    done = sexpgpu(folder, "run", "e.lisp", *SMALL, "--checkpoint-dir", "c", "--resume", "latest", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "device was cpu, is cuda (interpreted)" in (done.stderr + (folder / "c/step-3/manifest.json").read_text())


def test_a_potential_of_packed_structures(folder: Path) -> None:
    """Buckets of capacities, statistics of the data, tensor products, and a gradient inside the loss."""
    shutil.copy(ROOT / "examples/potential.lisp", folder)
    for file in (ROOT / "examples/data").glob("*xyz*"):
        shutil.copy(file, folder / "data")
    small = ["--set", "channels=2", "--set", "hidden=4", "--set", "batch=4", "--eval-every", "0", "--steps", "3", "--metrics", "stdout"]
    losses = []
    for device in ("cuda", "cpu"):
        done = sexpgpu(folder, "run", "potential.lisp", *small, "--device", device)
        assert done.returncode == 0, done.stderr
        found = [r for r in map(json.loads, done.stdout.splitlines()) if r["type"] == "metric" and r["name"] in ("loss", "gradient-norm")]
        losses.append([r["value"] for r in found])
    assert losses[0] and np.allclose(*losses, rtol=2e-5)


def test_too_little_memory(folder: Path) -> None:
    done = sexpgpu(folder, "run", "e.lisp", *SMALL, SEXPGPU_MEMORY="0.05")
    assert done.returncode == 2 and "E-MEM-002" in done.stderr and "plan: " in done.stderr and "perceptron" in done.stderr


def test_profile(folder: Path) -> None:
    done = sexpgpu(folder, "profile", "e.lisp", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["launches"] >= 10 and abs(sum(line["share"] for line in told["lines"]) - 1) < 1e-6
    assert {"perceptron/in", "perceptron/out"} <= {line["path"] for line in told["lines"]}

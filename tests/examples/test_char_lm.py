"""char_lm.lisp: a resume at any step is exact, dropout and all; its loss is that of eager PyTorch."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sexpgpu.cli.main import perform

ROOT = Path(__file__).resolve().parents[2]
FILE = str(ROOT / "examples" / "char_lm.lisp")
PARITY = ROOT / "benchmarks" / "char_lm_parity.py"
STEPS = 60


def run(location: Path, *more: str) -> str:
    """A run into a location; the digest of the state that it ends with."""
    words = ["run", FILE, "--variant", "tiny", "--eval-every", "0", "--checkpoint-dir", str(location), *more]
    assert perform(words) == 0
    newest = max(location.glob("step-*/manifest.json"), key=lambda path: int(path.parent.name[5:]))
    return json.loads(newest.read_text("utf-8"))["digest"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("whole") / "c")


@pytest.mark.parametrize("k", [1, 7, 30, 43, 59])
def test_a_resume_with_dropout_is_exact(whole: str, tmp_path: Path, k: int) -> None:
    """Five of the 59 that tests/soak.py tries."""
    assert run(tmp_path / "c", "--steps", str(k)) != whole
    assert run(tmp_path / "c", "--resume", "latest") == whole


def parity():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("char_lm_parity", PARITY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_parity_script_calls_good() -> None:
    good = parity().good
    assert good(600, 2.04, 2.05, 2.54) and good(200, 2.6, 2.6, 2.54)
    assert not good(600, 2.1, 2.05, 2.54)  # more than 2% above eager
    assert not good(600, 2.55, 2.55, 2.54)  # no better than counting
    assert not good(600, math.nan, 2.05, 2.54)


@pytest.mark.timeout(280)
def test_200_steps_are_as_good_as_eager_ones(tmp_path: Path) -> None:
    """In f32, at an eighth of the batch; 600 whole steps: benchmarks/char_lm_parity.py --check."""
    words = [sys.executable, str(PARITY), "--steps", "200", "--set", "batch=4", "--check"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=270, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["steps"] == 200 and found["ratio"] == found["sexpgpu"] / found["eager"]
    assert found["sexpgpu"] < 3 and 2 < found["bigram"] < 3

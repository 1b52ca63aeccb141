"""Starts the scripts that run kernels under Triton's interpreter, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIRST: list[str] = []  # folders of packages that come before the installed ones


def environment(**more: str) -> dict[str, str]:
    """The variables of a process in which kernels are interpreted."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*FIRST, str(ROOT)]), "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", **more}


def interpreted(script: str, *words: str, timeout: int = 240) -> tuple[list[str], int]:
    """(failures, how much was compared) of a script of this folder."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *words], env=environment(), capture_output=True, text=True, timeout=timeout
    )
    if done.returncode != 0 or not done.stdout.strip():
        pytest.fail(f"{script} {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return told["failures"], told["count"]

"""Kernels compiled by processes without a GPU, and found again by key (benchmarks/no_gpu.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def ptxas() -> bool:
    """Whether Triton brings one."""
    found = find_spec("triton")
    return found is not None and (Path(str(found.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas").exists()


def run(cache: Path, *arguments: str) -> dict:
    """The last line of a benchmark's output."""
    environ = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "LIBCUDA", "OUT")}
    environ |= {"TRITON_CACHE_DIR": str(cache), "FLASHCART_CACHE_DIR": str(cache / "sources"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environ, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.skipif(not ptxas(), reason="Triton brings no ptxas here")
def test_kernels_are_compiled_once_and_found_where_the_archive_is_unpacked(tmp_path: Path) -> None:
    given = ("tensor_product.py", "--compile", "1", "--graphs", "random", "--products", "1,1,1", "--channels", "4", "--sides", "ours")
    first = run(tmp_path / "made", *given)
    assert first["failed"] == 0 and first["done"] == first["tasks"] == 4 and first["compiled"] >= 4
    packed = run(tmp_path / "made", "no_gpu.py", str(tmp_path / "kernels.txz"), str(tmp_path / "there"))
    assert packed["kernels"] == first["compiled"]
    with tarfile.open(tmp_path / "kernels.txz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert not list((tmp_path / "there").glob("*/*.ptx"))
    again = run(tmp_path / "there", *given)
    assert again["compiled"] == 0 and again["failed"] == 0 and again["found"] >= first["compiled"]

"""f32 products of many rows: values, that they compile for sm_90 without spills, and what the sums of tensor cores would lose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support_cuda import interpreted

pytest.importorskip("triton")

from sexpgpu.backends.cuda.tall import SUMS  # noqa: E402

HERE = Path(__file__).parent


def test_values_are_those_of_f64():
    failures, count = interpreted("tall_in_triton.py")
    assert not failures and count == 6


def cut(x):
    """f64 to f32 towards zero, as the sums of tensor cores are."""
    near = x.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def by_parts(x, y, step, inside):
    """xᵀ y as the matrix instructions make it: TF32 parts, eight rows at a time; a step's sum added inside or apart."""
    def high(v):
        return (v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    parts = [(high(v), high(v - high(v))) for v in (x, y)]
    total = np.zeros((x.shape[1], y.shape[1]), np.float32)
    for first in range(0, len(x), step):
        found = total if inside else np.zeros_like(total)
        for i, j in ((1, 0), (0, 1), (0, 0)):
            for at in range(first, first + step, 8):
                found = cut(found + parts[0][i][at : at + 8].T.astype(np.float64) @ parts[1][j][at : at + 8].astype(np.float64))
        total = found if inside else total + found
    return total


def test_sums_are_added_outside_of_the_tensor_cores():
    """The figures of decision 0059: what a sum over thousands of rows would lose inside."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((8192, n)).astype(np.float32) for n in (8, 12))
    exact = x.T.astype(np.float64) @ y.astype(np.float64)
    inside, apart = (float(np.abs(by_parts(x, y, SUMS[1], way) - exact).max() / np.abs(exact).max()) for way in (True, False))
    assert inside > 2e-5 and apart < 2e-6


def ptxas():
    import triton.backends.nvidia as nvidia

    return (Path(nvidia.__file__).parent / "bin" / "ptxas").exists()


@pytest.mark.skipif(not ptxas(), reason="Triton brings no ptxas here")
def test_kernels_compile_for_hopper():
    """No spills; and each thread adds its part of a 128x64 and a 64x64 tile outside of the tensor cores, twice for two pairs."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(HERE / "tall_for_gpu.py")], env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {r["name"]: r for r in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["rows", "sums", "rows of halves", "weights of halves", "sums of halves", "rank weights", "gathered"]
    assert not any(r["spilled"] or r["atomics"] for r in rows.values())
    assert rows["rows"]["apart"] >= 32 and rows["sums"]["apart"] >= 64 and rows["rank weights"]["apart"] >= 64
    assert rows["rows"]["matrix"] >= 12 and rows["sums"]["matrix"] >= 24
    assert all(rows[f"{name} of halves"]["matrix"] >= 6 for name in ("rows", "weights", "sums"))

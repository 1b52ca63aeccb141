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


TUNED = """
import json, sys
sys.path.insert(0, BENCHMARKS)
import no_gpu
import torch, triton, triton.language as tl, triton.testing

no_gpu.install()
triton.testing.do_bench = lambda call, quantiles, **_: (call(), [1.0] * 3)[1]


@triton.autotune([triton.Config({"B": b}) for b in (16, 32, 64)], key=["n"])
@triton.jit
def doubled(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, 2 * tl.load(x + i, i < n), i < n)


def call(n):
    doubled[(1,)](torch.empty(64), n)
    return doubled.best_config.kwargs["B"]


with no_gpu.candidate(1):
    doubled[(1,)](torch.empty(64), 48)
over = []
tuners = no_gpu.Tuners(1, 1, carried=True, over=lambda: bool(over))
found = [call(48), dict(tuners.told)]
tuners.told.clear()
found += [call(49), dict(tuners.told)]
over.append(1)
try:
    call(50)
except TimeoutError:
    found.append("no time")
print(json.dumps({"found": found}))
"""


@pytest.mark.skipif(not ptxas(), reason="Triton brings no ptxas here")
def test_a_tuner_leaves_out_what_is_not_carried_and_gives_up_when_the_time_is_over(tmp_path: Path) -> None:
    script = tmp_path / "tuned.py"
    script.write_text(TUNED.replace("BENCHMARKS", repr(str(ROOT / "benchmarks"))))
    # 48 is a multiple of 16 and one candidate is there; of the kernel for any other n none is: the first is compiled, unmeasured
    assert run(tmp_path / "cache", str(script))["found"] == [32, {"measured": 1, "left_out": 2}, 16, {"left_out": 3}, "no time"]


@pytest.mark.skipif(not ptxas(), reason="Triton brings no ptxas here")
def test_a_list_of_kernels_packs_those_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("tensor_product.py", "--compile", "1", "--graphs", "random", "--products", "1,1,1", "--sides", "ours", "--channels")
    run(tmp_path / "made", *given, "4")
    monkeypatch.setenv("KERNELS_LIST", str(tmp_path / "list"))
    second = run(tmp_path / "made", *given, "8")
    monkeypatch.delenv("KERNELS_LIST")
    packed = run(tmp_path / "made", "no_gpu.py", str(tmp_path / "kernels.txz"), str(tmp_path / "there"), str(tmp_path / "list"))
    assert packed["missing"] == 0 and packed["kernels"] == len(set((tmp_path / "list").read_text().split())) == second["compiled"] + second["found"]
    with tarfile.open(tmp_path / "kernels.txz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert run(tmp_path / "there", *given, "8")["compiled"] == 0

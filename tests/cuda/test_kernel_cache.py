"""What Triton's cache on disk is keyed by, and its use by several processes; kernels are compiled on several threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support_cuda import HERE, environment

from sexpgpu.backends.cuda.modules import keyed


def test_names_and_comments_are_no_part_of_the_key() -> None:
    one = "@triton.jit\ndef k_a(p0):\n    # a comment\n    tl.store(p0, 1)\n"
    other = "@triton.jit\ndef k_b(p0):\n    tl.store(p0, 1)\n"
    assert keyed(one, "k_a") == keyed(other, "k_b") != keyed(other.replace("1", "2"), "k_b")
    assert "repr=_shown, do_not_specialize=['n']" in keyed("@triton.jit(do_not_specialize=['n'])\ndef k(n):\n    pass\n", "k")
    with pytest.raises(ValueError, match="one function `k_c`"):
        keyed(one, "k_c")


def start(cache: Path, name: str) -> subprocess.Popen[str]:
    variables = environment(TRITON_CACHE_DIR=str(cache))
    return subprocess.Popen([sys.executable, str(HERE / "kernels_together.py"), str(cache), name], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> dict:
    out, trouble = process.communicate(timeout=240)
    assert process.returncode == 0, trouble
    return json.loads(out.strip().splitlines()[-1])


def test_processes_share_a_cache_and_a_new_name_is_found(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    both = [start(tmp_path, "layer"), start(tmp_path, "layer")]
    first, second = (end(process) for process in both)
    assert first["kernels"] == second["kernels"] >= 2 and first["names"] == second["names"]
    assert all(name.startswith("k_layer_") for name in first["names"])
    assert len(list(tmp_path.rglob("*.cubin"))) == first["kernels"]  # each once, whole: no leftover of a race
    renamed = end(start(tmp_path, "other"))
    assert renamed["before"] == renamed["after"] >= first["kernels"] and renamed["names"] == first["names"]

"""Losses of a head's rows of logits and their gradients over them, by the kernel that reads a row once and by that which reads it twice:
under Triton's interpreter, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support_cuda import HERE, interpreted

from sexpgpu.backends.cuda import choice, library
from sexpgpu.backends.cuda.choice import Switch


def _ptxas() -> bool:
    found = find_spec("triton")
    return found is not None and any(Path(p).glob("backends/nvidia/bin/ptxas*") for p in found.submodule_search_locations or ())


@pytest.mark.parametrize(("part", "least"), [("rows", 10), ("parts", 3), ("types", 3)])
def test_rows_of_logits_agree_with_float64(part: str, least: int) -> None:
    pytest.importorskip("triton")
    failures, count = interpreted("entropy_in_triton.py", part)
    assert not failures, "\n".join(failures)
    assert count >= least


def test_a_row_is_read_once_where_registers_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(classes: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> str:
        return library._row_kernel(dtype, classes, grad)[0]

    monkeypatch.setattr(choice, "SWITCH", Switch(once=False))
    assert name(50304) == "entropy_rows"
    monkeypatch.setattr(choice, "SWITCH", Switch())
    assert [name(classes) for classes in (16384, 32000, 50304, 65536)] == ["entropy_once"] * 4
    assert [name(classes) for classes in (16382, 50257, 65538)] == ["entropy_rows"] * 3
    assert {name(50304, torch.float32), name(50304, torch.float64), name(50304, grad=False)} == {"entropy_rows"}


@pytest.mark.skipif(not _ptxas(), reason="Triton brings no ptxas here")
def test_what_is_compiled_ahead_is_what_is_launched() -> None:
    """Wherever a part of the rows begins. A row stays in registers, and does not go through shared memory into another order."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(HERE / "entropy_for_gpu.py")], env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["kernel"] for r in rows] == ["entropy_once"] * 5 + ["entropy_rows"] and all(r["compiled"] == 1 for r in rows)
    assert all(r["spilled"] <= 32 and r["shared"] <= 1024 for r in rows[:5]), rows

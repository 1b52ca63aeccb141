"""Every kernel of the example programs compiles for sm_90. Triton brings what it needs for that, and no GPU is asked. CI names a folder
with the Triton of the devices (TRITON_OF_DEVICES), which is then the one that compiles."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import support_cuda
from support_cuda import interpreted

CASES = {"digits": 6, "conv_digits": 8, "vae": 8, "own_optimizer": 6, "pinn": 8, "char_lm": 12, "gpt2": 12, "by hand": 33, "prelude": 80}


def _ptxas() -> bool:
    found = find_spec("triton")
    return found is not None and any(Path(p).glob("backends/nvidia/bin/ptxas*") for p in found.submodule_search_locations or ())


@pytest.mark.skipif(not _ptxas(), reason="no Triton with ptxas")
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_sm_90(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("TRITON_OF_DEVICES")
    monkeypatch.setattr(support_cuda, "FIRST", [folder] if folder else [])
    failures, count = interpreted("compile_for_gpu.py", case)
    assert not failures, "\n".join(failures)
    assert count >= CASES[case]

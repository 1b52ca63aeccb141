"""The kernels of every op against the interpreter, under Triton's interpreter: values, gradients, sizes, precisions, NaN."""

from __future__ import annotations

import pytest
from support_cuda import interpreted

pytest.importorskip("triton")

#: part of ops_in_triton.py -> the least that it compares
PARTS = {"f64": 220, "f32": 220, "sizes": 36, "single": 142, "low": 14, "special": 8, "draws": 3, "second": 6}


@pytest.mark.parametrize("part", PARTS)
def test_kernels_agree_with_the_interpreter(part: str) -> None:
    failures, count = interpreted("ops_in_triton.py", part)
    assert not failures, "\n".join(failures)
    assert count >= PARTS[part]


def test_the_bands_find_a_wild_store() -> None:
    """The harness itself: a kernel that stores one element too far is found."""
    failures, count = interpreted("ops_in_triton.py", "wild")
    assert count == 1 and len(failures) == 1 and "wrote" in failures[0]

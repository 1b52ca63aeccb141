"""Programs that take several tiles side by side, or walk over rows, give what the interpreter gives: under Triton's interpreter."""

from __future__ import annotations

import pytest
from support_cuda import interpreted

pytest.importorskip("triton")

#: part of tiles_in_triton.py -> the least that it compares
PARTS = {"of the device": 12, "one row": 10, "walks": 10, "several rows": 10, "not numbers": 3, "text": 2}


@pytest.mark.parametrize("part", PARTS)
def test_tiles_side_by_side_agree_with_the_interpreter(part: str) -> None:
    failures, count = interpreted("tiles_in_triton.py", part)
    assert not failures, "\n".join(failures)
    assert count >= PARTS[part]

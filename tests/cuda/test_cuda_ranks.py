"""The CUDA program of several ranks, under Triton's interpreter: the numbers of one rank, divided or not, and where sums stand."""

from __future__ import annotations

import pytest
import torch
from support_cuda import interpreted

from sexpgpu.backends.arena import Line
from sexpgpu.backends.cuda.exchange import Bucket, buckets

pytest.importorskip("triton")


@pytest.mark.parametrize(("cases", "steps"), [(("weighed",), 20), (("parts", "several", "states"), 24), (("matrices", "bf16", "index", "rehearsal"), 18)])
def test_ranks_train_as_one_does(cases: tuple[str, ...], steps: int) -> None:
    failures, count = interpreted("ranks_in_triton.py", *cases)
    assert not failures, "\n".join(failures)
    assert count == steps


def test_buckets_are_cut_by_size_and_by_share_in_the_order_of_the_launches() -> None:
    """Names are `l<launch>`; vectors of f32, so 40 bytes are 10 elements."""
    lines = [Line(torch.zeros(48), {"l1": 0, "l2": 4, "l5": 16, "l9": 40}, 24), Line(torch.zeros(8), {"l3": 0, "l4": 4})]
    found = buckets(lines, lambda name: int(name[1:]), 40)
    assert found == [
        Bucket(0, 0, 16, ("l1", "l2"), 2, 0),
        Bucket(1, 0, 8, ("l3", "l4"), 4, None),
        Bucket(0, 16, 24, ("l5",), 5, 0), Bucket(0, 24, 40, ("l5",), 5, 1),
        Bucket(0, 40, 48, ("l9",), 9, 1),
    ]  # fmt: skip

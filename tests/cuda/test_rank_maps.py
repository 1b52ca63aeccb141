"""Equivariant linear maps in one launch, values and gradients to the second order; sums and numbers in products."""

import pytest
from support_cuda import interpreted

pytest.importorskip("triton")


def test_maps_and_gradients_equal_the_interpreter():
    failures, count = interpreted("rank_maps_in_triton.py")
    assert not failures and count == 8

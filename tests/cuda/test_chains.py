"""Small layers over the same rows in one launch, with their gradients to the second order."""

import pytest
from support_cuda import interpreted

pytest.importorskip("triton")


def test_chains_equal_the_interpreter():
    failures, count = interpreted("chains_in_triton.py")
    assert not failures and count == 5

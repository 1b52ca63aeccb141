"""f32 products of many rows: values, that they compile for sm_90 without spills, and what the sums of tensor cores would lose."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support_cuda import interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_values_are_those_of_f64():
    failures, count = interpreted("tall_in_triton.py")
    assert not failures and count == 4

"""Initial values made by torch have the bits of those made by NumPy; on a GPU `benchmarks/on_gpu.py --part initial` asks the same."""

import numpy as np
import pytest
import torch

from sexpgpu.backends import initial
from sexpgpu.ops.initial import initial_value
from sexpgpu.ops.philox import draw_key

CASES = [("normal", {}), ("normal", {"mean": 0.5, "std": 0.02}), ("uniform", {}), ("uniform", {"low": -1.5, "high": 0.25})]


@pytest.mark.parametrize("size", [1, 7, 64, 129, 40_001])
@pytest.mark.parametrize("kind, settings", CASES)
def test_bits_of_the_host(kind: str, settings: dict, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "CHUNK", 4096)
    key = draw_key(7, f"a/{kind}", 0, "init")
    out = torch.full((size,), float("nan"))
    initial.drawn(kind, settings, key, out)
    assert np.array_equal(out.numpy(), initial_value(kind, settings, (size,), key).astype(np.float32))


def test_far_tails() -> None:
    """Quantiles of what a draw can give at its ends, where a third polynomial is taken."""
    p = np.concatenate([2.0 ** -np.arange(1, 53), 1 - 2.0 ** -np.arange(1, 53), [0.075, 0.925, 1e-11, 1e-12]])
    from sexpgpu.ops.initial import normal_quantile

    assert np.array_equal(initial._quantiles(torch.from_numpy(p)).numpy(), normal_quantile(p))


def test_strided_and_narrow_tensors() -> None:
    key = draw_key(1, "a/b", 0, "init")
    wanted = initial_value("normal", {}, (6, 5), key)
    turned = torch.zeros(5, 6).T
    initial.drawn("normal", {}, key, turned)
    assert np.array_equal(turned.numpy(), wanted.astype(np.float32))
    low = torch.zeros(6, 5, dtype=torch.bfloat16)
    initial.drawn("normal", {}, key, low)
    assert torch.equal(low, torch.from_numpy(wanted.astype(np.float32)).to(torch.bfloat16))

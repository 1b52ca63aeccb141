"""Initial values made in pieces by threads: the bits of before, whatever the cut."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from sexpgpu import compiler
from sexpgpu.backends import state
from sexpgpu.compiler import Selection, load
from sexpgpu.ops import initial
from sexpgpu.ops.initial import exact_log, initial_value, normal_quantile, pieces
from sexpgpu.ops.philox import draw_key

ROOT = Path(__file__).resolve().parents[2]
# hashes of the float64s as they were computed in one piece, before values were cut
BITS = [
    ("normal", {"std": 0.1}, (65537,), "odd", "a8df7f275a47146a6a4b3472c61435cc2eaba2a1e17a921810c6c98b2d4044f0"),
    ("normal", {"mean": 1.5, "std": 3}, (131073,), "n1", "f5b4f98bb73ef9481d9c4f69671d002067cf9c80b9a4cbb2f66543ab11ccd4e5"),
    ("normal", {"std": 0.02}, (3, 700001), "n", "b528ea9c3c3da8b3a7707619033c1576a542fd18b31cccb8e7805f4fc246e863"),
    ("uniform", {"low": -2, "high": 3}, (1000003,), "u", "863b9e499d58434223e02f69b7d1686ad49dd91306c85814e662e4835818783c"),
    ("orthogonal", {"gain": 2}, (65, 130), "o", "178af51fc3e73f44ac16ac1c5fe48d690e61a48d35ea7228d4df49ca60e1d5d2"),
]


@pytest.fixture
def traced_pair() -> tuple:
    """A traced run of some tensors of every kind, and what its state is."""
    loaded = load(str(ROOT / "examples/gpt2.lisp"), Selection(variant="tiny"))
    run = next(iter(loaded.experiment.runs.values()))
    traced = compiler.train_graph(loaded, run)
    return traced, state.schema(traced, "f32")


@pytest.mark.parametrize("kind, attrs, shape, name, bits", BITS, ids=[b[3] for b in BITS])
def test_the_bits_of_before(kind: str, attrs: dict[str, float], shape: tuple[int, ...], name: str, bits: str) -> None:
    value = initial_value(kind, attrs, shape, draw_key(3, f"x/{name}", 0, "init"))
    assert value.dtype == np.float64 and value.shape == shape and sha256(value.tobytes()).hexdigest() == bits


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_no_cut_decides_a_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, key = 10_001, draw_key(1, "w", 0, "init")
    whole = initial_value(kind, {}, (count,), key)
    for chunk, piece in ((2, 4), (64, 64), (1000, 3000)):
        monkeypatch.setattr(initial, "_CHUNK", chunk)
        monkeypatch.setattr(initial, "_PIECE", piece)
        out = np.full(count, np.nan, np.float32)
        for write in reversed(pieces(kind, {}, (count,), key, out)):
            write()
        assert (out == whole).all()


def test_threads_decide_no_bit(monkeypatch: pytest.MonkeyPatch, traced_pair: tuple) -> None:
    traced, schema = traced_pair
    monkeypatch.setattr(initial, "_CHUNK", 128)
    monkeypatch.setattr(initial, "_PIECE", 256)
    found = []
    for cores in (1, 3, 64):
        monkeypatch.setattr(state.os, "cpu_count", lambda cores=cores: cores)
        tensors = {name: torch.full(shape, float("nan"), dtype=torch.float32) for name, (_, shape) in schema.items()}
        if cores == 3:  # memory that is not in order, as that of another device is written: by a copy
            tensors = {name: torch.full((*reversed(t.shape),), float("nan")).permute(*reversed(range(t.dim()))) for name, t in tensors.items()}
        state.initialise(traced, 5, tensors)
        found.append(tensors)
    for name, tensor in found[0].items():
        assert torch.isfinite(tensor).all() and all(torch.equal(tensor, other[name]) for other in found[1:]), name
    some = next(n for n in found[0] if n.startswith("param/") and n.endswith("weight"))
    spec = traced.params[some.removeprefix("param/")]
    expected = initial_value(spec.init.kind, dict(spec.init.settings), spec.shape, draw_key(5, str(spec.node.attrs["path"]), 0, "init"))
    assert (found[0][some].numpy() == expected).all()


def test_the_logarithm_at_its_seams() -> None:
    x = np.array([0.5, 0.7071067811865475, 0.7071067811865476, 0.7071067811865477, 1.0, 1.4142135623730951, 2.0, 2.0**-53, 2.0**500])
    assert np.allclose(exact_log(x), np.log(x), rtol=2e-16, atol=1e-300) and exact_log(np.array([1.0]))[0] == 0


def test_quantiles_keep_shape_and_argument() -> None:
    p = np.array([[0.5, 0.1], [1e-13, 0.9]])
    kept = p.copy()
    assert normal_quantile(p).shape == (2, 2) and (p == kept).all() and normal_quantile(np.array([0.5]))[0] == 0

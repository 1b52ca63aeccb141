"""Philox against the published vectors of Random123, draws over ranks and micro-batches, initial values."""

from statistics import NormalDist

import numpy as np
import pytest

from sexpgpu.backends.interpreter import Executable
from sexpgpu.ops import build
from sexpgpu.ops.initial import exact_log, initial_value, normal_quantile
from sexpgpu.ops.philox import blocks, draw_key, halves, philox, words

ONES = 0xFFFFFFFF
# kat_vectors of Random123, lines "philox4x32 10"
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_known_answers(counter, key, expected):
    got = philox(np.array([[c] for c in (*counter, 0, 0)], np.uint64), key)
    assert tuple(int(w[0]) for w in got) == expected


def test_words_and_halves_are_of_the_blocks():
    key = draw_key(1, "a/b", 2, "uniform")
    whole = blocks(key, 0, 20_000, 7)
    assert (words(key, 5, 50_000, 7) == whole.reshape(-1)[5:50_005]).all()
    flat = np.stack([whole & 0xFFFF, whole >> 16], -1).reshape(-1)
    assert (halves(key, 13, 1000, 7) == flat[13:1013]).all()
    assert (blocks(key, 2**32, 1, 7) != blocks(key, 0, 1, 7)).any()


def test_keys_differ_in_every_part():
    parts = [
        (1, "a", 0, "x"),
        (2, "a", 0, "x"),
        (1, "b", 0, "x"),
        (1, "a", 1, "x"),
        (1, "a", 0, "y"),
        (1, "a0", 0, "x"),
    ]
    assert len({draw_key(*p) for p in parts}) == len(parts)
    assert draw_key(1, "a", 0, "x") == draw_key(1, "a", 0, "x")


DRAWS = ["random-uniform", "random-normal", "random-bernoulli"]


def sample(op, shape, seed=1, step=0, offset=0, batch=True, **attrs):
    x = build("input", name="x", shape=shape, batch=batch)
    node = build(op, x, path="p", number=0, **attrs)
    assert node.inputs == () and node.type.batch == batch
    executable = Executable({"y": node, "x": x})
    return executable.run({x: np.zeros(shape)}, seed, step, offset)["y"].numpy()


@pytest.mark.parametrize("op", DRAWS)
def test_neither_ranks_nor_micro_batches_change_a_draw(op):
    whole = sample(op, (12, 3, 5))
    parts = [sample(op, (n, 3, 5), offset=o) for o, n in ((0, 5), (5, 1), (6, 6))]
    assert (np.concatenate(parts) == whole).all()
    assert (sample(op, (6, 3, 5), offset=6, batch=False) == whole[:6]).all()
    assert (sample(op, (12, 3, 5), step=1) != whole).any() and (sample(op, (12, 3, 5), seed=2) != whole).any()


def test_draws_have_their_distributions():
    u = sample("random-uniform", (200, 500))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.004 and abs(u.var() - 1 / 12) < 0.002
    n = sample("random-normal", (200, 500))
    assert abs(n.mean()) < 0.015 and abs(n.std() - 1) < 0.01 and np.isfinite(n).all() and abs((n**4).mean() - 3) < 0.15
    b = sample("random-bernoulli", (200, 500), p=0.3)
    assert b.dtype == bool and abs(b.mean() - 0.3) < 0.006
    assert sample("random-bernoulli", (64, 8), p=1.0).all() and not sample("random-bernoulli", (64, 8), p=0.0).any()


def test_a_reshaped_batch_draws_the_same_bits():
    x = build("input", name="x", shape=(4, 6))
    flat = build("random-uniform", build("reshape", x, shape=(24,)), path="p")
    wide = build("random-uniform", x, path="p")
    for offset in (0, 8):
        out = Executable({"a": flat, "b": wide, "x": x}).run({x: np.zeros(1)}, 3, 5, offset)
        assert (out["a"].view(4, 6) == out["b"]).all()


def test_categorical_follows_the_softmax():
    p = np.array([0.2, 0.5, 0.3])
    logits = build(
        "broadcast",
        build(
            "concat", *(build("reshape", build("constant", value=float(np.log(q)), dtype="f32"), shape=1) for q in p)
        ),
        shape=(20_000, 3),
    )
    got = Executable({"y": build("random-categorical", logits, path="c")}).run({}, 1)["y"].numpy()
    assert got.dtype == np.int32 and (np.abs(np.bincount(got) / len(got) - p) < 0.015).all()


def test_initial_values_are_fixed_to_the_bit():
    key = draw_key(1, "gpt/w", 0, "init")
    n, u = (
        initial_value("normal", {"std": 0.02}, (40, 500), key),
        initial_value("uniform", {"low": -2, "high": 2}, (40, 500), key),
    )
    assert abs(n.mean()) < 5e-4 and abs(n.std() - 0.02) < 5e-4 and u.min() > -2 and u.max() < 2 and abs(u.mean()) < 0.03
    assert (n == n.astype(np.float32)).all() and n.dtype == np.float64
    assert (initial_value("normal", {"std": 0.02}, (7,), key) == n.reshape(-1)[:7]).all()
    assert initial_value("constant", {"value": 0.1}, (2,), key).tolist() == [float(np.float32(0.1))] * 2
    assert initial_value("ones", {}, (), key).shape == () and not initial_value("zeros", {}, (2, 0), key).size


def test_own_logarithm_and_quantile():
    x = np.concatenate([2.0 ** np.arange(-60, 60, 0.37), np.linspace(0.5, 2, 4001)])
    assert np.allclose(exact_log(x), np.log(x), rtol=1e-15, atol=1e-17)
    p = np.concatenate([10.0 ** -np.arange(1, 16.0, 0.5), np.linspace(0.001, 0.999, 999)])
    expected = [NormalDist().inv_cdf(v) for v in p]
    np.testing.assert_allclose(normal_quantile(p), expected, rtol=1e-12, atol=1e-14)

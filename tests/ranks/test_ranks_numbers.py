"""1, 2 and 4 ranks train the same: losses weighted by counts, dropout, clipping, averages, taps, metrics and evaluations."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support_ranks import farthest, points, run, write


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write(folder)
    with run(folder, "--checkpoint-dir", "ck", ranks=1) as alone:
        assert alone.wait() == 0, alone.text()
    return folder


def ranked(folder: Path, count: int, keys: str = "", name: str = "m") -> Path:
    write(folder, keys=keys)
    with run(folder, "--checkpoint-dir", f"ck-{name}", ranks=count, name=name) as several:
        assert several.wait() == 0, several.text()
    return folder


def test_two_ranks_give_the_numbers_of_one_and_twice_the_same_bits(one, tmp_path):
    ranked(tmp_path, 2, name="a")
    ranked(tmp_path, 2, name="b")
    a, b, alone = points(tmp_path, "a"), points(tmp_path, "b"), points(one)
    assert a == b
    assert len([k for k in a if k[0] == "loss" and k[2] == "train"]) == 50 and any(k[1] for k in a) and any(k[2] == "valid" for k in a)
    assert farthest(alone, a)[0] < 1e-5, farthest(alone, a)
    weights = [hashlib.sha256((tmp_path / f"ck-{n}/step-50/part-00001-of-00001.safetensors").read_bytes()).hexdigest() for n in "ab"]
    assert weights[0] == weights[1]


def test_four_ranks_and_micro_batches_give_the_numbers_of_one(one, tmp_path):
    ranked(tmp_path, 4, " :accumulate 2")
    assert farthest(points(one), points(tmp_path))[0] < 1e-5, farthest(points(one), points(tmp_path))


def test_optimizer_state_divided_over_ranks_gives_the_same_numbers_and_files(one, tmp_path):
    ranked(tmp_path, 2, " :shard optimizer")
    assert farthest(points(one), points(tmp_path))[0] < 1e-5, farthest(points(one), points(tmp_path))
    import safetensors.torch as st

    a, b = (st.load_file(f / "step-50/part-00001-of-00001.safetensors") for f in (one / "ck", tmp_path / "ck-m"))
    assert a.keys() == b.keys() and any(k.startswith("opt/") for k in a)
    for name in a:
        assert a[name].shape == b[name].shape and (a[name] - b[name]).abs().max() < 1e-5, name

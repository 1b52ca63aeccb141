"""A run saved on two ranks goes on on one, and then on four, divided or not; what is exact is said."""

from __future__ import annotations

import json
from pathlib import Path

from support_ranks import farthest, points, run, write


def go(folder: Path, name: str, *flags: str, ranks: int, keys: str) -> str:
    write(folder, steps=30, every=10, keys=keys)
    with run(folder, "--checkpoint-dir", name, *flags, ranks=ranks, name=name) as process:
        assert process.wait() == 0, process.text()
        return process.text()


def test_two_ranks_then_one_then_four(tmp_path):
    go(tmp_path, "whole", ranks=1, keys="")
    go(tmp_path, "cut", "--steps", "10", ranks=2, keys=" :shard optimizer")
    said = go(tmp_path, "cut", "--steps", "20", "--resume", "latest", ranks=1, keys="")
    assert "not bit-exact: ranks was 2, is 1" in said and "within float tolerance" in said, said
    said = go(tmp_path, "cut", "--resume", "latest", ranks=4, keys=" :shard optimizer")
    assert "not bit-exact: ranks was 1, is 4" in said, said
    a, b = points(tmp_path, "whole"), points(tmp_path, "cut")
    b = {k: v for k, v in b.items() if k in a}  # a run that is cut evaluates after its last step too
    assert farthest(a, b)[0] < 1e-5, farthest(a, b)
    manifests = [json.loads((tmp_path / f"cut/step-{n}/manifest.json").read_text()) for n in (10, 20, 30)]
    assert [m["ranks"] for m in manifests] == [2, 1, 4] and [m["shard"] for m in manifests] == ["optimizer", "", "optimizer"]


def test_the_same_number_of_ranks_goes_on_bit_for_bit(tmp_path):
    go(tmp_path, "whole", ranks=2, keys=" :shard optimizer")
    go(tmp_path, "cut", "--steps", "10", ranks=2, keys=" :shard optimizer")
    said = go(tmp_path, "cut", "--resume", "latest", ranks=2, keys=" :shard optimizer")
    assert "bit for bit" in said and "not bit-exact" not in said, said
    whole, cut = (json.loads((tmp_path / f"{name}/step-30/manifest.json").read_text()) for name in ("whole", "cut"))
    assert whole["digest"] == cut["digest"]

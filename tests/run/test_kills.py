"""A few of the kill points of `tests/kills.py`, in a folder and in a bucket: kill -9 loses nothing that was durable."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from kills import kill_points, s3_kill_points


@pytest.fixture(autouse=True)
def _from_here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    random.seed()  # other moments each time


def test_five_in_a_folder(tmp_path):
    rows = []
    assert kill_points(tmp_path / "k", 5, lambda name: str(tmp_path / "k" / name), {}, "local", steps=60, say=rows.append) == 0, rows
    assert sum("kill" in row for row in rows) == 5 and all(row.get("ok", True) and row.get("identical", True) for row in rows)


def test_two_in_a_bucket(tmp_path):
    rows = []
    assert s3_kill_points(tmp_path, 2, steps=20, every=5, wide=200, say=rows.append) == 0, rows
    assert sum("kill" in row for row in rows) == 2

"""What the long drivers do, for a minute and with a fixed seed: mutated programs, grammar, damaged files."""

from __future__ import annotations

import random
from pathlib import Path

import files
import pytest
from drive import SEEDS, drive, findings, report
from mutate import MUTATIONS, mutate


def test_the_seeds_are_right(tmp_path: Path) -> None:
    for seed in sorted(SEEDS.glob("*.lisp")):
        assert findings(tmp_path / seed.name, seed.read_text("utf-8")) == (), seed.name


def test_mutations_change_the_text_where_they_say() -> None:
    text = (SEEDS / "digits.lisp").read_text("utf-8")
    for number in range(200):
        made = mutate(text, random.Random(number))
        assert made.text[: made.start] == text[: made.start] and 0 <= made.start <= made.end <= len(made.text) + 2
    assert len(MUTATIONS) >= 12


def test_mutated_programs(capsys: pytest.CaptureFixture[str]) -> None:
    tally = drive(300, seed=4)
    with capsys.disabled():
        print("\n" + report(tally).partition("\ncodes")[0])
    assert not tally.bad, report(tally)
    assert tally.errors > 200


def test_programs_of_the_grammar() -> None:
    tally = drive(100, seed=4, with_grammar=True)
    assert not tally.bad, report(tally)
    assert tally.clean > 10


@pytest.mark.parametrize("kind", files.KINDS, ids=lambda kind: kind.name)
def test_damaged_data(kind: files.Kind, tmp_path: Path) -> None:
    tally = files.data_files(kind, 60, 0, tmp_path)
    assert not tally.bad, tally.bad[0]
    assert sum(tally.ends.values()) == 60 and tally.ends["right"] < 60


@pytest.mark.parametrize("work", [files.checkpoints, files.weights], ids=lambda work: work.__name__)
def test_damaged_state(work, tmp_path: Path) -> None:
    tally = work(60, 0, tmp_path)
    assert not tally.bad, tally.bad[0]
    assert sum(tally.ends.values()) == 60

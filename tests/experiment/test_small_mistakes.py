"""Mistakes of a word or a number in knobs, runs, initial values and sharing: each has a code, a place and a mend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import HEAD, MODEL, RUN, error, traced

EVAL = "(defeval valid :data (batches d :split valid :batch 4) :every 1 :metrics {})\n"


def loss(value: str) -> str:
    return f"(defun f (x label) (cross-entropy {value} label))\n"


MISTAKES = [
    ("E-KNOB-010", "(defknob a b)\n(defknob b 2)\n" + MODEL, "", "defined later, at line 6", "move (defknob b …) before (defknob a …)"),
    ("E-KNOB-010", "(defknob a (* 2 a))\n" + MODEL, "", "reads itself", "give it a value"),
    ("E-EVAL-001", "(defknob a (* 2 none))\n" + MODEL, "", "none", ""),
    ("E-KNOB-011", "(defknob a 3 :min 5 :max 1)\n" + MODEL, "", ":min 5 is above :max 1", ":min 1 :max 5"),
    ("E-EVAL-103", MODEL, ":clip-norm 0", "every gradient would become 0", "leave :clip-norm out"),
    ("E-EVAL-103", MODEL, ":clip-norm -1", "at least 0", ""),
    ("E-EVAL-103", loss('(matmul x (param "w" [3 5] :init (normal :std -1)))'), "", ":std is -1", "(normal :std 1)"),
    ("E-EVAL-103", loss('(matmul x (param "w" [3 5] :init (normal :std +inf)))'), "", "finite", ""),
    ("E-EVAL-103", loss('(matmul x (param "w" [3 5] :init (uniform :low 2 :high 1)))'), "", ":low 2 is above :high 1", "(uniform :low 1 :high 2)"),
    ("E-EVAL-103", loss('(+ (linear x 5) (param "b" [5] :init orthogonal))'), "", "starts a matrix", "zeros"),
    ("E-EVAL-130", loss("(linear x 5 :share true)"), "", "no earlier call of `linear`", "leave :share out of the first call"),
    ("E-EVAL-130", loss('(linear x 5 :name "q" :share true)'), "", "no earlier call at `q`", "the later ones say it"),
]


@pytest.mark.parametrize(("code", "program", "keys", "message", "mend"), MISTAKES, ids=[f"{c}-{m}" for c, _, _, m, _ in MISTAKES])
def test_small_mistakes(tmp_path: Path, code: str, program: str, keys: str, message: str, mend: str) -> None:
    d = error(tmp_path, HEAD + program + RUN.format(keys), code)
    assert message in d.message and d.span is not None
    assert mend in " ".join(d.help), d.help


def test_an_evaluation_needs_a_metric_and_a_run_does_not(tmp_path: Path) -> None:
    d = error(tmp_path, HEAD + MODEL + RUN.format("") + EVAL.format("()"), "E-EVAL-103")
    assert "`valid` has no metric" in d.message and ":metrics ((loss my-loss))" in d.help[0]
    _, run = traced(tmp_path, HEAD + MODEL + RUN.format(":metrics ()"))
    assert run.metrics == ()


def test_a_second_visit_shares_what_the_first_one_made(tmp_path: Path) -> None:
    """Below a shared call the first call of an inner layer may say `:share true` nowhere, and needs not."""
    inner = "(deflayer inner (x) (+ (linear x 5 :name \"a\") (linear x 5 :name \"a\" :share true)))\n"
    _, run = traced(tmp_path, HEAD + inner + loss("(+ (inner x) (inner x :share true))") + RUN.format(""))
    assert set(run.params) == {"inner/a/weight", "inner/a/bias"}


@pytest.mark.parametrize(("word", "other"), [
    ('(einsum "ij,jk->ik" x w)', '(einsum x w :equation "ij,jk->ik")'),
    ("(matmul (cumulative-sum x :axis 1) w)", "(matmul (cumsum x :axis 1) w)"),
])
def test_two_ways_to_write_one_graph(tmp_path: Path, word: str, other: str) -> None:
    make = '(let ((w (param "w" [3 5] :init orthogonal))) {})'
    one, two = (traced(tmp_path, HEAD + loss(make.format(text)) + RUN.format(""))[1].loss.total for text in (word, other))
    assert one is two


def test_an_equation_is_given_once(tmp_path: Path) -> None:
    text = loss('(einsum "ij,jk->ik" x (param "w" [3 5] :init orthogonal) :equation "ij,jk->ik")')
    assert "given twice" in error(tmp_path, HEAD + text + RUN.format(""), "E-EVAL-104").message

"""Schedules against their closed forms, read off the learning rate of a step."""

from __future__ import annotations

import sys
from math import cos, pi, sqrt
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from library import batch, made

TEXT = '(defun f (x) (sum (square (param "w" [2] :init ones))))'


def warm(s, peak, warmup, later):
    return peak * (s + 1) / warmup if s < warmup else later


def cosine(high, low, part):
    return low + (high - low) / 2 * (1 + cos(pi * min(1, max(0, part))))


def line(high, low, part):
    return high + (low - high) * min(1, max(0, part))


#: how it is written -> the rate at step s, with 10 steps of warmup of 100
TABLE = {
    "constant-rate 0.3": lambda s: 0.3,
    "linear-decay :peak 2 :steps 100 :final 1": lambda s: line(2, 1, s / 100),
    "cosine-decay :peak 2 :steps 100 :final 0.5": lambda s: cosine(2, 0.5, s / 100),
    "step-decay :peak 2 :every 30": lambda s: 2 * 0.1 ** (s // 30),
    "exponential-decay :peak 2 :every 10 :factor 0.9": lambda s: 2 * 0.9 ** (s / 10),
    "warmup-cosine :peak 2 :warmup 10 :steps 100": lambda s: warm(s, 2, 10, cosine(2, 0, (s - 10) / 90)),
    "warmup-cosine :peak 2 :warmup 10 :steps 100 :final 0.5": lambda s: warm(s, 2, 10, cosine(2, 0.5, (s - 10) / 90)),
    "warmup-cosine :peak 2 :warmup 0 :steps 100": lambda s: cosine(2, 0, s / 100),
    "warmup-cosine :peak 2 :warmup 100 :steps 100": lambda s: warm(s, 2, 100, 2),
    "warmup-cosine :peak 2 :warmup 300 :steps 100": lambda s: warm(s, 2, 300, 2),
    "warmup-linear :peak 2 :warmup 10 :steps 100 :final 1": lambda s: warm(s, 2, 10, line(2, 1, (s - 10) / 90)),
    "warmup-hold-decay :peak 2 :warmup 10 :steps 100 :decay 30": lambda s: warm(s, 2, 10, line(2, 0, (s - 70) / 30)),
    "warmup-hold-decay :peak 2 :warmup 10 :steps 100": lambda s: warm(s, 2, 10, line(2, 0, (s - 80) / 20)),
    "inverse-square-root :peak 2 :warmup 10": lambda s: warm(s, 2, 10, 2 * sqrt(10 / (s + 1))),
}  # fmt: skip


@pytest.mark.parametrize("schedule", TABLE)
def test_closed_form(tmp_path, schedule):
    p = made(tmp_path, TEXT, optimizer=f"(sgd :lr ({schedule}))")
    rows, state = batch(0, 2, x=(2,)), p.state()
    for s in (0, 9, 10, 11, 29, 30, 50, 70, 85, 99, 100, 150):
        p.load(dict(state), s)
        assert p.step(rows, False).learning_rates[""] == pytest.approx(TABLE[schedule](s), rel=1e-9, abs=1e-12), s


def test_the_first_step_takes_peak_over_warmup(tmp_path):
    p = made(tmp_path, TEXT, optimizer="(sgd :lr (warmup-cosine :peak 1e-3 :warmup 100 :steps 2000))", keys="")
    assert p.step(batch(0, 2, x=(2,)), False).learning_rates[""] == pytest.approx(1e-5, rel=1e-6)

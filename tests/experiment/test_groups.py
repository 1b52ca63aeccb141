"""Optimizers by path, frozen parameters, averaged weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from support import HEAD, MODEL, RUN, error, loaded
from test_program import batch, made

from sexpgpu.compiler import train_graph, trajectory

BY_PATH = RUN.replace("(adamw :lr 1e-3)", '(by-path ("**/bias" (sgd :lr 0.5)) (else (sgd :lr 0.25)))')


def test_each_group_follows_its_own_optimizer(tmp_path):
    p = made(tmp_path, HEAD + MODEL + BY_PATH.format(""))
    whole = made(tmp_path, HEAD + MODEL + RUN.replace("(adamw :lr 1e-3)", "(sgd :lr 0.5)").format(""))
    before = {k: v.clone() for k, v in p.state().items()}
    result, _ = p.step(batch(0), True), whole.step(batch(0), True)
    for name in ("model/in/weight", "model/out/bias"):
        moved, full = p.state()[f"param/{name}"] - before[f"param/{name}"], whole.state()[f"param/{name}"] - before[f"param/{name}"]
        assert torch.allclose(moved, full * (1.0 if name.endswith("bias") else 0.5), atol=1e-7), name
    assert result.learning_rates == {"**/bias": 0.5, "else": 0.25}


def test_frozen_parameters_stay_and_have_no_state(tmp_path):
    p = made(tmp_path, HEAD + MODEL + RUN.format(':frozen ("model/in/**")'))
    before = {k: v.clone() for k, v in p.state().items()}
    p.step(batch(0), False)
    after = p.state()
    assert torch.equal(before["param/model/in/weight"], after["param/model/in/weight"])
    assert not torch.equal(before["param/model/out/weight"], after["param/model/out/weight"])
    assert not [n for n in after if n.startswith("opt/") and "/in/" in n]


def test_averages_follow_their_formula_and_evaluations_use_them(tmp_path):
    evals = "".join(
        f"(defeval {w} :data (batches d :split valid :batch 8) :every 5 :weights {w} :metrics ((loss f)))" for w in ("raw", "ema")
    )
    p = made(tmp_path, HEAD + MODEL + RUN.format(":ema 0.75") + evals)
    average = p.state()["param/model/in/weight"].clone()
    for i in range(3):
        p.step(batch(i), False)
        average = 0.75 * average + 0.25 * p.state()["param/model/in/weight"]
    assert torch.allclose(p.state()["ema/model/in/weight"], average, atol=1e-7)
    raw, ema = (p.evaluate(w, batch(9))["loss"][0] for w in ("raw", "ema"))
    assert raw != ema
    swapped = {n: v for n, v in p.state().items()} | {f"param/{n[4:]}": v for n, v in p.state().items() if n.startswith("ema/")}
    p.load(swapped, 3)
    assert p.evaluate("raw", batch(9))["loss"][0] == ema


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("E-EVAL-103", HEAD + MODEL + RUN.format("") + "(defeval v :data (batches d :split valid :batch 8) :every 5 :weights ema :metrics ((loss f)))"),
        ("E-EVAL-103", HEAD + MODEL + RUN.format(":ema 1")),
        ("E-EVAL-107", HEAD + MODEL + RUN.format(':frozen ("modle/**")')),
        ("E-EVAL-110", HEAD + MODEL + RUN.format(':frozen ("**")')),
        ("E-EVAL-107", HEAD + MODEL + BY_PATH.format("").replace(" (else (sgd :lr 0.25))", "")),
        ("E-EVAL-104", HEAD + MODEL + BY_PATH.format("").replace('"**/bias"', "bias")),
    ],
)
def test_wrong_groups(tmp_path, code, text):
    error(tmp_path, text, code)


def test_frozen_and_ema_change_the_trajectory(tmp_path):
    hashes = set()
    for extra in ("", ":ema 0.5", ':frozen ("model/in/**")'):
        found = loaded(tmp_path, HEAD + MODEL + RUN.format(extra))
        run = found.experiment.runs["train"]
        hashes.add(str(sorted(trajectory(train_graph(found, run), run).items())))
    assert len(hashes) == 3

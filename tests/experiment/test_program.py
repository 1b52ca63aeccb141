"""A traced run as a program on the interpreter: exactness of accumulation, clipping, evaluation, gating, precision."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from support import HEAD, MODEL, RUN, loaded

from sexpgpu.compiler import program, stages
from sexpgpu.diagnostics import SexpError

RAGGED = """(defun f (x label)
  (let ((kept (cast (< label 3) f32)))
    (list (sum (* kept (softmax-cross-entropy (linear x 5 :name "a") label))) (sum kept))))
"""


def batch(seed: int = 0, rows: int = 8) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"x": draw.normal(size=(rows, 3)).astype(np.float32), "label": draw.integers(0, 5, rows).astype(np.int32)}


def made(folder: Path, text: str, threads: int = 1):
    found = loaded(folder, text)
    made_program = program(stages(found, found.experiment.runs["train"]), "cpu", threads)
    made_program.initialise()
    return made_program


def trained(folder: Path, text: str, steps: int = 5):
    p = made(folder, text)
    results = [p.step(batch(i), True) for i in range(steps)]
    return results, p.state()


@pytest.mark.parametrize("model", [MODEL, RAGGED], ids=["mean", "sum and count"])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_does_not_change_the_step(tmp_path, model, parts):
    whole, one = trained(tmp_path, HEAD + model + RUN.format(":clip-norm 0.5"))
    cut, two = trained(tmp_path, HEAD + model + RUN.format(f":clip-norm 0.5 :accumulate {parts}"))
    for a, b in zip(whole, cut, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-6) and a.gradient_norm == pytest.approx(b.gradient_norm, abs=1e-6)
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-6), name


def test_a_step_follows_torch(tmp_path):
    """Loss, gradient norm and parameters after 20 clipped AdamW steps against eager PyTorch."""
    p = made(tmp_path, HEAD + MODEL + RUN.format(":clip-norm 0.5"))
    weights = {n.removeprefix("param/"): torch.nn.Parameter(v.clone()) for n, v in p.state().items() if n.startswith("param/")}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=1e-2)
    for i in range(20):
        rows = batch(i)
        ours = p.step(rows, False)
        hidden = torch.relu(torch.from_numpy(rows["x"]) @ weights["model/in/weight"] + weights["model/in/bias"])
        logits = hidden @ weights["model/out/weight"] + weights["model/out/bias"]
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(rows["label"]).long())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        assert ours.loss == pytest.approx(loss.item(), rel=1e-5) and ours.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, value in weights.items():
        assert torch.allclose(p.state()[f"param/{name}"], value, atol=2e-6), name


def test_a_step_that_is_not_finite_changes_nothing(tmp_path):
    p = made(tmp_path, HEAD + MODEL + RUN.format(""))
    p.step(batch(0), False)
    before = {k: v.clone() for k, v in p.state().items()}
    bad = batch(1)
    bad["x"][3, 1] = np.nan
    result = p.step(bad, True)
    assert not result.finite and result.fell == "loss"
    assert all(torch.equal(before[k], v) for k, v in p.state().items()) and p.updates == 1


def test_evaluation_weighs_by_samples(tmp_path):
    text = HEAD + MODEL + RUN.format("") + "(defeval v :data (batches d :split valid :batch 8) :every 5 :metrics ((loss f)))"
    p = made(tmp_path, text)
    total, count = p.evaluate("v", batch(3, 8))["loss"]
    first, second = (p.evaluate("v", {k: v[s] for k, v in batch(3, 8).items()})["loss"] for s in (slice(0, 5), slice(5, 8)))
    assert count == 8 and first[1] + second[1] == 8
    assert total / count == pytest.approx((first[0] + second[0]) / 8, rel=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("f64", torch.float64), ("bf16", torch.float32), ("tf32", torch.float32)])
def test_precisions_train(tmp_path, precision, dtype):
    exact, _ = trained(tmp_path, HEAD + MODEL + RUN.format(""))
    results, state = trained(tmp_path, HEAD + MODEL + RUN.format(f":precision {precision}"))
    assert all(v.dtype == dtype for k, v in state.items())
    assert results[-1].loss == pytest.approx(exact[-1].loss, rel=2e-2 if precision == "bf16" else 1e-5)
    if precision == "bf16":
        assert results[0].loss != exact[0].loss


def test_taps_and_metrics_only_when_logged(tmp_path):
    model = MODEL.replace("(linear (relu", '(tap "size" (mean (* x x))) (linear (relu')
    text = HEAD + model + RUN.format(':diagnostics ("model/*") :metrics ((again f))')
    p = made(tmp_path, text)
    quiet, loud = p.step(batch(0), False), p.step(batch(0), True)
    assert not quiet.metrics and not quiet.taps
    assert set(loud.taps) == {"model/size"} and loud.metrics["again"] == pytest.approx(loud.loss)
    assert loud.learning_rates == {"": pytest.approx(1e-3)}


def test_second_derivatives_train(tmp_path):
    model = """(defun f (x) (let* ((y (sum (tanh (matmul x (param "w" [3 2] :init (normal :std 0.5))))))
      (g (grad y x))) (mean (* g g))))"""
    p = made(tmp_path, HEAD + model + RUN.format(""))
    rows = batch(0)
    w = p.state()["param/w"].clone().requires_grad_()
    x = torch.from_numpy(rows["x"]).requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(x @ w).sum(), x, create_graph=True)
    loss = (g * g).mean()
    (dw,) = torch.autograd.grad(loss, w)
    result = p.step(rows, False)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.gradient_norm == pytest.approx(dw.norm().item(), rel=1e-5)


def test_an_index_computed_in_the_step_is_named(tmp_path):
    """Exit 3, with the op, its path, the place in the file, the index and the size; nothing is written."""
    model = """(defun f (x label)
  (mean (* (embed (param "table" [6 2] :init ones) (+ label 2)) (mean x))))
"""
    text = HEAD + model + RUN.format("") + "(defeval v :data (batches d :split valid :batch 8) :every 5 :metrics ((loss f)))"
    p = made(tmp_path, text)
    good = batch(0)
    good["label"] = np.array([0, 1, 2, 3, 3, 2, 1, 0], np.int32)
    assert p.step(good, False).finite
    before = {k: v.clone() for k, v in p.state().items()}
    bad = {**good, "label": np.array([0, 1, 2, 3, 4, 2, 1, 0], np.int32)}
    for fails in (lambda: p.step(bad, True), lambda: p.evaluate("v", bad)):
        with pytest.raises(SexpError) as caught:
            fails()
        d = caught.value.diagnostic
        assert d.code == "E-RUN-031" and d.exit_code == 3
        assert "embed" in d.message and "index 6" in d.message and "size 6" in d.message
        assert d.span is not None and d.span.text.startswith("(embed")
    assert all(torch.equal(before[k], v) for k, v in p.state().items()) and p.updates == 1


@pytest.mark.parametrize("label", [5, -1, -100])
def test_a_label_computed_in_the_step_is_checked(tmp_path, label):
    """Also -100, which torch passes over."""
    p = made(tmp_path, HEAD + MODEL.replace("label)", "(+ label 0))", 2).replace("(x (+ label 0))", "(x label)") + RUN.format(""))
    rows = batch(0)
    rows["label"][3] = label
    with pytest.raises(SexpError) as caught:
        p.step(rows, False)
    assert caught.value.diagnostic.code == "E-RUN-031" and f"index {label}" in caught.value.diagnostic.message

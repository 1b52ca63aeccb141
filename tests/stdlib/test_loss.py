"""Losses and their gradients against torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from library import batch, double, made, parameters, put

F = torch.nn.functional
FIELDS = "(x f32 [4]) (y f32 [4]) (label i32)"


def check(tmp_path, call, reference, rows=None, spread=1.0):
    """`call` sees the trained z [6 4], the field y and labels; loss and step must be those of `reference`."""
    p = made(tmp_path, f'(defun f (x y label) (let ((z (param "z" [6 4] :init zeros))) {call}))', FIELDS, 6)
    rows = rows or batch(3, 6, x=(4,), y=(4,)) | {"label": np.array([0, 3, 1, 2, 3, 0], np.int32)}
    z = (spread * double(rows, "x")).requires_grad_()
    put(p, {"z": z})
    loss = reference(z, double(rows, "y"), torch.from_numpy(rows["label"]).long())
    (g,) = torch.autograd.grad(loss, z)
    result = p.step(rows, False)
    assert result.loss == pytest.approx(loss.item(), rel=1e-9)
    assert torch.allclose(z.detach() - parameters(p)["z"], g, rtol=1e-9, atol=1e-12)


TABLE = {
    "(cross-entropy z label)": lambda z, y, n: F.cross_entropy(z, n),
    "(cross-entropy z label :smoothing 0.1)": lambda z, y, n: F.cross_entropy(z, n, label_smoothing=0.1),
    "(cross-entropy z label :ignore 3)": lambda z, y, n: F.cross_entropy(z, n, ignore_index=3),
    "(cross-entropy z label :ignore 3 :smoothing 1/10)": lambda z, y, n: F.cross_entropy(z, n, ignore_index=3, label_smoothing=0.1),
    "(mean-squared-error z y)": lambda z, y, n: F.mse_loss(z, y),
    "(mse z y)": lambda z, y, n: F.mse_loss(z, y),
    "(mean-absolute-error z y)": lambda z, y, n: F.l1_loss(z, y),
    "(huber z y)": lambda z, y, n: F.huber_loss(z, y),
    "(huber z y :delta 0.4)": lambda z, y, n: F.huber_loss(z, y, delta=0.4),
    "(smooth-l1 z y :beta 0.4)": lambda z, y, n: F.smooth_l1_loss(z, y, beta=0.4),
    "(bce z (sigmoid y))": lambda z, y, n: F.binary_cross_entropy_with_logits(z, y.sigmoid()),
    "(bce z (sigmoid y) :positive-weight 3)":
        lambda z, y, n: F.binary_cross_entropy_with_logits(z, y.sigmoid(), pos_weight=torch.tensor(3.0).double()),
    "(kl-gaussian z y)": lambda z, y, n: torch.distributions.kl_divergence(
        torch.distributions.Normal(z, (y / 2).exp()), torch.distributions.Normal(0.0, 1.0)).sum(-1).mean(),
    "(kl-gaussian y z)": lambda z, y, n: torch.distributions.kl_divergence(
        torch.distributions.Normal(y, (z / 2).exp()), torch.distributions.Normal(0.0, 1.0)).sum(-1).mean(),
}  # fmt: skip


@pytest.mark.parametrize("call", TABLE)
def test_against_torch(tmp_path, call):
    check(tmp_path, call, TABLE[call])


@pytest.mark.parametrize("call", ["(bce z (sigmoid y))", "(cross-entropy z label)", "(huber z y)"])
def test_large_values_do_not_overflow(tmp_path, call):
    check(tmp_path, call, TABLE[call], spread=500.0)


def test_a_label_outside_the_classes_can_be_ignored(tmp_path):
    rows = batch(3, 6, x=(4,), y=(4,)) | {"label": np.array([0, -100, 1, 2, -100, 0], np.int32)}
    check(tmp_path, "(cross-entropy z label :ignore -100)", lambda z, y, n: F.cross_entropy(z, n), rows)


def test_ignored_rows_are_counted_across_parts(tmp_path):
    text = "(deflayer net (x) (linear x 4))(defun f (x label) (cross-entropy (net x) label :ignore 3))"
    rows = batch(3, 6, x=(4,)) | {"label": np.array([0, 3, 1, 3, 3, 0], np.int32)}
    whole = made(tmp_path, text, FIELDS, 6).step(rows, False)
    parts = made(tmp_path, text, FIELDS, 6, keys=":precision f64 :accumulate 3").step(rows, False)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-12)
    assert whole.gradient_norm == pytest.approx(parts.gradient_norm, rel=1e-12)


def test_accuracy(tmp_path):
    text = "(defun f (x label) (mean (linear x 4)))(defun a (x label) (accuracy x label))"
    p = made(tmp_path, text, FIELDS, 6, keys=":precision f64 :metrics ((a a))")
    rows = batch(3, 6, x=(4,)) | {"label": np.array([0, 3, 1, 3, 3, 0], np.int32)}
    assert p.step(rows, True).metrics["a"] == pytest.approx((rows["x"].argmax(-1) == rows["label"]).mean())

"""Each optimizer: one row of a table. It goes down on three problems, and follows torch's where torch has it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from library import batch, double, made, parameters, put

O = torch.optim  # noqa: E741
EPS = 1.1920929e-7

#: name -> (settings for torch's defaults, torch's optimizer, settings to go down)
TABLE = {
    "sgd": ("sgd :lr 0.1", lambda p: O.SGD(p, lr=0.1), "sgd :lr 1e-3"),
    "sgd momentum": (
        "sgd :lr 0.05 :momentum 0.9 :weight-decay 0.1", lambda p: O.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), "sgd :lr 1e-4 :momentum 0.9",
    ),
    "sgd nesterov": (
        "sgd :lr 0.05 :momentum 0.9 :nesterov true", lambda p: O.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "sgd :lr 1e-4 :momentum 0.9 :nesterov true",
    ),
    "adam": ("adam :lr 0.02 :weight-decay 0.1", lambda p: O.Adam(p, lr=0.02, weight_decay=0.1), "adam :lr 0.02"),
    "adamw": ("adamw :lr 0.02 :betas [0.8 0.95]", lambda p: O.AdamW(p, lr=0.02, betas=(0.8, 0.95)), "adamw :lr 0.02"),
    "lion": ("lion :lr 0.01 :weight-decay 0.1", None, "lion :lr 0.01"),
    "rmsprop": ("rmsprop :lr 0.01 :weight-decay 0.1", lambda p: O.RMSprop(p, lr=0.01, weight_decay=0.1), "rmsprop :lr 1e-2"),
    "rmsprop centered": (
        "rmsprop :lr 0.01 :momentum 0.5 :centered true", lambda p: O.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        "rmsprop :lr 1e-3 :momentum 0.5 :centered true",
    ),
    "adagrad": ("adagrad :lr 0.1 :lr-decay 0.01 :weight-decay 0.1", lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1), "adagrad :lr 0.1"),
    "adadelta": ("adadelta :lr 0.5 :weight-decay 0.1", lambda p: O.Adadelta(p, lr=0.5, weight_decay=0.1), "adadelta :lr 2"),
    "adamax": ("adamax :lr 0.02 :weight-decay 0.1", lambda p: O.Adamax(p, lr=0.02, weight_decay=0.1), "adamax :lr 0.02"),
    "nadam": ("nadam :lr 0.02 :weight-decay 0.1", lambda p: O.NAdam(p, lr=0.02, weight_decay=0.1), "nadam :lr 0.02"),
    "radam": ("radam :lr 0.02 :weight-decay 0.1", lambda p: O.RAdam(p, lr=0.02, weight_decay=0.1), "radam :lr 0.02"),
    "adafactor": (
        "adafactor :lr 0.05 :weight-decay 0.1", lambda p: O.Adafactor(p, lr=0.05, weight_decay=0.1, eps=(EPS, 1e-3)), "adafactor :lr 0.1",
    ),
    "muon": ("muon :lr 0.02 :weight-decay 0.1", None, "muon :lr 0.02 :adam-lr 0.02"),
}  # fmt: skip

PARABOLA = '(defun f (x) (let ((w (param "w" [2 3] :init zeros)) (v (param "v" [3] :init zeros))) (+ (sum (square (- w 1))) (sum (square (- v 2))))))'
ROSENBROCK = """(defun f (x) (let* ((w (param "w" [2] :init zeros)) (a (slice w :stop 1)) (b (slice w :start 1)))
  (sum (+ (square (- 1 a)) (* 100 (square (- b (* a a))))))))"""
MIXED = """(deflayer net (x) (linear (tanh (linear x 6 :name "in")) 3 :name "out"))
(defun f (x y) (mean-squared-error (net x) y))"""
PROBLEMS = {"parabola": (PARABOLA, 0.8), "rosenbrock": (ROSENBROCK, 0.9), "mixed": (MIXED, 0.98)}


def mixed(tmp_path, settings):
    p = made(tmp_path, MIXED, "(x f32 [4]) (y f32 [3])", 8, optimizer=f"({settings})")
    return p, batch(1, 8, x=(4,), y=(3,))


def torch_loss(w, rows):
    hidden = torch.tanh(double(rows, "x") @ w["net/in/weight"] + w["net/in/bias"])
    return torch.nn.functional.mse_loss(hidden @ w["net/out/weight"] + w["net/out/bias"], double(rows, "y"))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_it_goes_down(tmp_path, name, problem):
    text, share = PROBLEMS[problem]
    p = made(tmp_path, text, "(x f32 [4]) (y f32 [3])", 8, optimizer=f"({TABLE[name][2]})", keys="")
    rows = batch(1, 8, x=(4,), y=(3,))
    losses = [p.step(rows, False).loss for _ in range(100)]
    assert losses[-1] < share * losses[0] and np.isfinite(losses).all()


@pytest.mark.parametrize("name", [n for n, row in TABLE.items() if row[1]])
def test_it_follows_torch(tmp_path, name):
    ours, theirs, _ = TABLE[name]
    p, rows = mixed(tmp_path, ours)
    w = {n: torch.nn.Parameter(v) for n, v in parameters(p).items()}
    assert all(v.dtype == torch.float64 for v in w.values())
    optimizer = theirs(list(w.values()))
    for _ in range(50):
        p.step(rows, False)
        optimizer.zero_grad()
        torch_loss(w, rows).backward()
        optimizer.step()
    for key, value in parameters(p).items():
        assert torch.allclose(value, w[key], rtol=0, atol=1e-6), (key, (value - w[key]).abs().max())


def lion(state, key, w, g, t):
    m = state.get(key, torch.zeros_like(w))
    state[key] = 0.99 * m + 0.01 * g
    return w * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)


def muon(state, key, w, g, t):
    """As torch.optim.Muon on the transpose, but in float64 where it takes bf16; AdamW for vectors."""
    m, v = state.get(key, (torch.zeros_like(w), torch.zeros_like(w)))
    if w.dim() == 2:
        m = 0.95 * m + 0.05 * g
        x = (0.05 * g + 0.95 * m).T
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        state[key] = m, v
        return w * (1 - 0.02 * 0.1) - 0.02 * max(1, w.shape[1] / w.shape[0]) ** 0.5 * x.T
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    state[key] = m, v
    return w * (1 - 3e-4 * 0.1) - 3e-4 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)


@pytest.mark.parametrize("rule", [lion, muon])
def test_it_follows_its_formula(tmp_path, rule):
    p, rows = mixed(tmp_path, TABLE[rule.__name__][0])
    w, state = parameters(p), {}
    for t in range(1, 51):
        p.step(rows, False)
        w = {n: v.requires_grad_() for n, v in w.items()}
        gradients = torch.autograd.grad(torch_loss(w, rows), list(w.values()))
        w = {n: rule(state, n, v.detach(), g, t) for (n, v), g in zip(w.items(), gradients, strict=True)}
    for key, value in parameters(p).items():
        assert torch.allclose(value, w[key], rtol=0, atol=1e-6), key


def test_muon_is_near_torchs_in_bf16(tmp_path):
    text = '(defun f (x y) (mean-squared-error (matmul x (param "w" [4 3] :init zeros)) y))'
    p = made(tmp_path, text, "(x f32 [4]) (y f32 [3])", 8, optimizer="(muon :lr 0.02 :weight-decay 0.1)")
    rows, w = batch(1, 8, x=(4,), y=(3,)), torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    optimizer = torch.optim.Muon([w], lr=0.02, weight_decay=0.1)
    for _ in range(10):
        p.step(rows, False)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(double(rows, "x") @ w.T, double(rows, "y")).backward()
        optimizer.step()
    assert torch.allclose(parameters(p)["w"].T, w, rtol=0, atol=5e-3)


def test_slots_have_their_shapes(tmp_path):
    p, _ = mixed(tmp_path, "adafactor")
    shapes = {n: tuple(v.shape) for n, v in p.state().items() if n.startswith("opt/")}
    assert shapes["opt/row/net/in/weight"] == (4, 1) and shapes["opt/column/net/in/weight"] == (1, 6)
    assert (
        shapes["opt/v/net/in/weight"] == ()
        and shapes["opt/v/net/in/bias"] == (6,)
        and shapes["opt/row/net/in/bias"] == ()
    )
    p, _ = mixed(tmp_path, "muon")
    assert tuple(p.state()["opt/v/net/in/weight"].shape) == ()


def test_adafactor_takes_tensors_of_four_axes(tmp_path):
    text = '(defun f (x) (sum (square (- (param "w" [2 3 4 5] :init zeros) 1))))'
    p = made(tmp_path, text, optimizer="(adafactor :lr 0.05)")
    w = torch.nn.Parameter(torch.zeros(2, 3, 4, 5, dtype=torch.float64))
    optimizer = torch.optim.Adafactor([w], lr=0.05, eps=(EPS, 1e-3))
    for _ in range(20):
        p.step(batch(0, 2, x=(2,)), False)
        optimizer.zero_grad()
        ((w - 1) ** 2).sum().backward()
        optimizer.step()
    assert torch.allclose(parameters(p)["w"], w, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["sgd", "adam", "adamw", "lion", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "radam", "adafactor", "muon"],
)
def test_settings_may_be_tensors(tmp_path, name):
    """A schedule as rate and as weight decay gives what the same numbers give."""
    one, rows = mixed(tmp_path, f"{name} :lr 0.01 :weight-decay 0.1")
    two, _ = mixed(tmp_path, f"{name} :lr (constant-rate 0.01) :weight-decay (constant-rate 0.1)")
    put(two, parameters(one))
    for _ in range(3):
        one.step(rows, False), two.step(rows, False)
    for key, value in parameters(one).items():
        assert torch.allclose(value, parameters(two)[key], rtol=0, atol=1e-12), key

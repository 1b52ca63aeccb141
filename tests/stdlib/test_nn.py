"""Layers against torch.nn with the same weights: the loss is the mean of result times a field, so its gradient is seen too."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from library import batch, double, made, parameters, put

from sexpgpu.diagnostics import SexpError

nn = torch.nn
ROWS = 5


def check(tmp_path, call, shape, out, modules, reference, extra="", skip=()):
    """`modules`: our path -> (torch tensor, whether it lies the other way). `reference(x)` uses those tensors."""
    sizes = " ".join(map(str, shape)), " ".join(map(str, out))
    p = made(
        tmp_path, f"(defun f (x y) (mean (* y {call}))){extra}", f"(x f32 [{sizes[0]}]) (y f32 [{sizes[1]}])", ROWS
    )
    ours = parameters(p)
    assert set(ours) == set(modules), set(ours) ^ set(modules)
    draw = torch.Generator().manual_seed(1)
    for tensor, _ in modules.values():
        tensor.grad = None
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) / 2)
    put(p, {name: tensor.T if turned else tensor for name, (tensor, turned) in modules.items()})
    rows = batch(2, ROWS, x=shape, y=out)
    loss = (double(rows, "y") * reference(double(rows, "x"))).mean()
    before = {name: tensor.detach().clone() for name, (tensor, _) in modules.items()}
    loss.backward()
    result = p.step(rows, False)
    assert result.loss == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    for name, value in parameters(p).items():
        tensor, turned = modules[name]
        expected = before[name] - (tensor.grad if tensor.grad is not None else 0)
        assert torch.allclose(value, expected.T if turned else expected, rtol=1e-8, atol=1e-9), name
    return p, rows


def named(path, module, turned=True):
    return {f"{path}/weight": (module.weight, turned)} | (
        {f"{path}/bias": (module.bias, False)} if module.bias is not None else {}
    )


def test_linear(tmp_path):
    for bias in (True, False):
        m = nn.Linear(4, 3, bias=bias).double()
        check(tmp_path, f"(linear x 3 :bias {str(bias).lower()})", (4,), (3,), named("linear", m), m)


def test_embedding(tmp_path):
    text = "(defun f (i y) (mean (* y (embedding i 7 3))))"
    p = made(tmp_path, text, "(i i32 [2]) (y f32 [2 3])", ROWS)
    table = parameters(p)["embedding/weight"].requires_grad_()
    rows = batch(2, ROWS, y=(2, 3)) | {"i": np.array([[0, 6], [1, 1], [2, 0], [6, 6], [3, 4]], np.int32)}
    loss = (double(rows, "y") * nn.functional.embedding(torch.from_numpy(rows["i"]).long(), table)).mean()
    loss.backward()
    assert p.step(rows, False).loss == pytest.approx(loss.item(), rel=1e-9)
    assert torch.allclose(parameters(p)["embedding/weight"], table.detach() - table.grad, atol=1e-12)


def test_layer_norm(tmp_path):
    m = nn.LayerNorm(6).double()
    check(tmp_path, "(layer-norm x)", (3, 6), (3, 6), named("layer-norm", m, False), m)


def test_rms_norm(tmp_path):
    m = nn.RMSNorm(6, eps=1e-6).double()
    check(tmp_path, "(rms-norm x)", (3, 6), (3, 6), {"rms-norm/weight": (m.weight, False)}, m)


def test_group_norm(tmp_path):
    m = nn.GroupNorm(2, 6).double()
    check(tmp_path, "(group-norm x 2)", (6, 3, 2), (6, 3, 2), named("group-norm", m, False), m)


@pytest.mark.parametrize("shape", [(4,), (4, 3, 2)])
def test_batch_norm_trains_and_evaluates(tmp_path, shape):
    m = (nn.BatchNorm1d(4) if len(shape) == 1 else nn.BatchNorm2d(4)).double()
    evals = "(defeval v :data (batches d :split valid :batch 5) :every 5 :metrics ((loss f)))"
    p, rows = check(tmp_path, "(batch-norm x)", shape, shape, named("batch-norm", m, False), m, evals)
    for name, expected in (("mean", m.running_mean), ("variance", m.running_var)):
        assert torch.allclose(p.state()[f"state/batch-norm/{name}"], expected, atol=1e-9), name
    with torch.no_grad():
        for name, value in parameters(p).items():
            getattr(m, name.rpartition("/")[2]).copy_(value)
        expected = (double(rows, "y") * m.eval()(double(rows, "x"))).mean().item()
    total, count = p.evaluate("v", rows)["loss"]
    assert total / count == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("sizes", "kernel", "keys", "torch_keys"), [
    ((4, 7), "3", "", {}), ((4, 7, 6), "3", ":stride 2 :padding 1", {"stride": 2, "padding": 1}),
    ((4, 7, 6), "[3 2]", ":dilation [2 1] :groups 2", {"dilation": (2, 1), "groups": 2}), ((4, 3, 4, 3), "2", "", {}),
    ((4, 7), "4", ":padding 'same", {"padding": "same"}),
    ((4, 7, 6), "[3 2]", ":padding 'same :dilation [2 3]", {"padding": "same", "dilation": (2, 3)}),
])  # fmt: skip
def test_convolution(tmp_path, sizes, kernel, keys, torch_keys):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(sizes) - 2]
    m = kind(4, 6, eval(kernel.replace(" ", ",")), **torch_keys).double()
    out = tuple(m(torch.zeros(1, *sizes, dtype=torch.float64)).shape[1:])
    check(tmp_path, f"(convolution x 6 {kernel} {keys})", sizes, out, named("convolution", m, False), m)
    m = kind(4, 6, eval(kernel.replace(" ", ",")), bias=False, **torch_keys).double()
    check(tmp_path, f"(convolution x 6 {kernel} :bias false {keys})", sizes, out, named("convolution", m, False), m)


def test_same_padding_has_stride_1(tmp_path):
    with pytest.raises(SexpError, match="'same goes with :stride 1"):
        made(tmp_path, "(defun f (x) (mean (convolution x 6 3 :padding 'same :stride 2)))", "(x f32 [4 7])")


def test_transposed_convolution(tmp_path):
    m = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2).double()
    call = "(transposed-convolution x 6 3 :stride 2 :padding 1 :groups 2)"
    out = tuple(m(torch.zeros(1, 4, 5, 3, dtype=torch.float64)).shape[1:])
    check(tmp_path, call, (4, 5, 3), out, named("transposed-convolution", m, False), m)


def test_moving_mean(tmp_path):
    text = '(defun f (x) (+ (mean (moving-mean (mean x :axis 0) :decay 0.9)) (* 0 (sum (param "w" [1] :init zeros)))))'
    p = made(
        tmp_path,
        text,
        "(x f32 [2])",
        ROWS,
        evals="(defeval v :data (batches d :split valid :batch 5) :every 5 :metrics ((loss f)))",
    )
    total = weight = 0.0
    for seed in range(4):
        rows = batch(seed, ROWS, x=(2,))
        total, weight = 0.9 * total + 0.1 * double(rows, "x").mean().item(), 0.9 * weight + 0.1
        assert p.step(rows, False).loss == pytest.approx(total / weight, rel=1e-9)
    value, count = p.evaluate("v", batch(9, ROWS, x=(2,)))["loss"]
    assert value / count == pytest.approx(total / weight, rel=1e-6)


def heads(m, path, bias=True):
    """A torch attention's weights under our names; its query, key and value lie in one matrix."""
    parts = {}
    for i, name in enumerate(("query", "key", "value")):
        parts[f"{path}/{name}/weight"] = m.in_proj_weight[i * 8 : i * 8 + 8].T
        parts[f"{path}/{name}/bias"] = m.in_proj_bias[i * 8 : i * 8 + 8]
    return parts | {f"{path}/out/weight": m.out_proj.weight.T, f"{path}/out/bias": m.out_proj.bias}


@pytest.mark.parametrize("causal", [True, False])
def test_attention(tmp_path, causal):
    m = nn.MultiheadAttention(8, 2, batch_first=True).double()
    nn.init.normal_(m.in_proj_bias)
    text = f"(defun f (x y) (mean (* y (attention x :heads 2 :causal {str(causal).lower()}))))"
    p = made(tmp_path, text, "(x f32 [5 8]) (y f32 [5 8])", ROWS)
    put(p, heads(m, "attention"))
    rows = batch(2, ROWS, x=(5, 8), y=(5, 8))
    x = double(rows, "x")
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None
    loss = (double(rows, "y") * m(x, x, x, attn_mask=mask, need_weights=False)[0]).mean()
    loss.backward()
    result = p.step(rows, False)
    assert result.loss == pytest.approx(loss.item(), rel=1e-9)
    after = parameters(p)
    gradient = m.in_proj_weight.detach()[8:16] - m.in_proj_weight.grad[8:16]
    assert torch.allclose(after["attention/key/weight"].T, gradient, atol=1e-9)


def test_attention_to_a_memory(tmp_path):
    m = nn.MultiheadAttention(8, 2, batch_first=True).double()
    p = made(tmp_path, "(defun f (x z) (mean (attention x :heads 2 :memory z)))", "(x f32 [5 8]) (z f32 [3 8])", ROWS)
    put(p, heads(m, "attention"))
    rows = batch(2, ROWS, x=(5, 8), z=(3, 8))
    x, z = double(rows, "x"), double(rows, "z")
    assert p.step(rows, False).loss == pytest.approx(m(x, z, z, need_weights=False)[0].mean().item(), rel=1e-9)


@pytest.mark.parametrize("keys", [":causal true :window 2", ":mask (> z 0)", ":kv-heads 2 :causal true", ":kv-heads 1"])
def test_what_attention_sees(tmp_path, keys):
    """Windows, masks and groups of heads, against the softmax written out."""
    text = f"(defun f (x y z) (mean (* y (attention x :heads 4 {keys}))))"
    p = made(tmp_path, text, "(x f32 [5 8]) (y f32 [5 8]) (z f32 [1 5 5])", ROWS)
    w = {n.removeprefix("attention/"): v for n, v in parameters(p).items()}
    rows = batch(2, ROWS, x=(5, 8), y=(5, 8), z=(1, 5, 5))
    rows["z"] += 5 * np.eye(5, dtype=np.float32)  # a row that sees nothing is the op's affair
    split = {
        n: (double(rows, "x") @ w[f"{n}/weight"] + w[f"{n}/bias"]).unflatten(-1, (-1, 2)).transpose(1, 2)
        for n in ("query", "key", "value")
    }
    k, v = (split[n].repeat_interleave(4 // split[n].shape[1], 1) for n in ("key", "value"))
    assert w["key/weight"].shape == (8, 2 * split["key"].shape[1])
    distance = torch.arange(5)[:, None] - torch.arange(5)
    seen = torch.ones(ROWS, 1, 5, 5, dtype=torch.bool)
    seen = seen & (distance >= 0) if "causal" in keys else seen
    seen = seen & (distance < 2) if "window" in keys else seen
    seen = seen & (double(rows, "z") > 0) if "mask" in keys else seen
    scores = (split["query"] @ k.transpose(-1, -2) / 2**0.5).masked_fill(~seen, -np.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["out/weight"] + w["out/bias"]
    assert p.step(rows, False).loss == pytest.approx((double(rows, "y") * out).mean().item(), rel=1e-9)


def test_rotary_positions(tmp_path):
    """As complex numbers: the pair (i, i + d/2) at position t turns by t / 10000^(2i/d); scores depend on distance alone."""
    text = '(defun f (x y) (+ (mean (* y (rotary-embedding x))) (* 0 (sum (param "w" [1] :init zeros)))))'
    p = made(tmp_path, text, "(x f32 [5 8]) (y f32 [5 8])", ROWS)
    rows = batch(2, ROWS, x=(5, 8), y=(5, 8))
    x = double(rows, "x")
    angle = torch.arange(5.0).double()[:, None] / 10000 ** (torch.arange(4.0).double() / 4)
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = (double(rows, "y") * torch.cat([z.real, z.imag], -1)).mean().item()
    assert p.step(rows, False).loss == pytest.approx(expected, rel=1e-9)


def test_feed_forward(tmp_path):
    up, down = nn.Linear(4, 16).double(), nn.Linear(16, 4).double()
    weights = named("feed-forward/up", up) | named("feed-forward/down", down)
    check(tmp_path, "(feed-forward x)", (4,), (4,), weights, lambda x: down(nn.functional.gelu(up(x))))
    check(tmp_path, "(feed-forward x :activation relu)", (4,), (4,), weights, lambda x: down(torch.relu(up(x))))


def test_gated_feed_forward(tmp_path):
    gate, up, down = (nn.Linear(a, b, bias=False).double() for a, b in ((4, 6), (4, 6), (6, 4)))
    weights = (
        named("gated-feed-forward/gate", gate)
        | named("gated-feed-forward/up", up)
        | named("gated-feed-forward/down", down)
    )
    check(
        tmp_path, "(gated-feed-forward x 6)", (4,), (4,), weights, lambda x: down(nn.functional.silu(gate(x)) * up(x))
    )


def test_transformer_block(tmp_path):
    m = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double()
    p = made(
        tmp_path, "(defun f (x y) (mean (* y (transformer-block x :heads 2))))", "(x f32 [5 8]) (y f32 [5 8])", ROWS
    )
    weights = heads(m.self_attn, "transformer-block/attention")
    for path, part in (("feed-forward/up", m.linear1), ("feed-forward/down", m.linear2)):
        weights |= {f"transformer-block/{path}/weight": part.weight.T, f"transformer-block/{path}/bias": part.bias}
    put(p, weights)
    rows = batch(2, ROWS, x=(5, 8), y=(5, 8))
    expected = (double(rows, "y") * m(double(rows, "x"))).mean().item()
    assert p.step(rows, False).loss == pytest.approx(expected, rel=1e-9)


def dropped(tmp_path, rate):
    text = f'(defun f (x) (mean (+ (dropout x {rate}) (* 0 (sum (param "w" [1] :init zeros))))))'
    evals = "(defeval v :data (batches d :split valid :batch 5) :every 5 :metrics ((loss f)))"
    p = made(tmp_path, text, "(x f32 [4000])", ROWS, evals=evals)
    ones = {"x": np.ones((ROWS, 4000), np.float32)}
    total, count = p.evaluate("v", ones)["loss"]
    assert total / count == pytest.approx(1.0)
    graph = p.staged.whole(False)
    return [p.step(ones, False).loss for _ in range(2)], any("random" in n.op for n in nodes(graph.values()))


def nodes(roots):
    seen, left = set(), list(roots)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += node.inputs
    return seen


def test_dropout(tmp_path):
    (one, two), drew = dropped(tmp_path, "1/4")
    assert drew and one != two and one == pytest.approx(1, abs=0.02) and two == pytest.approx(1, abs=0.02)
    assert dropped(tmp_path, "0") == ([1.0, 1.0], False)
    assert dropped(tmp_path, "0.0") == ([1.0, 1.0], False)
    assert dropped(tmp_path, "1") == ([0.0, 0.0], False)


def recurrent(p, path, m, units, gates):
    bias = m.bias_ih_l0 + m.bias_hh_l0
    weights = {f"{path}/cell/input": m.weight_ih_l0.T, f"{path}/cell/hidden": m.weight_hh_l0.T}
    if gates == 3:
        zero = torch.cat([torch.ones(2 * units), torch.zeros(units)]).double()
        weights[f"{path}/cell/hidden-bias"] = m.bias_hh_l0[2 * units :]
        bias = m.bias_ih_l0 + m.bias_hh_l0 * zero
    put(p, weights | {f"{path}/cell/bias": bias})


@pytest.mark.parametrize(("name", "module", "gates"), [("rnn", nn.RNN, 1), ("gru", nn.GRU, 3), ("lstm", nn.LSTM, 4)])
def test_recurrent(tmp_path, name, module, gates):
    m = module(4, 3, batch_first=True).double()
    p = made(tmp_path, f"(defun f (x y) (mean (* y ({name} x 3))))", "(x f32 [6 4]) (y f32 [6 3])", ROWS)
    recurrent(p, name, m, 3, gates)
    rows = batch(2, ROWS, x=(6, 4), y=(6, 3))
    loss = (double(rows, "y") * m(double(rows, "x"))[0]).mean()
    loss.backward()
    assert p.step(rows, False).loss == pytest.approx(loss.item(), rel=1e-9)
    after = parameters(p)[f"{name}/cell/hidden"]
    assert torch.allclose(after.T, m.weight_hh_l0.detach() - m.weight_hh_l0.grad, atol=1e-9)


def test_bidirectional(tmp_path):
    m = nn.LSTM(4, 3, batch_first=True, bidirectional=True).double()
    p = made(tmp_path, "(defun f (x y) (mean (* y (bidirectional x 3 :layer lstm))))", "(x f32 [6 4]) (y f32 [6 6])", ROWS)
    for path, end in (("forward", ""), ("backward", "_reverse")):
        w = {n: getattr(m, f"{n}_l0{end}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        own = f"bidirectional/{path}/cell"
        put(p, {f"{own}/input": w["weight_ih"].T, f"{own}/hidden": w["weight_hh"].T, f"{own}/bias": w["bias_ih"] + w["bias_hh"]})
    rows = batch(2, ROWS, x=(6, 4), y=(6, 6))
    loss = (double(rows, "y") * m(double(rows, "x"))[0]).mean()
    assert p.step(rows, False).loss == pytest.approx(loss.item(), rel=1e-9)


SHAPES = {
    "(flatten x)": lambda x: x.flatten(1),
    "(flatten x :from 2)": lambda x: x.flatten(2),
    "(flatten (flatten x) :from 1)": lambda x: x.flatten(1),
    "(flatten x :from 0)": lambda x: x.flatten(),
    "(stack [x (* 2 x)])": lambda x: torch.stack([x, 2 * x]),
    "(stack [x x x] :axis -1)": lambda x: torch.stack([x, x, x], -1),
    "(upsample x 3)": lambda x: nn.functional.interpolate(x, scale_factor=3),
    "(upsample (flatten x :from 2) 2)": lambda x: nn.functional.interpolate(x.flatten(2), scale_factor=2),
}


@pytest.mark.parametrize("call", SHAPES)
def test_functions_of_shape(tmp_path, call):
    p = made(tmp_path, f"(defun f (x) (let ((y {call})) (mean (* (param \"w\" (shape y) :init ones) y y))))", "(x f32 [2 3 4])", ROWS)
    rows = batch(2, ROWS, x=(2, 3, 4))
    y = SHAPES[call](double(rows, "x"))
    assert p.step(rows, False).loss == pytest.approx(y.square().mean().item(), rel=1e-9)
    assert torch.allclose(parameters(p)["w"], 1 - y.square() / y.numel(), atol=1e-9)


INITS = {
    "(glorot-uniform 300 200)": (2 / 500) ** 0.5, "(glorot-normal 300 200 :gain 2)": 2 * (2 / 500) ** 0.5,
    "(he-uniform 300)": (2 / 300) ** 0.5, "(he-normal 300)": (2 / 300) ** 0.5, "(lecun-normal 300)": (1 / 300) ** 0.5,
}  # fmt: skip


@pytest.mark.parametrize("init", INITS)
def test_initial_values_have_their_deviation(tmp_path, init):
    p = made(tmp_path, f"(defun f (x) (mean (linear x 200 :init {init})))", "(x f32 [300])")
    weight = parameters(p)["linear/weight"]
    assert weight.std().item() == pytest.approx(INITS[init], rel=0.02) and abs(weight.mean().item()) < 0.01

"""The ops of issue 3 beside their cases in breadth_cases.py: NaN, infinities and -0, parity with torch's autograd,
refusals, batch marks, precision."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sexpgpu.backends.interpreter import Executable
from sexpgpu.diagnostics import entry
from sexpgpu.ir import postorder
from sexpgpu.ops import OpProblem, build
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.precision import apply_precision

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.5, 1e-40, 100.0])


def leaf(name, t, batch=False):
    dtype = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32", torch.bool: "bool"}[t.dtype]
    return build("input", name=name, shape=tuple(t.shape), dtype=dtype, batch=batch)


def leaves(*tensors):
    return [leaf(str(i), t) for i, t in enumerate(tensors)]


def run(node, nodes, tensors):
    return Executable({"y": node}).run(dict(zip(nodes, tensors, strict=True)))["y"]


def value(op, *tensors, **attrs):
    nodes = leaves(*tensors)
    return run(build(op, *nodes, **attrs), nodes, tensors)


def gradients(op, *tensors, order=1, **attrs):
    """By the float operands, of Σ y²; at order 2, of Σ of the squares of the first gradients."""
    nodes = leaves(*tensors)
    y = build(op, *nodes, **attrs)
    wrt = [n for n in nodes if n.type.is_float]
    for _ in range(order):
        parts = [build("sum", build("square", p)) for p in (y if isinstance(y, list) else [y])]
        scalar = parts[0]
        for p in parts[1:]:
            scalar = build("+", scalar, p)
        y = grad(scalar, wrt)
    return [run(g, nodes, tensors) for g in y]


def autograd(function, *tensors):
    wanted = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    return torch.autograd.grad(function(*wanted).square().sum(), [t for t in wanted if t.requires_grad])


def same(got, expected, exact=True):
    """Equal with NaN where NaN is, and equal signs of zero."""
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    if exact:
        assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
        known = ~expected.isnan()
        assert torch.equal(torch.signbit(got)[known], torch.signbit(expected)[known])
    else:
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# element by element ------------------------------------------------------------------------------

NUMPY = {n: getattr(np, n) for n in ("tan", "sinh", "cosh", "exp2", "log2")}
NUMPY |= {f"a{n}": getattr(np, f"arc{n}") for n in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}


@pytest.mark.parametrize("name", NUMPY)
def test_functions_of_special_values(name):
    with np.errstate(all="ignore"):
        expected = NUMPY[name](SPECIAL.double().numpy())
    got = value(name, SPECIAL.double())
    torch.testing.assert_close(got, torch.from_numpy(expected), equal_nan=True, rtol=1e-12, atol=0)
    known = ~np.isnan(expected)
    assert (np.signbit(got.numpy()) == np.signbit(expected))[known].all()


@pytest.mark.parametrize(
    "name, function",
    {
        "leaky-relu": F.leaky_relu,
        "elu": F.elu,
        "selu": F.selu,
        "mish": F.mish,
        "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    }.items(),
)
def test_activations_of_special_values(name, function):
    for x in SPECIAL:  # one by one: vectorized kernels may differ in the last bit
        same(value(name, x.reshape(1)), function(x.reshape(1)))
    assert value(name, torch.tensor([NAN])).isnan().all()


@pytest.mark.parametrize("name", ["leaky-relu", "elu", "selu", "mish", "gelu-tanh"])
def test_activations_have_finite_derivatives_far_out(name):
    x = torch.tensor([-200.0, -1.0, 0.0, -0.0, 1.0, 200.0])
    for order in (1, 2):
        assert gradients(name, x, order=order)[0].isfinite().all()


@pytest.mark.parametrize("name, function", [("atan2", np.arctan2), ("hypot", np.hypot)])
def test_functions_of_two_special_values(name, function):
    a, b = SPECIAL.repeat(10), SPECIAL.repeat_interleave(10)
    same(value(name, a, b), torch.from_numpy(function(a.numpy(), b.numpy())), exact=False)


# moments and order -------------------------------------------------------------------------------


def test_prod_of_special_values_and_its_gradient_beside_zeros():
    x = torch.tensor([[0.0, INF, 1.0], [-0.0, 2.0, 3.0], [NAN, 1.0, 1.0], [-INF, 2.0, 1.0]])
    same(value("prod", x, axis=1), torch.tensor([NAN, -0.0, NAN, -INF]))
    x = torch.tensor([[0.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 3.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    node = leaves(x)[0]
    g = run(grad(build("sum", build("prod", node, axis=1)), [node])[0], [node], [x])
    expected = torch.tensor([[120.0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [120, 60, 40, 30, 24]])
    assert torch.equal(g, expected)
    assert value("prod", torch.tensor([2, 3], dtype=torch.int32)).dtype == torch.int32
    assert value("prod", torch.zeros(0)).item() == 1.0


def test_variance_of_special_values():
    x = torch.tensor([[1.0, NAN, 2.0], [INF, 1.0, 1.0], [-0.0, 0.0, -0.0], [3.0, 3.0, 3.0]])
    same(value("variance", x, axis=1), torch.tensor([NAN, NAN, 0.0, 0.0]))
    same(value("variance", x, axis=1), x.var(1))
    assert gradients("variance", x[2:], axis=1)[0].tolist() == [[0.0] * 3] * 2


def test_order_takes_nan_as_largest_and_keeps_equals_in_order():
    x = torch.tensor([0.0, NAN, -0.0, INF, -INF, 1.0, 1.0, NAN])
    same(value("sort-along", x), torch.tensor([-INF, 0.0, -0.0, 1.0, 1.0, INF, NAN, NAN]))
    same(value("sort-along", x, descending=True), torch.tensor([NAN, NAN, INF, 1.0, 1.0, 0.0, -0.0, -INF]))
    assert value("argsort", x).tolist() == [4, 0, 2, 5, 6, 3, 1, 7]
    assert value("argsort", x, descending=True).tolist() == [1, 7, 3, 5, 6, 0, 2, 4]
    same(value("top-k", x, k=4), torch.tensor([NAN, NAN, INF, 1.0]))
    assert value("top-k-indices", x, k=4).tolist() == [1, 7, 3, 5]
    weights = torch.arange(8.0)
    node, w = leaves(x.nan_to_num(5.0, 9.0, -9.0), weights)
    g = grad(build("sum", build("*", w, build("sort-along", node))), [node])[0]
    assert run(g, [node, w], [x.nan_to_num(5.0, 9.0, -9.0), weights]).tolist() == [
        1.0,
        5.0,
        2.0,
        7.0,
        0.0,
        3.0,
        4.0,
        6.0,
    ]
    assert value("sort-along", torch.tensor([3, 1, 2], dtype=torch.int32)).tolist() == [1, 2, 3]


def test_reading_and_adding_along_an_axis_touch_only_what_is_named():
    x, i = torch.tensor([[NAN, -0.0, INF]]), torch.tensor([[1, 2, 1]], dtype=torch.int32)
    same(value("take-along", x, i), torch.tensor([[-0.0, INF, -0.0]]))
    same(value("scatter-add-along", x, i, count=4), torch.tensor([[0.0, NAN, 0.0, 0.0]]))


def test_embed_names_rows_and_adds_gradients_in_order():
    table = torch.tensor([[1.0, -0.0], [NAN, 2.0], [INF, 3.0], [1e8, 1.0]])
    i = torch.tensor([[0, 2], [0, 0]], dtype=torch.int32)
    same(value("embed", table, i), table[i.long()])
    table, i = random(5, 3), torch.randint(5, (200,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    first = gradients("embed", table, i)[0]
    assert torch.equal(first, gradients("embed", table, i)[0])
    same(first, autograd(lambda t, i: t[i.long()], table, i)[0], exact=False)
    with pytest.raises(IndexError):
        value("embed", table, torch.tensor([5], dtype=torch.int32))


# products ----------------------------------------------------------------------------------------


def test_einsum_spells_one_equation_one_way():
    x, y = leaves(random(2, 3, 4), random(4, 5))
    node = build("einsum", x, y, equation="...qz, zk -> ...qk")
    assert node is build("einsum", x, y, equation="abc,cd->abd") and node.attrs["equation"] == "abc,cd->abd"
    assert build("einsum", y, equation="ba").type.shape == (5, 4)
    assert build("einsum", x, y, equation="...i,ij").type.shape == (2, 3, 5)


def test_einsum_of_special_values():
    x, y = torch.tensor([[1.0, NAN], [INF, 1.0], [-0.0, 0.0]]), torch.tensor([[1.0], [0.0]])
    same(value("einsum", x, y, equation="ij,jk->ik"), torch.tensor([[NAN], [INF], [0.0]]), exact=False)


def test_convolve_keeps_nan_and_infinity_local():
    x, w = torch.zeros(1, 1, 9, 9), torch.ones(1, 1, 3, 3)
    x[0, 0, 1, 1], x[0, 0, 7, 7], x[0, 0, 1, 7] = NAN, INF, -0.0
    got = value("convolve", x, w, padding=1)[0, 0]
    expected = torch.zeros(9, 9)
    expected[0:3, 0:3], expected[6:9, 6:9] = NAN, INF
    same(got.abs(), expected)


@pytest.mark.parametrize(
    "x, w, settings",
    [
        ((2, 4, 9), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
        ((2, 3, 8, 7), (5, 3, 3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
        ((2, 4, 6, 6), (4, 1, 3, 3), {"padding": 1, "groups": 4}),
    ],
)
def test_convolve_has_torchs_gradients(x, w, settings):
    tensors = random(*x), random(*w, seed=1), random(w[0], seed=2)
    function = {3: F.conv1d, 4: F.conv2d}[len(x)]
    theirs = autograd(lambda *t: function(*t, **settings), *tensors)
    for got, expected in zip(gradients("convolve", *tensors, **settings), theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_convolve_transpose_is_torchs():
    u, w = random(2, 4, 5, 4), random(4, 2, 3, 3, seed=1)
    got = value("convolve-transpose", u, w, stride=2, padding=1, groups=2, size=(10, 8))
    expected = F.conv_transpose2d(u, w, stride=2, padding=1, output_padding=1, groups=2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# pools -------------------------------------------------------------------------------------------

_E = torch.tensor([1.0, NAN, 2.0, -INF, -INF, -INF, INF, 1.0, 3.0, 3.0, -0.0, 0.0])


@pytest.mark.parametrize("window, stride, padding", [(2, 2, 0), (3, 2, 1), (10, 1, 0)])
def test_max_pool_of_special_values(window, stride, padding):
    x = _E.reshape(1, 1, 12)
    theirs = F.max_pool2d(x.unsqueeze(2), (1, window), (1, stride), (0, padding)).squeeze(2)
    same(value("max-pool", x, window=window, stride=stride, padding=padding) + 0.0, theirs + 0.0)
    function = lambda x: F.max_pool2d(x.unsqueeze(2), (1, window), (1, stride), (0, padding))  # noqa: E731
    same(
        gradients("max-pool", x, window=window, stride=stride, padding=padding)[0],
        autograd(function, x)[0],
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_pools_have_torchs_gradients(channels):
    x = random(2, channels, 7, 6).relu()  # ties: the first gets it
    for name, function in (("max-pool", F.max_pool2d), ("average-pool", F.avg_pool2d)):
        settings = {"stride": (2, 1), "padding": (1, 0)}
        same(value(name, x, window=(3, 2), **settings), function(x, (3, 2), **settings), exact=False)
        got = gradients(name, x, window=(3, 2), **settings)[0]
        same(got, autograd(partial(function, kernel_size=(3, 2), **settings), x)[0], exact=False)


def test_average_pool_of_special_values():
    x = torch.tensor([[[NAN, 1.0, INF, 1.0, INF, -INF, -0.0, 0.0]]])
    same(value("average-pool", x, window=2), torch.tensor([[[NAN, INF, NAN, 0.0]]]))


# attend ------------------------------------------------------------------------------------------

MASKS = {
    "bool": torch.tensor([[True, False, True, True], [False] * 4, [True] * 4, [False, False, False, True]]),
    "float": torch.tensor([[0.5, -INF, 0.0, 1.0], [-INF] * 4, [0.0] * 4, [-INF, -INF, -INF, 2.0]]),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_sees_nothing_gives_zero_and_no_nan_in_any_derivative(kind, dtype, causal):
    q, k, v = (random(1, 2, 4, 3, seed=s, dtype=dtype) for s in range(3))
    mask = MASKS[kind] if kind == "bool" else MASKS[kind].to(dtype)
    got = value("attend", q, k, v, mask, causal=causal)
    assert (got[:, :, 1] == 0).all() and got.isfinite().all()
    assert ((got[:, :, 3] - v[:, :, 3]).abs() < 1e-6).all()
    for order in (1, 2):
        assert all(g.isfinite().all() for g in gradients("attend", q, k, v, mask, order=order, causal=causal))


def test_attend_of_nan_and_infinity():
    q, k, v = (random(1, 2, 4, 3, seed=s) for s in range(3))
    q[0, 0, 1, 0] = NAN
    for mask in ((), (MASKS["bool"] | torch.eye(4, dtype=torch.bool),), (MASKS["float"].nan_to_num(0.0, 0.0, 0.0),)):
        for causal in (False, True):
            got = value("attend", q, k, v, *mask, causal=causal)
            assert got[0, 0, 1].isnan().all() and got.isnan().sum() == 3
    got = value("attend", q, k, v, MASKS["bool"])  # the query of NaN sees nothing
    assert (got[0, 0, 1] == 0).all() and not got.isnan().any()
    k[0, 0, 3, 0], q[0, 0, 1, 0] = NAN, 0.0
    assert value("attend", q, k, v, causal=True)[0].isnan().any(-1).tolist() == [[False] * 3 + [True], [False] * 4]
    k[0, 0, 3, 0] = 0.0
    bias = torch.zeros(4, 4)
    bias[2, 1] = NAN
    assert value("attend", q, k, v, bias)[0, 0].isnan().any(-1).tolist() == [False, False, True, False]
    v[0, 1, 2, 1] = INF
    got = value("attend", q, k, v, causal=True, window=2)
    assert got[0, 1, 2, 1] == INF and got[0, 1, 3, 1] == INF and torch.isfinite(got[0, 0]).all()
    same(value("attend", q, k, torch.full_like(v, -0.0)), torch.zeros_like(v), exact=False)


@pytest.mark.parametrize("causal, masked", [(False, False), (True, False), (False, True)])
def test_grouped_attend_has_torchs_gradients(causal, masked):
    q, k, v = random(2, 4, 5, 8), random(2, 2, 5, 8, seed=1), random(2, 2, 5, 6, seed=2)
    mask = (random(2, 1, 1, 5, seed=3) > -1,) if masked else ()
    theirs = autograd(
        lambda q, k, v, *m: F.scaled_dot_product_attention(
            q, k, v, attn_mask=m[0] if m else None, is_causal=causal, enable_gqa=True
        ),
        *(q, k, v, *mask),
    )
    for got, expected in zip(gradients("attend", q, k, v, *mask, causal=causal), theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# refusals, marks, precision ----------------------------------------------------------------------


def x(*shape, dtype="f32", batch=False):
    return build("input", name="x", shape=shape, dtype=dtype, batch=batch)


ATTEND = (x(2, 4, 5, 3), x(2, 2, 5, 3), x(2, 2, 5, 3))
REFUSED = [
    ("E-SHAPE-021", "k is 4, axis 1 has 3", lambda: build("top-k", x(2, 3), k=4)),
    ("E-SHAPE-021", "k is 0", lambda: build("top-k-indices", x(2, 3), k=0)),
    ("E-SHAPE-022", "leaves nothing", lambda: build("variance", x(2, 1), axis=1)),
    ("E-SHAPE-023", "2 operands, the call 1", lambda: build("einsum", x(2, 3), equation="ij,jk->ik")),
    ("E-SHAPE-023", "each once", lambda: build("einsum", x(2, 3), equation="ij->ii")),
    ("E-SHAPE-023", "each once", lambda: build("einsum", x(2, 3), equation="ij->ik")),
    ("E-SHAPE-023", "not letters", lambda: build("einsum", x(2, 3), equation="i1->i")),
    ("E-SHAPE-007", "tensor of 2 axes", lambda: build("einsum", x(2, 3), equation="ijk->i")),
    ("E-SHAPE-001", "sizes 3 and 4", lambda: build("einsum", x(2, 3), x(4, 2), equation="ij,jk->ik")),
    ("E-SHAPE-007", "samples channels", lambda: build("convolve", x(2, 3), x(4, 2))),
    ("E-SHAPE-024", "3 channels", lambda: build("convolve", x(2, 3, 8), x(4, 2, 3))),
    ("E-SHAPE-024", "spans 5, axis 2 is 4", lambda: build("convolve", x(2, 3, 4), x(4, 3, 5))),
    ("E-SHAPE-024", "into 2 groups", lambda: build("convolve", x(2, 4, 4), x(3, 2, 3), groups=2)),
    ("E-SHAPE-024", "bias", lambda: build("convolve", x(2, 3, 4), x(4, 3, 3), x(3))),
    ("E-SHAPE-024", "gives [4]", lambda: build("convolve-transpose", x(2, 3, 5), x(3, 2, 3), size=6)),
    ("E-SHAPE-025", ":stride", lambda: build("convolve", x(2, 3, 4), x(4, 3, 3), stride=(1, 2))),
    ("E-SHAPE-025", ":groups", lambda: build("convolve", x(2, 3, 4), x(4, 3, 3), groups=0)),
    ("E-SHAPE-025", "half", lambda: build("max-pool", x(2, 3, 8), window=2, padding=2)),
    ("E-SHAPE-024", "spans 9, axis 2 is 8", lambda: build("average-pool", x(2, 3, 8), window=9)),
    ("E-SHAPE-026", "does not broadcast", lambda: build("attend", *ATTEND, x(4, 5, dtype="bool"))),
    ("E-SHAPE-026", "one mask", lambda: build("attend", *ATTEND, x(5, 5), x(5, 5))),
    ("E-SHAPE-002", "dtypes differ", lambda: build("attend", *ATTEND, x(5, 5, dtype="f64"))),
    ("E-SHAPE-001", "4 and 3", lambda: build("attend", x(4, 5, 3), x(3, 5, 3), x(3, 5, 3))),
    ("E-SHAPE-001", "as many queries", lambda: build("attend", x(5, 3), x(4, 3), x(4, 3), window=2)),
    ("E-SHAPE-015", ":window", lambda: build("attend", *ATTEND, window=0)),
    ("E-SHAPE-015", ":slope", lambda: build("leaky-relu", x(2), slope=NAN)),
    ("E-SHAPE-012", "indices", lambda: build("embed", x(2, 3), x(2))),
    ("E-SHAPE-001", "axes differ: 2 and 3", lambda: build("take-along", x(2, 3), x(3, 3, dtype="i32"))),
    ("E-SHAPE-007", "number of axes", lambda: build("take-along", x(2, 3), x(3, dtype="i32"))),
]


@pytest.mark.parametrize("code, words, make", REFUSED)
def test_refusal(code, words, make):
    with pytest.raises(OpProblem) as caught:
        make()
    assert caught.value.code == code and words in caught.value.message
    assert entry(code).page


def test_batch_marks():
    b, image = x(8, 4, batch=True), x(8, 4, 6, 6, batch=True)
    i, heads = x(8, 2, dtype="i32", batch=True), x(8, 2, 5, 4, batch=True)
    kept = [
        build("elu", b),
        build("sort-along", b),
        build("top-k", b, k=2),
        build("variance", b, axis=1),
        build("prod", b, axis=1),
        build("embed", x(9, 3), i),
        build("take-along", b, i),
        build("einsum", b, x(4, 3), equation="ij,jk->ik"),
        build("convolve", image, x(5, 4, 3, 3)),
        build("max-pool", image, window=2),
        build("attend", heads, heads, heads, causal=True),
    ]
    lost = [
        build("sort-along", b, axis=0),
        build("top-k", b, k=2, axis=0),
        build("prod", b),
        build("einsum", b, x(4, 3), equation="ij,jk->ki"),
        build("convolve-weight-grad", image, x(8, 5, 4, 4), kernel=3),
    ]
    assert all(n.type.batch for n in kept) and not any(n.type.batch for n in lost)


def test_bf16_casts_contractions_and_nothing_else():
    w, image, table, i = x(5, 4, 3, 3), x(8, 4, 6, 6), x(9, 4), x(8, dtype="i32")
    q, mask = x(2, 5, 4), x(5, 5, dtype="bool")
    y = {
        "c": build("sum", build("convolve", image, w)),
        "e": build("sum", build("embed", table, i)),
        "a": build("sum", build("attend", q, q, q, mask)),
        "s": build("sum", build("einsum", table, table, equation="ij,ij->i")),
    }
    y["g"], y["h"] = grad(y["c"], [w])[0], grad(y["c"], [image])[0]
    low = apply_precision(y, "bf16")
    types = {n.op: n.type.dtype for n in postorder(low.values()) if n.op not in ("cast", "input", "constant")}
    contractions = {"convolve", "convolve-transpose", "convolve-weight-grad", "attend", "einsum"}
    assert {op for op, dtype in types.items() if dtype == "bf16"} == contractions
    assert types["embed"] == "f32" and all(n.type.dtype == "f32" for n in low.values())
    tensors = {n: random(*n.type.shape) for n in (w, image)}
    wide, narrow = (Executable({k: g[k] for k in "cgh"}).run(tensors) for g in (y, low))
    for key in wide:
        torch.testing.assert_close(narrow[key], wide[key], rtol=0.05, atol=0.3)

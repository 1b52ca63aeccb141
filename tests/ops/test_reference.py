"""Every op against NumPy in float64: through the interpreter's code, and through its reference; costs are numbers."""

import numpy as np
import pytest
import torch
from op_cases import CASES, leaf, value

from sexpgpu.backends.interpreter import Executable, from_numpy
from sexpgpu.ops import build, table
from sexpgpu.ops.verify import verify


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_means_what_numpy_says(case):
    arrays = [value(shape, kind, seed + 1) for seed, (shape, kind) in enumerate(case.operands)]
    leaves = [leaf(i, a) for i, a in enumerate(arrays)]
    node = build(case.op, *leaves, **case.attrs)
    verify({"y": node})
    bindings = {n: from_numpy(a, n.type.dtype) for n, a in zip(leaves, arrays, strict=True)}
    executable = Executable({"y": node})
    got = executable.run(bindings)["y"]
    expected = np.asarray(case.expected(*arrays))
    assert tuple(got.shape) == expected.shape == node.type.shape
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)
    for _, _, walked in executable.walk(bindings):
        last = walked
    assert last.dtype == got.dtype and torch.equal(last, got)
    flops, moved = table()[case.op].cost(node)
    assert flops >= 0 and moved >= 0
    again = build(case.op, *leaves, **node.attrs)
    assert again is node, "canonical attributes are not a fixed point"


SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 2.5, 1e-40]
PAIRS = np.array([(a, b) for a in SPECIAL for b in SPECIAL], np.float32)


def run(op, *arrays, **attrs):
    leaves = [build("input", name=str(i), shape=a.shape, batch=False) for i, a in enumerate(arrays)]
    executable = Executable({"y": build(op, *leaves, **attrs)})
    return executable.run({n: torch.from_numpy(a) for n, a in zip(leaves, arrays, strict=True)})["y"].numpy()


@pytest.mark.parametrize("op, reference", [("max", np.maximum), ("min", np.minimum)])
def test_extremes_of_two_propagate_nan(op, reference):
    np.testing.assert_array_equal(run(op, PAIRS[:, 0].copy(), PAIRS[:, 1].copy()), reference(PAIRS[:, 0], PAIRS[:, 1]))


@pytest.mark.parametrize("op, reference", [("reduce-max", np.max), ("reduce-min", np.min)])
def test_reductions_propagate_nan(op, reference):
    np.testing.assert_array_equal(run(op, PAIRS, axis=1), reference(PAIRS, axis=1))


def test_relu_and_clamp_propagate_nan():
    x = np.array(SPECIAL, np.float32)
    np.testing.assert_array_equal(run("relu", x), np.maximum(x, np.float32(0)))
    np.testing.assert_array_equal(run("clamp", x, low=-0.5, high=2.0), np.clip(x, -0.5, 2.0))
    np.testing.assert_array_equal(run("clamp", x, low=0.0), np.maximum(x, np.float32(0)))


@pytest.mark.parametrize("op, reference", [("argmax", np.argmax), ("argmin", np.argmin)])
def test_the_place_of_an_extreme_is_the_first_nan_or_the_first_of_equals(op, reference):
    rows = np.array([[1, np.nan, 3, np.nan], [2, 2, 1, 2], [-0.0, 0.0, -0.0, 0.0], [1, np.inf, np.inf, 0]], np.float32)
    np.testing.assert_array_equal(run(op, rows), reference(rows, axis=-1))


def test_bf16_products_are_summed_in_f32():
    a, b = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((3, 300), (300, 4)))
    leaves = [build("input", name=n, shape=tuple(x.shape), dtype="bf16", batch=False) for n, x in (("a", a), ("b", b))]
    got = Executable({"y": build("matmul", *leaves)}).run(
        {n: x.bfloat16() for n, x in zip(leaves, (a, b), strict=True)}
    )
    assert torch.equal(got["y"], (a.bfloat16().float() @ b.bfloat16().float()).bfloat16())


def test_wide_products_and_products_with_a_bias_are_rounded_at_most_once():
    generator = torch.Generator().manual_seed(2)
    a, b, bias = (torch.randn(s, generator=generator).bfloat16() for s in ((3, 300), (300, 4), (4,)))
    leaves = [build("input", name=n, shape=tuple(x.shape), dtype="bf16", batch=False) for n, x in zip("abc", (a, b, bias), strict=True)]
    results = {"wide": build("matmul-f32", *leaves[:2]), "bias": build("matmul-bias", *leaves)}
    got = Executable(results).run(dict(zip(leaves, (a, b, bias), strict=True)))
    product = a.float() @ b.float()
    assert results["wide"].type.dtype == "f32" and torch.equal(got["wide"], product)
    assert results["bias"].type.dtype == "bf16" and torch.equal(got["bias"], (product + bias.float()).bfloat16())

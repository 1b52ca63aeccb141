"""NaN, the infinities and -0 in every op that takes floats: the same as NumPy says, from both ways to run it.

One element of each float operand is the special value. Where NumPy's formula is no judge, because a matrix of units spreads NaN
by 0 · NaN, the rule is locality: what depends on that element is not finite, and the rest stays.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from op_cases import CASES, Case, leaf, value

from sexpgpu.backends.interpreter import Executable, from_numpy
from sexpgpu.ops import build
from sexpgpu.ops.definition import FAMILIES

SPECIAL = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf, "-0": -0.0}
#: ops whose case states another formula than the meaning at these values
OWN = {"sign": lambda x: np.where(np.isnan(x), 0.0, np.sign(x)), "rsqrt": lambda x: 1 / np.sqrt(x)}
#: linear ops: what depends on the element is not finite, the rest is as it was
LINEAR = {"convolve-transpose", "convolve-weight-grad", "average-pool-grad", "einsum"}
#: the sign of a zero is not promised: it depends on the order of a sum, or the result is 0 by a comparison
EITHER_ZERO = {"sum", "cumsum", "einsum", "mod", "relu"}
#: op -> values at which test_breadth.py judges: an oracle that sorts by negation moves NaN, a softmax takes inf - inf
ELSEWHERE = {name: {"NaN"} for name in ("sort-along", "top-k", "top-k-indices")} | {"attend": {"NaN", "inf", "-inf"}}


#: families whose own tests give them values that are not finite
OTHER = {op.name for family in FAMILIES if ".cartesian" in family for op in import_module(family).OPS}


def arrays_of(case: Case, special: float) -> list[np.ndarray]:
    arrays = [value(shape, kind, seed + 1) for seed, (shape, kind) in enumerate(case.operands)]
    for number, array in enumerate(arrays):
        if array.dtype.kind == "f" and array.size:
            array.reshape(-1)[(number + array.size // 2) % array.size] = special
    return arrays


def run(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    """By the emitted program, which must agree with the walk through the references."""
    leaves = [leaf(i, a) for i, a in enumerate(arrays)]
    bindings = {n: from_numpy(a, n.type.dtype) for n, a in zip(leaves, arrays, strict=True)}
    executable = Executable({"y": build(case.op, *leaves, **case.attrs)})
    got = executable.run(bindings)["y"].numpy()
    *_, (_, _, walked) = executable.walk(bindings)
    np.testing.assert_array_equal(walked.numpy(), got)
    return got


def meaning(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(OWN.get(case.op, case.expected)(*arrays))


@pytest.mark.parametrize("case", [c for c in CASES if c.op not in OTHER and any(a.dtype.kind == "f" for a in arrays_of(c, 0.5))], ids=str)
def test_special_values(case: Case) -> None:
    for word, special in SPECIAL.items():
        if word in ELSEWHERE.get(case.op, ()):
            continue
        arrays = arrays_of(case, special)
        got = run(case, arrays)
        if case.op in LINEAR and word != "-0":
            finite, other = run(case, arrays_of(case, 0.5)), run(case, arrays_of(case, 0.75))
            depends = finite != other
            assert not np.isfinite(got[depends]).any(), word
            if case.op != "convolve-weight-grad":  # there the zeros of :padding meet the value too
                np.testing.assert_allclose(got[~depends], finite[~depends], rtol=1e-12, atol=1e-12)
            continue
        expected = meaning(case, arrays)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12, err_msg=word)
        if got.dtype.kind == "f" and case.op not in EITHER_ZERO:
            zero = (got == 0) & (expected == 0)
            assert (np.signbit(got) == np.signbit(expected))[zero].all(), f"{word}: the sign of a zero"


def test_a_categorical_never_draws_what_cannot_be() -> None:
    logits = torch.zeros(400, 4)
    logits[:, 1], logits[:, 3] = -torch.inf, -0.0
    node = build("input", name="x", shape=(400, 4), dtype="f32", batch=False)
    drawn = Executable({"y": build("random-categorical", node, path="p", number=0)}).run({node: logits}, seed=1)["y"]
    assert set(drawn.tolist()) == {0, 2, 3}

"""Updates added to rows in a fixed order, onto what lies there: under Triton's interpreter."""

from __future__ import annotations

import pytest
from support_cuda import interpreted

from sexpgpu.ops import build
from sexpgpu.passes.onto import onto

pytest.importorskip("triton")


def test_rows_are_added_in_a_fixed_order() -> None:
    failures, count = interpreted("scatter_in_triton.py")
    assert not failures, "\n".join(failures)
    assert count >= 18


def test_only_what_stands_in_memory_is_added_to() -> None:
    """A pointwise operand, a narrow row, a second reader, another axis or type leave the sum as it is."""
    def leaf(name: str, *shape: int, dtype: str = "f32"):
        return build("input", name=name, shape=shape, dtype=dtype, batch=False)

    def total(x, updates, **more):
        return build("+", x, build("scatter-add", updates, indices, **{"count": 9, **more}))

    indices = leaf("i", 5, dtype="i32")
    product = build("matmul", leaf("a", 9, 4), leaf("b", 4, 128))
    updates = leaf("u", 5, 128)
    assert onto({"y": total(product, updates)})["y"].op == "scatter-onto"
    assert onto({"y": build("+", *total(product, updates).inputs[::-1])})["y"].op == "scatter-onto"
    left = [total(build("sin", product), updates), total(leaf("x", 9, 128), updates), total(build("matmul", leaf("a", 9, 4), leaf("c", 4, 8)), leaf("v", 5, 8)),
            total(build("matmul", leaf("d", 9, 4, dtype="f64"), leaf("e", 4, 128, dtype="f64")), leaf("w", 5, 128, dtype="f64")),
            total(build("matmul", leaf("a", 130, 4), leaf("f", 4, 128)), leaf("z", 130, 5), axis=1, count=128)]
    assert [onto({"y": y})["y"].op for y in left] == ["+"] * len(left)
    y = total(product, updates)
    assert onto({"y": y, "apart": y.inputs[1]})["y"].op == "+"

"""What ops refuse: code, words, and the axes that clash."""

import pytest

from sexpgpu.diagnostics import entry
from sexpgpu.ops import OpProblem, build


def x(*shape, dtype="f32"):
    return build("input", name="x", shape=shape, dtype=dtype, batch=False)


REFUSED = [
    ("E-SHAPE-001", "+: axes differ: 3 and 4", lambda: build("+", x(2, 3), x(4)), ((0, 1), (1, 0))),
    ("E-SHAPE-001", "axes differ: 3 and 4", lambda: build("broadcast", x(3), shape=(2, 4)), ((0, 0),)),
    ("E-SHAPE-002", "dtypes differ: f32 and i32", lambda: build("*", x(2), x(2, dtype="i32")), ()),
    ("E-SHAPE-002", "dtypes differ", lambda: build("concat", x(2), x(2, dtype="f64")), ()),
    (
        "E-SHAPE-003",
        "matmul: inner dimensions differ: 512 and 768",
        lambda: build("matmul", x(4, 512), x(768, 2)),
        ((0, 1), (1, 0)),
    ),
    ("E-SHAPE-003", "inner dimensions differ: 3 and 2", lambda: build("matmul", x(3), x(5, 2, 4)), ((0, 0), (1, 1))),
    ("E-SHAPE-004", "sum: no axis 2 in a tensor of rank 2", lambda: build("sum", x(2, 3), axis=2), ()),
    ("E-SHAPE-004", "given twice", lambda: build("sum", x(2, 3), axis=[1, -1]), ()),
    ("E-SHAPE-004", "no axis -1", lambda: build("argmax", x()), ()),
    ("E-SHAPE-005", "has 6 elements", lambda: build("reshape", x(2, 3), shape=(4, -1)), ()),
    ("E-SHAPE-005", "axis 0 has size 2", lambda: build("squeeze", x(2, 3), axis=0), ((0, 0),)),
    ("E-SHAPE-006", "/: needs a float tensor, got i32", lambda: build("/", x(2, dtype="i32"), x(2, dtype="i32")), ()),
    ("E-SHAPE-006", "needs numbers, got bool", lambda: build("sum", x(2, dtype="bool")), ()),
    ("E-SHAPE-007", "transpose: needs 2 axes", lambda: build("transpose", x(3)), ()),
    ("E-SHAPE-007", "rank", lambda: build("concat", x(3), x(3, 1)), ()),
    ("E-SHAPE-008", "axis 1 differs: 3 and 4", lambda: build("concat", x(2, 3), x(2, 4)), ((0, 1), (1, 1))),
    ("E-SHAPE-009", "does not lie in axis 1", lambda: build("slice", x(2, 3), axis=1, stop=4), ((0, 1),)),
    ("E-SHAPE-010", "no order of the 2 axes", lambda: build("transpose", x(2, 3), permutation=(0, 0)), ()),
    ("E-SHAPE-011", "where: needs a bool tensor", lambda: build("where", x(2), x(2), x(2)), ()),
    ("E-SHAPE-012", "indices must be", lambda: build("gather", x(2), x(2)), ()),
    ("E-SHAPE-013", "integer", lambda: build("reshape", x(2), shape=(2.5,)), ()),
    ("E-SHAPE-014", "concat", lambda: build("concat"), ()),
    ("E-SHAPE-015", "probability", lambda: build("random-bernoulli", shape=(2,), p=1.5), ()),
    ("E-SHAPE-015", "f31 is no dtype", lambda: build("cast", x(2), dtype="f31"), ()),
]


@pytest.mark.parametrize("code, words, make, axes", REFUSED)
def test_refusal(code, words, make, axes):
    with pytest.raises(OpProblem) as caught:
        make()
    assert caught.value.code == code and words in caught.value.message and caught.value.axes == axes
    assert entry(code).page


def test_batch_mark():
    b, w = build("input", name="b", shape=(8, 4)), x(4, 5)
    kept = [
        build("matmul", b, w),
        build("+", x(4), b),
        build("sum", b, axis=1),
        build("reshape", b, shape=(32,)),
        build("reshape", build("reshape", b, shape=(-1, 2)), shape=(8, 2, 2)),
        build("gather", w, build("input", name="i", shape=(8, 2), dtype="i32")),
        build("softmax", b),
        build("slice", b, axis=1, stop=2),
        build("broadcast", b, shape=(8, 4)),
        build("concat", b, x(8, 1), axis=1),
    ]
    lost = [
        build("transpose", b),
        build("sum", b, axis=0),
        build("slice", b, stop=4),
        build("matmul", build("transpose", b), b),
        build("+", x(1), x(8)),
        build("concat", b, b),
        build("expand-dims", b, axis=0),
        build("broadcast", b, shape=(2, 8, 4)),
    ]
    assert all(n.type.batch for n in kept) and not any(n.type.batch for n in lost)

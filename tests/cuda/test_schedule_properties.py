"""Index arithmetic against brute force, views against NumPy, plans and schedules by their invariants."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sexpgpu.ir import Node
from sexpgpu.ops import build
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.schedule.fuse import Call, fuse
from sexpgpu.passes.schedule.index import Expr, Var, lift, offset, render, unravel
from sexpgpu.passes.schedule.memory import ALIGN, Life, plan
from sexpgpu.passes.schedule.views import through

SETTINGS = settings(max_examples=150, deadline=None)
VARS = tuple(Var(n, s) for n, s in (("a", 2), ("b", 3), ("c", 4), ("d", 6)))


def value(x: Expr, at: dict[str, int]) -> int:
    """An expression at a point, by the source that kernels get."""
    return int(eval(render(x, lambda v: v.name), {}, at))  # noqa: S307 - our own text


@st.composite
def expressions(draw: st.DrawFn) -> Expr:
    """Sums, multiples, quotients and remainders, 0 or more everywhere."""
    x = lift(draw(st.sampled_from(VARS)))
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from("+*/%o"))
        if kind == "+":
            x = x + draw(st.integers(0, 7))
        elif kind == "*":
            x = x * draw(st.integers(0, 6))
        elif kind == "/":
            x = x // draw(st.integers(1, 12))
        elif kind == "%":
            x = x % draw(st.integers(1, 12))
        else:
            x = x + lift(draw(st.sampled_from(VARS))) * draw(st.integers(1, 12))
    return x


@SETTINGS
@given(expressions(), st.integers(1, 24))
def test_quotients_and_remainders_are_those_of_integers(x: Expr, by: int) -> None:
    quotient, rest = x // by, x % by
    low, high = x.bounds
    for point in itertools.product(*(range(v.size) for v in VARS)):
        at = dict(zip("abcd", point, strict=True))
        n = value(x, at)
        assert low <= n <= high
        assert value(quotient, at) == n // by
        assert value(rest, at) == n % by
        assert value(quotient * by + rest, at) == n


@SETTINGS
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_unravel_undoes_offset(shape: list[int], data: st.DataObject) -> None:
    names = [Var(f"i{a}", s) for a, s in enumerate(shape)]
    index = tuple(lift(v) for v in names)
    place = offset(index, tuple(shape))
    assert unravel(place, tuple(shape)) == index  # and not only equal in value: equal ones look equal
    other = data.draw(st.permutations(shape))
    again = unravel(place, tuple(other))
    for point in itertools.product(*(range(s) for s in shape)):
        at = {v.name: p for v, p in zip(names, point, strict=True)}
        n = int(np.ravel_multi_index(point, shape))
        assert tuple(value(i, at) for i in again) == tuple(int(i) for i in np.unravel_index(n, other))


@st.composite
def views(draw: st.DrawFn) -> tuple[Node, np.ndarray]:
    """A tensor of numbers 0 … n - 1 under up to five views, and what NumPy makes of it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    node = build("input", name="x", shape=shape, dtype="f32", batch=False)
    array = np.arange(prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(("reshape", "transpose", "flip", "slice", "broadcast", "expand-dims")))
        rank = array.ndim
        if kind == "reshape":
            new = tuple(draw(st.permutations(array.shape))) if draw(st.booleans()) else (array.size,)
            node, array = build("reshape", node, shape=new), array.reshape(new)
        elif kind == "transpose":
            order = tuple(draw(st.permutations(range(rank))))
            node, array = build("transpose", node, permutation=order), array.transpose(order)
        elif kind == "flip":
            axis = draw(st.integers(0, rank - 1))
            node, array = build("flip", node, axis=axis), np.flip(array, axis)
        elif kind == "slice":
            axis = draw(st.integers(0, rank - 1))
            start = draw(st.integers(0, array.shape[axis] - 1))
            step = draw(st.integers(1, 3))
            node = build("slice", node, axis=axis, start=start, step=step)
            array = array[tuple(slice(start, None, step) if a == axis else slice(None) for a in range(rank))]
        elif kind == "broadcast" and array.size <= 64 and rank < 5:
            new = (2, *(3 if s == 1 else s for s in array.shape))
            node, array = build("broadcast", node, shape=new), np.broadcast_to(array, new)
        elif kind == "expand-dims" and rank < 5:
            axis = draw(st.integers(0, rank))
            node, array = build("expand-dims", node, axis=axis), np.expand_dims(array, axis)
    return node, array


@SETTINGS
@given(views())
def test_views_are_index_arithmetic(case: tuple[Node, np.ndarray]) -> None:
    node, array = case
    assert node.type.shape == array.shape
    names = [Var(f"i{a}", s) for a, s in enumerate(array.shape)]
    index = tuple(lift(v) for v in names)
    while node.op != "input":
        node, index = through(node, index)
    place = offset(index, node.type.shape)
    for point in itertools.product(*(range(s) for s in array.shape)):
        assert value(place, {v.name: p for v, p in zip(names, point, strict=True)}) == array[point]


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 20)), max_size=25))
def test_a_plan_never_puts_two_living_tensors_in_one_place(lives: list[tuple[int, int, int]]) -> None:
    asked = {i: Life(size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(lives)}
    made = plan(asked)
    assert made.offsets.keys() == asked.keys() and made.peak <= made.size
    assert all(start % ALIGN == 0 and start + asked[i].size <= made.size for i, start in made.offsets.items())
    for i, j in itertools.combinations(asked, 2):
        if asked[i].first <= asked[j].last and asked[j].first <= asked[i].last:
            a, b = made.offsets[i], made.offsets[j]
            assert a + asked[i].size <= b or b + asked[j].size <= a
    assert plan(asked) == made


UNARY = ("exp", "tanh", "gelu", "sin", "softmax", "normalize", "neg", "square")


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Node]:
    """A model of matrix products, pointwise values and reductions over [6 8], with its gradients."""
    x = build("input", name="x", shape=(6, 8), dtype="f32", batch=False)
    w = build("param", path="w", shape=(8, 8))
    b = build("param", path="b", shape=(8,))
    values = [x, build("matmul", x, w)]
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from((*UNARY, "+", "*", "matmul", "row", "column")))
        node, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind in UNARY:
            values.append(build(kind, node))
        elif kind in "+*":
            values.append(build(kind, node, draw(st.sampled_from((other, b)))))
        elif kind == "matmul":
            values.append(build("matmul", node, w))
        else:
            values.append(build("-", node, build("sum", other, axis=1 if kind == "row" else 0, **{"keep-dims": True})))
    loss = build("sum", build("*", values[-1], values[-1]))
    found = {"loss": loss, "last": values[-1]}
    return found | {f"g{i}": g for i, g in enumerate(grad(loss, [w, b]))}


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_launches_run_after_what_they_read(results: dict[str, Node]) -> None:
    schedule = fuse(decompose(results))
    made: set[Node] = set()
    for launch in schedule.launches:
        for base in launch.reads:
            assert base in made or base.op in ("input", "param", "constant"), f"{base.op} is read before it is made"
        made |= set(launch.stores)
    stored = [n for launch in schedule.launches for n in launch.stores]
    assert len(stored) == len(set(stored)), "a value is stored twice"
    for node in schedule.results.values():
        assert node in made or node.op in ("input", "param", "constant")
    assert sum(isinstance(launch, Call) for launch in schedule.launches) == sum(n.op.startswith("matmul") for n in stored)


def test_the_order_of_a_schedule_does_not_depend_on_the_process() -> None:
    """Interned nodes hash by place in memory: nothing may be ordered by a set of them."""
    x = build("input", name="x", shape=(32, 16), dtype="f32", batch=False)
    w = build("param", path="w", shape=(16, 16))
    y = build("softmax", build("gelu", build("matmul", x, w)))
    loss = build("sum", build("*", y, y))
    results = {"loss": loss, "g": grad(loss, [w])[0]}
    text = [str([type(launch).__name__ + str([n.op for n in launch.stores]) for launch in fuse(decompose(results)).launches]) for _ in range(3)]
    assert len(set(text)) == 1


@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (2, 3, 4)])
def test_every_element_of_a_view_is_in_range(shape: tuple[int, ...]) -> None:
    x = build("input", name="x", shape=shape, dtype="f32", batch=False)
    turned = build("transpose", x, permutation=tuple(reversed(range(len(shape)))))
    index = tuple(lift(Var(f"i{a}", s)) for a, s in enumerate(turned.type.shape))
    _, inside = through(turned, index)
    assert offset(inside, shape).bounds == (0, prod(shape) - 1)

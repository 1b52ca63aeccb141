"""Values stored over ones that are read for the last time: in plans, and in steps under Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support_cuda import interpreted

from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.ir import Node
from sexpgpu.ops import build
from sexpgpu.passes.schedule import over
from sexpgpu.passes.schedule.fuse import fuse
from sexpgpu.passes.schedule.memory import Life, plan
from sexpgpu.passes.schedule.recompute import lives_of


@pytest.mark.parametrize("case", ["gpt2-bf16", "gpt2-bf16-remat"])
def test_steps_have_the_same_bits(case: str) -> None:
    failures, count = interpreted("over_in_triton.py", case)
    assert not failures and count > 5, "\n".join(failures)


def test_a_feed_forwards_gradient() -> None:
    """Of f32 and bf16, odd sizes and one row, GELU made once more or kept: values against float64, and where they lie."""
    failures, count = interpreted("over_in_triton.py", "gradients")
    assert not failures and count == 8, "\n".join(failures)


def leaf(name: str, *shape: int, dtype: str = "f32") -> Node:
    return build("input", name=name, shape=shape, dtype=dtype, batch=False)


def kept(x: Node) -> Node:
    """What a library makes of x: both are in memory."""
    return build("matmul", x, leaf("w", x.type.shape[-1], 16, dtype=x.type.dtype))


def pairs(results: dict[str, Node]) -> dict[Node, Node]:
    schedule = fuse(results)
    return over.stored_over(schedule.launches, lives_of(schedule, set()))


def test_only_what_a_value_is_made_of_gives_it_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over, "LEAST", 0)
    x, y = kept(leaf("x", 8, 16)), kept(leaf("y", 8, 16))
    both = build("+", x, y)
    one = build("exp", x)
    made = kept(one), kept(both)
    assert pairs({"a": made[0], "b": made[1]}) == {one: x, both: y}  # of the two that `both` could take, that which is left
    alone = build("exp", x)
    assert pairs({"a": kept(alone), "more": build("sum", x, axis=(0,)), "y": build("sum", y)}) == {alone: x}
    for other in (build("exp", build("transpose", x)), build("exp", build("flip", x, axis=0)), build("cast", build("exp", x), dtype="bf16"), build("sum", x, axis=(1,))):
        assert pairs({"a": kept(other)}) == {}  # at other elements, or of another size
    assert pairs({"a": kept(one), "x": x}) == {}  # it is read later: as a result
    assert pairs({"a": kept(one), "b": kept(build("exp", build("flip", x, axis=0)))}) == {}
    assert pairs({"a": one}) == {one: x}
    monkeypatch.setattr(over, "LEAST", 8 * 16 * 4 + 1)
    assert pairs({"a": made[0], "b": made[1]}) == {}


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over, "LEAST", 0)
    z = build("matmul", leaf("a", 64, 32), leaf("b", 32, 64))
    graph = {"y": build("matmul", build("exp", z), leaf("c", 64, 8))}
    compiled = Compiled(graph, None, "cpu")
    ((new, old),) = compiled.over.items()
    assert compiled.plan.offsets[new] == compiled.plan.offsets[old]
    monkeypatch.setattr(choice, "SWITCH", choice.Switch(over=False))
    apart = Compiled(graph, None, "cpu")
    assert not apart.over and (compiled.plan.peak, apart.plan.peak) == (4 * (64 * 64 + 64 * 8), 4 * 2 * 64 * 64)


def test_a_chain_of_places_is_one_tensor() -> None:
    lives = {"a": Life(100, 0, 2), "b": Life(100, 2, 4), "c": Life(100, 4, 9), "d": Life(300, 3, 5)}
    found = plan(lives, {"b": "a", "c": "b"})
    assert found.offsets["a"] == found.offsets["b"] == found.offsets["c"] != found.offsets["d"]
    assert found.peak == 256 + 512 and found.size == 768
    assert plan(lives).peak == 256 * 2 + 512

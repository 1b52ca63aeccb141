"""Products that run beside the chain: which they are, and that the order and the memory hold for them."""

from __future__ import annotations

from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.schedule import aside as module
from sexpgpu.passes.schedule.fuse import Call


def graph(width: int = 16) -> dict[str, Node]:
    """Loss and gradients of a perceptron of three layers."""
    x = build("input", name="x", shape=(8, width), dtype="f32", batch=True)
    weights = [build("param", path=f"w{i}", shape=(width, width), dtype="f32") for i in range(3)]
    value = x
    for weight in weights:
        value = build("relu", build("matmul", value, weight))
    loss = build("sum", build("*", value, value))
    return expand_gradients({"loss": loss} | {f"gradient/{i}": g for i, g in enumerate(grad(loss, weights))}, Origins())


def compiled(**more: object) -> Compiled:
    results = graph()
    return Compiled(results, dict.fromkeys(results), "cpu")


def test_gradients_by_weights_go_aside_right_behind_what_they_read():
    made = compiled()
    launches = made.schedule.launches
    names = {node: name for name, node in made.results.items()}
    assert {names[n] for l in made.aside for n in l.stores} == {"gradient/0", "gradient/1", "gradient/2"}
    home = {node: i for i, l in enumerate(launches) for node in l.stores}
    for i, launch in enumerate(launches):
        before = [home[b] for b in launch.reads if b in home]
        assert all(j < i for j in before)
        if launch in made.aside:
            assert all(l in made.aside for l in launches[max(before, default=-1) + 1 : i])


def test_what_they_read_and_write_stays_until_the_end():
    made = compiled()
    end = len(made.schedule.launches)
    lives = made._lives()
    for launch in made.aside:
        for node in launch.reads:
            assert node not in lives or lives[node].last == end
        for node in launch.stores:
            assert node in made.placed or lives[node].last == end
    spans = [(made.plan.offsets[k], made.plan.offsets[k] + life.size, life) for k, life in lives.items()]
    for n, (start, stop, life) in enumerate(spans):
        for other_start, other_stop, other in spans[n + 1 :]:
            assert stop <= other_start or other_stop <= start or life.last < other.first or other.last < life.first


def test_without_the_switch_or_with_much_memory_the_order_stays(monkeypatch):
    with_it = compiled()
    monkeypatch.setattr(choice, "SWITCH", choice.Switch(aside=False))
    without = compiled()
    assert with_it.aside and not without.aside and without.plan.size <= with_it.plan.size
    monkeypatch.setattr(choice, "SWITCH", choice.Switch())
    monkeypatch.setattr("sexpgpu.backends.cuda.executable.SMALL", 0)
    large = compiled()
    assert not large.aside and [l.stores for l in large.schedule.launches] == [l.stores for l in without.schedule.launches]


def test_a_product_that_a_launch_reads_or_whose_operand_may_go_stays():
    made = compiled()
    schedule, found = module.aside(made.schedule, lambda node: False, lambda kernel: True)
    assert not found and [l.stores for l in schedule.launches] == [l.stores for l in made.schedule.launches]
    _, products = module.aside(made.schedule, lambda node: True, lambda kernel: False)
    assert products and all(isinstance(launch, Call) for launch in products)
    for launch in made.schedule.launches:
        if any(n in other.reads for other in made.schedule.launches for n in launch.stores):
            assert launch not in made.aside

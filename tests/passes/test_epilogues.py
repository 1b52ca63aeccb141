"""Which products get an epilogue, and that the graph means what it meant."""

from __future__ import annotations

import pytest
import torch

from sexpgpu.backends.interpreter import compile_graph
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.epilogues import KINDS, epilogues
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.slopes import slopes

ALL = frozenset(KINDS)


def leaf(name: str, *shape: int, dtype: str = "f32", batch: bool = False) -> Node:
    return build("input", name=name, shape=shape, dtype=dtype, batch=batch)


class Block:
    """x + W2 gelu(W1 x + b1) + b2 over [2 5 8] with gradients by all of them, in bf16."""

    def __init__(self, activation: str = "gelu-tanh", precision: str = "bf16", more: bool = False):
        self.x, self.ct = leaf("x", 2, 5, 8, batch=True), leaf("ct", 2, 5, 8, batch=True)
        self.leaves = [self.x, leaf("up", 8, 16), leaf("b1", 16), leaf("down", 16, 8), leaf("b2", 8)]
        x, up, b1, down, b2 = self.leaves
        inner = build("+", build("matmul", x, up), b1)
        act = build(activation, inner)
        y = build("+", x, build("+", build("matmul", act, down), b2))
        loss = build("sum", build("*", y, self.ct))
        results = {"y": y, "loss": loss} | {f"g{i}": g for i, g in enumerate(grad(loss, self.leaves))}
        if more:
            results["act"] = act
        self.before = decompose(apply_precision(expand_gradients(results, Origins()), precision))

    def values(self, results: dict[str, Node]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        bound = {n: torch.randn(n.type.shape, generator=generator).to(TORCH[n.type.dtype]) for n in (*self.leaves, self.ct)}
        return {name: t.clone() for name, t in compile_graph(results).run(bound).items()}


def feed_forward(rows: int, bias: bool = True) -> dict[str, Node]:
    """Gradients of W2 gelu(W1 x + b) over `rows` rows of 1,024, in bf16."""
    x, ct, up, b, down = (leaf(n, *s) for n, s in (("x", (rows, 1024)), ("ct", (rows, 1024)), ("up", (1024, 4096)), ("b", (4096,)), ("down", (4096, 1024))))
    y = build("matmul", build("gelu-tanh", build("+", build("matmul", x, up), b)), down)
    by = [up, down, x, *([b] if bias else [])]
    loss = build("sum", build("*", y, ct))
    return decompose(apply_precision(expand_gradients({f"by {n.attrs['name']}": g for n, g in zip(by, grad(loss, by), strict=True)}, Origins()), "bf16"))


def count(results: dict[str, Node]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in postorder(results.values()):
        found[node.op] = found.get(node.op, 0) + 1
    return found


def test_a_block_has_its_gelu_its_gradient_and_its_bias_gradient_in_products():
    block = Block()
    after, told = epilogues(block.before, ALL - {"residual"})
    ops = count(after)
    assert ops["matmul-gelu"] == 2 and ops["matmul-gelu-grad"] == 1 and ops["matmul-rows"] == 2
    assert not {"gelu-tanh", "tanh"} & ops.keys()
    assert {d.kind for d in told if d.taken} == {"gelu", "gelu-grad", "sum"}


@pytest.mark.parametrize("kinds", [ALL, ALL - {"residual"}, frozenset({"gelu"}), frozenset({"residual"}), frozenset({"sum"}), frozenset()], ids=lambda kinds: "+".join(sorted(kinds)) or "none")
def test_the_numbers_stay_within_the_rounding_of_bf16(kinds: frozenset[str]):
    block = Block()
    expected, found = block.values(block.before), block.values(epilogues(block.before, kinds)[0])
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-2 * float(value.abs().max()))
        if not kinds:
            assert torch.equal(found[name], value)


def test_a_forward_pass_alone_keeps_nothing_for_a_gradient():
    block = Block()
    after, _ = epilogues({"y": block.before["y"]}, ALL)
    found = [n.attrs["of"] for n in postorder(after.values()) if n.op == "matmul-gelu"]
    assert found == [0] and after["y"].op == "matmul-add" and after["y"].type.dtype == "f32"


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Block("gelu"), None),  # of the error function, which the vendor does not have
        (Block("relu"), None),  # the vendor's turns NaN into 0
        (Block(precision="f32"), "gelu"),
        (Block(more=True), "gelu"),
    ],
    ids=["exact", "relu", "f32", "read-in-f32"],
)
def test_what_the_vendor_computes_otherwise_stays_apart(block: Block, why: str | None):
    after, told = epilogues(block.before, ALL - {"sum", "residual"})
    assert after == block.before
    assert [(d.kind, d.taken) for d in told] == ([(why, False)] if why else [])
    assert all(d.why for d in told)


def test_sums_of_rows_without_their_product_are_named():
    rows = leaf("rows", 6, 4, dtype="bf16")
    total = build("sum", build("cast", rows, dtype="f32"), axis=(0,))
    after, told = epilogues({"total": total}, ALL)
    assert after == {"total": total} and [(d.kind, d.taken) for d in told] == [("sum", False)]


def test_a_large_gradient_of_gelu_with_a_bias_has_a_kernel_of_its_own():
    """Two epilogues read 2 tensors slower than a kernel reads or writes 3; a small one is not worth a launch, and without the bias's sum the
    product's epilogue has less to do."""
    found, told = epilogues(feed_forward(16384), ALL)
    (why,) = [d.why for d in told if d.kind == "gelu-grad" and not d.taken]
    assert "gelu where that is needed once more" in why and count(found)["matmul-gelu"] == 2
    assert not {"matmul-gelu-grad", "matmul-rows"} & count(found).keys()
    for graph, passes in ((feed_forward(16384), False), (feed_forward(256), True), (feed_forward(16384, bias=False), True)):
        found, told = epilogues(graph, ALL, passes=passes)
        assert count(found)["matmul-gelu-grad"] == 1 and all(d.taken for d in told if d.kind == "gelu-grad")


def test_a_gradient_of_gelu_that_is_written_out_is_one_operation():
    for precision, activation, one in (("bf16", "gelu-tanh", 1), ("f32", "gelu-tanh", 1), ("f32", "gelu", 0), ("f32", "silu", 0)):
        block = Block(activation, precision)
        after = slopes(block.before)
        assert count(after).get("gelu-tanh-grad", 0) == one and "tanh" not in count(after)
        expected, found = block.values(block.before), block.values(after)
        for name, value in expected.items():
            near = 2e-2 if precision == "bf16" else 1e-5
            torch.testing.assert_close(found[name], value, rtol=near, atol=near * float(value.abs().max()))
            assert one or torch.equal(found[name], value)
    assert slopes({"t": build("tanh", leaf("t", 3))})["t"].op == "tanh"

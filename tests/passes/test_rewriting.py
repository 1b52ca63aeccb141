"""The rewrite driver and what it stands on: the order of nodes, their types, their origins."""

from __future__ import annotations

from pathlib import Path

import pytest

from sexpgpu import compiler
from sexpgpu.compiler import Selection
from sexpgpu.ir import Node, Origin, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.passes.rewrite import rebuild, rewrite

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def graphs(file: str) -> tuple[compiler.Loaded, dict[str, Node], dict[str, Node]]:
    """The whole graph of a run as it is traced, and the step that is made of it for a GPU."""
    loaded = compiler.load(str(EXAMPLES / file), Selection())
    run = next(iter(loaded.experiment.runs.values()))
    traced = compiler.train_graph(loaded, run)
    return loaded, compiler.graph_results(traced), compiler.stages(loaded, run, "cuda", traced=traced).micro(True)


@pytest.mark.parametrize("file", ["digits.lisp", "vae.lisp", "char_lm.lisp"])
def test_a_node_has_the_type_that_its_op_infers(file: str) -> None:
    """So that `rebuild` need not infer it where the operands have the types that they had."""
    _, _, step = graphs(file)
    order = postorder(step.values())
    assert len(order) > 20
    for node in order:
        assert build(node.op, *node.inputs, **node.attrs) is node


def test_operands_come_before_users_in_the_order_of_a_recursion() -> None:
    _, _, step = graphs("digits.lisp")
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in order:
            for operand in node.inputs:
                visit(operand)
            order[node] = None

    for root in step.values():
        visit(root)
    assert postorder(step.values()) == list(order)


def test_rebuilt_over_operands_of_other_types() -> None:
    one, two = build("input", name="a", dtype="f32", shape=(2, 3), batch=False), build("input", name="b", dtype="f32", shape=(4, 2, 3), batch=False)
    total = build("+", one, one)
    assert rebuild(total, (one, one)) is total
    assert rebuild(total, (one, two)) is build("+", one, two) and rebuild(total, (one, two)).type.shape == (4, 2, 3)


def test_a_replacement_inherits_and_what_is_made_for_it_comes_from_there() -> None:
    x = build("input", name="x", dtype="f32", shape=(3,), batch=False)
    first, second = build("exp", x), build("sin", build("exp", x))
    origins = Origins({first: Origin(paths=("a",)), second: Origin(paths=("b",))})

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return build("cos", build("abs", inputs[0])) if node.op == "sin" else None

    found = rewrite({"y": second}, rule, origins)["y"]
    assert found is build("cos", build("abs", first)) and origins.of(found).paths == ("b",)
    assert origins.of(build("abs", first)).paths == ("b",) and origins.of(first).paths == ("a",)
    inner = build("tanh", x)  # made after: of no origin
    assert origins.of(inner) == Origin()


def test_a_run_is_traced_once_where_its_batch_is_whole() -> None:
    loaded = compiler.load(str(EXAMPLES / "digits.lisp"), Selection())
    run = next(iter(loaded.experiment.runs.values()))
    traced = compiler.train_graph(loaded, run)
    assert compiler.stages(loaded, run, "cuda", traced=traced).traced is traced
    cut = compiler.stages(loaded, run, "cuda", 2, traced=traced).traced
    assert cut is not traced and 2 * cut.samples == traced.samples
    assert compiler.stages(loaded, run).traced is not traced

"""Leaves and markers of differentiation: `grad` in the language, and the values an update reads.

`grad` is a marker that `passes.expand` replaces, innermost first, before every other rewrite; `gradient`
and `slot` are leaves of the update graph: the averaged gradient of a parameter, and optimizer state.
"""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter

LEAF = Lowering("leaf")


def _no_reference(torch: Any, node: Node, args: list[Any]) -> Any:
    raise AssertionError(f"{node.op} is bound or expanded before anything runs")


def _leaf_cost(node: Node) -> tuple[int, int]:
    return 0, node.type.bytes


def _leaf_type(types: tuple[TensorType, ...], attrs: dict[str, Any]) -> TensorType:
    return TensorType(attrs["dtype"], tuple(attrs["shape"]))


def _grad_type(types: tuple[TensorType, ...], attrs: dict[str, Any]) -> TensorType:
    scalar, x = types
    if scalar.shape or not scalar.is_float:
        raise OpProblem(
            "E-SHAPE-016", f"grad: what is differentiated must be a float scalar, not {scalar}", help="take its `sum` or `mean`"
        )
    if not x.is_float:
        raise OpProblem("E-SHAPE-017", f"grad: cannot differentiate by {x}: only floats have a gradient")
    return x


OPS = (
    Op(
        "grad",
        "The gradient of a scalar by a field, a parameter, a state or `(variable expr)`; differentiable to any order.",
        ("scalar", "x"),
        _grad_type,
        _no_reference,
        lambda node: (0, 0),
        Lowering("leaf"),
        differentiable=False,
        example="(grad (sum (* x x)) x)",
    ),
    Op(
        "gradient",
        "The gradient of the whole batch by one parameter, as an update reads it.",
        (),
        _leaf_type,
        _no_reference,
        _leaf_cost,
        LEAF,
        attributes=(Parameter("path", "string"), Parameter("shape", "shape"), Parameter("dtype", "dtype", "f32")),
        lisp=False,
        differentiable=False,
        example="",
    ),
    Op(
        "slot",
        "One slot of an optimizer's state for one parameter, as an update reads it.",
        (),
        _leaf_type,
        _no_reference,
        _leaf_cost,
        LEAF,
        attributes=(
            Parameter("path", "string"),
            Parameter("slot", "string"),
            Parameter("shape", "shape"),
            Parameter("dtype", "dtype", "f32"),
        ),
        lisp=False,
        differentiable=False,
        example="",
    ),
)

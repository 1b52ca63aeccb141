"""What an op is: one definition with all its parts, and the table that finds it by name.

A family module makes `Op(...)`s and lists them in `OPS`; `FAMILIES` below names the modules. `build`
is the only way a node of an op is made: it infers the type, so a graph is always typed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from sexpgpu.ir import Node, TensorType, intern, postorder

FAMILIES = (
    "sexpgpu.ops.leaves",
    "sexpgpu.ops.derivative",
    "sexpgpu.ops.pointwise",
    "sexpgpu.ops.reduce",
    "sexpgpu.ops.views",
    "sexpgpu.ops.index",
    "sexpgpu.ops.contract",
    "sexpgpu.ops.epilogues",
    "sexpgpu.ops.normalise",
    "sexpgpu.ops.attention",
    "sexpgpu.ops.random",
    "sexpgpu.ops.functions",
    "sexpgpu.ops.moments",
    "sexpgpu.ops.order",
    "sexpgpu.ops.embedding",
    "sexpgpu.ops.einsum",
    "sexpgpu.ops.convolution",
    "sexpgpu.ops.pool",
    "sexpgpu.ops.linear_entropy",
    "sexpgpu.ops.cartesian.expand",
    "sexpgpu.ops.cartesian.product",
    "sexpgpu.ops.cartesian.joint",
    "sexpgpu.ops.cartesian.linear",
    "sexpgpu.ops.cartesian.maps",
    "sexpgpu.ops.chain",
)


class OpProblem(Exception):
    """Operands that an op refuses. Knows no place: the caller that has spans makes it a diagnostic.

    `code` is a catalogue code (E-SHAPE-…); `axes` lists (operand number, axis) whose sizes clash; `{0}` in `help` stands
    for the text of operand 0.
    """

    def __init__(self, code: str, message: str, axes: tuple[tuple[int, int], ...] = (), help: str = ""):  # noqa: A002
        super().__init__(message)
        self.code, self.message, self.axes, self.help = code, message, axes, help


@dataclass(frozen=True)
class Parameter:
    """A keyword of the op in Lisp that becomes an attribute.

    `kind`: int, float, number, bool, axis, axes, shape, dtype, string, triples ([[1 1 0] …]), parts (tuples that no person writes).
    """

    name: str
    kind: str
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Lowering:
    """How the op reaches a kernel: `pointwise` (with a Triton expression of {0} {1} …), `reduction`, `view`,
    `contraction`, `external`, `template`, or `leaf`."""

    kind: str
    expression: str = ""


@dataclass(frozen=True)
class Op:
    """One op.

    operands: names of tensor operands, in order; a last one ending in `*` takes any number of them.
    positional: names of `attributes` that may follow the operands without a keyword, e.g. `(reshape x [2 3])`.
    infer(types, attrs) -> TensorType, raising `OpProblem`.
    vjp(node, ct) -> one cotangent node or None an operand, in IR ops (made with `build`); None: not differentiable.
    reference(torch, node, args) -> tensor: the meaning, for any dtype, float64 included.
    cost(node) -> (flops, bytes moved).
    lisp: False for ops that have no name in the language (gradient ops, leaves).
    canonical(inputs, attrs) -> (inputs, attrs): one spelling for what a person may write in several ways (axis -1,
        reshape's -1, a list for a tuple), so that equal nodes join; `infer` sees its result. Idempotent.
    differentiable: False says on purpose that no gradient passes (integer or bool results, leaves).
    """

    name: str
    doc: str
    operands: tuple[str, ...]
    infer: Callable[[tuple[TensorType, ...], dict[str, Any]], TensorType]
    reference: Callable[[Any, Node, list[Any]], Any]
    cost: Callable[[Node], tuple[int, int]]
    lowering: Lowering
    vjp: Callable[[Node, Node], tuple[Node | None, ...]] | None = None
    attributes: tuple[Parameter, ...] = ()
    positional: tuple[str, ...] = ()
    lisp: bool = True
    example: str = ""
    differentiable: bool = True
    canonical: Callable[[tuple[Node, ...], dict[str, Any]], tuple[tuple[Node, ...], dict[str, Any]]] | None = None


@cache
def table() -> dict[str, Op]:
    """Every op by name, in the order of the families."""
    ops: dict[str, Op] = {}
    for family in FAMILIES:
        for op in import_module(family).OPS:
            assert op.name not in ops, f"two ops are named {op.name}"
            ops[op.name] = op
    return ops


def build(name: str, /, *inputs: Node, **attrs: Any) -> Node:
    """The node of op `name`: infers its type, fills default attributes, interns. Raises `OpProblem`."""
    op = table()[name]
    full = {p.name: attrs.get(p.name, p.default) for p in op.attributes}
    assert attrs.keys() <= full.keys(), f"{name}: unknown attributes {set(attrs) - set(full)}"
    if op.canonical is not None:
        inputs, full = op.canonical(inputs, full)
    return intern(name, inputs, full, op.infer(tuple([i.type for i in inputs]), full))


def evaluated(torch: Any, root: Node, known: dict[Node, Any]) -> Any:
    """The value of a graph by the references of its ops, from the values that are known; the others are added to them."""
    for node in postorder([root]):
        if node not in known:
            known[node] = table()[node.op].reference(torch, node, [known[x] for x in node.inputs])
    return known[root]


def constant(value: float, dtype: str) -> Node:
    """A scalar constant; `value` is stored as a Python number of the dtype's kind."""
    return build("constant", value=value, dtype=dtype)

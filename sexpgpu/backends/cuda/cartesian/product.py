"""What a launch makes: derivatives of the form Φ by its slots, each a sum over several fillings of the other slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.cartesian.algebra import width
from sexpgpu.ops.cartesian.product import SLOTS, Form, form_of

Use = tuple[int, int, int]
#: ops of several outputs: at once, and over parts of the edges
JOINT = ("tensor-product-joint", "tensor-product-parts")


@dataclass(frozen=True)
class Output:
    """∂Φ/∂target, added over `uses`: the numbers of the operands that fill the other slots, in the order of SLOTS."""

    target: str
    uses: tuple[Use, ...]

    def filled(self, use: Use) -> dict[str, int]:
        """Slot -> number of the operand."""
        return dict(zip((s for s in SLOTS if s != self.target), use, strict=True))


@dataclass(frozen=True)
class Product:
    """Outputs of one form over one graph. slots: which slot each operand fills; shared: weights have no rows; dtype: of storage.
    inner: of each operand, 0, or that it is given as two factors, [rows inner] and [inner columns]; () if none is."""

    form: Form
    slots: tuple[str, ...]
    outputs: tuple[Output, ...]
    shared: bool
    edges: bool
    dtype: str = "f32"
    inner: tuple[int, ...] = ()

    @property
    def second(self) -> bool:
        """Whether it is of second order: an output joins several fillings."""
        return any(len(o.uses) > 1 for o in self.outputs)

    @property
    def narrow(self) -> str | None:
        """The operand of one channel, whose coupling matrices all channels share."""
        if self.form.channels_b == 1:
            return "b"
        return "a" if self.form.channels_a == 1 else None

    def only(self, outputs: Sequence[Output]) -> Product:
        """Some of the outputs, over the same operands."""
        return Product(self.form, self.slots, tuple(outputs), self.shared, self.edges, self.dtype, self.inner)

    def factored(self, number: int) -> int:
        """The inner size of an operand that is given as two factors, else 0."""
        return self.inner[number] if self.inner else 0

    def components(self, slot: str) -> int:
        """Components of a slot's row: ranks, paths, or rows of the result."""
        if slot == "result":
            return width(self.form.top) if self.form.reduced else self.form.resolved
        return {"a": width(self.form.first), "b": width(self.form.second), "weights": len(self.form.paths)}[slot]

    def channels(self, slot: str) -> int:
        return {"a": self.form.channels_a, "b": self.form.channels_b}.get(slot, self.form.channels)

    def place(self, path: int, component: int) -> int:
        """The row of the result that a component of a path adds to."""
        p = self.form.paths[path]
        if self.form.reduced:
            return p.result**2 + component
        return self._rows()[path, component]

    def _rows(self) -> dict[tuple[int, int], int]:
        found = self.form.__dict__.get("_places")
        if found is None:
            found = {row: i for i, row in enumerate(self.form.rows)}
            self.form.__dict__["_places"] = found
        return found


def passes(form: Form, shared: bool, edges: bool, dtype: str, inner: int = 0) -> dict[str, Product]:
    """A product and all its first and second derivatives: `forward` of operands (a, b, weights), `backward` with the cotangent as
    the fourth, `second` with tangents of a, b and weights after it. With `inner`, weights and their tangents are given as factors."""
    first = ("a", "b", "weights", "result")
    by_slot = Output("a", ((1, 2, 3),)), Output("b", ((0, 2, 3),)), Output("weights", ((0, 1, 3),))
    second = (
        Output("result", ((4, 1, 2), (0, 5, 2), (0, 1, 6))), Output("a", ((5, 2, 3), (1, 6, 3))),
        Output("b", ((4, 2, 3), (0, 6, 3))), Output("weights", ((4, 1, 3), (0, 5, 3))),
    )
    made = {"forward": (first[:3], (Output("result", ((0, 1, 2),)),)), "backward": (first, by_slot), "second": ((*first, "a", "b", "weights"), second)}
    return {
        name: Product(form, slots, outputs, shared, edges, dtype, tuple(inner if s == "weights" else 0 for s in slots) if inner else ())
        for name, (slots, outputs) in made.items()
    }


def of_node(node: Node) -> tuple[Product, tuple[Node, ...], tuple[Node, ...]]:
    """A product node, single or joint: the product, its operands and its indices. Of one in parts, the product that a part is."""
    attrs: Any = node.attrs
    if node.op in JOINT:
        count, inner = len(attrs["slots"]), attrs.get("inner", ())
        factors = sum(k > 0 for k in inner)
        slots, operands = attrs["slots"], node.inputs[:count]
        edges = node.inputs[count + factors :] if node.op == JOINT[0] else node.inputs[-2:]
        outputs = tuple(Output(target, uses) for target, _, _, uses in attrs["outputs"])
        shapes = {target: shape for target, shape, _, _ in attrs["outputs"]}
    else:
        target = "result" if node.op == "tensor-product" else attrs["target"]
        slots = tuple(s for s in SLOTS if s != target)
        operands, edges, inner = node.inputs[:3], node.inputs[3:], ()
        outputs, shapes = (Output(target, ((0, 1, 2),)),), {target: node.type.shape}
    types = {s: x.type for s, x in zip(slots, operands, strict=True)}
    types = {s: TensorType(node.type.dtype, shape) for s, shape in shapes.items()} | types
    form = form_of(types["a"], types["b"], attrs)
    shared = not any(inner) and types["weights"].rank == 1
    return Product(form, slots, outputs, shared, bool(edges), node.type.dtype, inner), operands, edges


def shapes_of(node: Node) -> list[tuple[int, ...]]:
    """The shape of each output of a product node."""
    if node.op in JOINT:
        return [shape for _, shape, _, _ in node.attrs["outputs"]]
    return [node.type.shape]


def rows_of(node: Node) -> int:
    """Nodes of the graph, or rows of a product by rows."""
    product, operands, _ = of_node(node)
    for slot, shape in [*zip(product.slots, (x.type.shape for x in operands), strict=True),
                        *zip((o.target for o in product.outputs), shapes_of(node), strict=True)]:
        if slot in ("a", "result"):
            return shape[0]
    raise LookupError("a product without operand a and result")

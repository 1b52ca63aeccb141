"""Views as index arithmetic: where the element of a view lies in what it views."""

from __future__ import annotations

from sexpgpu.ir import Node
from sexpgpu.passes.schedule.index import Expr, Index, Var, lift, offset, unravel

#: views whose element is one element of their operand, at an index that only depends on their own
PLAIN = frozenset({"reshape", "squeeze", "expand-dims", "transpose", "broadcast", "flip", "slice", "variable", "stop-gradient", "again"})
#: views that need a mask, several operands, or an index that is read
CHOOSING = frozenset({"pad", "concat", "gather", "embed", "take-along"})
VIEWS = PLAIN | CHOOSING


def data(node: Node) -> tuple[Node, ...]:
    """The operands whose elements a value is made of: what `again` waits for is none."""
    return node.inputs[:1] if node.op == "again" else node.inputs


def through(node: Node, index: Index) -> tuple[Node, Index]:
    """The operand of a plain view and the element of it that stands at `index`."""
    x, a = node.inputs[0], node.attrs
    old = x.type.shape
    if node.op in ("variable", "stop-gradient", "again"):
        return x, index
    if node.op in ("reshape", "squeeze", "expand-dims"):
        return x, unravel(offset(index, node.type.shape), old)
    if node.op == "transpose":
        inverse = {source: place for place, source in enumerate(a["permutation"])}
        return x, tuple(index[inverse[axis]] for axis in range(len(old)))
    if node.op == "broadcast":
        return x, aligned(index, old)
    if node.op == "flip":
        return x, tuple(i * -1 + (s - 1) if axis in a["axis"] else i for axis, (i, s) in enumerate(zip(index, old, strict=True)))
    assert node.op == "slice", node.op
    return x, tuple(i * a["step"] + a["start"] if axis == a["axis"] else i for axis, i in enumerate(index))


def aligned(index: Index, shape: tuple[int, ...]) -> Index:
    """The index into an operand of `shape` that broadcasts to the shape of `index` (axes matched from the last)."""
    tail = index[len(index) - len(shape) :]
    return tuple(Expr() if size == 1 else i for i, size in zip(tail, shape, strict=True))


def layout(node: Node) -> tuple[int, ...] | None:
    """The order of axes in memory of a call's result, None for its own. Attention [b h t d] has heads between positions and
    their elements; the gradient by a weight that is a transposed matrix lies as that matrix does."""
    if node.op == "again":  # of a tensor in memory: it lies as that does
        return layout(node.inputs[0])
    if node.op in ("attend", "attend-grad"):
        return (0, 2, 1, 3) if node.type.rank == 4 else None
    if node.op == "linear-cross-entropy-grad" and node.attrs["of"] == 1 and node.inputs[1].op == "transpose":
        return (1, 0)
    return None


def place_of(node: Node, index: Index) -> Expr:
    """Where an element of a kept tensor lies in memory, in elements."""
    order = layout(node)
    if order is None:
        return offset(index, node.type.shape)
    return offset(tuple(index[a] for a in order), tuple(node.type.shape[a] for a in order))


def picked(node: Node, index: Index, number: object) -> tuple[Node, Index, Node, Index]:
    """Of gather, embed and take-along: (operand, its index, indices, their index); `number` tells the read value."""
    x, places = node.inputs
    axis = node.attrs.get("axis", 0)
    if node.op == "take-along":
        where = index
        before, after = index[:axis], index[axis + 1 :]
    else:
        where = index[axis : axis + places.type.rank]
        before, after = index[:axis], index[axis + places.type.rank :]
    value = lift(Var("value", x.type.shape[axis], (places, where, number)))
    return x, (*before, value, *after), places, where


def strided(node: Node, stop: frozenset[Node] | set[Node]) -> tuple[Node, tuple[int, ...], int] | None:
    """The tensor of `stop` (or the first that is no view) under plain views, and strides and start of `node` in it, in
    elements; None if it is none, or lies in it without strides."""
    axes = tuple(Var(f"d{i}", size) for i, size in enumerate(node.type.shape))
    index: Index = tuple(lift(v) for v in axes)
    base = node
    while base not in stop and base.op in PLAIN:
        base, index = through(base, index)
    if base not in stop and base.op in CHOOSING:
        return None
    place = place_of(base, index)
    steps = dict.fromkeys(axes, 0)
    for atom, k in place.terms:
        if not isinstance(atom, Var) or k < 0:
            return None
        steps[atom] = k
    return base, tuple(steps[v] for v in axes), place.const

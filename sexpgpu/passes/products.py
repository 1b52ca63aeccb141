"""Matrix products for a device: numbers that they or their operands are multiplied by, and sums of several, go into the product, and a
`scatter-add` onto few places is a reduction.

A library multiplies its sums by a number and adds them to what is there for nothing; as launches of their own these are a pass over
memory each. Runs on decomposed graphs, f32 products only: a rounded one would be rounded elsewhere.

Weights of a tensor product that are a product themselves, of many edges by a small inner size, are a `matmul-sum` for which a device has
kernels, and one for each launch that reads them, so that they need not live between the forward pass and its derivatives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.ops.helpers import total, where, zeros
from sexpgpu.passes.rank_maps import factor, number
from sexpgpu.passes.rewrite import rebuild, rewrite

PLACES = 64  # places of a `scatter-add` that each update is compared with
COMPARED = 1 << 23  # comparisons of one
PRODUCT = "tensor-product"  # the op, its gradients, and several of them together
TALL, NARROW = 8192, 128  # rows of a product, and columns on one side of it, that a device has kernels of its own for


class _Root(NamedTuple):
    """`scale` times the sum of products of pairs of matrices."""

    scale: float
    pairs: tuple[tuple[Node, Node], ...]


def tall(shape: Sequence[int], inner: Sequence[int]) -> bool:
    """Whether a product [rows columns] over these inner sizes has many rows, and few columns on one side."""
    return shape[0] >= TALL and (shape[1] <= NARROW or max(inner) <= NARROW)


def products(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """`results` with `matmul-sum` nodes where numbers or sums stand at products, and without small `scatter-add` nodes."""
    order = postorder(results.values())
    bare = _bare(order, set(results.values()))
    roots = _roots(order, set(results.values()), bare)
    rewritten: dict[Node, Node] = {}
    weights = _weights(order, roots, set(results.values()))
    roots = {n: root for n, root in roots.items() if n in weights or _of_edges(root) or len(root.pairs) > 1 or root.scale != 1.0 or any(_scaled(x, bare)[1] != 1.0 for x in root.pairs[0])}
    readings: dict[tuple[Node, ...], int] = {}  # the operands of a launch -> which reading of weights it is

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node:
        new = _summed(roots[node], rewritten, bare) if node in roots else None
        if node.op.startswith(PRODUCT) and weights.intersection(node.inputs):
            number = readings.setdefault(node.inputs, len(readings) + 1)
            inputs = tuple(build(x.op, *x.inputs, **{**x.attrs, "again": number}) if old in weights else x for old, x in zip(node.inputs, inputs, strict=True))
        if node.op == "scatter-add":
            new = _reduced(node, inputs)
        rewritten[node] = new or rebuild(node, inputs)
        return rewritten[node]

    return rewrite(results, rule, origins)


def _bare(order: list[Node], results: set[Node]) -> set[Node]:
    """Multiples that products alone read, so that nothing else needs them made."""
    readers: dict[Node, list[Node]] = {}
    for node in order:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    found: set[Node] = set()
    for node in reversed(order):
        if node.op in ("*", "transpose") and node not in results and all(r.op == "matmul" or (r.op == "transpose" and r in found) for r in readers.get(node, ())):
            found.add(node)
    return found


def _scaled(node: Node, bare: set[Node]) -> tuple[Node, float]:
    """A matrix, transposed or not, and the number that it is multiplied by."""
    if node.op == "transpose":
        inner, scale = _scaled(node.inputs[0], bare)
        return (build("transpose", inner, **node.attrs), scale) if scale != 1.0 else (node, 1.0)
    return factor(node) if node in bare else (node, 1.0)


def _roots(order: list[Node], results: set[Node], bare: set[Node]) -> dict[Node, _Root]:
    """The outermost sums and multiples of products whose parts nothing else reads."""
    readers = Counter(x for n in order for x in n.inputs)
    found: dict[Node, _Root] = {}

    def alone(part: Node) -> bool:
        return readers[part] == 1 and part not in results

    for node in order:
        known = _own(node, {x: found[x] for x in node.inputs if x in found and alone(x)}, bare)
        if known is not None:
            for part in node.inputs if node.op != "matmul" else ():
                found.pop(part, None)
            found[node] = known
    return found


def _weights(order: list[Node], roots: Mapping[Node, _Root], results: set[Node]) -> set[Node]:
    """Single products of many rows by a small inner size that tensor products alone read."""
    found = {n for n, root in roots.items() if n not in results and len(root.pairs) == 1 and n.type.shape[1] > NARROW and tall(n.type.shape, [root.pairs[0][0].type.shape[1]])}
    for n in order:
        if not n.op.startswith(PRODUCT):
            found.difference_update(n.inputs)
    return found


def _of_edges(root: _Root) -> bool:
    """Whether it is a sum over edges, of cotangents of their weights: each of two is made as soon as it can be, so that the first's cotangents, as large as
    all weights, do not wait for the second's."""
    (left, right), *_ = root.pairs
    while right.op in ("reshape", "transpose", "*") and (right.op != "*" or factor(right)[0] is not right):
        right = factor(right)[0] if right.op == "*" else right.inputs[0]
    return right.op.startswith(PRODUCT) and left.type.shape[1] >= TALL


def _own(node: Node, parts: Mapping[Node, _Root], bare: set[Node]) -> _Root | None:
    if node.op == "matmul" and node.type.dtype == "f32" and all(x.type.rank == 2 for x in node.inputs):
        return _Root(1.0, ((node.inputs[0], node.inputs[1]),))
    if node.op == "*" and len(parts) == 1:
        (part, root), value = next(iter(parts.items())), next((v for v in map(number, node.inputs) if v is not None), None)
        return root._replace(scale=root.scale * value) if value is not None and part.type.shape == node.type.shape else None
    if node.op == "+" and len(parts) == 2:
        first, second = (parts[x] for x in node.inputs)
        if _of_edges(first) and _of_edges(second):
            return None
        factors = {root.scale * _scaled(a, bare)[1] * _scaled(b, bare)[1] for root in (first, second) for a, b in root.pairs}
        if len(factors) == 1 and first.scale == second.scale:
            return _Root(first.scale, first.pairs + second.pairs)
    return None


def _summed(root: _Root, rewritten: Mapping[Node, Node], bare: set[Node]) -> Node:
    scale, operands = root.scale, []
    for i, pair in enumerate(root.pairs):
        for x in pair:
            inner, value = _taken(x, rewritten, bare)
            scale *= value if i == 0 else 1.0
            operands.append(inner)
    return build("matmul-sum", *operands, scale=scale)


def _taken(node: Node, rewritten: Mapping[Node, Node], bare: set[Node]) -> tuple[Node, float]:
    """What stands for a matrix after the rewrite without its number, and the number."""
    inner, value = _scaled(node, bare)
    if value == 1.0:
        return rewritten[node], 1.0
    turns = []
    while inner.op == "transpose":
        turns.append(inner.attrs)
        inner = inner.inputs[0]
    new = rewritten[inner]
    for attrs in reversed(turns):
        new = build("transpose", new, **attrs)
    return new, value


def _reduced(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """Each place as a sum of the updates that are for it: few places, so that no order of updates has to be found."""
    updates, indices = inputs
    axis, count = node.attrs["axis"], node.attrs["count"]
    if indices.type.rank != 1 or not 1 <= count <= PLACES or updates.type.size * count > COMPARED or not updates.type.is_float or not updates.type.size:
        return None
    shape = updates.type.shape
    tail = len(shape) - axis - 1
    wide = (*shape[: axis + 1], count, *shape[axis + 1 :])
    own = build("broadcast", build("reshape", indices, shape=(shape[axis], *(1,) * (tail + 1))), shape=wide, batch=False)
    place = build("iota", count=count, dtype=indices.type.dtype)
    place = build("broadcast", build("reshape", place, shape=(count, *(1,) * tail)), shape=wide, batch=False)
    spread = build("reshape", updates, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
    spread = build("broadcast", spread, shape=wide, batch=False)
    found = total(where(build("=", own, place), spread, zeros(spread.type)), (axis,), keep=False)
    return found if found.type == node.type else build("broadcast", found, shape=node.type.shape, batch=node.type.batch)

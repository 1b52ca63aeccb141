"""Equivariant linear maps for a device: numbers that their weights, features and results are multiplied by go into the map, and the
gradients by the weights of all ranks, with the sums over several uses of a weight and its factor, into one launch.

A weight of a layer is a parameter over √inputs, and training through forces uses it twice, in the map and in the map's gradient. As
plain products that is a launch for each factor, each rank's product with two copies of its operands, each sum and each factor of
a gradient. Messages are divided by √neighbours before they are mixed, and their cotangent after: that would be a pass over all
paths of all atoms each time. Runs on decomposed f32 graphs; what it does not know it leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.passes.rewrite import rebuild, rewrite

MAPS = ("equivariant-linear", "equivariant-linear-back")
WEIGHT = "equivariant-linear-weight"


class _Root(NamedTuple):
    """A gradient by one rank's weight: `scale` times the sum over pairs of features and cotangents."""

    scale: float
    pairs: tuple[tuple[Node, Node], ...]
    rank: int
    start: int
    inputs: int


def rank_maps(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """`results` with `rank-map` and `rank-weights` nodes in place of the maps and gradients."""
    order = postorder(results.values())
    if not any(n.op in MAPS for n in order):
        return dict(results)
    roots = _roots(order, set(results.values()))
    readers: dict[Node, list[Node | None]] = defaultdict(list)
    for x in results.values():
        readers[x].append(None)
    for node in order:
        for x in node.inputs:
            readers[x].append(node)
    bare = _bare(order, readers, roots)
    homes = _homes(roots, bare, {n: i for i, n in enumerate(order)})
    rewritten: dict[Node, Node] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node:
        rewritten[node] = _made(node, inputs, bare, homes, rewritten, readers) or rebuild(node, inputs)
        return rewritten[node]

    return rewrite(results, rule, origins)


def _made(node: Node, inputs: tuple[Node, ...], bare: set[Node], homes: Mapping[Node, Any], rewritten: Mapping[Node, Node],
          readers: Mapping[Node, list[Node | None]]) -> Node | None:
    if node in homes:
        pairs, blocks, of = homes[node]
        return build("rank-weights", *(rewritten[x] for pair in pairs for x in pair), blocks=blocks, of=of)
    if node.type.dtype != "f32":
        return None
    if node.op in MAPS:
        (x, own), (weights, scales) = _stripped(node.inputs[0], bare), zip(*(factor(w) for w in inputs[1:]), strict=True)
        scales = tuple(own * s for s in scales)
        return build("rank-map", rewritten[x], *weights, scales=scales, back=node.op == MAPS[1], shape=node.type.shape, batch=node.type.batch)
    value, inner = _multiple(node) or (1.0, node)
    made = rewritten.get(inner, node)
    if made.op == "rank-map" and readers[inner] == [node] and made.type == node.type:  # the result's number, where nothing reads it without
        return build(made.op, *made.inputs, **{**made.attrs, "scales": tuple(value * s for s in made.attrs["scales"])})
    return None


def _bare(order: list[Node], readers: Mapping[Node, list[Node | None]], roots: Mapping[Node, _Root]) -> set[Node]:
    """Multiples that need not be made: maps alone read them, as features, and gradients by weights all of whose pairs have one number."""
    inside = {n for n in order if n.op == WEIGHT}
    found = {n for n in order if n.type.dtype == "f32" and _multiple(n) is not None
             and all(r is not None and ((r.op in MAPS and r.inputs.count(n) == 1 and r.inputs[0] is n) or r in inside) for r in readers[n])}
    while True:
        apart = {x for root in roots.values() if len({_of_pair(pair, found) for pair in root.pairs}) > 1 for pair in root.pairs for x in pair}
        apart |= {x for n in inside if n.type.dtype != "f32" for x in n.inputs}
        if not apart & found:
            return found
        found -= apart


def _stripped(node: Node, bare: set[Node]) -> tuple[Node, float]:
    return factor(node) if node in bare else (node, 1.0)


def _of_pair(pair: tuple[Node, Node], bare: set[Node]) -> float:
    return _stripped(pair[0], bare)[1] * _stripped(pair[1], bare)[1]


def factor(node: Node) -> tuple[Node, float]:
    """A tensor and the number that it is multiplied by."""
    scale = 1.0
    while (found := _multiple(node)) is not None:
        scale, node = scale * found[0], found[1]
    return node, scale


def _multiple(node: Node) -> tuple[float, Node] | None:
    """The number and the tensor whose product, or quotient, a node is."""
    for a, b in (node.inputs, node.inputs[::-1]) if node.op == "*" else (node.inputs[::-1],) if node.op == "/" else ():
        if (value := number(a)) is not None and b.type.shape == node.type.shape and (node.op == "*" or value != 0.0):
            return value if node.op == "*" else 1.0 / value, b
    return None


def number(node: Node) -> float | None:
    while node.op in ("broadcast", "reshape"):
        node = node.inputs[0]
    return float(node.attrs["value"]) if node.op == "constant" and node.type.dtype == "f32" else None


def _roots(order: list[Node], results: set[Node]) -> dict[Node, _Root]:
    """The outermost sums and multiples of weight gradients of one rank whose parts nothing else reads."""
    readers = Counter(x for n in order for x in n.inputs)
    found: dict[Node, _Root] = {}
    for node in order:
        known = _own(node, found, lambda part: readers[part] == 1 and part not in results)
        if known is not None:
            for part in node.inputs if node.op != WEIGHT else ():
                found.pop(part, None)
            found[node] = known
    return found


def _own(node: Node, found: Mapping[Node, _Root], alone: Any) -> _Root | None:
    a = node.attrs
    if node.op == WEIGHT and node.type.dtype == "f32":
        return _Root(1.0, ((node.inputs[0], node.inputs[1]),), a["rank"], a["start"], a["inputs"])
    parts = [found[x] for x in node.inputs if x in found and alone(x)]
    if node.op == "*" and len(parts) == 1:
        value = next((v for v in map(number, node.inputs) if v is not None), None)
        fits = any(x in found and x.type.shape == node.type.shape for x in node.inputs)
        return parts[0]._replace(scale=parts[0].scale * value) if value is not None and fits else None
    if node.op == "+" and len(parts) == 2 and parts[0]._replace(pairs=()) == parts[1]._replace(pairs=()):
        return parts[0]._replace(pairs=parts[0].pairs + parts[1].pairs)
    return None


def _homes(roots: Mapping[Node, _Root], bare: set[Node], place: Mapping[Node, int]) -> dict[Node, tuple[Any, Any, int]]:
    """Root -> (pairs, blocks, number): ranks with the same pairs together."""
    groups: dict[Any, list[tuple[Node, _Root]]] = defaultdict(list)
    for node, root in roots.items():
        scale = root.scale * _of_pair(root.pairs[0], bare)
        plain = ((_stripped(x, bare)[0], _stripped(y, bare)[0]) for x, y in root.pairs)
        pairs = tuple(sorted(plain, key=lambda pair: (place[pair[0]], place[pair[1]])))
        groups[pairs].append((node, root._replace(scale=scale)))
    homes: dict[Node, tuple[Any, Any, int]] = {}
    for pairs, members in groups.items():
        blocks = tuple((root.rank, root.start, root.inputs, root.scale) for _, root in members)
        homes |= {node: (pairs, blocks, i) for i, (node, _) in enumerate(members)}
    return homes

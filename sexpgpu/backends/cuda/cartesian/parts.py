"""Products over many edges, with the matrix products that make their weights and those that their weights' gradients go to, as single nodes that
do all of it for some edges after others (`sweep.py` runs them).

The weights of all edges are the largest tensors of a potential by far, and their gradients are as large: 655 MiB each for 158,000 edges, 17 paths and 64
channels, where all that a step keeps between its passes is 1.5 GiB. Nothing but what stands here reads them, so a part of the edges needs them for itself
alone, and no longer (docs/decisions/0063).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sexpgpu.backends.cuda.cartesian.config import config
from sexpgpu.backends.cuda.cartesian.lanes import suits
from sexpgpu.backends.cuda.cartesian.product import of_node
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.ops.cartesian.joint import Out
from sexpgpu.passes.join import replaced
from sexpgpu.passes.products import PRODUCT

EDGES = 40960  # of a part, about: each of 1,000 nodes' walks still has 40 of them, and one wave of programs is full
ALIGNED = 128
FORM = ("l-max", "paths", "reduce-paths")


class _Behind(NamedTuple):
    """A product that an output by weights goes to: `rows` of it times `other`, or its transpose times the rows of `other` (`sums`)."""

    node: Node
    kind: str
    other: Node
    scale: float


def size_of(edges: int) -> int:
    """Edges of a part."""
    count = max(1, round(edges / EDGES))
    return -(-edges // (count * ALIGNED)) * ALIGNED


def in_parts(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """`results` with a `tensor-product-parts` node for each product over more edges than one part has, whose weights are made for it alone."""
    order = postorder(results.values())
    readers: dict[Node, list[Node]] = {}
    for node in order:
        for x in dict.fromkeys(node.inputs):
            readers.setdefault(x, []).append(node)
    roots = set(results.values())
    groups: dict[tuple[Node, ...], list[Node]] = {}
    for node in order:
        if node.op.startswith(PRODUCT):
            groups.setdefault(node.inputs, []).append(node)
    swept = [g for members in groups.values() if (g := _group(members, readers, roots)) is not None]
    if not swept:
        return dict(results)
    needs = _Needs(order, swept)
    later = [(n, behind) for n, group in enumerate(swept) for behind in group.sort(needs, n)]
    for n, behind in later:
        host = next((i for i, other in enumerate(swept) if i != n and other.takes(swept[n], behind, needs, i)), None)
        if host is None:
            swept[n].apart.append(behind)
    found: dict[Node, Node] = {}  # what stood there -> what stands for it
    for group in swept:
        found |= group.nodes()
    return replaced(results, found, origins)


class _Needs:
    """Which groups a node depends on, while they come to depend on more: bits."""

    def __init__(self, order: Sequence[Node], groups: Sequence[_Group]):
        bits = {m: 1 << i for i, g in enumerate(groups) for m in g.members.values()}
        self.below: dict[Node, int] = {}
        for node in order:
            mask = bits.get(node, 0)
            for x in node.inputs:
                mask |= self.below[x]
            self.below[node] = mask
        self.more = [0] * len(groups)  # of what was added to a group

    def allows(self, number: int, node: Node) -> bool:
        """Adds a node to what a group reads, unless it depends on the group."""
        mask = before = self.below[node]
        while True:
            for i, more in enumerate(self.more):
                if mask >> i & 1:
                    mask |= more
            if mask == before:
                break
            before = mask
        if mask >> number & 1:
            return False
        self.more[number] |= mask
        return True


@dataclass
class _Group:
    """The outputs of one product by number, its operands, which of them are products of two factors, and the matrix products behind its weights' gradients:
    all; those that are made with it; those that are made of gradients made once more, for which nothing else is read.
    """

    first: Node
    members: Mapping[int, Node]
    slots: tuple[str, ...]
    operands: tuple[Node, ...]
    ends: tuple[Node, ...]
    outputs: tuple[Out, ...]
    factored: tuple[bool, ...]
    behind: tuple[tuple[int, _Behind], ...]
    now: list[tuple[int, _Behind]] = field(default_factory=list)
    apart: list[tuple[int, _Behind]] = field(default_factory=list)

    def sort(self, needs: _Needs, number: int) -> list[tuple[int, _Behind]]:
        """Takes what is behind its outputs, but for that which depends on them, and so must wait: kept until then, the gradients that it is made of
        would be what a step needs most memory for. They are made once more."""
        self.now = [(n, b) for n, b in self.behind if needs.allows(number, b.other)]
        return [pair for pair in self.behind if pair not in self.now]

    def takes(self, other: _Group, behind: tuple[int, _Behind], needs: _Needs, number: int) -> bool:
        """Makes a gradient of another group once more, as an output of its own: where it reads all that it is made of anyway."""
        n, b = behind
        target, shape, batch, uses = other.outputs[n]
        own = {x: i for i, x in enumerate(self.operands) if not self.factored[i]}
        read = {i: own.get(other.operands[i]) for use in uses for i in use}
        alike = self.ends == other.ends and all(self.first.attrs[k] == other.first.attrs[k] for k in FORM) and any(t == target and s == shape for t, s, _, _ in self.outputs)
        if not alike or any(i is None or self.slots[i] != other.slots[x] for x, i in read.items()) or not needs.allows(number, b.other):
            return False
        output = target, shape, batch, tuple((read[x], read[y], read[z]) for x, y, z in uses)
        if output not in self.outputs:
            self.outputs = (*self.outputs, output)  # type: ignore[assignment]
        self.now.append((self.outputs.index(output), b))  # type: ignore[arg-type]
        return True

    def nodes(self) -> dict[Node, Node]:
        """What stands for the members, and for what is behind them."""
        inputs = [x.inputs[0] if f else x for x, f in zip(self.operands, self.factored, strict=True)] + [x.inputs[1] for x, f in zip(self.operands, self.factored, strict=True) if f]
        scales = tuple(float(x.attrs["scale"]) if f else 0.0 for x, f in zip(self.operands, self.factored, strict=True))
        hidden = {n for n, _ in self.behind}
        found = self._made(self.slots, scales, self.outputs, inputs, self.now)
        wanted = {m: found[n] for n, m in self.members.items() if n not in hidden} | {b.node: found[len(self.outputs) + i] for i, (_, b) in enumerate(self.now)}
        for n in dict.fromkeys(n for n, _ in self.apart):
            target, shape, batch, uses = self.outputs[n]
            read = sorted({x for use in uses for x in use})
            output = target, shape, batch, tuple((read.index(x), read.index(y), read.index(z)) for x, y, z in uses)
            own = [(0, b) for at, b in self.apart if at == n]
            found = self._made(tuple(self.slots[x] for x in read), (0.0,) * len(read), (output,), [self.operands[x] for x in read], own)
            wanted |= {b.node: found[1 + i] for i, (_, b) in enumerate(own)}
        return wanted

    def _made(self, slots: tuple[str, ...], scales: tuple[float, ...], outputs: tuple[Out, ...], inputs: list[Node], behind: list[tuple[int, _Behind]]) -> list[Node]:
        keep = {k: self.first.attrs[k] for k in FORM}
        after = tuple((n, b.kind, b.scale) for n, b in behind)
        every = *inputs, *(b.other for _, b in behind), *self.ends
        return [build("tensor-product-parts", *every, slots=slots, scales=scales, outputs=outputs, after=after, size=size_of(self.ends[0].type.size), of=n, **keep)
                for n in range(len(outputs) + len(after))]


def _group(members: list[Node], readers: Mapping[Node, list[Node]], roots: set[Node]) -> _Group | None:
    """The nodes over the same operands as one group; None where they stay."""
    first = members[0]
    joint = first.op == "tensor-product-joint"
    product, operands, ends = of_node(first)
    settings, form = config(), product.form
    if not ends or size_of(ends[0].type.size) >= ends[0].type.size or (joint and any(first.attrs["inner"])):
        return None
    if settings.scatter != "csr" or max(form.first, form.second, form.top) > settings.l_max or product.dtype != "f32" or not suits(product):
        return None
    own = set(members)

    def alone(x: Node) -> bool:
        return x.op == "matmul-sum" and x.attrs["again"] > 0 and len(x.inputs) == 2 and x not in roots and set(readers[x]) <= own

    factored = tuple(slot == "weights" and alone(x) for slot, x in zip(product.slots, operands, strict=True))
    if not any(factored):
        return None
    if not joint and len(members) > 1:  # single gradients that did not share a launch
        return None
    target = "result" if first.op == "tensor-product" else first.attrs.get("target")
    outputs = first.attrs["outputs"] if joint else ((target, first.type.shape, first.type.batch, ((0, 1, 2),)),)
    numbered = {m.attrs["of"] if joint else 0: m for m in members}
    behind: list[tuple[int, _Behind]] = []
    for n, member in sorted(numbered.items()):
        taken = [_behind(reader, member) for reader in readers.get(member, ())] if outputs[n][0] == "weights" and member not in roots else []
        behind += [(n, b) for b in taken if b is not None] if all(taken) else []
    return _Group(first, numbered, product.slots, operands, ends, outputs, factored, tuple(behind))


def _behind(node: Node, output: Node) -> _Behind | None:
    if node.op not in ("matmul", "matmul-sum") or len(node.inputs) != 2 or any(x.type.rank != 2 or x.type.dtype != "f32" for x in node.inputs):
        return None
    left, right = node.inputs
    scale = float(node.attrs.get("scale", 1.0))
    if left is output and right is not output:
        return _Behind(node, "rows", right, scale)
    if right is output and left.op == "transpose" and left.inputs[0] is not output:
        return _Behind(node, "sums", left.inputs[0], scale)
    return None

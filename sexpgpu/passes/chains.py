"""Small layers over many rows as one launch: products of [rows n] with matrices of up to 128 rows and columns, the pointwise ops between
them, and the gradients by those matrices, which are sums over the rows.

The network of an edge's length is such a chain, and so are its gradients. As launches each layer and each derivative passes over memory
twice; together they read what comes in once and write what others need. A chain is what stands at one level: a value's level is how many
launches of other kinds lie before it on any way, so no way leads out of a chain and back into it. A value of an earlier chain, products
included, is made again where what that reads besides is no larger than the value itself: hidden rows follow from an edge's few basis
numbers, and need not be kept from one pass to the next (docs/decisions/0064).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, table
from sexpgpu.passes.rank_maps import number
from sexpgpu.passes.rewrite import rebuild

ROWS = 8192  # at least so many
COLUMNS = 128  # of a value, at most
STEPS = 64  # of a chain, at most: a longer one has more values than a program's registers hold, and stays as it was
NARROW = 16  # a value of so many columns ends its chain: those that need it read it
VIEWS = ("transpose", "reshape", "broadcast")


@dataclass(eq=False)
class _Chain:
    members: list[Node]  # in order
    products_again: bool = True  # whether it may make products of earlier chains again
    own: set[Node] = field(default_factory=set)
    sums: list[Node] = field(default_factory=list)
    program: list[Any] = field(default_factory=list)
    places: dict[Node, int] = field(default_factory=dict)  # value -> its step
    inputs: dict[Node, int] = field(default_factory=dict)
    outputs: list[Node] = field(default_factory=list)


def chains(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """`results` with `row-chain` nodes in place of the layers."""
    order = postorder(results.values())
    inside = {n for n in order if _fits(n)}
    if not any(n.op == "matmul-sum" for n in inside):
        return dict(results)
    kept: set[Node] = set()  # members of chains that would be too long if they made products again
    while True:
        found = _chains(order, inside)
        for chain in found:
            chain.products_again = kept.isdisjoint(chain.members)
        made = {n: chain for chain in found for n in (*chain.members, *chain.sums)}
        for chain in found:
            _begin(chain, made)
        long = [chain for chain in found if len(chain.program) > STEPS]
        if not long:
            break
        kept |= {n for chain in long if chain.products_again for n in chain.members}
        inside -= {n for chain in long if not chain.products_again for n in chain.members}
    _choose_outputs(order, set(results.values()), found, made)
    return _rebuilt(results, made, origins)


def _begin(chain: _Chain, made: Mapping[Node, _Chain]) -> None:
    """The program of what a chain is for: its sums and its products."""
    for node in chain.sums:
        for x, y in _pairs(node):
            _value(chain, x.inputs[0], made)
            _value(chain, y, made)
    for node in chain.members:
        if node.op == "matmul-sum":
            _value(chain, node, made)


def _fits(node: Node) -> bool:
    """Whether it may stand in a chain: f32 [rows n], a product with a small leaf, or pointwise over values of its shape and numbers."""
    if node.type.dtype != "f32" or node.type.rank != 2 or node.type.shape[0] < ROWS or node.type.shape[1] > COLUMNS:
        return False
    if node.op == "matmul-sum":
        return len(node.inputs) == 2 and node.inputs[0].type.shape[1] <= COLUMNS and _small(node.inputs[1])
    op = table()[node.op]
    if op.lowering.kind != "pointwise" or op.attributes or not node.inputs:
        return False
    return all(x.type.dtype == "f32" and (x.type.shape == node.type.shape or number(x) is not None) for x in node.inputs)


def _small(weight: Node) -> bool:
    leaf = weight.inputs[0] if weight.op == "transpose" else weight
    return leaf.type.rank == 2 and max(leaf.type.shape) <= COLUMNS and table()[leaf.op].lowering.kind == "leaf" and leaf.op != "constant"


def _pairs(node: Node) -> list[tuple[Node, Node]]:
    return list(zip(node.inputs[::2], node.inputs[1::2], strict=True))


def _sums(node: Node) -> bool:
    """Whether it is a gradient by a small matrix: a sum of xᵀ y over many rows."""
    return node.op == "matmul-sum" and node.type.dtype == "f32" and all(
        x.op == "transpose" and x.type.rank == 2 and x.type.shape[1] >= ROWS and max(x.type.shape[0], y.type.shape[1]) <= COLUMNS for x, y in _pairs(node))


def _chains(order: list[Node], inside: set[Node]) -> list[_Chain]:
    """Members by level, and what hangs together at it; sums where one of their values stands at theirs."""
    level: dict[Node, int] = {}
    after: dict[Node, int] = {}
    for node in order:
        level[node] = max((after[x] for x in node.inputs), default=0)
        simple = (node in inside and node.type.shape[1] > NARROW) or node.op in VIEWS or not node.inputs
        after[node] = level[node] + (0 if simple else 1)
    root: dict[Node, Node] = {n: n for n in inside}

    def top(node: Node) -> Node:
        while root[node] is not node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    sums: dict[Node, Node] = {}
    for node in order:
        if node in inside:
            near = [x for x in node.inputs if x in inside and level[x] == level[node]]
            values: list[Node] = [node, *near]
        elif _sums(node):
            values = [v for x, y in _pairs(node) for v in (x.inputs[0], y) if v in inside and level[v] == level[node]]
            if values:
                sums[node] = values[0]
        else:
            continue
        for a, b in zip(values, values[1:], strict=False):
            root[top(a)] = top(b)
    members: dict[Node, _Chain] = {}
    for node in order:
        if node in inside:
            chain = members.setdefault(top(node), _Chain([]))
            chain.members.append(node)
            chain.own.add(node)
    for node, value in sums.items():
        members[top(value)].sums.append(node)
    return [c for c in members.values() if any(n.op == "matmul-sum" for n in c.members) or c.sums]


def _value(chain: _Chain, node: Node, made: Mapping[Node, _Chain]) -> int:
    """The number of a value in the chain's program, which grows by what it needs: a load, or the ops that make it."""
    stack = [node]
    while stack:
        top = stack[-1]
        if top in chain.places:
            stack.pop()
            continue
        if top not in chain.own and not _again(chain, top, made):
            _add(chain, top, ("load", _input(chain, top)))
            continue
        need = [x for x in (top.inputs[:1] if top.op == "matmul-sum" else top.inputs) if number(x) is None and x not in chain.places]
        if need:
            stack += need
            continue
        if top.op == "matmul-sum":
            weight = top.inputs[1]
            leaf = weight.inputs[0] if weight.op == "transpose" else weight
            _add(chain, top, ("dot", chain.places[top.inputs[0]], _input(chain, leaf), weight.op == "transpose", top.attrs["scale"]))
        else:
            arguments = tuple(("number", number(x)) if number(x) is not None else chain.places[x] for x in top.inputs)
            _add(chain, top, ("point", top.op, arguments))
    return chain.places[node]


def _add(chain: _Chain, node: Node, step: Any) -> None:
    chain.places[node] = len(chain.program)
    chain.program.append(step)


def _input(chain: _Chain, node: Node) -> int:
    return chain.inputs.setdefault(node, len(chain.inputs))


def _again(chain: _Chain, node: Node, made: Mapping[Node, _Chain]) -> bool:
    """Whether a value of another chain is made here once more: where what that reads, and this chain does not read already, is no larger than
    the value itself."""
    if node not in made:
        return False
    new: set[Node] = set()
    seen: set[Node] = set()
    stack = [node]
    while stack:
        top = stack.pop()
        if top in chain.places or top in seen:
            continue
        seen.add(top)
        if top in chain.own:
            return False
        if top not in made or (top.op == "matmul-sum" and (top.type.shape[1] <= NARROW or not chain.products_again)):
            if top is node:
                return False
            new.add(top)
            if sum(x.type.shape[-1] for x in new) > node.type.shape[-1]:
                return False
            continue
        stack += [x for x in (top.inputs[:1] if top.op == "matmul-sum" else top.inputs) if number(x) is None]
    return True


def _choose_outputs(order: list[Node], results: set[Node], found: list[_Chain], made: Mapping[Node, _Chain]) -> None:
    """What others read: results, operands of other ops, and loads of other chains, which may need further values."""
    readers: dict[Node, list[Node]] = {}
    for node in order:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    sums = {node for chain in found for node in chain.sums}
    kept = {n for n in made if n in results}
    for node in order:
        turned = node.op == "transpose" and node not in results and all(r in sums for r in readers.get(node, ()))
        if node not in made and not turned:
            kept |= {x for x in node.inputs if x in made}
    while True:
        kept |= {x for chain in found for x in chain.inputs if x in made}
        missing = [(made[n], n) for n in sorted(kept - sums, key=order.index) if n not in made[n].places]
        if not missing:
            break
        for chain, node in missing:
            _value(chain, node, made)
    for chain in found:
        chain.outputs = [n for n in chain.members if n in kept] + chain.sums


def _rebuilt(results: Mapping[str, Node], made: Mapping[Node, _Chain], origins: Origins | None) -> dict[str, Node]:
    done: dict[Node, Node] = {}
    stack = list(results.values())
    open_: set[Node] = set()  # whose operands are being made
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        chain = made.get(node)
        below: Iterable[Node] = node.inputs if chain is None else chain.inputs
        waiting = [x for x in below if x not in done]
        if waiting:
            assert node not in open_, "a way out of a chain and back"
            open_.add(node)
            stack += waiting
            continue
        stack.pop()
        if chain is None:
            done[node] = rebuild(node, tuple(done[x] for x in node.inputs))
        else:
            done[node] = _node(chain, chain.outputs.index(node), [done[x] for x in chain.inputs])
        if origins is not None and done[node] is not node and node in origins.table:
            origins.add(done[node], origins.of(node))
    return {name: done[node] for name, node in results.items()}


def _node(chain: _Chain, of: int, inputs: list[Node]) -> Node:
    outputs: list[Any] = []
    for node in chain.outputs:
        if node in chain.sums:
            pairs = tuple((chain.places[x.inputs[0]], chain.places[y]) for x, y in _pairs(node))
            outputs.append((("sum", pairs, node.attrs["scale"]), node.type.shape))
        else:
            outputs.append((("value", chain.places[node]), node.type.shape))
    return build("row-chain", *inputs, program=tuple(chain.program), outputs=tuple(outputs), of=of)



"""Product nodes of a graph joined: sums of products with one target become one output, and gradients of one product over the same
cotangents share launches, where no path leads from one to another. Weights that are a matrix product which only products read go to the
kernels as its two factors, and never reach memory, where they are large and not made in parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.backends.cuda.cartesian.config import Config, config
from sexpgpu.backends.cuda.cartesian.lanes import suits
from sexpgpu.backends.cuda.cartesian.product import of_node
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, constant
from sexpgpu.ops.cartesian.product import SLOTS
from sexpgpu.passes.products import tall

INNER = 64  # columns of hidden rows whose fragments a thread has registers for
INSIDE = 4 << 30  # bytes of weights of edges, that are a product of two factors, beyond which they are made inside the tensor product, if not in parts
PRODUCTS = ("tensor-product", "tensor-product-grad")


@dataclass(eq=False)
class _Sum:
    """One output to be: the node it stands for, the products whose sum it is, and what else is added."""

    node: Node
    products: list[Node]
    others: list[Node] = field(default_factory=list)

    @property
    def target(self) -> str:
        return _target(self.products[0])


@dataclass(eq=False)
class _Group:
    members: list[_Sum]
    needs: int = 0  # bits of the outputs that its operands depend on
    own: int = 0


def join(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """`results` with joint nodes in place of the products that may share a launch."""
    order = postorder(results.values())
    if not any(n.op in PRODUCTS for n in order):
        return dict(results)
    readers = Counter(x for n in order for x in set(n.inputs)) + Counter(set(results.values()))
    twice = {x for n in order for x in n.inputs if n.inputs.count(x) > 1}
    sums = _sums(order, readers, twice)
    groups = _groups(order, sums)
    factored = {x: pair for x, pair in _factored(order, results, config()).items() if x.type.bytes > INSIDE and not _in_parts(x)}
    return _rebuilt(results, groups, factored, origins)


def _factored(order: list[Node], results: Mapping[str, Node], settings: Config) -> dict[Node, tuple[Node, Node]]:
    """Matrix products, also with a bias, that are read as weights alone by products which can take their factors: each with its two."""
    fit = {n for n in order if n.op in PRODUCTS and _takes_factors(n, settings)}
    found: dict[Node, tuple[Node, Node]] = {}
    for n in fit:
        for slot, x in _filled(n).items():
            pair = _factors(x) if slot == "weights" and x not in found else None
            if pair is not None:
                found[x] = pair
    for x in results.values():
        found.pop(x, None)
    for n in order:
        read = [x for slot, x in _filled(n).items() if slot != "weights"] if n in fit else n.inputs
        for x in read:
            found.pop(x, None)
    return found


def _in_parts(x: Node) -> bool:
    """Whether weights are made for some edges after others (`parts.py`), which is faster."""
    return x.op == "matmul" and x.type.dtype == "f32" and tall(x.type.shape, [x.inputs[0].type.shape[1]])


def _factors(x: Node) -> tuple[Node, Node] | None:
    """[rows inner] and [inner columns] whose product a node is. A bias is one more row of the second, beside a column of ones."""
    bias: Node | None = None
    if x.op == "matmul-bias":
        left, right, bias = x.inputs
    elif x.op == "matmul":
        left, right = x.inputs
    elif x.op == "+" and len(x.inputs) == 2 and {i.op for i in x.inputs} >= {"matmul"}:
        number = 0 if x.inputs[0].op == "matmul" else 1
        (left, right), bias = x.inputs[number].inputs, x.inputs[1 - number]
    else:
        return None
    dtype = x.type.dtype
    if left.type.rank != 2 or right.type.rank != 2 or left.type.dtype != dtype or right.type.dtype != dtype or left.type.shape[1] > INNER:
        return None
    if bias is None:
        return left, right
    if bias.type.shape != right.type.shape[1:] or bias.type.dtype != dtype:
        return None
    ones = build("broadcast", constant(1.0, dtype), shape=(left.type.shape[0], 1), batch=left.type.batch)
    return build("concat", left, ones, axis=1), build("concat", right, build("reshape", bias, shape=(1, *bias.type.shape)), axis=0)


def _takes_factors(node: Node, settings: Config) -> bool:
    product = of_node(node)[0]
    form = product.form
    return settings.scatter == "csr" and max(form.first, form.second, form.top) <= settings.l_max and suits(product)


def _target(node: Node) -> str:
    return "result" if node.op == "tensor-product" else str(node.attrs["target"])


def _filled(node: Node) -> dict[str, Node]:
    return dict(zip((s for s in SLOTS if s != _target(node)), node.inputs, strict=False))


def _key(node: Node) -> tuple[Any, ...]:
    """Products of one form over one graph have equal keys."""
    types = {s: x.type for s, x in _filled(node).items()} | {_target(node): node.type}
    a = node.attrs
    return node.inputs[3:], a["paths"], a["reduce-paths"], a["l-max"], *((types[s].dtype, types[s].shape) for s in SLOTS)


def _sums(order: list[Node], readers: Counter[Node], twice: set[Node]) -> list[_Sum]:
    """The outputs: sums of two or more products of one key and target, and products alone."""

    def inner(node: Node, shape: tuple[int, ...]) -> bool:
        return readers[node] == 1 and node not in twice and node.type.shape == shape

    roots = [n for n in order if n.op == "+"]
    below = {x for n in roots for x in n.inputs if x.op == "+" and inner(x, n.type.shape)}
    found, taken = [], set()
    for root in roots:
        if root in below:
            continue
        terms, stack = [], list(reversed(root.inputs))
        while stack:
            x = stack.pop()
            if x.op == "+" and inner(x, root.type.shape):
                stack += reversed(x.inputs)
            else:
                terms.append(x)
        by_key: dict[Any, list[Node]] = defaultdict(list)
        for x in terms:
            if x.op in PRODUCTS and inner(x, root.type.shape):
                by_key[_target(x), _key(x)].append(x)
        best = max((group for terms_of in by_key.values() for group in _akin(terms_of)), key=len, default=[])
        if len(best) > 1:
            found.append(_Sum(root, best, [x for x in terms if x not in best]))
            taken |= set(best)
    return found + [_Sum(n, [n]) for n in order if n.op in PRODUCTS and n not in taken]


def _akin(terms: list[Node]) -> list[list[Node]]:
    """Products in groups that share features, weights or cotangents, directly or by way of others. Those of two layers, which share an edge's attributes alone,
    would walk the edges once more for their sum, where each is one more output of its own layer's gradient."""
    found: list[tuple[set[tuple[str, Node]], list[Node]]] = []
    for term in terms:
        own = {(slot, x) for slot, x in _filled(term).items() if slot != "b"}
        members = [term]
        apart = []
        for known, group in found:
            if known & own:
                own, members = own | known, group + members
            else:
                apart.append((known, group))
        found = [*apart, (own, members)]
    return [group for _, group in found]


def _groups(order: list[Node], sums: list[_Sum]) -> list[_Group]:
    """Gradients with one key and one set of cotangents together, as long as none depends on another."""
    bits = {s.node: 1 << i for i, s in enumerate(sums)}
    below: dict[Node, int] = {}
    for node in order:
        mask = bits.get(node, 0)
        for x in node.inputs:
            mask |= below[x]
        below[node] = mask
    singles = []
    for s in sums:
        needs = 0
        for p in s.products:
            for x in p.inputs:
                needs |= below[x]
        singles.append(_Group([s], needs, bits[s.node]))
    done: list[_Group] = []
    by_key: dict[Any, list[_Group]] = defaultdict(list)
    for group in singles:
        s = group.members[0]
        if s.target == "result":
            done.append(group)
            continue
        key = _key(s.products[0]), frozenset(_filled(p)["result"] for p in s.products)
        home = next((g for g in by_key[key] if all(m.target != s.target for m in g.members) and _may(g, group, singles, done)), None)
        if home is None:
            by_key[key].append(group)
            done.append(group)
            continue
        home.members.append(s)
        home.needs |= group.needs
        home.own |= group.own
        for other in [*done, *singles]:
            if other.needs & home.own:
                other.needs |= home.needs
    return done


def _may(home: _Group, new: _Group, *all_: list[_Group]) -> bool:
    """Whether the two may run together: no way leads out of one of them and back into the other."""
    needs, own = home.needs | new.needs, home.own | new.own
    if needs & own:
        return False
    return not any(g.needs & own and needs & g.own for groups in all_ for g in groups if g is not home and g is not new)


def _rebuilt(results: Mapping[str, Node], groups: list[_Group], factored: Mapping[Node, tuple[Node, Node]], origins: Origins | None) -> dict[str, Node]:
    home: dict[Node, tuple[_Group, int]] = {}
    operands: dict[int, list[tuple[str, Node]]] = {}
    for group in groups:
        alone = len(group.members) == 1 and len(group.members[0].products) == 1
        if alone and not any(x in factored for x in group.members[0].products[0].inputs):
            continue
        seen: dict[tuple[str, Node], None] = {}
        for s in group.members:
            home[s.node] = group, group.members.index(s)
            for p in s.products:
                for slot, x in _filled(p).items():
                    seen.setdefault((slot, x))
        operands[id(group)] = list(seen)
    done: dict[Node, Node] = {}
    stack = list(results.values())
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        found = home.get(node)
        below = list(node.inputs)
        if found is not None:
            group, number = found
            given = [x for _, x in operands[id(group)]]
            below = [y for x in given for y in factored.get(x, (x,))] + list(group.members[0].products[0].inputs[3:]) + group.members[number].others
        waiting = [b for b in below if b not in done]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        with nullcontext() if origins is None else origins.at(origins.of(node)):
            new = _made(node, done) if found is None else _joint(*found, operands[id(found[0])], factored, done)
        if origins is not None and new is not node and node in origins.table:
            origins.add(new, origins.of(node))
        done[node] = new
    return {name: done[node] for name, node in results.items()}


def _made(node: Node, done: Mapping[Node, Node]) -> Node:
    inputs = tuple(done[x] for x in node.inputs)
    return node if inputs == node.inputs else build(node.op, *inputs, **node.attrs)


def _joint(group: _Group, number: int, operands: list[Any], factored: Mapping[Node, tuple[Node, Node]], done: Mapping[Node, Node]) -> Node:
    places = {key: i for i, key in enumerate(operands)}
    outputs = []
    for s in group.members:
        uses = tuple(tuple(places[slot, x] for slot, x in _filled(p).items() if slot in SLOTS) for p in s.products)
        outputs.append((s.target, s.products[0].type.shape, s.products[0].type.batch, uses))
    first = group.members[0].products[0]
    pairs = [factored.get(x, (x,)) for _, x in operands]
    inputs = [done[p[0]] for p in pairs] + [done[p[1]] for p in pairs if len(p) > 1] + [done[x] for x in first.inputs[3:]]
    inner = tuple(p[0].type.shape[1] if len(p) > 1 else 0 for p in pairs)
    keep = {k: first.attrs[k] for k in ("l-max", "paths", "reduce-paths")}
    new = build("tensor-product-joint", *inputs, slots=tuple(slot for slot, _ in operands), outputs=tuple(outputs), of=number,
                inner=inner if any(inner) else (), **keep)
    for other in group.members[number].others:
        new = build("+", done[other], new)
    return new

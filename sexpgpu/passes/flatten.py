"""The update of many parameters as that of one long vector.

An optimizer is written for one parameter, so the update's graph has its expression once a parameter. Where the
expressions of several are the same up to the parameter, and each acts element by element, they are one expression over
one vector, in which the parameters lie one after another; so do their gradients and each kind of optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.ir import DTYPES, Node, postorder
from sexpgpu.ops import build
from sexpgpu.ops.pointwise import POINTWISE
from sexpgpu.passes.rewrite import rebuild

ALIGN = 64  # bytes: what torch aligns a tensor to, so that sums go in the same order wherever a parameter lies


Owners = Mapping[tuple[str, str], tuple[str, str]]
StandsFor = Callable[[Node], tuple[str, str]]


@dataclass
class Group:
    """Parameters whose update is one expression. `roles`: the results' and leaves' kinds, such as `opt/m`.

    offsets: name -> first element in each vector of the group; `size`: elements of a vector, gaps included, a multiple of
    `shares`: the update is of one share of it. `kind`: what their caller keeps apart.
    """

    number: int
    names: list[str]
    shapes: dict[str, tuple[int, ...]]
    roles: list[str]
    dtype: str
    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0
    shares: int = 1
    kind: str = ""

    @property
    def share(self) -> int:
        return self.size // self.shares

    def place(self) -> None:
        step = ALIGN // DTYPES[self.dtype]
        for name in self.names:
            count = 1
            for n in self.shapes[name]:
                count *= n
            self.offsets[name] = self.size
            self.size += -(-count // step) * step
        self.size += -self.size % (step * self.shares)

    def vector(self, role: str) -> str:
        """The name of one of its vectors: as a parameter path, it cannot be a user's."""
        return f"{role}//{self.number}"


@dataclass
class Flat:
    """results: the update's, those of grouped parameters as vectors named `Group.vector`. homes: result that replaces a
    leaf's value -> that leaf, for all of them; gradients: name or vector -> its leaf."""

    results: dict[str, Node]
    groups: list[Group]
    homes: dict[str, Node]
    gradients: dict[str, Node]

    def arrange(self, order: Callable[[str], int]) -> None:
        """Lays the parameters of each vector by this number, and of equal ones as they lay. Graphs do not know where they lie."""
        for group in self.groups:
            group.names.sort(key=order)
            group.offsets, group.size = {}, 0
            group.place()
        grouped = {group.vector("gradient") for group in self.groups}
        self.gradients = dict(sorted(self.gradients.items(), key=lambda item: -1 if item[0] in grouped else order(item[0])))


class _Update:
    """One update's graph, looked at."""

    def __init__(self, results: Mapping[str, Node], owners: Owners, stands_for: StandsFor):
        """owners: what a leaf stands for -> (role, parameter's name)."""
        self.results, self.norm = results, results["gradient-norm"]
        self.order = postorder(results.values())
        self.leaf: dict[Node, tuple[str, str]] = {}
        self.owned: dict[Node, frozenset[str]] = {}
        for node in self.order:
            found = owners.get(stands_for(node)) if not node.inputs else None
            if found is not None:
                self.leaf[node] = found
                self.owned[node] = frozenset((found[1],))
            elif node is self.norm:
                self.owned[node] = frozenset()
            else:
                self.owned[node] = frozenset().union(*(self.owned[i] for i in node.inputs))
        self.keys: dict[Node, Any] = {}
        self.words: dict[Any, int] = {}

    def key(self, name: str, shape: tuple[int, ...], results: Mapping[str, Node]) -> tuple | None:
        """Equal for parameters of one expression; None if it is not element by element."""
        for node in self._until_norm(results.values()):
            if node in self.keys:
                continue
            word: tuple
            if not self.owned[node]:
                word = ("shared", id(node))
                if node.type.shape:
                    return None
            elif node in self.leaf:
                word = ("leaf", self.leaf[node][0])
            else:
                attrs = {k: v for k, v in node.attrs.items() if k not in ("shape", "batch")}
                word = (node.op, tuple(sorted(attrs.items())), tuple(self.keys.get(i) for i in node.inputs))
                spread = node.op == "broadcast" and not node.inputs[0].type.shape
                if not (node.op in POINTWISE or node.op in ("variable", "stop-gradient") or spread):
                    return None
            if self.owned[node] and (self.owned[node] != {name} or node.type.shape != shape):
                return None
            self.keys[node] = self.words.setdefault((word, node.type.dtype), len(self.words))
        return tuple((role, self.keys[node]) for role, node in results.items())

    def _until_norm(self, roots: Iterable[Node]) -> list[Node]:
        """Operands before users; what the gradient's norm is made of left out."""
        found: dict[Node, None] = {}
        stack = [(root, False) for root in roots]
        while stack:
            node, expanded = stack.pop()
            if expanded or node is self.norm:
                found.setdefault(node)
            elif node not in found:
                stack.append((node, True))
                stack.extend((i, False) for i in node.inputs if i not in found)
        return list(found)

    def after_norm(self) -> set[Node]:
        """The norm and what depends on it."""
        after: set[Node] = set()
        for node in self.order:
            if node is self.norm or any(i in after for i in node.inputs):
                after.add(node)
        return after

    def norm_terms(self) -> tuple[list[Node], set[Node]]:
        """Σg² of each parameter in the norm, and the nodes that do nothing but sum them or within them."""
        terms, sums, stack = [], set(), [self.norm.inputs[0]]
        while stack:
            node = stack.pop()
            if node.op == "+":
                stack.extend(reversed(node.inputs))
            else:
                terms.append(node)
            if node.op in ("+", "sum"):
                sums.add(node)
        return terms, sums


def flatten(
    results: Mapping[str, Node], names: Sequence[str], owners: Owners, stands_for: StandsFor, shares: int = 1, kind: Callable[[str], str] = lambda name: "",
) -> Flat:  # fmt: skip
    """The update `results` with one vector for the parameters of equal expressions. Numbers change by the order of the
    sum in the gradient's norm alone.

    `shares` above 1: of each vector one share, and the gradient's norm, which needs all of them, is the input `gradient-norm`. `kind`:
    parameters of two kinds share no vector.
    """
    update = _Update(results, owners, stands_for)
    own: dict[str, dict[str, Node]] = {name: {} for name in names}
    for result, node in results.items():
        for role, name in _split(result, own):
            own[name][role] = node
    shapes = {name: node.type.shape for node, (role, name) in update.leaf.items() if role == "gradient"}
    groups: dict[tuple, Group] = {}
    for name in names:
        if name not in shapes:
            continue
        leaves = {role: leaf for leaf, (role, owner) in update.leaf.items() if owner == name}
        key = update.key(name, shapes[name], own[name] | {f"leaf {role}": leaf for role, leaf in leaves.items()})
        if key is None:
            continue
        dtype = own[name]["param"].type.dtype
        group = groups.setdefault((key, kind(name)), Group(len(groups), [], {}, list(own[name]), dtype, shares=shares, kind=kind(name)))
        group.names.append(name)
        group.shapes[name] = shapes[name]
    for group in groups.values():
        group.place()
    return _rebuilt(update, own, list(groups.values()))


def _split(result: str, own: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(role, parameter) of a result `param/<p>`, `ema/<p>` or `opt/<slot>/<p>`."""
    kind, _, rest = result.partition("/")
    if kind in ("param", "ema") and rest in own:
        return [(kind, rest)]
    slot, _, name = rest.partition("/")
    return [(f"opt/{slot}", name)] if kind == "opt" and name in own else []


def _rebuilt(update: _Update, own: Mapping[str, dict[str, Node]], groups: list[Group]) -> Flat:
    grouped = {name: group for group in groups for name in group.names}
    first = {group.names[0]: group for group in groups}
    vectors: dict[Node, Node] = {}
    homes: dict[str, Node] = {}
    gradients: dict[str, Node] = {}
    for leaf, (role, name) in update.leaf.items():
        if name in first:
            group = first[name]
            attrs = {**leaf.attrs, "path": group.vector(role), "shape": (group.share,)}
            vectors[leaf] = build(leaf.op, **attrs)
            (gradients if role == "gradient" else homes)[group.vector(role)] = vectors[leaf]
        elif name not in grouped:
            (gradients if role == "gradient" else homes)[name if role == "gradient" else f"{role}/{name}"] = leaf
    new: dict[Node, Node] = {}
    late, (terms, sums) = update.after_norm(), update.norm_terms()
    for node in update.order:
        if node not in late and node not in sums:
            _renew(update, node, new, vectors, grouped, first)
    if groups and groups[0].shares > 1:
        new[update.norm] = build("input", name="gradient-norm", dtype=update.norm.type.dtype, shape=(), batch=False)
    else:
        new[update.norm] = _norm(update, terms, new, grouped, first)
    for node in update.order:
        if node in late and node is not update.norm:
            _renew(update, node, new, vectors, grouped, first)
    results: dict[str, Node] = {}
    for result, node in update.results.items():
        found = _split(result, own)
        if not found or found[0][1] not in grouped:
            results[result] = new[node]
        elif found[0][1] in first:
            results[first[found[0][1]].vector(found[0][0])] = new[node]
    return Flat(results, groups, {name: leaf for name, leaf in homes.items() if name in results}, gradients)


def _renew(
    update: _Update,
    node: Node,
    new: dict[Node, Node],
    vectors: Mapping[Node, Node],
    grouped: Mapping[str, Group],
    first: Mapping[str, Group],
) -> None:
    """The node over renewed operands: over vectors where it belongs to the first parameter of a group; the others' go."""
    owners = update.owned[node]
    if any(name in grouped and (name not in first or len(owners) > 1) for name in owners):
        return
    if node in vectors:
        new[node] = vectors[node]
    elif node.op == "broadcast" and owners and owners <= first.keys():
        new[node] = new[node.inputs[0]]
    else:
        new[node] = rebuild(node, tuple(new[i] for i in node.inputs))


def _norm(
    update: _Update,
    terms: Sequence[Node],
    new: Mapping[Node, Node],
    grouped: Mapping[str, Group],
    first: Mapping[str, Group],
) -> Node:
    """√Σg² with one sum a vector: of the sums in the norm, those of the other parameters of a group go."""
    total = None
    for term in terms:
        (name,) = update.owned[term]
        if name in grouped and name not in first:
            continue
        square = new[term.inputs[0] if term.op == "sum" else term]
        value = build("sum", square)
        total = value if total is None else build("+", total, value)
    assert total is not None
    return build("sqrt", total)

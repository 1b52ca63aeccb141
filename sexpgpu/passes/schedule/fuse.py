"""Fusion: which values share a kernel, which are kept in memory, and which are computed again where they are used.

A *unit* is a value that a kernel must produce as such: every reduction, and every pointwise value or copy that a
call, a result, or too many readers need. Every other pointwise value is computed inside its readers. Units join one kernel
when they run over the same elements in the same order, when one reads the other only at the element it is at, and when no path
leads from the kernel through another launch back into it. A greedy sweep in topological order, the most shared bytes first:
what Inductor's scheduler does (Ansel et al., "PyTorch 2", ASPLOS 2024, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod

from sexpgpu.ir import Node, postorder
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND
from sexpgpu.passes.schedule.index import Expr, Index, Var, lift, offset, unravel
from sexpgpu.passes.schedule.memory import in_turn
from sexpgpu.passes.schedule.views import CHOOSING, PLAIN, VIEWS, aligned, data, picked, place_of, strided, through

TOGETHER = frozenset({"matmul-gelu", "matmul-rows", "attend-grad-packed"})  # ops of which one call gives every `:of` over the same operands
REDUCTIONS = frozenset({"sum", "reduce-max", "reduce-min", "reduce-all", "reduce-any", "prod"})
INLINE_WEIGHT = 240  # operations an element that may be repeated instead of read
INLINE_NODES = 192  # nodes of one expression
MAX_READS = 40
AGAIN = 1.6  # a value is computed again rather than kept if that reads at most so many times its bytes
ROW = 4096  # elements that one program adds up at once
PERSISTENT = 16384  # columns that one program holds at once
ACCUMULATED = 8192  # columns over which a program keeps running sums


@dataclass(frozen=True)
class Operand:
    """A view of a kept tensor that a call takes: sizes, strides and start in elements."""

    base: Node
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass(eq=False)
class Call:
    """An op that a library computes. `operands` in the op's order; `more`: other results of the same call; `again`: result -> what
    stands for it in a second run."""

    node: Node
    operands: tuple[Operand, ...]
    more: tuple[Node, ...] = ()
    again: Mapping[Node, Node] = field(default_factory=dict)

    @property
    def reads(self) -> list[Node]:
        return list(dict.fromkeys(o.base for o in self.operands))

    @property
    def stores(self) -> tuple[Node, ...]:
        return tuple(self.again.get(n, n) for n in (self.node, *self.more))


@dataclass(eq=False)
class Kernel:
    """One fused kernel over rows x columns elements (`rows` 1: flat).

    units: in topological order; stores: those that memory keeps; reads: kept tensors of other launches, and leaves. own: stored value
    -> those of them that its elements are computed of, and that the kernel reads nowhere else. again: value of the kernel's text
    -> what stands for it here, where layers run again; `own` is of the text.
    """

    rows: int
    columns: int
    units: tuple[Node, ...]
    stores: tuple[Node, ...] = ()
    reads: list[Node] = field(default_factory=list)
    inline: frozenset[Node] = frozenset()
    own: Mapping[Node, frozenset[Node]] = field(default_factory=dict)
    again: Mapping[Node, Node] = field(default_factory=dict)


Launch = Call | Kernel


@dataclass(frozen=True)
class Schedule:
    """Launches in order; `aliases`: results that are leaves, so that nothing computes them."""

    launches: tuple[Launch, ...]
    results: Mapping[str, Node]
    kept: frozenset[Node]


class _Group:
    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        self.rows: int | None = None
        self.units: list[Node] = []
        self.reads: dict[Node, int] = {}
        self.ancestors = 0

    @property
    def columns(self) -> int:
        return self.size // (self.rows or 1)


def reduced_shape(unit: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a reduction: axes kept and axes reduced, without those of size 1."""
    x, axes = unit.inputs[0].type, unit.attrs["axis"]
    kept = tuple(a for a in range(x.rank) if a not in axes and x.shape[a] != 1)
    return kept, tuple(a for a in axes if x.shape[a] != 1)


def form(unit: Node, point: bool) -> str:
    """How a unit runs: `point`, or a reduction over the `row` (columns reduced), the `column` (rows reduced) or `total`."""
    if point:
        return "point"
    kept, reduced = reduced_shape(unit)
    if not kept:  # a short one is a row, so that what is computed from it may follow in its kernel
        return "row" if unit.inputs[0].type.size <= ROW else "total"
    return "column" if max(reduced) < min(kept) else "row"


def spans(unit: Node, point: bool) -> tuple[int | None, int]:
    """(rows, elements) that a unit runs over; rows None: any."""
    if point:
        return None, unit.type.size
    x = unit.inputs[0].type.shape
    kept, reduced = reduced_shape(unit)
    how, size = form(unit, False), prod(x)
    if how == "total":
        return None, size
    return (prod(x[a] for a in kept) if how == "row" else prod(x[a] for a in reduced)), size


def element(unit: Node, point: bool, rows: int, columns: int, r: Expr, c: Expr) -> tuple[Node, Index]:
    """What a unit evaluates at row r and column c of a kernel, and the index there. A point of `rows` elements stands
    once a row."""
    if point:
        place = r * columns + c if unit.type.size == rows * columns else r
        return unit, unravel(place, unit.type.shape)
    x = unit.inputs[0]
    kept, reduced = reduced_shape(unit)
    how = form(unit, False)
    if how == "total":
        return x, unravel(r * columns + c, x.type.shape)
    outer, inner = (kept, reduced) if how == "row" else (reduced, kept)
    index = [Expr()] * x.type.rank
    for axes, place in ((outer, r), (inner, c)):
        for axis, i in zip(axes, unravel(place, tuple(x.type.shape[a] for a in axes)), strict=True):
            index[axis] = i
    return x, tuple(index)


class Fuser:
    """One run of the pass over one graph; `results` may name the same node more than once. `given`: values that memory holds
    already, which nothing computes again."""

    def __init__(self, results: Mapping[str, Node], given: Set[Node] = frozenset()):
        self.results, self.given = results, given
        self.order = _until(results.values(), given)
        self.ops = table()
        self.kinds = {n: "leaf" if n in given else self._kind(n) for n in self.order}
        self.kept: set[Node] = {n for n in self.order if n in given}
        self.weights: dict[Node, tuple[int, int]] = {}
        self.loads: dict[Node, dict[Node, int]] = {}
        self._scalars: list[_Group] = []
        self._again = any(n.op == "again" for n in self.order)
        self._waits: dict[Node, list[Node]] = {}
        self._places: dict[tuple[Node, int, int], list[tuple[Node, Expr]]] = {}  # what a unit reads, and where
        self._choose()

    # --- which values are units ---

    def _kind(self, node: Node) -> str:
        if node.op in BOUND or node.op == "constant":
            return "leaf" if node.op != "constant" else "constant"
        if node.op in VIEWS:
            return "view"
        if node.op in REDUCTIONS and node.inputs[0].type.size and reduced_shape(node)[1]:
            return "reduction"
        if node.op in REDUCTIONS and node.inputs[0].type.size:
            return "copy"
        if self.ops[node.op].lowering.kind == "pointwise" or node.op == "iota":
            return "point"
        return "call"

    def _inputs(self, node: Node) -> tuple[Node, ...]:
        return () if node in self.given else data(node)

    def _consumers(self) -> dict[Node, list[Node | None]]:
        """Value -> what reads it through views; None stands for a result."""
        found: dict[Node, list[Node | None]] = {n: [] for n in self.order}
        results = set(self.results.values())
        for node in reversed(self.order):
            own: list[Node | None] = list(found[node])
            if node in results:
                own.append(None)
                found[node] = own
            passed = own if self.kinds[node] == "view" else [node]
            for operand in dict.fromkeys(self._inputs(node)):
                found[operand] += [c for c in passed if c not in found[operand]]
        return found

    def _choose(self) -> None:
        consumers = self._consumers()
        results = set(self.results.values())
        calls = [n for n in self.order if self.kinds[n] == "call"]
        for node in self.order:
            if self.kinds[node] in ("reduction", "call"):
                self.kept.add(node)
            elif node in results and self.kinds[node] not in ("leaf",):
                self.kept.add(node)
        for call in calls:
            for operand in call.inputs:
                found = strided(operand, self.kept)
                base = operand if found is None else found[0]
                if self.kinds[base] not in ("leaf",):
                    self.kept.add(base)
        for node in self.order:
            self._weigh(node)
            if node in self.kept or self.kinds[node] not in ("point", "copy"):
                continue
            readers = consumers[node]
            loaded = sum(self.loads[node].values())
            flops, count = self.weights[node]
            heavy = flops > INLINE_WEIGHT or count > INLINE_NODES
            if heavy or (len(readers) > 1 and loaded > AGAIN * node.type.bytes):
                self.kept.add(node)
                self._weigh(node)

    def _weigh(self, node: Node) -> None:
        """Bytes that one evaluation of a value over its shape reads, and its operations an element."""
        loads: dict[Node, int] = {}
        flops, count = 1, 1
        for operand in self._inputs(node):
            if operand in self.kept or self.kinds[operand] == "leaf":
                loads[operand] = min(operand.type.bytes, max(node.type.size, operand.type.size if self.kinds[node] == "reduction" else 0) * _width(operand))
                continue
            for base, size in self.loads[operand].items():
                loads[base] = min(base.type.bytes, max(loads.get(base, 0), min(size, node.type.size * _width(base))))
            more, nodes = self.weights[operand]
            flops, count = flops + more, count + nodes
        if self.kinds[node] == "point":
            cost = self.ops[node.op].cost(node)[0]
            flops += max(1, cost // max(1, node.type.size))
        self.loads[node], self.weights[node] = loads, (flops, count)

    # --- what a unit reads ---

    def reads(self, node: Node, index: Index, first: bool = True, seen: set | None = None) -> Iterator[tuple[Node, Expr]]:
        """(kept tensor or leaf, place) that the value of `node` at `index` depends on."""
        seen = set() if seen is None else seen
        if (node, index, first) in seen:
            return
        seen.add((node, index, first))
        if not first and (node in self.kept or self.kinds[node] == "leaf"):
            yield node, place_of(node, index)
            return
        for operand, at in self.operands(node, index):
            yield from self.reads(operand, at, False, seen)

    def operands(self, node: Node, index: Index) -> list[tuple[Node, Index]]:
        """The operands of a value and the elements of them that its element at `index` needs."""
        if self.kinds[node] == "leaf":
            return [(node, index)] if node in self.kept else []
        if node.op in PLAIN:
            return [through(node, index)]
        if node.op in CHOOSING:
            return self._chosen(node, index)
        if self.kinds[node] == "copy":
            return [(node.inputs[0], unravel(offset(index, node.type.shape), node.inputs[0].type.shape))]
        if node.op == "one-hot":
            return [(node.inputs[0], index[:-1])]
        return [(x, aligned(index, x.type.shape)) for x in node.inputs]

    def _chosen(self, node: Node, index: Index) -> list[tuple[Node, Index]]:
        if node.op == "pad":
            return [(node.inputs[0], padded(node, index))]
        if node.op == "concat":
            return [(x, at) for x, at, _ in joined(node, index)]
        x, at, places, where = picked(node, index, None)
        return [(places, where), (x, at)]

    # --- groups ---

    def run(self) -> Schedule:
        groups: list[_Group] = []
        calls: dict[Node, Call] = {}
        home: dict[Node, int] = {}  # kept node -> number of its launch
        launches: list[_Group | Call] = []
        ancestors: list[int] = []
        together: dict[tuple[object, ...], Call] = {}
        touching: dict[Node, list[_Group]] = {}
        for node in self.order:
            if node not in self.kept or node in self.given:
                continue
            if self.kinds[node] == "call" and parts_of(node) in together:
                call = together[parts_of(node)]
                call.more += (node,)
                home[node] = home[call.node]
                continue
            if self.kinds[node] == "call":
                call = calls[node] = Call(node, tuple(self._operand(x) for x in node.inputs))
                if node.op in TOGETHER:
                    together[parts_of(node)] = call
                number = len(launches)
                launches.append(call)
                home[node] = number
                ancestors.append(self._above([*call.reads, *self._gates(node)], home, ancestors))
                continue
            found = self._join(node, touching, home, ancestors)
            if found is None:
                rows, size = spans(node, self._point(node))
                found = _Group(len(launches), size)
                found.rows = rows
                if size == 1:
                    self._scalars.append(found)
                groups.append(found)
                launches.append(found)
                ancestors.append(0)
            self._add(found, node, touching, home, ancestors)
        self._sink(launches, home)
        return self._finish(launches, home)

    def _sink(self, launches: list[_Group | Call], home: dict[Node, int]) -> None:
        """Moves a pointwise unit that one other kernel alone reads into that kernel, where this spares memory traffic."""
        results = set(self.results.values())
        own = {u: self._bases(u, g) for g in launches if isinstance(g, _Group) for u in g.units}
        readers: dict[Node, set[int]] = {}
        for number, launch in enumerate(launches):
            for base in launch.reads if isinstance(launch, Call) else [b for u in launch.units for b in own[u]]:
                readers.setdefault(base, set()).add(number)
        for unit in reversed(self.order):
            if unit not in own or not self._point(unit) or unit in results or len(readers.get(unit, ())) != 1:
                continue
            source, target = launches[home[unit]], launches[next(iter(readers[unit]))]
            if source is target or not isinstance(target, _Group) or not isinstance(source, _Group) or not self._takes(target, unit):
                continue
            others = {b for u in source.units if u is not unit for b in own[u]}
            new = {b for u in target.units for b in own[u]}
            gain = 2 * unit.type.bytes + sum(b.type.bytes for b in own[unit] if b not in others)
            if gain <= sum(b.type.bytes for b in own[unit] if b not in new) or len(new | set(own[unit])) + len(target.units) >= MAX_READS:
                continue
            source.units.remove(unit)
            target.units = [unit, *target.units]
            home[unit] = target.number
            own[unit] = self._bases(unit, target)
            for group in (source, target):
                group.reads = {b: b.type.bytes for u in group.units for b in own[u]}
            for base in own[unit]:
                readers.setdefault(base, set()).add(target.number)
                if base not in source.reads:
                    readers[base].discard(source.number)

    def _gates(self, unit: Node) -> list[Node]:
        """Kept values that must be there before the unit runs though it does not read them: what makes `again` late."""
        if not self._again:
            return []
        if unit not in self._waits:
            found: dict[Node, None] = {}
            stack, seen = [(x, False) for x in unit.inputs], set()
            while stack:
                node, behind = stack.pop()  # behind: a gate
                if (node, behind) in seen:
                    continue
                seen.add((node, behind))
                if node in self.kept:
                    if behind and node not in self.given:
                        found.setdefault(node)
                    continue
                stack += [(x, behind or (node.op == "again" and i == 1)) for i, x in enumerate(node.inputs)]
            self._waits[unit] = list(found)
        return self._waits[unit]

    def _bases(self, unit: Node, group: _Group) -> list[Node]:
        return list(dict.fromkeys(base for base, _ in self._unit_reads(unit, group.rows or 1, group.columns)))

    def _takes(self, group: _Group, unit: Node) -> bool:
        """Whether the unit runs over the group's elements, and each of the group reads it at its own."""
        shape = self._shape_for(group, unit)
        if shape is None or shape != (group.rows or 1, group.columns):
            return False
        r, c = lift(Var("r", shape[0])), lift(Var("c", shape[1]))
        here = r if unit.type.size == shape[0] and unit.type.size != group.size else r * shape[1] + c
        return all(place == here for u in group.units for base, place in self._unit_reads(u, *shape) if base is unit)

    def _point(self, node: Node) -> bool:
        return self.kinds[node] != "reduction"

    def _operand(self, x: Node) -> Operand:
        found = strided(x, self.kept | {n for n in (x,) if self.kinds[n] == "leaf"})
        assert found is not None, x
        return Operand(found[0], x.type.shape, found[1], found[2])

    def _above(self, reads: Iterable[Node], home: Mapping[Node, int], ancestors: list[int]) -> int:
        mask = 0
        for base in reads:
            if base in home:
                mask |= (1 << home[base]) | ancestors[home[base]]
        return mask

    def _unit_reads(self, node: Node, rows: int, columns: int) -> list[tuple[Node, Expr]]:
        key = node, rows, columns
        if key not in self._places:
            r, c = lift(Var("r", rows)), lift(Var("c", columns))
            point = self._point(node)
            body, index = element(node, point, rows, columns, r, c)
            self._places[key] = list(self.reads(body, index, point))
        return self._places[key]

    def _shape_for(self, group: _Group, node: Node) -> tuple[int, int] | None:
        """Rows and columns of the group once the unit is in it, or None."""
        point = self._point(node)
        rows, size = spans(node, point)
        if point and group.rows is not None and size == group.rows and size != group.size:
            return group.rows, group.columns
        if size != group.size:
            return None
        if rows is None or group.rows is None or rows == group.rows:
            fixed = group.rows if rows is None else rows
            return (1, size) if fixed is None else (fixed, size // fixed)
        return None

    def _join(self, node: Node, touching: Mapping[Node, list[_Group]], home: Mapping[Node, int], ancestors: list[int]) -> _Group | None:
        """The group that the unit shares the most bytes with, among those it may join."""
        point = self._point(node)
        rows, size = spans(node, point)
        own = self._unit_reads(node, *((1, size) if rows is None else (rows, size // rows)))
        bases = dict.fromkeys(base for base, _ in own)
        candidates: dict[_Group, int] = {}
        for base in bases:
            for group in touching.get(base, ()):
                candidates[group] = candidates.get(group, 0) + base.type.bytes
        if size == 1 and point:  # scalars share a launch whatever they read
            for group in self._scalars:
                candidates.setdefault(group, 0)
        for group in sorted(candidates, key=lambda g: (-candidates[g], -g.number)):
            if self._fits(group, node, bases, home, ancestors):
                return group
        return None

    def _fits(self, group: _Group, node: Node, bases: Iterable[Node], home: Mapping[Node, int], ancestors: list[int]) -> bool:
        shape = self._shape_for(group, node)
        if shape is None:
            return False
        if len(group.reads.keys() | set(bases)) + len(group.units) >= MAX_READS:
            return False
        bit = 1 << group.number
        for base in (*bases, *self._gates(node)):
            if base in home and home[base] != group.number and ancestors[home[base]] & bit:
                return False
        if any(home[gate] == group.number for gate in self._gates(node)):
            return False
        rows, columns = shape
        forms = {form(u, self._point(u)) for u in (*group.units, node)}
        if "row" in forms and columns > PERSISTENT and "column" in forms:
            return False
        if "row" in forms and "column" in forms and columns > ACCUMULATED:
            return False
        r, c = lift(Var("r", rows)), lift(Var("c", columns))
        for base, place in self._unit_reads(node, rows, columns):
            if base not in group.units:
                continue
            how = form(base, self._point(base))
            if how in ("column", "total"):
                return False
            once_a_row = how == "row" or (base.type.size == rows and base.type.size != group.size)
            if place != (r if once_a_row else r * columns + c):
                return False
        return True

    def _add(self, group: _Group, node: Node, touching: dict[Node, list[_Group]], home: dict[Node, int], ancestors: list[int]) -> None:
        shape = self._shape_for(group, node)
        assert shape is not None
        if shape[0] != 1 or spans(node, self._point(node))[0] is not None:
            group.rows = shape[0]
        group.units.append(node)
        home[node] = group.number
        bases = dict.fromkeys(base for base, _ in self._unit_reads(node, *shape))
        outer = [b for b in (*bases, *self._gates(node)) if home.get(b) != group.number]
        before = ancestors[group.number]
        ancestors[group.number] |= self._above(outer, home, ancestors)
        if ancestors[group.number] != before:
            bit, mask = 1 << group.number, ancestors[group.number]
            for number, above in enumerate(ancestors):
                if above & bit:
                    ancestors[number] |= mask
        for base in (*bases, node):
            group.reads.setdefault(base, base.type.bytes)
            known = touching.setdefault(base, [])
            if group not in known:
                known.append(group)

    def _finish(self, launches: list[_Group | Call], home: Mapping[Node, int]) -> Schedule:
        emptied = {i for i, l in enumerate(launches) if isinstance(l, _Group) and not l.units}
        numbers = {i: n for n, i in enumerate(i for i in range(len(launches)) if i not in emptied)}
        reads = [l.reads if isinstance(l, Call) else [b for b in l.reads if home.get(b) != l.number] for l in launches if not isinstance(l, _Group) or l.units]
        home = {node: numbers[i] for node, i in home.items()}
        launches = [l for i, l in enumerate(launches) if i not in emptied]
        outside: set[Node] = set(self.results.values())
        for bases in reads:
            outside |= {b for b in bases if b in home}
        made: list[Launch] = []
        for launch, bases in zip(launches, reads, strict=True):
            if isinstance(launch, Call):
                made.append(launch)
                continue
            stores = tuple(u for u in launch.units if u in outside)
            made.append(Kernel(launch.rows or 1, launch.columns, tuple(launch.units), stores, list(bases), frozenset(self.kept), self._own(launch, bases, stores)))
        return Schedule(tuple(self._sorted(made, home)), self.results, frozenset(self.kept))

    def _own(self, group: _Group, bases: Iterable[Node], stores: tuple[Node, ...]) -> dict[Node, frozenset[Node]]:
        """Stored value -> what is read at the kernel's own elements alone, and needed for the value's; none where it goes over a row twice."""
        rows, columns = group.rows or 1, group.columns
        if columns > PERSISTENT and any(form(u, self._point(u)) == "row" for u in group.units):
            return {}
        here = lift(Var("r", rows)) * columns + lift(Var("c", columns))
        alone = {b for b in bases if b.type.size == rows * columns}
        for unit in group.units:
            alone -= {base for base, place in self._unit_reads(unit, rows, columns) if place != here}
        found: dict[Node, frozenset[Node]] = {}
        for unit in group.units:
            read = {base for base, _ in self._unit_reads(unit, rows, columns)}
            found[unit] = frozenset(alone & read).union(*(found[base] for base in read if base in found))
        return {unit: found[unit] for unit in stores if found[unit]}

    def _sorted(self, launches: list[Launch], home: Mapping[Node, int]) -> list[Launch]:
        """Producers first; among those that may run, one that leaves fewer bytes alive than before, else the one whose last value is
        the earliest in the graph's order."""
        waits = [self._gates(l.node) if isinstance(l, Call) else [g for u in l.units for g in self._gates(u)] for l in launches]
        needs = [{home[b] for b in (*l.reads, *waits[i]) if b in home} - {i} for i, l in enumerate(launches)]
        place = {n: i for i, n in enumerate(self.order)}
        for unit in self._waits:  # what waits for something is wanted once that is there
            if self._waits[unit]:
                place[unit] = min(place[unit], max(place[g] for g in self._waits[unit]) + 1)
        rank = [place[l.node] if isinstance(l, Call) else max(place[u] for u in l.units) for l in launches]
        for i, late in _before_readers(launches, needs, rank).items():
            rank[i] = late
        results = set(self.results.values())
        together = [parts_of(l.node) if isinstance(l, Call) else None for l in launches]
        reads = [[b for b in l.reads if b in home and b not in results] for l in launches]
        order = in_turn(needs, reads, [[n for n in l.stores if n not in results] for l in launches], lambda node: node.type.bytes, rank, together)
        return [launches[i] for i in order]


def _before_readers(launches: Sequence[Launch], needs: Sequence[set[int]], rank: Sequence[int]) -> dict[int, int]:
    """Ranks of launches that make something again for each of its readers: right before the reader, when all else that this needs is there."""
    anew = {i for i, l in enumerate(launches) if isinstance(l, Call) and l.node.op == "matmul-sum" and l.node.attrs["again"]}
    if not anew:
        return {}
    when: dict[int, int] = {}  # the rank after which a launch may run
    stack = list(range(len(launches)))
    while stack:
        i = stack[-1]
        waiting = [j for j in needs[i] if j not in when]
        if i in when or not waiting:
            stack.pop()
            when.setdefault(i, max([rank[i], *(when[j] for j in needs[i] - anew)]))
        else:
            stack += waiting
    return {i: min(max([0, *(when[j] for j in above - anew)]) for above in needs if i in above) for i in anew}


def original(node: Node) -> Node:
    """Of what a value's second making is called: the value."""
    return node.inputs[0] if node.op == "again" and node.inputs[0] is node.inputs[1] else node


def parts_of(node: Node) -> tuple[object, ...]:
    """Equal for the nodes that one call of a library makes: the same op over the same operands, their numbers (`of`) apart."""
    if "of" not in node.attrs:
        return (node,)
    return node.op, node.inputs, tuple((k, v) for k, v in sorted(node.attrs.items()) if k != "of")


def _width(node: Node) -> int:
    return node.type.bytes // max(1, node.type.size)


def padded(node: Node, index: Index) -> Index:
    """The element of a padded operand, where there is one."""
    a = node.attrs
    return tuple(
        (i + -before) // (interior + 1) for i, before, interior in zip(index, a["before"], a["interior"], strict=True)
    )


def joined(node: Node, index: Index) -> list[tuple[Node, Index, int]]:
    """Of concat: each operand, the element of it, and the first place after it."""
    axis, start, found = node.attrs["axis"], 0, []
    for x in node.inputs:
        at = tuple(i + -start if a == axis else i for a, i in enumerate(index))
        start += x.type.shape[axis]
        found.append((x, at, start))
    return found


def fuse(results: Mapping[str, Node], given: Set[Node] = frozenset()) -> Schedule:
    """The launches of a decomposed graph; `given`: values that others compute, and memory holds."""
    return Fuser(results, given).run()


def beside(core: Schedule, more: Schedule) -> Schedule:
    """`core`, its launches as they are and in their order, with those of `more`, which read what `core` stores: each as early as
    that is there."""
    place = {node: i for i, launch in enumerate(core.launches) for node in launch.stores}
    order: list[tuple[tuple[int, int, int], Launch]] = [((i, 0, 0), launch) for i, launch in enumerate(core.launches)]
    for i, launch in enumerate(more.launches):
        after = max((place[base] for base in launch.reads if base in place), default=-1)
        place |= dict.fromkeys(launch.stores, after)
        order.append(((after, 1, i), launch))
    launches = tuple(launch for _, launch in sorted(order, key=lambda item: item[0]))
    return Schedule(launches, {**core.results, **more.results}, core.kept | more.kept)


def _until(roots: Iterable[Node], given: Set[Node]) -> list[Node]:
    """Operands before users, down to the values that are given."""
    if not given:
        return postorder(roots)
    done: dict[Node, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready or node in given:
            done[node] = None
            continue
        stack.append((node, True))
        stack += [(x, False) for x in reversed(node.inputs)]
    return list(done)

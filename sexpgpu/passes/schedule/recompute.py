"""What is computed again in the backward pass instead of kept through it.

A kept pointwise value that lives across the moment of most memory, and is read on both sides of it, may be made once more
where it is needed again, out of what lies there anyway. It costs the traffic that this adds, and saves its bytes less those of
what must live longer for it. The cheapest bytes come first, until they cost `SHARE` of the step. Repeated, as the moment moves.

The second computation is a value of its own: `again` stands for the kept tensors that it starts from, and holds it back until
the backward pass is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build, table
from sexpgpu.passes.rewrite import rebuild
from sexpgpu.passes.schedule.fuse import Call, Fuser, Kernel, Schedule, fuse, parts_of
from sexpgpu.passes.schedule.memory import Life, at_peak, together
from sexpgpu.passes.schedule.over import stored_over
from sexpgpu.passes.schedule.views import data

FLOOR = 256 << 20  # bytes alive at once below which nothing is computed again
SHARE = 0.015  # of the step's time by the rates below that this may add; under the power cap about two thirds of it arrive
BANDWIDTH = 4.0e12  # bytes/s of a kernel, FLOP/s of products, seconds of a launch: an H200 (performance.md)
ARITHMETIC = {"bf16": 6.5e14, "f16": 6.5e14, "f32": 5e13, "f64": 5e13}
ATTENTION = 0.4  # of that, in attention
REACHED = 0.7  # of these rates, over a step: 57.9 ms were measured where they say 41 (GPT-2, batch 32)
LAUNCH = 2e-6
NEAR = 6  # launches between two that one kernel may replace
ROUNDS = 2


@dataclass(frozen=True)
class Choice:
    """A value that is computed again: the bytes that this saves at the peak, and the seconds that it costs."""

    node: Node
    saved: int
    seconds: float


@dataclass(frozen=True)
class Recomputed:
    """The graph, its schedule, and what was chosen. refused: values that would have saved bytes, and why they are kept; moved:
    value of the graph as it was -> the one that stands for it now."""

    results: Mapping[str, Node]
    schedule: Schedule
    choices: tuple[Choice, ...] = ()
    refused: Mapping[Node, str] = field(default_factory=dict)
    moved: Mapping[Node, Node] = field(default_factory=dict)


def recompute(results: Mapping[str, Node], elsewhere: Iterable[str] = (), origins: Origins | None = None, layers: bool = False) -> Recomputed:
    """The schedule with the least memory at its peak that the rule above finds. `elsewhere`: results with memory of their own.

    layers: whole layers run again after this pass, which then leaves alone what gives the same bits either way: no number may depend
    on whether layers do.
    """
    away = set(elsewhere)
    made = plain = Recomputed(results, fuse(results))
    lives = lives_of(made.schedule, {made.results[n] for n in away})
    moment, most = _peak(made.schedule, lives)
    first = lives, moment, SHARE * seconds_of(made.schedule)
    left = first[2]
    for _ in range(ROUNDS):
        if most < FLOOR:
            break
        found = _Choosing(made, lives, moment, left, recipes=not made.choices)
        if not found.choices:
            made = replace(made, refused={**found.refused, **made.refused})
            break
        new = found.rewritten(origins)
        schedule = fuse(new)
        after = lives_of(schedule, {new[n] for n in away})
        peak_at, peak = _peak(schedule, after)
        if peak >= most:
            break
        moved = {old: found.late.get(now, now) for old, now in ({n: n for n in found.late} | dict(made.moved)).items()}
        made = Recomputed(new, schedule, (*made.choices, *found.choices), {**made.refused, **found.refused}, {old: n for old, n in moved.items() if n is not old})
        left -= sum(c.seconds for c in found.choices)
        lives, moment, most = after, peak_at, peak
    return _recipes_alone(plain, made, *first, origins) if layers else made


def _recipes_alone(plain: Recomputed, made: Recomputed, lives: Mapping[Node, Life], moment: int, seconds: float, origins: Origins | None) -> Recomputed:
    """Of what was chosen, that which makes a value from another one than it was first made from."""
    chosen = {c.node for c in made.choices if recipe(c.node) is not None}
    if not chosen:
        return plain
    found = _Choosing(plain, lives, moment, seconds)
    found.choices = [c for c in found.choices if c.node in chosen]
    new = found.rewritten(origins)
    return Recomputed(new, fuse(new), tuple(found.choices), {}, {old: n for old, n in found.late.items() if n is not old})


def recipe(node: Node) -> tuple[Node, Node] | None:
    """How a value that a library's call gives may be made again, and the other result of that call of which it is made: gelu from what
    it is applied to, which is rounded there, and is not inside the call. None: not at all."""
    if node.op != "matmul-gelu" or node.attrs["of"] != 0:
        return None
    before = build(node.op, *node.inputs, of=1)
    wide = "f64" if before.type.dtype == "f64" else "f32"
    return build("cast", build("gelu-tanh", build("cast", before, dtype=wide)), dtype=node.type.dtype), before


def _peak(schedule: Schedule, lives: Mapping[Node, Life]) -> tuple[int, int]:
    return at_peak(together(lives, stored_over(schedule.launches, lives)))


def lives_of(schedule: Schedule, elsewhere: set[Node]) -> dict[Node, Life]:
    """From which launch to which each stored value lives, those `elsewhere` left out."""
    last = {base: i for i, launch in enumerate(schedule.launches) for base in launch.reads}
    end, kept = len(schedule.launches), set(schedule.results.values())
    first: dict[object, int] = {}
    return {
        node: Life(node.type.bytes, first.setdefault(parts_of(node), i), end if node in kept else last.get(node, i))
        for i, launch in enumerate(schedule.launches)
        for node in launch.stores
        if node not in elsewhere
    }


def seconds_of(schedule: Schedule) -> float:
    """The time of a graph: each launch takes the longer of its arithmetic and its traffic, and a start."""
    total = 0.0
    made: set[object] = set()
    for launch in schedule.launches:
        if isinstance(launch, Call):
            if parts_of(launch.node) in made:
                continue  # it is a part of a call that was counted
            made.add(parts_of(launch.node))
        moved = sum(n.type.bytes for n in (*launch.reads, *launch.stores))
        flops = 0.0
        if isinstance(launch, Call):
            dtype = launch.node.inputs[0].type.dtype if launch.node.inputs else launch.node.type.dtype
            rate = ARITHMETIC.get(dtype, 5e13) * (ATTENTION if launch.node.op.startswith("attend") else 1.0)
            flops = table()[launch.node.op].cost(launch.node)[0] / rate
        total += LAUNCH + max(flops, moved / BANDWIDTH) / REACHED
    return total


class _Choosing:
    """One round: which values are made again after the launch `moment`, and the graph in which they are."""

    def __init__(self, made: Recomputed, lives: Mapping[Node, Life], moment: int, seconds: float, recipes: bool = True):
        self.made, self.lives, self.moment = made, lives, moment
        self.fuser = Fuser(made.results)
        self.launches = made.schedule.launches
        made_of = {n: r for n in self.fuser.order if recipes and (r := recipe(n)) is not None}
        self.recipes = {n: r[0] for n, r in made_of.items() if r[1] in self.fuser.kept}
        self.loads = {n: self._loads(n) for n in lives}
        self.home = {node: i for i, launch in enumerate(self.launches) for node in launch.stores}
        self.units = {u: i for i, l in enumerate(self.launches) for u in (l.stores if isinstance(l, Call) else l.units)}
        self.readers: dict[Node, list[int]] = {}
        for i, launch in enumerate(self.launches):
            for base in launch.reads:
                self.readers.setdefault(base, []).append(i)
        self.above: list[int] = []  # launch -> those that it needs, as bits
        for launch in self.launches:
            needed = {self.home[b] for b in launch.reads if b in self.home}
            self.above.append(sum(1 << i for i in needed) | _union(self.above[i] for i in needed))
        self.gates: dict[Node, Node] = {}
        self.before: dict[Node, int] = {}  # value -> the last launch that reads it as it was first made
        self.firsts: dict[Node, int] = {}  # value -> the first launch that reads it again
        self.choices: list[Choice] = []
        self.refused: dict[Node, str] = {}
        self._choose(seconds)

    def _choose(self, seconds: float) -> None:
        found = []
        for node, life in self.lives.items():
            if life.first <= self.moment < life.last:
                choice = self._weighed(node, life)
                if choice is not None:
                    found.append(choice)
        found.sort(key=lambda c: (-c.saved / c.seconds, c.saved < c.node.type.bytes, self.home[c.node]))
        taken: set[Node] = set()
        pulled: list[tuple[Node, Node]] = []  # (value, another that it is made of and that would have been made again later)
        for choice in found:
            node = choice.node
            if choice.seconds > seconds:
                self.refused[node] = f"computing it again would take {choice.seconds * 1e6:.0f} µs, more than is left of {100 * SHARE:.0f}% of the step"
                continue
            pulls = [(node, b) for b in self.loads[node] if b in taken and self.firsts[b] > self.firsts[node]]
            pulls += [(other, node) for other in taken if node in self.loads[other] and self.firsts[node] > self.firsts[other]]
            if any(not self._near(by, b) for by, b in pulls) or {by for by, _ in pulls + pulled} & {b for _, b in pulls + pulled}:
                self.refused[node] = "something that is computed again is made of it, or it of that, at another time"
                continue
            pulled += pulls
            taken.add(node)
            seconds -= choice.seconds
            self.choices.append(choice)

    def _loads(self, node: Node) -> Mapping[Node, int]:
        """Tensor -> bytes of it that computing the value again reads."""
        if node not in self.recipes:
            return self.fuser.loads[node]
        found, stack = {}, [self.recipes[node]]
        while stack:
            x = stack.pop()
            if x in self.fuser.kept:
                found[x] = x.type.bytes
            else:
                stack += x.inputs
        return found

    def _weighed(self, node: Node, life: Life) -> Choice | None:
        """What computing a value again saves and costs; None where it cannot be."""
        readers = self.readers.get(node, [])
        late = [i for i in readers if i > self.moment]
        if (self.fuser.kinds[node] != "point" and node not in self.recipes) or not late or node in set(self.made.results.values()) or node.op == "again":
            return None
        first, before = late[0], max([self.home[node], *(i for i in readers if i <= self.moment)])
        gates = [b for b in self.launches[first].reads if b is not node and before < self.home.get(b, -1) < first]
        if not gates:
            return None
        saved = life.size
        after = sum(1 << i for i in late)
        near = [i for i in range(max(before + 1, first - NEAR), min(len(self.launches), first + NEAR + 1)) if self._over(i, node) and (i in late or not self.above[i] & after)]
        stored = any(i not in near for i in late)
        homes = near if stored else late  # the kernels that the second computation may be a part of
        traffic = node.type.bytes if stored else -node.type.bytes
        for base, size in self.loads[node].items():
            if base in self.lives and self.lives[base].last <= self.moment:
                saved -= base.type.bytes
            if not any(base in self.launches[i].reads for i in homes):
                traffic += size
        if saved <= 0:
            return None
        self.gates[node], self.firsts[node], self.before[node] = max(gates, key=lambda b: self.home[b]), first, before
        return Choice(node, saved, max(traffic, 0.0) / BANDWIDTH + (0.0 if near else LAUNCH) + 1e-9)

    def _over(self, i: int, node: Node) -> bool:
        """Whether a launch is a kernel over as many elements as the value has."""
        launch = self.launches[i]
        return isinstance(launch, Kernel) and launch.rows * launch.columns == node.type.size

    def _near(self, node: Node, base: Node) -> bool:
        """Whether `base` may be made again when `node` is."""
        return self.firsts[base] - self.firsts[node] <= NEAR and self.before[base] < self.home[self.gates[node]]

    # --- the new graph ---

    def rewritten(self, origins: Origins | None) -> dict[str, Node]:
        """The results over the values that are computed again."""
        self.chosen = {c.node for c in self.choices}
        self.origins = origins
        self.early: dict[tuple[Node, Node], Node] = {}
        self.clones: dict[Node, Node] = {}
        self.late: dict[Node, Node] = {}
        for i in range(self.moment + 1, len(self.launches)):
            launch = self.launches[i]
            for base in launch.reads:
                if base in self.chosen and base not in self.clones:
                    self._again(base, self.late.get(self.gates[base], self.gates[base]))
            for unit in launch.stores if isinstance(launch, Call) else launch.units:
                self._later(unit)
        for node in self.made.results.values():
            if node not in self.units:
                self._later(node)
        return {name: self.late.get(node, node) for name, node in self.made.results.items()}

    def _kept_early(self, node: Node) -> bool:
        return self.units.get(node, self.moment + 1) <= self.moment

    def _later(self, root: Node) -> None:
        """`root` and what is computed inside it, as they are after the moment."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.late:
                stack.pop()
                continue
            if self._kept_early(node) or not node.inputs:
                self.late[node] = self.clones.get(node, node)
                stack.pop()
                continue
            waiting = [x for x in node.inputs if x not in self.late]
            if waiting:
                stack += waiting
                continue
            self.late[node] = self._rebuilt(node, tuple(self.late[x] for x in node.inputs))
            stack.pop()

    def _again(self, root: Node, gate: Node) -> None:
        """Puts into `clones` the value once more, over the tensors that are kept; those that are made again too, over these."""
        stack, done = [self.recipes.get(root, root)], {}
        goal = stack[0]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
            elif node is not goal and node in self.fuser.kept:
                if node in self.chosen and node not in self.clones:
                    self._again(node, gate)  # it is made of none that is not there by then
                done[node] = self.clones[node] if node in self.clones else build("again", node, gate)
                stack.pop()
            elif not node.inputs:
                done[node] = node
                stack.pop()
            elif waiting := [x for x in data(node) if x not in done]:
                stack += waiting
            else:
                done[node] = self._rebuilt(node, (*(done[x] for x in data(node)), *node.inputs[len(data(node)) :]), root)
                stack.pop()
        self.clones[root] = done[goal]

    def _rebuilt(self, node: Node, inputs: tuple[Node, ...], like: Node | None = None) -> Node:
        """`like`: what an origin is taken from where the node has none."""
        new = rebuild(node, inputs)
        if self.origins is not None and new is not node and new not in self.origins.table:
            source = node if node in self.origins.table or like is None else like
            if source in self.origins.table:
                self.origins.add(new, replace(self.origins.of(source), phase="backward"))
        return new


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found

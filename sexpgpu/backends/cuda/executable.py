"""A graph as launches over one planned arena of a device, in a fixed order, without a decision left for run time.

Leaves are tensors that the caller owns and that stay where they are; results lie where the caller says (`into`) or in the
arena, until the next run. `launch` does it all; a program captures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sexpgpu.backends.cuda import choice, library, modules
from sexpgpu.backends.cuda.cartesian.join import join
from sexpgpu.backends.cuda.cartesian.parts import in_parts
from sexpgpu.backends.cuda.emit import Emitted, Emitter, choose_blocks, kernel_name
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import DTYPES, Node, Origins
from sexpgpu.ops import build, table
from sexpgpu.ops.helpers import total
from sexpgpu.ops.linear_entropy import LOSS
from sexpgpu.passes.chains import chains
from sexpgpu.passes.epilogues import Decision, epilogues
from sexpgpu.passes.onto import onto
from sexpgpu.passes.products import products
from sexpgpu.passes.rank_maps import rank_maps
from sexpgpu.passes.rewrite import rebuild, rewrite
from sexpgpu.passes.schedule.aside import SMALL, aside
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.schedule.fuse import Call, Kernel, Launch, Operand, Schedule, fuse, original, parts_of
from sexpgpu.passes.schedule.fuse import beside as join_schedules
from sexpgpu.passes.schedule.index import strides
from sexpgpu.passes.schedule.memory import Life, Plan, plan
from sexpgpu.passes.schedule.over import stored_over
from sexpgpu.passes.schedule.recompute import recompute
from sexpgpu.passes.schedule.repeat import repeat
from sexpgpu.passes.schedule.views import layout
from sexpgpu.passes.slopes import slopes

PARTS = 2048  # partial sums that a kernel of one element adds up

Draws = Callable[[str, tuple], torch.Tensor]


class Compiled:
    """The launches of a graph and the plan of their memory; no tensor exists yet.

    kept: results that must outlive the run in memory of their own (the others may share it with later values).
    into: results that the caller places, name -> the leaf that they replace, or None.
    beside: results that are watched only. Their launches read what the others store; those are the same functions over the same
    tensors as in a graph without them, so no other result depends on whether they are there, to the last bit.
    """

    def __init__(self, results: Mapping[str, Node], into: Mapping[str, Node | None] | None = None, device: str = "cuda", origins: Origins | None = None, shadow: Callable[[Node], Node | None] | None = None, beside: Collection[str] = (), remat: Sequence[str] = ()):
        """`remat`: paths of layers' calls that run again for the backward pass. `shadow`: gives the leaf that stands for a node, if another launch keeps its value."""
        self.device = device
        #: what became of products with something behind them
        self.decisions: list[Decision]
        self.results, self.decisions = _lowered(results, origins)
        if beside:
            alone, self.decisions = _lowered({n: node for n, node in results.items() if n not in beside}, origins)
            self.results |= alone
        if shadow is not None:
            self.results = rewrite(self.results, lambda node, inputs: shadow(node), origins)
        self.into = dict(into or {})
        self.emitted: dict[Launch, Emitted] = {}
        self.whole = not remat  # no other launches will read what these store
        #: totals that are never added up: so many partial sums
        self.parts: dict[Node, int] = {}
        #: what is made again rather than kept; a result that is only watched reads the values that are there by then
        self.recomputed = recompute({n: node for n, node in self.results.items() if n not in beside}, self.into.keys() - set(beside), origins, bool(remat))
        self.results |= self.recomputed.results
        self.schedule: Schedule = self.recomputed.schedule
        self._emit(self.schedule, origins)
        if remat and origins is not None:
            self.schedule, was = repeat(self.schedule, remat, origins)
            self.emitted |= {new: self.emitted[old] for new, old in was.items() if old in self.emitted}  # type: ignore[index]
        #: f32 sums over partial results that only results need: one launch makes them all, at the end
        self.late = self._late(self.schedule)
        if beside:
            stored = {node for launch in self.schedule.launches for node in launch.stores}
            moved = {old: new for old, new in self.recomputed.moved.items() if new in stored and old not in stored}
            watched = rewrite({n: self.results[n] for n in beside}, lambda node, inputs: moved.get(node), origins)
            self.results |= watched | rewrite({n: node for n, node in watched.items() if node not in self.late}, self._apart, origins)
            more = fuse({n: self.results[n] for n in beside}, stored - self.parts.keys())
            self._emit(more, origins)
            self.late |= self._late(more)
            self.schedule = join_schedules(self.schedule, more)
        self._calls = {node for l in self.schedule.launches if isinstance(l, Call) for node in l.stores}
        #: launches that run beside the others, on a stream of their own
        self.aside: frozenset[Launch] = frozenset()
        self._place()
        if choice.SWITCH.aside and all(leaf is None for leaf in self.into.values()):
            self._set_aside()

    def _apart(self, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        """Of what is watched: a total that is put together at the end, or never, is computed once more, under a name of its own."""
        if node in self.late and library.partials(node):
            rows = build(node.op, *inputs, **{**node.attrs, "of": 0})
            return total(build("cast", rows, dtype=node.type.dtype), tuple(range(rows.type.rank - 1)), keep=False)
        if node in self.late or node in self.parts:
            return rebuild(node, (build("stop-gradient", inputs[0]), *inputs[1:]))
        return None

    def _set_aside(self) -> None:
        """Launches that nothing waits for run beside the rest, where that takes little memory."""
        before = self.schedule
        self.schedule, self.aside = aside(before, self._planned, lambda kernel: kernel in self.emitted and all(n == 1 for n, _ in self.emitted[kernel].partials.values()))
        if self.aside:
            self._place()
        if self.plan.size > SMALL or not self.aside:
            self.schedule, self.aside = before, frozenset()
            self._place()

    def _place(self) -> None:
        """Where values lie, of the launches in their order."""
        self.placed: dict[Node, str] = {}  # node -> the result whose place it is stored at
        self.joint = self._joint()
        hazards = self._hazards()
        for name in self.into:
            node = self.results[name]
            if node not in self.placed and node in self.schedule.kept and name not in hazards and layout(node) is None:
                self.placed[node] = name
        #: what `scatter-onto` adds to -> the result in whose place it is made
        self.lent = {base: self.placed[node] for launch in self.schedule.launches for node in launch.stores if (base := self._whole_base(launch)) is not None and node in self.placed}
        lives = self._lives()
        #: what a kernel stores -> the value in whose place, as it reads that for the last time
        self.over = stored_over(self.schedule.launches, lives, lambda kernel: self.emitted[kernel].aligned if kernel in self.emitted else frozenset()) if choice.SWITCH.over else {}
        self.plan: Plan = plan(lives, self.over)

    def _whole_base(self, launch: Launch) -> Node | None:
        """What this launch alone reads, whole and as it lies, to add to it: the result may be made in its place."""
        if not isinstance(launch, Call) or original(launch.stores[0]).op != "scatter-onto" or self.into.get(self.placed.get(launch.stores[0], "")) is not None:
            return None
        operand, base = launch.operands[0], launch.operands[0].base
        whole = operand.strides == strides(operand.shape) and not operand.start and math.prod(operand.shape) == base.type.size
        alone = base not in self.results.values() and base not in self.placed and base in self._calls and self._planned(base)
        return base if whole and alone and all(other is launch or base not in other.reads for other in self.schedule.launches) else None

    def _joint(self) -> dict[Node, tuple[int, dict[int, Node]]]:
        """Node of `library.JOINT` or `PUT` -> the launch that makes it, the first of those over the same operands; and their nodes by number."""
        groups: dict[Any, tuple[int, dict[int, Node]]] = {}
        found = {}
        for i, launch in enumerate(self.schedule.launches):
            for stored in launch.stores if isinstance(launch, Call) and (launch.node.op in library.JOINT or launch.node.op in library.PUT) else ():
                node = original(stored)  # a second run has results of its own
                found[stored] = groups.setdefault((parts_of(node), stored is node), (i, {}))
                found[stored][1][node.attrs.get("of", LOSS)] = stored
        return found

    def _emit(self, schedule: Schedule, origins: Origins | None) -> None:
        for launch in schedule.launches:
            if isinstance(launch, Call):
                library.require(launch.node, origins)
            elif launch.rows * launch.columns:
                self.emitted[launch] = Emitter(launch, choose_blocks(launch, self.device), kernel_name(launch, origins), self.parts).emit()
                self._leave(launch, schedule)

    def _leave(self, launch: Kernel, schedule: Schedule) -> None:
        """Leaves totals as partial sums, where kernels of one element alone read them: no launch adds them up."""
        for unit, (programs, elements) in self.emitted[launch].partials.items():
            readers = [other for other in schedule.launches if other is not launch and unit in other.reads]
            small = all(isinstance(other, Kernel) and other.rows * other.columns == 1 for other in readers)
            plain = unit.op == "sum" and unit.type.dtype == "f32" and unit not in schedule.results.values()
            if elements == 1 and 1 < programs <= PARTS and readers and small and plain and self.whole:
                self.parts[unit] = programs

    def _late(self, schedule: Schedule) -> set[Node]:
        read = {original(base) for launch in schedule.launches for base in launch.reads}
        calls = {node for launch in schedule.launches if isinstance(launch, Call) for node in launch.stores}
        return {node for node in calls - read if library.partials(node)} | {
            unit
            for launch in schedule.launches
            if isinstance(launch, Kernel) and launch in self.emitted
            for unit, (programs, _) in self.emitted[launch].partials.items()
            if programs > 1 and unit not in read and unit.op == "sum" and unit.type.dtype == "f32"
        }

    def _hazards(self) -> set[str]:
        """Results that may not be written over the leaf they replace while the step still reads it."""
        found = set()
        for name, leaf in self.into.items():
            if leaf is None:
                continue
            node = self.results[name]
            writer = next((i for i, l in enumerate(self.schedule.launches) if node in l.stores), None)
            writer = self.joint[node][0] if node in self.joint else writer
            if writer is None:
                continue
            for i, launch in enumerate(self.schedule.launches):
                if leaf in launch.reads and (i > writer or (i == writer and not self._in_place(launch, leaf))):
                    found.add(name)
        return found

    def _in_place(self, launch: Launch, leaf: Node) -> bool:
        return isinstance(launch, Kernel) and launch in self.emitted and leaf in self.emitted[launch].aligned

    def _lives(self) -> dict[Any, Life]:
        lives: dict[Any, Life] = {}
        last: dict[Node, int] = {}
        end = len(self.schedule.launches)
        for i, launch in enumerate(self.schedule.launches):
            for base in launch.reads:
                last[base] = max(last.get(base, 0), end if launch in self.aside else i)
        kept = set(self.results.values())
        for i, launch in enumerate(self.schedule.launches):
            for node in launch.stores:
                if node in self.placed or node in self.lent or not self._planned(node):
                    continue
                first = self.joint[node][0] if node in self.joint else i
                lives[node] = Life(max(1, node.type.bytes), first, end if node in kept else last.get(node, i))
            for node in launch.stores if isinstance(launch, Call) else ():
                if shapes := library.partials(node):
                    lives["partial", node] = Life(4 * sum(rows * elements for rows, elements in shapes), self.joint[node][0], end if node in self.late else i)
            if isinstance(launch, Call) and launch.node.op in library.SCRATCH and self.joint[launch.stores[0]][0] == i and (room := library.SCRATCH[launch.node.op](launch.node)):
                lives["scratch", launch.stores[0]] = Life(room, i, i)
            if launch in self.emitted:
                for unit, (programs, elements) in self.emitted[launch].partials.items():
                    if programs > 1:
                        until = end if unit in self.late and unit not in launch.again else last[unit] if unit in self.parts else i
                        lives["partial", launch.again.get(unit, unit)] = Life(programs * elements * max(4, DTYPES[unit.type.dtype]), i, until)
        return lives

    def _planned(self, node: Node) -> bool:
        """Whether the arena holds it; a library that allocates gives its own memory."""
        if node not in self._calls:
            return True
        node = original(node)
        return node.op in library.OUT or node.op in library.JOINT or node.op in library.PUT

    def final(self, name: str) -> int:
        """The launch after which a result that the caller places is there, and nothing reads it any more; the number of launches for
        one that the last sums make, and one more for one that is copied there at the end."""
        node, end = self.results[name], len(self.schedule.launches)
        if self.placed.get(node) != name or sum(other is node for other in self.results.values()) > 1:
            return end + 1
        if node in self.late:
            return end
        return max(i for i, launch in enumerate(self.schedule.launches) if node in launch.stores or node in launch.reads)

    @property
    def leaves(self) -> list[Node]:
        """The leaves that it reads, in the order of first use."""
        found: dict[Node, None] = {}
        for launch in self.schedule.launches:
            for base in launch.reads:
                if table()[base.op].lowering.kind == "leaf" and base.op != "constant":
                    found.setdefault(base)
        for node in self.results.values():
            if table()[node.op].lowering.kind == "leaf" and node.op != "constant":
                found.setdefault(node)
        return list(found)


def _lowered(results: Mapping[str, Node], origins: Origins | None) -> tuple[dict[str, Node], list[Decision]]:
    found = in_parts(chains(products(rank_maps(join(decompose(results, origins), origins), origins), origins), origins), origins)
    found, decisions = epilogues(onto(found, origins), choice.SWITCH.epilogues, origins, choice.SWITCH.passes)
    return slopes(found, origins), decisions


def _shape(node: Node) -> tuple[int, ...]:
    """The shape of a stored value as it lies."""
    order = layout(node)
    return node.type.shape if order is None else tuple(node.type.shape[a] for a in order)


class Bound:
    """A compiled graph over tensors: `leaves` node -> tensor, `into` result name -> tensor, `arena` bytes of its plan. `after`: what
    else is done after a launch, by its number as `Compiled.final` counts."""

    def __init__(self, compiled: Compiled, leaves: Mapping[Node, torch.Tensor], into: Mapping[str, torch.Tensor], arena: torch.Tensor | None, draws: Draws, deterministic: bool = True,
                 after: Mapping[int, Sequence[Callable[[], None]]] | None = None):
        after, end = after or {}, len(compiled.schedule.launches)
        self.compiled, self.draws = compiled, draws
        self.library = library.Library(deterministic)
        self.device = torch.device(compiled.device)
        self.arena = torch.zeros(compiled.plan.size, dtype=torch.uint8, device=self.device) if arena is None else arena
        self.values: dict[Node, Any] = dict(leaves)
        for node, name in compiled.placed.items():
            self.values[node] = into[name]
        for node, name in compiled.lent.items():
            self.values[node] = into[name].view(_shape(node))
        for key, start in compiled.plan.offsets.items():
            if isinstance(key, Node):
                self.values[key] = self._view(start, _shape(key), TORCH[key.type.dtype])
        self.work: list[Callable[[], None]] = []
        self._owed: list[tuple[torch.Tensor, torch.Tensor]] = []  # a vector and the partial sums that make it
        self._wanted: list[modules.Wanted] = []
        self._last = self._last_uses()
        self._aside: set[int] = set()  # numbers of works
        for i, launch in enumerate(compiled.schedule.launches):
            if launch in compiled.aside and not after:
                self._aside.add(len(self.work))
            if isinstance(launch, Call):
                self.work.append(self._call(i, launch))
            elif launch in compiled.emitted:
                self.work += self._kernel(launch)
            self.work += after.get(i, ())
        self._meet = len(self.work)
        if self._owed:
            self.work.append(self._finish())
        self.work += after.get(end, ())
        if self.device.type == "cuda":
            modules.compile_together(self._wanted)
        for name, node in compiled.results.items():
            if node.op == "constant":
                self.value(node)
            if name in into and compiled.placed.get(node) != name:
                self.work.append(partial(self._copy, into[name], node))
        self.work += after.get(end + 1, ())
        self.into = dict(into)

    def _finish(self) -> Callable[[], None]:
        """One launch for all sums of partial results that no launch waits for. Blocks are narrow, so that two sums of 1,024 columns are 64
        programs with 128 partial sums on their way at once; what is added in which order depends on nothing else that is summed."""
        finish = modules.by_hand("finish")
        high, wide = (128, 32) if self.device.type == "cuda" else (256, 128)
        rows = []
        for vector, parts in self._owed:
            count, elements = parts.shape
            for start in range(0, elements, wide):
                rows.append([parts.data_ptr(), count, elements, start, vector.data_ptr(), 0])
        table = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._wanted.append((finish, (table, high, wide), {"num_warps": 4}))

        def run() -> None:
            finish[(len(rows),)](table, high, wide, num_warps=4)

        return run

    def _view(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for n in shape:
            count *= n
        size = count * torch.empty((), dtype=dtype).element_size()
        return self.arena[start : start + size].view(dtype).view(tuple(shape))

    def _last_uses(self) -> dict[int, list[Node]]:
        """Launch -> tensors of libraries that it is the last to read."""
        last: dict[Node, int] = {}
        for i, launch in enumerate(self.compiled.schedule.launches):
            for base in launch.reads:
                if base not in self.values and base.op != "constant":
                    last[base] = i
        kept = set(self.compiled.results.values())
        found: dict[int, list[Node]] = {}
        for node, i in last.items():
            if node not in kept:
                found.setdefault(i, []).append(node)
        return found

    def _copy(self, target: torch.Tensor, node: Node) -> None:
        target.copy_(self.value(node))

    def value(self, node: Node) -> torch.Tensor:
        """The tensor of a kept node, or of a constant."""
        if node.op == "constant" and node not in self.values:  # made before anything is captured
            with torch.device(self.device):
                self.values[node] = table()["constant"].reference(torch, node, [])
        tensor = self.values[node]
        order = layout(node)
        return tensor if order is None else tensor.permute(order)  # every order of two swapped axes undoes itself

    def _operand(self, o: Operand) -> torch.Tensor:
        base = self.value(o.base)
        return torch.as_strided(base, o.shape, o.strides, base.storage_offset() + o.start)

    def _call(self, number: int, launch: Call) -> Callable[[], None]:
        node = launch.node
        for operand in launch.operands:
            if operand.base.op == "constant":
                self.value(operand.base)
        function = library.OUT.get(node.op)
        dead = self._last.get(number, [])
        stored = launch.stores[0]
        if self.device.type == "cuda" and node.op in library.AHEAD and self.compiled.joint.get(stored, (number,))[0] == number:
            self._wanted += library.AHEAD[node.op](node)
        if stored in self.compiled.joint:
            first, members = self.compiled.joint[stored]
            make = self.library.put if node.op in library.PUT else library.JOINT[node.op]
            room = self.compiled.plan.offsets.get(("scratch", stored))
            more: tuple[Any, ...] = ()
            if node.op in library.SCRATCH:
                more = (self.arena[:0] if room is None else self._view(room, (library.SCRATCH[node.op](node),), torch.uint8),)
            sums = [pair for member in members.values() for pair in self._partials(member)]
            now = [] if any(member in self.compiled.late for member in members.values()) else sums
            if number == first:
                self._owed += [] if now else sums
            more += ([part for _, part in sums],) if sums else ()

            def together() -> None:
                if number == first:
                    make(node, [self._operand(o) for o in launch.operands], {of: self.values[member] for of, member in members.items()}, *more)
                    for vector, part in now:
                        torch.sum(part, 0, out=vector)
                for gone in dead:
                    self.values.pop(gone, None)

            return together

        def run() -> None:
            operands = [self._operand(o) for o in launch.operands]
            if function is not None:
                function(node, *operands, self.values[stored])
            elif stored in self.compiled.placed:
                self.values[stored].copy_(library.call(node, operands, self.device, self.library))
            else:
                self.values[stored] = library.call(node, operands, self.device, self.library)
            for gone in dead:
                self.values.pop(gone, None)

        return run

    def _partials(self, node: Node) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of a call's result that it leaves as partial sums: each piece of it, and its partial sums."""
        found = []
        place, start = self.compiled.plan.offsets.get(("partial", node), 0), 0
        for rows, elements in library.partials(node):
            found.append((self.values[node][start : start + elements], self._view(place, (rows, elements), torch.float32)))
            place, start = place + 4 * rows * elements, start + elements
        return found

    def _kernel(self, launch: Kernel) -> list[Callable[[], None]]:
        emitted = self.compiled.emitted[launch]
        function = modules.load(emitted.source, emitted.name)
        number = self.compiled.schedule.launches.index(launch)
        dead = self._last.get(number, [])
        again = launch.again
        late = any(what in ("read",) and again.get(parts[0], parts[0]) not in self.values for what, *parts in emitted.arguments)
        partials = {}
        for unit, (programs, elements) in emitted.partials.items():
            if programs > 1:
                dtype = torch.int32 if unit.type.dtype == "bool" else torch.float32 if unit.type.dtype in ("bf16", "f16") else TORCH[unit.type.dtype]
                partials[unit] = self._view(self.compiled.plan.offsets["partial", again.get(unit, unit)], (programs, elements), dtype)

        late_sums = self.compiled.late
        now = {unit: tensor for unit, tensor in partials.items() if unit not in late_sums and unit not in self.compiled.parts}
        self._owed += [(self.values[unit], tensor) for unit, tensor in partials.items() if unit in late_sums and unit not in again]

        def arguments() -> list[Any]:
            found = []
            for what, *parts in emitted.arguments:
                if what in ("read", "store"):
                    tensor = self.values[again.get(parts[0], parts[0])]
                    found.append(tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor)
                elif what == "partial":
                    found.append(partials[parts[0]])
                elif what == "parts":
                    found.append(self._view(self.compiled.plan.offsets["partial", parts[0]], (self.compiled.parts[parts[0]],), torch.float32))
                else:
                    found.append(self.draws(what, tuple(parts)))
            return found

        fixed = None if late else arguments()
        if fixed is not None:
            self._wanted.append((function, fixed, {"num_warps": emitted.warps}))

        def run() -> None:
            function[emitted.grid](*(arguments() if fixed is None else fixed), num_warps=emitted.warps)
            for unit, tensor in now.items():
                whole(unit, tensor, self.values[again.get(unit, unit)])
            for gone in dead:
                self.values.pop(gone, None)

        return [run]

    def launch(self) -> None:
        """Every launch, in order, on the current stream; those set aside on a stream of their own, until the last launch is out."""
        side = choice.side() if self._aside and self.device.type == "cuda" else None
        for number, work in enumerate([*self.work, lambda: None]):
            if side is not None and number == self._meet:
                torch.cuda.current_stream().wait_stream(side)
            if side is not None and number in self._aside:
                with choice.beside(side):
                    work()
            else:
                work()
        self.library.forget()

    def result(self, name: str) -> torch.Tensor:
        """A result, after `launch`."""
        return self.into[name] if name in self.into else self.value(self.compiled.results[name])


def whole(unit: Node, parts: torch.Tensor, out: torch.Tensor) -> None:
    """A reduction from its partial results [programs elements]."""
    if unit.op == "sum" and out.dtype == parts.dtype:
        torch.sum(parts, 0, out=out.view(-1))
        return
    if unit.op == "sum":
        found = parts.sum(0)
    elif unit.op == "prod":
        found = parts.prod(0)
    else:
        found = parts.amin(0) if unit.op in ("reduce-min", "reduce-all") else parts.amax(0)
    out.copy_(found.reshape(out.shape))


def run_graph(results: Mapping[str, Node], bindings: Mapping[Node, torch.Tensor], device: str, draws: Draws | None = None) -> dict[str, torch.Tensor]:
    """The results of a graph, once: for tests and checks."""

    def none(what: str, parts: tuple) -> torch.Tensor:
        raise LookupError("this graph draws")

    compiled = Compiled(results, None, device)
    bound = Bound(compiled, {leaf: t.to(device) for leaf, t in bindings.items()}, {}, None, draws or none)
    bound.launch()
    return {name: bound.result(name) for name in results}

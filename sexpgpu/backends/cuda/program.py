"""A run on a CUDA device: implements `run.program.Program` by replaying one CUDA graph a step.

A step is forward and backward of each micro-batch, then the update over flat vectors, which writes in place where loss, gradient
norm and every step before were finite. On the CPU, under Triton's interpreter, the same launches run one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from sexpgpu.backends import state
from sexpgpu.backends.arena import COPIED, Arena, divides
from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda.ahead import Ahead
from sexpgpu.backends.cuda.device import INTERPRETED, Device, free_memory, interpreted, memory_errors
from sexpgpu.backends.cuda.exchange import SQUARES, WAITED, Exchange
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.cuda.flight import INDEX, ROOMS, Fields, InFlight, Replay, Report, Room
from sexpgpu.backends.cuda.indices import raise_bad_index
from sexpgpu.backends.cuda.memory import MemoryPlan, check_plan, check_state, memory_plan
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.program import Result, capacity_of
from sexpgpu.backends.leaves import flat_update, source_of
from sexpgpu.backends.ranks import Alone, Team
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import build, constant
from sexpgpu.ops.philox import draw_key
from sexpgpu.ops.random import draw_kind
from sexpgpu.passes.bounds import BAD, bounded_fields, guard_indices
from sexpgpu.passes.flatten import Flat

ALIVE = "//alive"  # no parameter's path
COUNT = "//step"
SCALAR = "//scalar/"
WATCHED = f"{BAD} watched"  # of a step with metrics and taps: of their indices, too
SHADOW = "//bf16/"
HOME = "//home/"


class CudaProgram:
    """`staged` is `compiler.Stages`; `threads` is not used by the device, and is kept for the manifest. `opened`: the device;
    `budget`: bytes that the plan may take, None for what is free. `device`: in tests, `cpu` or `cuda` instead of `opened`.

    Of several ranks (`team`) each computes its part of the batch, and the launches of a step have sums over ranks among them
    (`exchange`). With `:shard optimizer` a rank updates its share of each vector, and parameters are put together after.
    """

    def __init__(self, staged: Any, threads: int | None, device: str | None = None, opened: Device | None = None, budget: int | None = None, team: Team | None = None):
        self.team: Team = Alone() if team is None else team
        self.shard = staged.run.shard and self.team.ranks > 1
        self.target = device or ("cpu" if interpreted() else "cuda")
        self.device = self.target if opened is None else opened.label
        self.place = torch.device(self.target)
        if budget is None and opened is not None and opened is not INTERPRETED:
            budget = free_memory(opened)
        self.staged, self.traced, self.config = staged, staged.traced, staged.run
        self.threads = threads or torch.get_num_threads()
        self.precision = self.config.precision
        self.dtype = torch.float64 if self.precision == "f64" else torch.float32
        self._pool = torch.cuda.graph_pool_handle() if self.place.type == "cuda" else None
        self.full = state.sources(self.traced)
        kinds = {spec.init.kind for spec in (self.traced.params | self.traced.states).values()}
        self._ahead = Ahead(kinds) if self.place.type == "cuda" else None
        self._draws: dict[tuple, torch.Tensor] = {}
        self._step = torch.zeros((), dtype=torch.int32, device=self.place)
        self._alive = torch.zeros((), dtype=torch.bool, device=self.place)
        flat = self._flat()
        divided = self._divided_names(flat)
        check_state(self.schema(), budget, divided, self.team.ranks)
        self.float = "f64" if self.precision == "f64" else "f32"
        self._final = self.staged.micro(False)  # made once for what is lowered here
        self._bounded = bounded_fields(self._final)
        self._shadowed = {str(self.traced.params[n].node.attrs["path"]) for group in flat.groups for n in group.names} if self.precision == "bf16" else set()
        self._compiled: dict[Any, tuple[Compiled, Compiled]] = {}
        self._weights = {e.name: e.weights for e in self.config.evals}
        first = self._micro(False) if self.team.ranks > 1 else None
        if first is not None:
            if self.shard and self._shadowed:
                flat = self._flat(self._wide(first))
                divided = self._divided_names(flat)
            flat.arrange(lambda name: first.final(f"gradient/{name}"))
        with memory_errors(), torch.device(self.place):
            self._arena = Arena(flat, self.schema(), self.team.rank if self.shard else 0)
        self.exchange = None if first is None else Exchange(self.team, self._arena, first, self.traced.origins, self.config.deterministic)
        self.values: dict[str, Any] = self._arena.tensors
        self._known = {source: self.values[name] for name, source in self.full.items() if name in self.values}
        self._known |= {source_of(leaf): self._arena.place(name) for name, leaf in self._arena.flat.homes.items()}
        for name, value in self.config.statistics.items():
            self._known["statistic", name] = torch.tensor(value, dtype=self.dtype, device=self.place)
        self._fields: dict[Any, Fields] = {}  # (steps of a replay, capacity) -> their batches
        self._pinned: dict[Any, Room] = {}  # (turn, steps, capacity) -> where batches are put together
        self._rooms: dict[int, list[Room]] = {}  # steps -> those that are handed out in turn
        self._activations: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}  # of gradients over micro-batches
        self._turn = 0
        self._flight: dict[int, InFlight] = {}
        self._evals: dict[tuple[str, Any], Any] = {}
        self._steps: dict[Any, tuple[Replay, Report]] = {}
        self._make_shadows()
        if first is not None:
            self._compiled[False, None] = first, Compiled(*self._update_results(), self.target, self.traced.origins)
        self.plan: MemoryPlan = self._memory(*self._graphs(False), divided, self._others())
        again = None if self.traced.remat or not self.traced.layers else lambda: self._memory(self._micro(False, remat=self.traced.layers), self._graphs(False)[1], divided)
        check_plan(self.plan, budget, again)
        self._final = {}

    def _others(self) -> list[Compiled]:
        """Graphs that may need more memory than a step does: with metrics and taps, and evaluations of more samples than a micro-batch has."""
        large = [e for e in self.config.evals if not e.data.source.structures and e.data.batch > self.traced.samples]
        return [self._graphs(True)[0]] * self.apart + [self._eval_graph(e.name, self.staged.evaluation(e.name, e.data.batch)[1]) for e in large]

    def _memory(self, forward: Compiled, update: Compiled, divided: Collection[str], others: Sequence[Compiled] = ()) -> MemoryPlan:
        return memory_plan(self.traced, self.schema(), forward, update, divided, self.team.ranks, self.exchange.bytes if self.exchange else 0, others)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """torch's process-wide switches as this run has them, while its launches are made."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, torch.utils.deterministic.fill_uninitialized_memory
        strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        matmul.allow_tf32 = cudnn.allow_tf32 = self.precision in ("tf32", "bf16")
        matmul.allow_bf16_reduced_precision_reduction = False
        torch.utils.deterministic.fill_uninitialized_memory = False
        _strict(self.config.deterministic, True)
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, torch.utils.deterministic.fill_uninitialized_memory = before
            _strict(strict, warn)

    @property
    def updates(self) -> int:
        return int(self._step)

    def _make_shadows(self) -> None:
        """bf16 copies of the vectors of parameters, where the precision asks for them."""
        self._shadows: dict[str, torch.Tensor] = {}
        self._in_vectors: dict[str, torch.Tensor] = {}
        self._sources: dict[str, str] = {}  # shadow vector -> the vector it follows
        self._copied = {n for group in self._arena.flat.groups if group.kind == COPIED for n in group.names}
        if self.precision != "bf16":
            return
        for group in self._arena.flat.groups:
            name = SHADOW + str(group.number)
            self._sources[name] = group.vector("param")
            vector = self._shadows[name] = torch.zeros(group.size, dtype=torch.bfloat16, device=self.place)
            for parameter in group.names:
                shape, start = group.shapes[parameter], group.offsets[parameter]
                path = str(self.traced.params[parameter].node.attrs["path"])
                self._in_vectors[path] = vector[start : start + math.prod(shape)].view(shape)

    def _refresh_shadows(self) -> None:
        """Those of whole vectors; of divided ones `_put` and the update write them."""
        for name, vector in self._shadows.items():
            if self._sources[name] not in self._arena.divided:
                vector.copy_(self._arena.vectors[self._sources[name]])

    def _flat(self, wide: Collection[str] | None = None) -> Flat:
        """The update over vectors. wide: paths of parameters that the graphs read in f32, too; all others are COPIED."""
        params = self.traced.params

        def kind(name: str) -> str:
            return COPIED if wide is not None and str(params[name].node.attrs["path"]) not in wide else ""

        return flat_update(self.staged, self._micro_batches, self.team.ranks if self.shard else 1, kind)

    def _divided_names(self, flat: Flat) -> set[str]:
        """States of which a rank has its share alone."""
        return {f"{role}/{name}" for group in flat.groups if self.shard for role in group.roles if divides(group, role) for name in group.names}

    def _wide(self, first: Compiled) -> set[str]:
        """Paths of parameters that a graph of the run reads otherwise than as bf16: every graph is looked at, as it is compiled."""
        found = _parameters(first)
        if self.apart:
            found |= _parameters(self._micro(True))
        for e in self.config.evals:
            size = e.data.capacity if e.data.source.structures else e.data.batch
            _, plain = self.staged.evaluation(e.name, size)
            found |= _parameters(self._eval_graph(e.name, plain)) - ({str(self.traced.params[n].node.attrs["path"]) for n in self.traced.averages} if e.weights == "ema" else set())
        return found

    # --- graphs ---

    @property
    def _divided(self) -> bool:
        return self.traced.loss.count is not None or self._micro_batches > 1

    @property
    def _micro_batches(self) -> int:
        """Of a step, over all ranks."""
        return self.config.accumulate * self.team.ranks

    def _offset(self, part: int) -> int:
        """The place in the whole batch of a micro-batch's first sample."""
        return (self.team.rank * self.config.accumulate + part) * self.traced.samples

    def _put(self, name: str, value: torch.Tensor) -> None:
        """A state takes a whole tensor."""
        self._arena.put(name, value)
        kind, _, plain = name.partition("/")
        if kind == "param" and plain in self._copied:
            self._in_vectors[str(self.traced.params[plain].node.attrs["path"])].copy_(value)

    def _update_results(self) -> tuple[dict[str, Node], dict[str, Node | None]]:
        """The update, each write of which the sticky flag gates; result -> the leaf it replaces."""
        flat = self._arena.flat
        float_type = self.float
        loss = build("input", name="loss total", dtype=float_type, shape=(), batch=False)
        if self._divided:
            loss = build("/", loss, build("input", name="count", dtype=float_type, shape=(), batch=False))
        finite = build("logical-and", build("is-finite", loss), build("is-finite", flat.results["gradient-norm"]))
        alive = build("state", path=ALIVE, shape=(), dtype="bool")
        inside = build("=", build("input", name=BAD, dtype=float_type, shape=(), batch=False), constant(0.0, float_type))
        ok = build("logical-and", build("logical-and", alive, finite), inside)
        results: dict[str, Node] = {}
        into: dict[str, Node | None] = {}
        for name, node in flat.results.items():
            if name.startswith(("param/", "opt/", "ema/")):
                kept = build("state", path=HOME + name, shape=node.type.shape, dtype=node.type.dtype)  # where the update does not read it
                leaf = flat.homes.get(name) or kept
                results[name], into[name] = build("where", ok, node, leaf), leaf
            else:
                results[name], into[name] = _as_float(node, float_type), None
        for name in self.traced.state_updates:
            spec = self.traced.states[name]
            old = build("state", path=str(spec.node.attrs["path"]), shape=spec.shape, dtype=self.schema()[f"state/{name}"][0])
            new = build("input", name=f"new state {name}", dtype=old.type.dtype, shape=old.type.shape, batch=False)
            results[f"state/{name}"], into[f"state/{name}"] = build("where", ok, new, old), old
        for name, source in self._sources.items():
            if self.shard and source not in self._arena.divided:  # copied when the shares are together again
                continue
            results[name], into[name] = build("cast", results[source], dtype="bf16"), None
        if self._divided:  # else the forward pass leaves it where it is told from
            results["loss"], into["loss"] = loss, None
        step = build("step")
        results[COUNT], into[COUNT] = build("+", step, build("cast", ok, dtype=step.type.dtype)), step
        results["ok"], into["ok"] = build("cast", ok, dtype=float_type), None
        results[ALIVE], into[ALIVE] = ok, alive
        for number, node in enumerate(_of_the_step(results.values())):  # so that none but the scalars' launch reads the step, which it writes
            results[f"{SCALAR}{number}"], into[f"{SCALAR}{number}"] = node, None
        return results, into

    def _leaf(self, node: Node, extra: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if node.op == "step":
            return self._step
        if node.op == "state" and node.attrs["path"] == ALIVE:
            return self._alive
        kind, name = source_of(node)
        if name.startswith(HOME):
            return self._arena.place(name.removeprefix(HOME))
        if name.startswith(SHADOW):
            return self._in_vectors[name.removeprefix(SHADOW)]
        if kind in ("input", "gradient"):
            return extra[name]
        return self._known[kind, name]

    def _read(self, node: Node, extra: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As `_leaf`, for a graph that knows no copies: of a divided parameter it reads nothing else."""
        kind, name = source_of(node)
        return self._in_vectors[name].to(self.dtype) if kind == "param" and (kind, name) not in self._known else self._leaf(node, extra)

    def _draw(self, offset: int) -> Callable[[str, tuple], torch.Tensor]:
        def find(what: str, parts: tuple) -> torch.Tensor:
            if what == "draw":
                return self._step
            op, path, number, batch, size = parts[0]
            first = offset * (size // max(1, self.traced.samples)) if batch else 0
            key = draw_key(self.config.seed, path, number, draw_kind(op))
            if (key, first) not in self._draws:
                signed = key - (1 << 64) if key >= 1 << 63 else key
                self._draws[key, first] = torch.tensor([signed, first], dtype=torch.int64, device=self.place)
            return self._draws[key, first]

        return find

    def _build_step(self, logged: Sequence[bool], capacity: Any = None) -> tuple[Replay, Report]:
        """Steps in a row, each on its own batch, as one replay."""
        if self._ahead is not None:
            self._ahead.join()
        if self.exchange is not None:
            self.exchange.follow()
        graphs = [self._graphs(one, capacity) for one in logged]
        report = Report(self.place, self.dtype, sum(len(forward.results) + len(update.results) for forward, update in graphs))
        arena = self._activation(max(part.plan.size for pair in graphs for part in pair))
        works: list[Callable[[], None]] = []
        for step, (forward, update) in enumerate(graphs):
            fields = {n: t[step] for n, t in self._fields[len(logged), capacity].tensors.items()}
            works += self._one_step(forward, update, arena, fields, lambda name, step=step: report.place(f"{step}/{name}"))  # type: ignore[misc]

        def work() -> None:
            for one in works:
                one()

        alive = self._alive.clone()
        self._alive.zero_()  # the warm-up writes nothing
        rehearse = None if self.exchange is None else self.exchange.rehearsal(work)
        replay = Replay(work, self.place, self._pool, rehearse)
        self._alive.copy_(alive)
        return replay, report

    def _activation(self, size: int) -> torch.Tensor:
        """Memory for values between launches; one for all replays, as they follow one another."""
        size = max(size, self.plan.arena)
        if self._activations is None or len(self._activations) < size:
            self._activations = torch.empty(size, dtype=torch.uint8, device=self.place)
        return self._activations

    def _staged(self, capacity: Any) -> Any:
        """The stages of a packed batch of this capacity; None: of a batch that is not packed."""
        return self.staged if capacity is None or capacity == self.config.data.capacity else self.staged.at(capacity)

    def _graphs(self, logged: bool, capacity: Any = None) -> tuple[Compiled, Compiled]:
        """Forward and backward of a micro-batch, and the update. What a logged step computes more stands beside the rest."""
        logged = logged and self.apart
        if (logged, capacity) not in self._compiled:
            forward = self._micro(logged, capacity)
            same = next((update for _, update in self._compiled.values()), None)
            update = same or Compiled(*self._update_results(), self.target, self.traced.origins)
            self._compiled[logged, capacity] = forward, update
            self.plans = (forward.plan, update.plan)
        return self._compiled[logged, capacity]

    def _micro(self, logged: bool, capacity: Any = None, remat: Sequence[str] | None = None) -> Compiled:
        """Forward and backward of a micro-batch. `remat`: the calls of layers that run again, where not those that the run says."""
        guarded = self._guarded(capacity, False)
        beside: list[str] = []
        if logged:
            full = self._guarded(capacity, True)
            more = {n: node for n, node in full.items() if n not in guarded and n != BAD}
            if full.get(BAD) is not guarded.get(BAD):
                more[WATCHED] = full[BAD]
            guarded, beside = guarded | more, list(more)
        micro = {n: node if n.startswith(("gradient/", "state/")) else _as_float(node, self.float) for n, node in guarded.items()}
        return Compiled(micro, dict.fromkeys(micro), self.target, self.traced.origins, self._shadow, beside, self.traced.remat if remat is None else remat)

    def _guarded(self, capacity: Any, logged: bool) -> dict[str, Node]:
        plain = capacity is None and not logged and self._final
        return guard_indices(plain or self._staged(capacity).micro(logged), self._bounded, self.traced.origins)

    @property
    def apart(self) -> bool:
        """Whether a logged step computes more than another: metrics and taps."""
        return bool(self.traced.metrics or self.traced.taps)

    def _one_step(self, forward: Compiled, update: Compiled, arena: torch.Tensor, batch: Mapping[str, torch.Tensor], place: Callable[[str], torch.Tensor]) -> list[Callable[[], None]]:
        """The launches of a step; `place` gives the home of a scalar."""
        parts, exchange = self.config.accumulate, self.exchange
        scalars = [n for n in forward.results if not n.startswith(("gradient/", "state/"))]
        new_states = {n: torch.empty_like(self.values[n]) for n in forward.results if n.startswith("state/")}
        if exchange is not None:
            new_states, join_states = exchange.states(new_states)
        total = {n: place(n if n == "loss" and not self._divided else f"part/{n}") for n in scalars}
        works: list[Callable[[], None]] = []
        first = {n: self._arena.views[n.removeprefix("gradient/")] for n in forward.results if n.startswith("gradient/")}
        if parts > 1 and exchange is None and not self._sums:
            self._sums = {n: torch.empty_like(t) for n, t in self._arena.gradients.items()}
        for part in range(parts):
            fields = self._part(batch, part)
            leaves = {n: self._leaf(n, fields) for n in forward.leaves}
            into = first | new_states if part == 0 else first | {n: torch.empty_like(t) for n, t in new_states.items()}
            slots = total if part == 0 else {n: torch.zeros((), dtype=self.dtype, device=self.place) for n in scalars}
            after = exchange.after(forward, parts > 1) if exchange is not None and part + 1 == parts else None
            works.append(Bound(forward, leaves, into | slots, arena, self._draw(self._offset(part)), self.config.deterministic, after).launch)
            if exchange is not None and part + 1 < parts:
                works.append(exchange.keep(part == 0))
            if parts > 1:
                works.append(self._joined(part, parts, self._sums, total, slots, new_states, {n: into[n] for n in new_states}))
        inputs = {"loss total": total["loss"]}
        inputs["count"] = total["count"] if "count" in total else torch.full((), float(self._micro_batches), dtype=self.dtype, device=self.place)
        if exchange is not None:
            squares = {SQUARES[0]: place(SQUARES[0]), SQUARES[1]: torch.zeros((), dtype=self.dtype, device=self.place)}
            works.append(exchange.finish([*total.values(), squares[SQUARES[0]]], join_states, squares, place(WAITED)))
            if self.shard:
                inputs["gradient-norm"] = torch.zeros((), dtype=self.dtype, device=self.place)
                works.append(partial(_norm, inputs["gradient-norm"], list(squares.values()), inputs["count"]))
        bad = total.get(WATCHED, total.get(BAD))
        inputs[BAD] = torch.zeros((), dtype=self.dtype, device=self.place) if bad is None else bad
        inputs |= {f"new state {n.removeprefix('state/')}": t for n, t in new_states.items()}
        inputs |= self._gradient_leaves()
        homes = {name: self._home(name, place) for name in update.results}
        leaves = {n: self._leaf(n, inputs) for n in update.leaves}
        works.append(Bound(update, leaves, homes, arena, self._draw(0), self.config.deterministic).launch)
        if exchange is not None and self.shard:
            works += [partial(exchange.gather, [v for n, v in self._shadows.items() if self._sources[n] in self._arena.divided]), self._refresh_shadows]
        return works

    def _part(self, batch: Mapping[str, torch.Tensor], part: int) -> dict[str, torch.Tensor]:
        """The fields of one micro-batch: equal parts of each."""
        sizes = {n: len(t) // self.config.accumulate for n, t in batch.items()}
        return {n: t[part * sizes[n] : (part + 1) * sizes[n]] for n, t in batch.items()}

    def _home(self, name: str, place: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Where a result of the update is written."""
        if name in (ALIVE, COUNT):
            return self._alive if name == ALIVE else self._step
        if name.startswith(SHADOW):
            return self._arena.own(self._sources[name], self._shadows[name])
        if name.startswith(SCALAR):
            return torch.zeros((), dtype=self.dtype, device=self.place)
        if name.startswith(("param/", "opt/", "ema/")):
            return self._arena.place(name)
        return self.values[name] if name.startswith("state/") else place(name)

    def _shadow(self, node: Node) -> Node | None:
        """A parameter in bf16 of a vector that the update writes beside the parameters: the leaf that stands for it."""
        x = node.inputs[0] if node.op == "cast" else None
        if x is None or x.op != "param" or node.type.dtype != "bf16" or x.attrs["path"] not in self._shadowed:
            return None
        return build("param", path=SHADOW + x.attrs["path"], shape=x.type.shape, dtype="bf16")

    def _gradient_leaves(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, leaf in self._arena.flat.gradients.items():
            found[source_of(leaf)[1]] = self._arena.own(name, self._arena.gradients[name])
        return found

    def _joined(self, part: int, parts: int, own: Any, total: Any, slots: Any, states: Any, new: Any) -> Callable[[], None]:
        """After a micro-batch: its gradients, scalars and states join those before it."""

        def work() -> None:
            for name, kept in own.items():
                gradient = self._arena.gradients[name]
                if part == 0:
                    kept.copy_(gradient)
                else:
                    kept.add_(gradient)
                if part == parts - 1:
                    gradient.copy_(kept)
            for name, slot in slots.items():
                if part:
                    total[name].add_(slot)
            for name, tensor in new.items():
                if not part:
                    continue
                if tensor.dtype.is_floating_point:
                    states[name].add_(tensor)
                    if part == parts - 1:
                        states[name].div_(parts)
                else:
                    states[name].copy_(tensor)

        return work

    # --- the protocol ---

    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return state.schema(self.traced, self.precision)

    def initialise(self) -> None:
        missing = {n: torch.zeros(shape, dtype=TORCH[dtype]) for n, (dtype, shape) in self.schema().items() if n not in self.values}
        state.initialise(self.traced, self.config.seed, self.values | missing)
        for name, tensor in missing.items():
            self._put(name, tensor)
        self._restart(0)

    def _restart(self, step: int) -> None:
        self._step.fill_(step)
        self._alive.fill_(True)
        self._refresh_shadows()

    def kernels(self) -> dict[str, Any]:
        """The algorithms that products take, for a checkpoint."""
        return choice.used()

    def take_kernels(self, kernels: Mapping[str, Any]) -> None:
        """A checkpoint's choices, before the first step."""
        choice.take(kernels)

    def state(self) -> dict[str, Any]:
        """Every rank calls it where optimizer state is divided; rank 0 gets all of it, in host memory."""
        return self._arena.whole(self.team.on_host)

    def load(self, saved: Mapping[str, Any], step: int) -> None:
        for name in self.schema():
            self._put(name, saved[name])
        self._restart(step)

    def share(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Every rank takes rank 0's `saved` (None elsewhere), one tensor at a time."""
        for name, (dtype, shape) in sorted(self.schema().items()):
            tensor = torch.empty(shape, dtype=TORCH[dtype], device=self.place) if saved is None else saved[name].to(self.place, copy=True)
            self.team.copy_([tensor])
            self._put(name, tensor)
        self._restart(step)

    def _take(self, batches: Sequence[Mapping[str, Any]], turn: int, capacity: Any) -> None:
        """Batches into the device's fields, by way of pinned memory: their own, or that of this turn."""
        count = len(batches)
        room = batches if isinstance(batches, Room) else None
        if room is None:
            key = turn, count, capacity
            if key not in self._pinned:
                self._pinned[key] = self._room(batches)
            room = self._pinned[key]
            room.stack(batches)
        if (count, capacity) not in self._fields:
            self._fields[count, capacity] = Fields(room, self.place)
        self._fields[count, capacity].take(room)

    def _room(self, batches: Sequence[Mapping[str, Any]]) -> Room:
        """Room for so many batches of these shapes."""
        first = {name: self._host(array) for name, array in batches[0].items()}
        return Room(len(batches), {n: (tuple(t.shape), t.dtype) for n, t in first.items()}, self.place.type == "cuda")

    def _host(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor

    def step(self, batch: Mapping[str, Any], logged: bool) -> Result:
        """One optimizer step over a whole batch."""
        result = self.collect(self.launch([batch], (logged,)))[0]
        if result.fell == INDEX:
            self.blame(batch, logged)
        return result

    def room(self, count: int) -> Sequence[Mapping[str, Any]] | None:
        """Host memory to fill with the batches of a coming launch, ROOMS in turn; None before the first launch, whose
        batches show their shapes, and where those change from batch to batch (packed data)."""
        known = next(iter(self._pinned.values()), None)
        if known is None or self.config.data.source.structures:
            return None
        rooms = self._rooms.setdefault(count, [])
        if len(rooms) < ROOMS:
            rooms.append(self._room([known[0]] * count))
            return rooms[-1]
        rooms.append(rooms.pop(0))
        if rooms[-1].flight is not None:
            rooms[-1].flight.wait()
        return rooms[-1]

    def launch(self, batches: Sequence[Mapping[str, Any]], logged: Sequence[bool] | bool) -> InFlight:
        """Sends steps to the device, one a batch, as one replay; `logged`: which of them compute metrics and taps. Two replays may be
        in flight; `collect` them in order. Where a step is not finite, those after it change nothing, also those of the next replay.
        Packed batches of one launch have one capacity."""
        turn = self._turn = (self._turn + 1) % 2
        flags = tuple(one and self.apart for one in ([logged] * len(batches) if isinstance(logged, bool) else logged))
        capacity = capacity_of(batches[0], self.config.accumulate) if self.config.data.source.structures else None
        with memory_errors(self.plan), torch.no_grad():
            before = self._flight.get(turn)
            if before is not None:
                with self.team.waiting("the sums of a step"):
                    before.wait()
            self._take(batches, turn, capacity)
            self._latest = flags[-1], len(batches), capacity
            key = flags, capacity
            if key not in self._steps:
                with self._modes(), self.team.making():
                    self._steps[key] = self._build_step(*key)
            replay, report = self._steps[key]
            begun = report.begin()
            if replay.graph is None:
                with self._modes():
                    replay.run()
            else:
                replay.run()
            flight = self._flight[turn] = report.send(turn, begun, report.readings(self._micro_batches))
        if isinstance(batches, Room):
            batches.flight = flight
        return flight

    def collect(self, flight: InFlight) -> list[Result]:
        """The scalars of the steps of a launch, up to the first that is not finite; waits for it alone. After one that is not finite
        nothing may be collected but what was launched before it was known, and the next launch goes on as if it had not been."""
        with memory_errors(self.plan), self.team.waiting("the sums of a step"):
            results = flight.results()
        if self.exchange is not None:
            told = flight.read()
            self.team.waited(sum(told[f"{step}/{WAITED}"] for step in range(len(results))))
        if not results[-1].finite:
            self._alive.fill_(True)
        return results

    def blame(self, batch: Mapping[str, Any], logged: bool) -> None:
        """Names the index of a step's batch that was out of range (E-RUN-031): of one that fell by `index`, and changed nothing."""
        capacity = capacity_of(batch, self.config.accumulate) if self.config.data.source.structures else None
        whole = {name: self._host(array).to(self.place) for name, array in batch.items()}
        results, parts = self._staged(capacity).micro(logged), self.config.accumulate
        for part in range(parts):
            fields = self._part(whole, part)
            place = self.config.seed, self.updates, self._offset(part)
            if part + 1 == parts and self.team.ranks > 1:
                raise_bad_index(results, lambda leaf, fields=fields: self._read(leaf, fields), place, self.traced.origins, False)  # type: ignore[misc]
                self.team.sum_floats([0.0])  # the rank whose index it is ends the run
            raise_bad_index(results, lambda leaf, fields=fields: self._read(leaf, fields), place, self.traced.origins, part + 1 == parts)  # type: ignore[misc]

    def evaluate(self, name: str, batch: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        packed = "graph-mask" in batch
        samples = float(np.sum(batch["graph-mask"])) if packed else len(next(iter(batch.values())))
        size = capacity_of(batch) if packed else samples
        with memory_errors(self.plan), torch.no_grad(), self._modes():
            if (name, size) not in self._evals:
                with self.team.making():
                    self._evals[name, size] = self._build_eval(name, size, batch)
            replay, report, fields, means, plain, value = self._evals[name, size]
            for field, array in batch.items():
                fields[field].copy_(self._host(array), non_blocking=True)
            replay.run()
            found = report.read()
        if found.pop(BAD, 0.0):
            raise_bad_index(plain, value, (self.config.seed, self.updates, 0), self.traced.origins)
        weights = dict.fromkeys(means, samples)
        values: dict[str, tuple[float, float]] = {}
        for key, total in found.items():
            if key.endswith("/total"):
                short = key.split("/")[1]
                values[short] = (total * weights[short], weights[short]) if short in weights else (total, found[f"metric/{short}/count"])
        return values

    def _build_eval(self, name: str, size: Any, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        entries, plain = self.staged.evaluation(name, size)
        fields = {f: self._host(array).to(self.place, copy=True) for f, array in batch.items()}
        compiled = self._eval_graph(name, plain)
        report = Report(self.place, self.dtype, max(16, len(compiled.results)))
        known = dict(self._known)
        if self._weights[name] == "ema":
            for path in self.traced.averages:
                known[self.full[f"param/{path}"]] = self.values[f"ema/{path}"]

        def value(leaf: Node) -> torch.Tensor:
            kind, source = source_of(leaf)
            if source.startswith(SHADOW):
                return self._in_vectors[source.removeprefix(SHADOW)]
            if kind == "param" and (kind, source) not in known:  # by a reader that knows no copies
                return self._in_vectors[source].to(self.dtype)
            return self._step if leaf.op == "step" else fields[source] if kind == "input" else known[kind, source]

        leaves = {leaf: value(leaf) for leaf in compiled.leaves}
        bound = Bound(compiled, leaves, {n: report.place(n) for n in compiled.results}, self._activation(compiled.plan.size), self._draw(0), self.config.deterministic)
        replay = Replay(bound.launch, self.place, self._pool)
        return replay, report, fields, [e.name for e in entries if e.count is None], plain, value

    def _eval_graph(self, name: str, plain: Mapping[str, Node]) -> Compiled:
        """Of an evaluation; it reads bf16 copies where parameters are divided, as a step does, and averages as they are."""
        results = {n: _as_float(node, self.float) for n, node in guard_indices(plain, (), self.traced.origins).items()}
        copies = self._shadow if self.shard and self._weights[name] != "ema" else None
        return Compiled(results, dict.fromkeys(results), self.target, self.traced.origins, copies)

    def close(self) -> None:
        self._steps.clear()
        self._evals.clear()


def _strict(strict: bool, warn: bool) -> None:
    """`torch.use_deterministic_algorithms` without the compiler of torch's, which that one imports for a flag of it: four seconds."""
    torch._C._set_deterministic_algorithms(strict, warn_only=warn)


def _parameters(compiled: Compiled) -> set[str]:
    """Paths of parameters that are read as they are, and not as their bf16 copies."""
    return {path for leaf in compiled.leaves if leaf.op == "param" and not (path := str(leaf.attrs["path"])).startswith(SHADOW)}


def _norm(out: torch.Tensor, squares: Sequence[torch.Tensor], count: torch.Tensor) -> None:
    """The gradient's norm from the sums of squares of undivided gradients."""
    torch.add(*squares, out=out)
    out.sqrt_().div_(count)



def _of_the_step(roots: Iterable[Node]) -> list[Node]:
    """Floats of the step, such as a bias correction, that tensors are computed with."""
    found: dict[Node, None] = {}
    depends: dict[Node, bool] = {}
    for node in postorder(roots):
        depends[node] = node.op == "step" or any(depends[x] for x in node.inputs)
        for x in node.inputs:
            if node.type.size > 1 and x.type.size == 1 and x.inputs and depends[x] and x.type.is_float:
                found.setdefault(x)
    return list(found)


def _as_float(node: Node, dtype: str) -> Node:
    return node if node.type.dtype == dtype else build("cast", node, dtype=dtype)

"""A run on a CUDA device: implements `run.program.Program` by replaying one CUDA graph a step.

A step is forward and backward of each micro-batch, then the update over flat vectors, which writes in place where loss, gradient
norm and every step before were finite. On the CPU, under Triton's interpreter, the same launches run one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sexpgpu.backends import state
from sexpgpu.backends.arena import Arena
from sexpgpu.backends.cuda.device import INTERPRETED, Device, free_memory, interpreted, memory_errors
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.cuda.indices import raise_bad_index
from sexpgpu.backends.cuda.memory import MemoryPlan, check_plan, check_state, memory_plan
from sexpgpu.backends.interpreter.program import Result, capacity_of, source_of
from sexpgpu.ir import Node
from sexpgpu.ops import build, constant
from sexpgpu.ops.philox import draw_key
from sexpgpu.ops.random import draw_kind
from sexpgpu.passes.bounds import BAD, bounded_fields, guard_indices
from sexpgpu.passes.flatten import flatten

ALIVE = "//alive"  # no parameter's path
SHADOW = "//bf16/"
HOME = "//home/"


class InFlight:
    """Scalars on their way to the host."""

    def __init__(self, names: Mapping[str, int], values: torch.Tensor, event: Any):
        self.names, self.values, self.event = names, values, event

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def read(self) -> dict[str, float]:
        self.wait()
        return dict(zip(self.names, self.values[: len(self.names)].tolist(), strict=True))


class Report:
    """The scalars of a step, side by side in one tensor: one copy brings them to the host."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int = 4096):
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.names: dict[str, int] = {}
        self.hosts: dict[int, torch.Tensor] = {}

    def place(self, name: str) -> torch.Tensor:
        number = self.names.setdefault(name, len(self.names))
        return self.values[number]

    def send(self, turn: int = 0) -> InFlight:
        """Begins the copy into the pinned memory of this turn."""
        count = len(self.names)
        if self.values.device.type != "cuda":
            return InFlight(self.names, self.values[:count].clone(), None)
        if turn not in self.hosts:
            self.hosts[turn] = torch.empty(count, dtype=self.values.dtype, pin_memory=True)
        self.hosts[turn].copy_(self.values[:count], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return InFlight(self.names, self.hosts[turn], event)

    def read(self) -> dict[str, float]:
        return self.send().read()


class Replay:
    """Launches that are captured once, if the device captures, and then replayed."""

    def __init__(self, work: Callable[[], None], device: torch.device, pool: Any):
        self.work, self.graph = work, None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels, and sets up the libraries
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            work()

    def run(self) -> None:
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()


class CudaProgram:
    """`staged` is `compiler.Stages`; `threads` is not used by the device, and is kept for the manifest. `opened`: the device;
    `budget`: bytes that the plan may take, None for what is free. `device`: in tests, `cpu` or `cuda` instead of `opened`."""

    def __init__(self, staged: Any, threads: int | None, device: str | None = None, opened: Device | None = None, budget: int | None = None):
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
        self._draws: dict[tuple, torch.Tensor] = {}
        self._updates = torch.zeros((), dtype=torch.int64, device=self.place)
        self._step = torch.zeros((), dtype=torch.int32, device=self.place)
        self._alive = torch.zeros((), dtype=torch.bool, device=self.place)
        check_state(self.schema(), budget)
        with memory_errors(), torch.device(self.place):
            self._arena = Arena(self._flat(), self.schema())
        self.values: dict[str, Any] = self._arena.tensors
        self._known = {source: self.values[name] for name, source in self.full.items()}
        self._known |= {source_of(leaf): self._arena.place(name) for name, leaf in self._arena.flat.homes.items()}
        self.float = "f64" if self.precision == "f64" else "f32"
        for name, value in self.config.statistics.items():
            self._known["statistic", name] = torch.tensor(value, dtype=self.dtype, device=self.place)
        self._bounded = bounded_fields(self.staged.micro(False))
        self._compiled: dict[Any, tuple[Compiled, Compiled]] = {}
        self._fields: dict[Any, dict[str, torch.Tensor]] = {}  # (steps of a replay, capacity) -> field -> [steps batch …]
        self._pinned: dict[Any, torch.Tensor] = {}
        self._turn = 0
        self._flight: dict[int, InFlight] = {}
        self._weights = {e.name: e.weights for e in self.config.evals}
        self._evals: dict[tuple[str, Any], Any] = {}
        self._steps: dict[Any, tuple[Replay, Report]] = {}
        self._make_shadows()
        self.plan: MemoryPlan = memory_plan(self.traced, self.schema(), *self._graphs(False))
        check_plan(self.plan, budget)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """torch's process-wide switches as this run has them, while its launches are made."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, torch.utils.deterministic.fill_uninitialized_memory
        strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        matmul.allow_tf32 = cudnn.allow_tf32 = self.precision in ("tf32", "bf16")
        matmul.allow_bf16_reduced_precision_reduction = False
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(self.config.deterministic, warn_only=True)
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, torch.utils.deterministic.fill_uninitialized_memory = before
            torch.use_deterministic_algorithms(strict, warn_only=warn)

    @property
    def updates(self) -> int:
        return int(self._updates)

    def _make_shadows(self) -> None:
        """bf16 copies of the vectors of parameters, where the precision asks for them."""
        self._shadows: dict[str, torch.Tensor] = {}
        self._in_vectors: dict[str, torch.Tensor] = {}
        self._sources: dict[str, str] = {}  # shadow vector -> the vector it follows
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
        for name, vector in self._shadows.items():
            vector.copy_(self._arena.place(self._sources[name]))

    # --- graphs ---

    @property
    def _divided(self) -> bool:
        return self.traced.loss.count is not None or self.config.accumulate > 1

    def _flat(self) -> Any:
        owners = {("gradient", n): ("gradient", n) for n in self.traced.gradients}
        for name, (kind, path) in self.full.items():
            if kind in ("param", "opt", "ema"):
                slot, _, rest = name.removeprefix("opt/").partition("/")
                owners[kind, path] = (f"opt/{slot}", rest) if kind == "opt" else (kind, name.partition("/")[2])
        return flatten(self.staged.update(self._divided), list(self.traced.gradients), owners, source_of)

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
            results[name], into[name] = build("cast", results[source], dtype="bf16"), None
        results["loss"], into["loss"] = loss, None
        results["ok"], into["ok"] = build("cast", ok, dtype=float_type), None
        results[ALIVE], into[ALIVE] = ok, alive
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

    def _draw(self, offset: int) -> Callable[[str, tuple], torch.Tensor]:
        def find(what: str, parts: tuple) -> torch.Tensor:
            if what == "draw":
                return self._updates
            op, path, number, batch, size = parts[0]
            first = offset * (size // max(1, self.traced.samples)) if batch else 0
            key = draw_key(self.config.seed, path, number, draw_kind(op))
            if (key, first) not in self._draws:
                signed = key - (1 << 64) if key >= 1 << 63 else key
                self._draws[key, first] = torch.tensor([signed, first], dtype=torch.int64, device=self.place)
            return self._draws[key, first]

        return find

    def _build_step(self, logged: bool, steps: int, capacity: Any = None) -> tuple[Replay, Report]:
        """So many steps in a row, each on its own batch, as one replay."""
        report = Report(self.place, self.dtype)
        forward, update = self._graphs(logged, capacity)
        arena = torch.empty(max(forward.plan.size, update.plan.size), dtype=torch.uint8, device=self.place)
        works: list[Callable[[], None]] = []
        for step in range(steps):
            fields = {n: t[step] for n, t in self._fields[steps, capacity].items()}
            works += self._one_step(forward, update, arena, fields, lambda name, step=step: report.place(f"{step}/{name}"))  # type: ignore[misc]

        def work() -> None:
            for one in works:
                one()

        alive = self._alive.clone()
        self._alive.zero_()  # the warm-up writes nothing
        replay = Replay(work, self.place, self._pool)
        self._alive.copy_(alive)
        return replay, report

    def _staged(self, capacity: Any) -> Any:
        """The stages of a packed batch of this capacity; None: of a batch that is not packed."""
        return self.staged if capacity is None or capacity == self.config.data.capacity else self.staged.at(capacity)

    def _graphs(self, logged: bool, capacity: Any = None) -> tuple[Compiled, Compiled]:
        """Forward and backward of a micro-batch, and the update."""
        if (logged, capacity) not in self._compiled:
            guarded = guard_indices(self._staged(capacity).micro(logged), self._bounded, self.traced.origins)
            micro = {n: node if n.startswith(("gradient/", "state/")) else _as_float(node, self.float) for n, node in guarded.items()}
            forward = Compiled(micro, dict.fromkeys(micro), self.target, self.traced.origins, self._shadow)
            same = next((update for _, update in self._compiled.values()), None)
            update = same or Compiled(*self._update_results(), self.target, self.traced.origins)
            self._compiled[logged, capacity] = forward, update
            self.plans = (forward.plan, update.plan)
        return self._compiled[logged, capacity]

    def _one_step(self, forward: Compiled, update: Compiled, arena: torch.Tensor, batch: Mapping[str, torch.Tensor], place: Callable[[str], torch.Tensor]) -> list[Callable[[], None]]:
        """The launches of a step; `place` gives the home of a scalar."""
        parts, size = self.config.accumulate, self.traced.samples
        scalars = [n for n in forward.results if not n.startswith(("gradient/", "state/"))]
        new_states = {n: torch.empty_like(self.values[n]) for n in forward.results if n.startswith("state/")}
        total = {n: place(f"part/{n}") for n in scalars}
        works: list[Callable[[], None]] = []
        first = {n: self._arena.views[n.removeprefix("gradient/")] for n in forward.results if n.startswith("gradient/")}
        own = {n: torch.empty_like(t) for n, t in self._arena.gradients.items()} if parts > 1 else {}
        for part in range(parts):
            fields = self._part(batch, part)
            leaves = {n: self._leaf(n, fields) for n in forward.leaves}
            into = first | new_states if part == 0 else first | {n: torch.empty_like(t) for n, t in new_states.items()}
            slots = total if part == 0 else {n: torch.zeros((), dtype=self.dtype, device=self.place) for n in scalars}
            works.append(Bound(forward, leaves, into | slots, arena, self._draw(part * size), self.config.deterministic).launch)
            if parts > 1:
                works.append(self._joined(part, parts, own, total, slots, new_states, {n: into[n] for n in new_states}))
        inputs = {"loss total": total["loss"]}
        inputs["count"] = total["count"] if "count" in total else torch.full((), float(parts), dtype=self.dtype, device=self.place)
        inputs[BAD] = total[BAD] if BAD in total else torch.zeros((), dtype=self.dtype, device=self.place)
        inputs |= {f"new state {n.removeprefix('state/')}": t for n, t in new_states.items()}
        inputs |= self._gradient_leaves()
        homes = {name: self._home(name, place) for name in update.results}
        leaves = {n: self._leaf(n, inputs) for n in update.leaves}
        works.append(Bound(update, leaves, homes, arena, self._draw(0), self.config.deterministic).launch)
        works.append(self._count(homes["ok"]))
        return works

    def _part(self, batch: Mapping[str, torch.Tensor], part: int) -> dict[str, torch.Tensor]:
        """The fields of one micro-batch: equal parts of each."""
        sizes = {n: len(t) // self.config.accumulate for n, t in batch.items()}
        return {n: t[part * sizes[n] : (part + 1) * sizes[n]] for n, t in batch.items()}

    def _home(self, name: str, place: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Where a result of the update is written."""
        if name == ALIVE:
            return self._alive
        if name.startswith(SHADOW):
            return self._shadows[name]
        if name.startswith(("param/", "opt/", "ema/")):
            return self._arena.place(name)
        return self.values[name] if name.startswith("state/") else place(name)

    def _shadow(self, node: Node) -> Node | None:
        """A parameter in bf16 of a vector that the update writes beside the parameters: the leaf that stands for it."""
        x = node.inputs[0] if node.op == "cast" else None
        if x is None or x.op != "param" or node.type.dtype != "bf16" or x.attrs["path"] not in self._in_vectors:
            return None
        return build("param", path=SHADOW + x.attrs["path"], shape=x.type.shape, dtype="bf16")

    def _gradient_leaves(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, leaf in self._arena.flat.gradients.items():
            found[source_of(leaf)[1]] = self._arena.gradients[name]
        return found

    def _count(self, ok: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            self._updates.add_(ok.to(torch.int64))
            self._step.copy_(self._updates)

        return work

    def _joined(self, part: int, parts: int, own: Any, total: Any, slots: Any, states: Any, new: Any) -> Callable[[], None]:
        """After a micro-batch: its gradients, scalars and states join those before it."""

        def work() -> None:
            for name, gradient in self._arena.gradients.items():
                if part == 0:
                    own[name].copy_(gradient)
                else:
                    own[name].add_(gradient)
                if part == parts - 1:
                    gradient.copy_(own[name])
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
        state.initialise(self.traced, self.config.seed, self.values)
        self._restart(0)

    def _restart(self, step: int) -> None:
        self._updates.fill_(step)
        self._step.fill_(step)
        self._alive.fill_(True)
        self._refresh_shadows()

    def state(self) -> dict[str, Any]:
        return dict(self.values)

    def load(self, saved: Mapping[str, Any], step: int) -> None:
        for name, tensor in self.values.items():
            tensor.copy_(saved[name])
        self._restart(step)

    def _take(self, batches: Sequence[Mapping[str, Any]], turn: int, capacity: Any) -> None:
        """Batches into the device's fields, by way of pinned memory of this turn."""
        count = len(batches)
        fields = self._fields.setdefault((count, capacity), {})
        for name in batches[0]:
            tensors = [self._host(batch[name]) for batch in batches]
            shape = (count, *tensors[0].shape)
            if name not in fields:
                fields[name] = torch.empty(shape, dtype=tensors[0].dtype, device=self.place)
            if self.place.type != "cuda":
                torch.stack(tensors, out=fields[name])
                continue
            key = turn, count, capacity, name
            if key not in self._pinned:
                self._pinned[key] = torch.empty(shape, dtype=tensors[0].dtype, pin_memory=True)
            fields[name].copy_(torch.stack(tensors, out=self._pinned[key]), non_blocking=True)

    def _host(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor

    def step(self, batch: Mapping[str, Any], logged: bool) -> Result:
        """One optimizer step over a whole batch."""
        return self.collect(self.launch([batch], logged))[0]

    def launch(self, batches: Sequence[Mapping[str, Any]], logged: bool) -> InFlight:
        """Sends steps to the device, one a batch, as one replay. Two replays may be in flight; `collect` them in order. Where a step
        is not finite, those after it change nothing. Packed batches of one launch have one capacity."""
        turn = self._turn = (self._turn + 1) % 2
        capacity = capacity_of(batches[0], self.config.accumulate) if self.config.data.source.structures else None
        with memory_errors(self.plan), torch.no_grad():
            before = self._flight.get(turn)
            if before is not None:
                before.wait()
            self._take(batches, turn, capacity)
            key = logged, len(batches), capacity
            self._latest = key
            with self._modes():
                if key not in self._steps:
                    self._steps[key] = self._build_step(*key)
                replay, report = self._steps[key]
                replay.run()
            self._flight[turn] = report.send(turn)
        return self._flight[turn]

    def collect(self, flight: InFlight) -> list[Result]:
        """The scalars of the steps of a launch; waits for it alone."""
        steps: dict[int, dict[str, float]] = {}
        for name, value in flight.read().items():
            number, _, rest = name.partition("/")
            steps.setdefault(int(number), {})[rest] = value
        return [self._result(found, number) for number, found in steps.items()]

    def _result(self, found: dict[str, float], number: int) -> Result:
        parts = self.config.accumulate
        loss, norm, ok = found["loss"], found["gradient-norm"], found["ok"] != 0
        fell = "" if ok else "loss" if not math.isfinite(loss) else "gradient norm"
        if not ok:
            self._alive.fill_(True)
        if found.get(f"part/{BAD}"):
            self._raise_bad_index(number)
        rates = {n.removeprefix("learning-rate/"): v for n, v in found.items() if n.startswith("learning-rate/")}
        metrics: dict[str, float] = {}
        for name, value in found.items():
            if name.startswith("part/metric/") and name.endswith("/total"):
                short = name.split("/")[2]
                count = found.get(f"part/metric/{short}/count", float(parts))
                metrics[short] = value / count if count else math.nan
        taps = {n.removeprefix("part/tap/"): v / parts for n, v in found.items() if n.startswith("part/tap/")}
        return Result(loss, norm, rates, ok, metrics, taps, found.get("part/count"), fell)

    def _raise_bad_index(self, number: int) -> None:
        """Names the index of a step of the latest launch that was out of range; the step changed nothing."""
        logged, count, capacity = self._latest
        batch = {name: tensor[number] for name, tensor in self._fields[count, capacity].items()}
        results, parts = self._staged(capacity).micro(logged), self.config.accumulate
        for part in range(parts):
            fields = self._part(batch, part)
            place = self.config.seed, self.updates, part * self.traced.samples
            raise_bad_index(results, lambda leaf, fields=fields: self._leaf(leaf, fields), place, self.traced.origins, part + 1 == parts)  # type: ignore[misc]

    def evaluate(self, name: str, batch: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        packed = "graph-mask" in batch
        samples = float(np.sum(batch["graph-mask"])) if packed else len(next(iter(batch.values())))
        size = capacity_of(batch) if packed else samples
        with memory_errors(self.plan), torch.no_grad(), self._modes():
            if (name, size) not in self._evals:
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
        results = {n: _as_float(node, self.float) for n, node in guard_indices(plain, (), self.traced.origins).items()}
        fields = {f: self._host(array).to(self.place, copy=True) for f, array in batch.items()}
        report = Report(self.place, self.dtype, max(16, len(results)))
        compiled = Compiled(results, dict.fromkeys(results), self.target, self.traced.origins)
        known = dict(self._known)
        if self._weights[name] == "ema":
            for path in self.traced.averages:
                known[self.full[f"param/{path}"]] = self.values[f"ema/{path}"]

        def value(leaf: Node) -> torch.Tensor:
            kind, source = source_of(leaf)
            return self._step if leaf.op == "step" else fields[source] if kind == "input" else known[kind, source]

        leaves = {leaf: value(leaf) for leaf in compiled.leaves}
        bound = Bound(compiled, leaves, {n: report.place(n) for n in results}, None, self._draw(0), self.config.deterministic)
        replay = Replay(bound.launch, self.place, self._pool)
        return replay, report, fields, [e.name for e in entries if e.count is None], plain, value

    def close(self) -> None:
        self._steps.clear()
        self._evals.clear()


def _as_float(node: Node, dtype: str) -> Node:
    return node if node.type.dtype == dtype else build("cast", node, dtype=dtype)

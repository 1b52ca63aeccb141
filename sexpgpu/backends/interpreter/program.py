"""A run on torch CPU: implements `run.program.Program` over executables of the interpreter.

A step writes parameters, optimizer state and averages only when loss and gradient norm are finite, so a step that is
not finite changes nothing but the gradients' memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sexpgpu.backends import state
from sexpgpu.backends.arena import Arena
from sexpgpu.backends.interpreter.draws import Ahead, StepContext
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.executable import Executable
from sexpgpu.backends.interpreter.indices import refuse_index
from sexpgpu.backends.interpreter.memory import keep_freed
from sexpgpu.backends.interpreter.repeat import repeating
from sexpgpu.backends.leaves import flat_update, source_of
from sexpgpu.backends.ranks import Alone, Team
from sexpgpu.ir import Node
from sexpgpu.passes.flatten import Flat


@dataclass(frozen=True)
class Result:
    """The fields of `run.program.StepResult`; backends do not import run."""

    loss: float
    gradient_norm: float
    learning_rates: Mapping[str, float]
    finite: bool
    metrics: Mapping[str, float]
    taps: Mapping[str, float]
    tokens: float | None
    fell: str


class Compiled:
    """An executable whose leaves are bound by what they stand for, not by node: passes rebuild nodes."""

    def __init__(self, results: dict[str, Node]):
        self.executable = Executable(results)
        self.sources = [source_of(node) for node in self.executable.leaves]

    def run(self, values: Mapping[tuple[str, str], Any], seed: int, step: int, offset: int = 0) -> dict[str, Any]:
        leaves = [values[source] for source in self.sources]
        return dict(zip(self.executable.names, self.executable.run_list(leaves, seed, step, offset), strict=True))


class Bound:
    """An executable over tensors that stay where they are: of a call, the batch's fields alone are new."""

    def __init__(self, executable: Executable, tensors: Mapping[Node, Any], outs: list[Any]):
        self.executable, self.outs = executable, outs
        self.fixed = [tensors.get(leaf) for leaf in executable.leaves]
        self.fields = [(i, n.attrs["name"]) for i, n in enumerate(executable.leaves) if tensors.get(n) is None]

    def run(self, fields: Mapping[str, Any], context: StepContext) -> tuple[Any, ...]:
        leaves = self.fixed.copy()
        for place, name in self.fields:
            leaves[place] = fields[name]
        return self.executable.call(leaves, context, context.step, self.outs)


class InterpreterProgram:
    """`staged` is `compiler.Stages`; `threads` is a stored count, or None to choose by rule.

    A step is two graphs: from a batch to the loss and the gradients, and from those to new parameters. Parameters,
    gradients and optimizer state of equal updates lie in vectors (`flat`), of which the named tensors are views.

    Of several ranks (`team`) each computes its part of the batch; between the two graphs losses, counts and gradients are
    summed over them. With `:shard optimizer` a rank updates its share of each vector, and parameters are put together after.
    """

    device = "cpu"

    def __init__(self, staged: Any, threads: int | None, team: Team | None = None):
        keep_freed()
        self.team: Team = Alone() if team is None else team
        self.shard = staged.run.shard and self.team.ranks > 1
        self.staged, self.traced, self.config = staged, staged.traced, staged.run
        self.threads = threads or torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.dtype = torch.float64 if self.config.precision == "f64" else torch.float32
        self.updates = 0
        self._graphs: dict[Any, Any] = {}
        self._full = state.sources(self.traced)
        self._weights = {e.name: e.weights for e in self.config.evals}
        self._arena = Arena(self._flat(), self.schema(), self.team.rank if self.shard else 0)
        self.values: dict[str, Any] = self._arena.tensors  # state names -> tensors, for good
        self._known = {source: self.values[name] for name, source in self._full.items() if name in self.values}
        for name, value in self.config.statistics.items():
            self._known["statistic", name] = torch.tensor(value, dtype=self.dtype)
        self._update = self._bound_update()
        self._forward = {logged: self._bound_forward(logged) for logged in (False, True)}  # a mistake must not wait
        self._sums: list[Any] | None = None  # gradients summed over micro-batches
        masks = self._forward[False].executable.masks
        self._masks, self._ahead = masks, Ahead(self.config.seed, self._forward[False].executable.samples)

    def _graph(self, key: Any, make: Any) -> Any:
        if key not in self._graphs:
            self._graphs[key] = make()
        return self._graphs[key]

    def _flat(self) -> Flat:
        """The update's graph over vectors, or this rank's share of them."""
        return flat_update(self.staged, self.config.accumulate * self.team.ranks, self.team.ranks if self.shard else 1)

    def _bound_update(self) -> Bound:
        flat, arena = self._arena.flat, self._arena
        into = {name: flat.homes.get(name) for name in flat.results if name.startswith(("param/", "opt/", "ema/"))}
        scratch = [*flat.homes.values(), *flat.gradients.values()]
        kept = [name for name in flat.results if name not in into]
        self._kept = sorted(kept, key=lambda name: name != "gradient-norm")  # it decides whether anything is written
        executable = Executable(flat.results, into, scratch, self._kept)
        known = {leaf: arena.place(name) for name, leaf in flat.homes.items()}
        known |= {leaf: arena.own(name, arena.gradients[name]) for name, leaf in flat.gradients.items()}
        for leaf in executable.leaves:
            known.setdefault(leaf, self._known.get(source_of(leaf)))
        return Bound(executable, known, [arena.place(name) for name in into])

    def _bound_forward(self, logged: bool, staged: Any = None) -> Bound:
        """From a batch to the loss, and each gradient where it belongs; `staged` is that of another capacity."""
        results = (staged or self.staged).micro(logged)
        names = [name for name in results if name.startswith("gradient/")]
        traced = (staged or self.staged).traced
        executable = Executable(results, dict.fromkeys(names), again=repeating(traced.remat, traced.origins))
        known = {leaf: self._known.get(source_of(leaf)) for leaf in executable.leaves}
        return Bound(executable, known, [self._arena.views[name.removeprefix("gradient/")] for name in names])

    # --- state ---

    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return state.schema(self.traced, self.config.precision)

    def initialise(self) -> None:
        missing = {n: torch.zeros(shape, dtype=TORCH[dtype]) for n, (dtype, shape) in self.schema().items() if n not in self.values}
        state.initialise(self.traced, self.config.seed, self.values | missing)
        for name, tensor in missing.items():
            self._arena.put(name, tensor)
        self._moved(0)

    def state(self) -> dict[str, Any]:
        """Every rank calls it where optimizer state is divided."""
        with torch.inference_mode():
            return self._arena.whole(self.team.gather)

    def load(self, saved: Mapping[str, Any], step: int) -> None:
        for name in self.schema():
            self._arena.put(name, saved[name])
        self._moved(step)

    def share(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Every rank takes rank 0's `saved` (None elsewhere), one tensor at a time."""
        for name, (dtype, shape) in sorted(self.schema().items()):
            tensor = torch.empty(shape, dtype=TORCH[dtype]) if saved is None else saved[name].clone()
            self.team.copy_([tensor])
            self._arena.put(name, tensor)
        self._moved(step)

    def _moved(self, updates: int) -> None:
        self.updates = updates
        self._ahead.forget()

    # --- steps ---

    def _fields(self, batch: Mapping[str, Any], part: int = 0, parts: int = 1) -> dict[str, Any]:
        """The batch's fields, or those of one of so many equal parts."""
        fields = {}
        for name, array in batch.items():
            size = len(array) // parts
            tensor = torch.from_numpy(np.ascontiguousarray(array if parts == 1 else array[part * size : (part + 1) * size]))
            fields[name] = tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor
        return fields

    def _leaves(self, batch: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
        return self._known | {("input", name): tensor for name, tensor in self._fields(batch).items()}

    def step(self, batch: Mapping[str, Any], logged: bool) -> Result:
        """One optimizer step over a whole batch."""
        with torch.inference_mode():
            forward, size, parts = self._fitting(batch, logged), self.traced.samples, []
            for part in range(self.config.accumulate):
                context = StepContext(self.config.seed, self.updates, self._offset(part), size, self._ahead)
                self._draw_ahead(part)
                values = self._run(forward, self._fields(batch, part, self.config.accumulate), context)
                parts.append(dict(zip(forward.executable.names, values, strict=True)))
                if self.config.accumulate > 1:
                    self._add_gradients(part)
            return self._finish(parts)

    def _fitting(self, batch: Mapping[str, Any], logged: bool) -> Bound:
        """The graph of the batch's capacity; each but the largest is compiled when it first comes."""
        data = self.config.data
        if not data.source.structures:
            return self._forward[logged]
        capacity = capacity_of(batch, self.config.accumulate)
        if capacity == data.capacity:
            return self._forward[logged]
        return self._graph((capacity, logged), lambda: self._bound_forward(logged, self.staged.at(capacity)))

    def _run(self, bound: Bound, fields: Mapping[str, Any], context: StepContext) -> tuple[Any, ...]:
        try:
            return bound.run(fields, context)
        except (IndexError, RuntimeError):
            leaves = {n: f for n, f in zip(bound.executable.leaves, bound.fixed, strict=True) if f is not None}
            leaves |= {bound.executable.leaves[place]: fields[name] for place, name in bound.fields}
            refuse_index(bound.executable, leaves, context, self.traced.origins)
            raise

    def _draw_ahead(self, part: int) -> None:
        """Asks for the masks of this micro-batch, should they not be under way, and for those of the next."""
        if not self._masks:
            return
        self._ahead.ask(self._masks, self.updates, self._offset(part))
        after = (self.updates, part + 1) if part + 1 < self.config.accumulate else (self.updates + 1, 0)
        self._ahead.ask(self._masks, after[0], self._offset(after[1]))

    def _offset(self, part: int) -> int:
        """The place in the whole batch of a micro-batch's first sample."""
        return (self.team.rank * self.config.accumulate + part) * self.traced.samples

    def _add_gradients(self, part: int) -> None:
        """Sums of gradients over micro-batches, in their order; after the last they are the gradients."""
        gradients = list(self._arena.gradients.values())
        if self._sums is None:
            self._sums = [torch.empty_like(g) for g in gradients]
        if part == 0:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.copy_(gradient)
            return
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.add_(gradient)
            if part == self.config.accumulate - 1:
                gradient.copy_(total)

    def _finish(self, parts: list[dict[str, Any]]) -> Result:
        total, count, metrics, taps = self._sums_of(parts)
        loss = total / count if count else math.nan
        gathered = {"count": torch.tensor(count, dtype=self.dtype)}
        if self.team.ranks > 1:
            gathered |= self._gather_gradients(count)
        context = StepContext(self.config.seed, self.updates, open=math.isfinite(loss))
        out = dict(zip(self._update.executable.names, self._update.run(gathered, context), strict=True))
        norm = float(out["gradient-norm"])
        fell = "" if math.isfinite(loss) and math.isfinite(norm) else "gradient norm" if math.isfinite(loss) else "loss"
        rates = {k.removeprefix("learning-rate/"): float(v) for k, v in out.items() if k.startswith("learning-rate/")}
        if not fell:
            self._join_parameters()
            self._merge_states(parts)
            self.updates += 1
        return Result(loss, norm, rates, not fell, metrics, taps, count if "count" in parts[0] else None, fell)

    def _sums_of(self, parts: list[dict[str, Any]]) -> tuple[float, float, dict[str, float], dict[str, float]]:
        """Loss and count as sums over all micro-batches of all ranks, and the values of metrics and taps."""
        joined = _metrics(parts)
        taps = {k.removeprefix("tap/"): sum(float(p[k]) for p in parts) for k in parts[0] if k.startswith("tap/")}
        own = [float(_total(parts, name, self.dtype)) for name in ("loss", "count")]
        own += [value for pair in joined.values() for value in pair] + list(taps.values())
        total, count, *rest = self.team.sum_floats(own) if self.team.ranks > 1 else own
        pairs, many = iter(rest), len(parts) * self.team.ranks
        metrics = {}
        for name in joined:
            t, c = next(pairs), next(pairs)
            metrics[name] = t / c if c else math.nan
        return total, count, metrics, {name: next(pairs) / many for name in taps}

    def _gather_gradients(self, count: float) -> dict[str, Any]:
        """Sums over ranks where the update reads them; where vectors are divided, the gradient's norm too."""
        gradients, arena = self._arena.gradients, self._arena
        if not self.shard:
            self.team.gradients_(list(gradients.values()))
            return {}
        square = torch.zeros(1, dtype=torch.float64)
        for name, gradient in gradients.items():
            if name in arena.of_vector:
                own = arena.own(name, gradient)
                own.copy_(self.team.own_sum(gradient))
                square += torch.sum(torch.square(own / count))
        self.team.sum_(square)
        for name, gradient in gradients.items():
            if name not in arena.of_vector:
                self.team.gradients_([gradient])
                square += torch.sum(torch.square(gradient / count))
        return {"gradient-norm": torch.sqrt(square)[0].to(self.dtype)}

    def _join_parameters(self) -> None:
        """After an update of shares: the whole vectors of parameters and averages, which the next step reads."""
        if not self.shard:
            return
        for name, vector in self._arena.vectors.items():
            if name not in self._arena.divided:
                vector.copy_(self.team.gather(self._arena.own(name, vector)))

    def _merge_states(self, parts: list[dict[str, Any]]) -> None:
        """States that micro-batches updated each for itself: the mean over all of them; integers take the last."""
        for name in parts[0]:
            if not name.startswith("state/"):
                continue
            merged = _merged([p[name] for p in parts])
            if self.team.ranks > 1:
                merged = merged.clone(memory_format=torch.contiguous_format)
                if merged.dtype.is_floating_point:
                    self.team.sum_(merged)
                    merged /= self.team.ranks
                else:
                    self.team.copy_([merged], self.team.ranks - 1)
            self.values[name].copy_(merged)

    def evaluate(self, name: str, batch: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        packed = "graph-mask" in batch
        samples = float(np.sum(batch["graph-mask"])) if packed else len(next(iter(batch.values())))
        size = capacity_of(batch) if packed else samples
        entries, compiled = self._graph(("eval", name, size), lambda: self._evaluation(name, size))
        with torch.inference_mode():
            leaves = self._leaves(batch)
            if self._weights[name] == "ema":
                for path in self.traced.averages:
                    leaves[self._full[f"param/{path}"]] = self.values[f"ema/{path}"]
            out = self._evaluated(compiled, leaves)
        weights = {e.name: samples for e in entries if e.count is None}
        return {n: (t * weights[n], weights[n]) if n in weights else (t, c) for n, (t, c) in _metrics([out]).items()}

    def _evaluation(self, name: str, size: Any) -> tuple[Any, Compiled]:
        entries, results = self.staged.evaluation(name, size)
        return entries, Compiled(results)

    def _evaluated(self, compiled: Compiled, leaves: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        try:
            return compiled.run(leaves, self.config.seed, self.updates)
        except (IndexError, RuntimeError):
            values = {n: leaves[s] for n, s in zip(compiled.executable.leaves, compiled.sources, strict=True)}
            context = StepContext(self.config.seed, self.updates, 0, compiled.executable.samples)
            refuse_index(compiled.executable, values, context, self.traced.origins)
            raise

    def close(self) -> None:
        self._graphs.clear()
        self._ahead.close()


def capacity_of(batch: Mapping[str, Any], parts: int = 1) -> tuple[int, int, int]:
    """Structures, atoms and edges that each part of a packed batch has room for."""
    return len(batch["graph-mask"]) // parts, len(batch["atom-mask"]) // parts, len(batch["edge-mask"]) // parts


def _total(parts: list[dict[str, Any]], name: str, dtype: Any) -> Any:
    """The sum over micro-batches; a mean loss counts one a part."""
    if name not in parts[0]:
        return torch.tensor(float(len(parts)), dtype=dtype)
    total = parts[0][name]
    for part in parts[1:]:
        total = total + part[name]
    return total


def _merged(values: list[Any]) -> Any:
    """A state that several micro-batches updated: their mean; integers take the last."""
    if not values[0].dtype.is_floating_point:
        return values[-1]
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values)


def _metrics(parts: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Metric -> (total, count) over the parts; means of equal parts count one each."""
    names = [k.split("/")[1] for k in parts[0] if k.startswith("metric/") and k.endswith("/total")]
    joined = {}
    for name in names:
        total = sum(float(p[f"metric/{name}/total"]) for p in parts)
        key = f"metric/{name}/count"
        joined[name] = (total, sum(float(p[key]) for p in parts) if key in parts[0] else float(len(parts)))
    return joined

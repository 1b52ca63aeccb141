"""A run on torch CPU: implements `run.program.Program` over executables of the interpreter.

A step reads the old tensors and writes new ones; they replace the old only when loss and gradient norm are
finite, so a step that is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.executable import Executable
from sexpgpu.experiment.traced import AVERAGE
from sexpgpu.ir import Node
from sexpgpu.ops.initial import initial_value
from sexpgpu.ops.philox import draw_key


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
        self.sources = [self._source(node) for node in self.executable.leaves]

    @staticmethod
    def _source(node: Node) -> tuple[str, str]:
        if node.op == "input":
            return "input", node.attrs["name"]
        if node.op == "slot" and node.attrs["slot"] == AVERAGE:
            return "ema", node.attrs["path"]
        if node.op == "slot":
            return "opt", f"{node.attrs['slot']}/{node.attrs['path']}"
        return node.op, node.attrs.get("path", node.attrs.get("name", ""))

    def run(self, values: Mapping[tuple[str, str], Any], seed: int, step: int, offset: int = 0) -> dict[str, Any]:
        leaves = [values[source] for source in self.sources]
        return dict(zip(self.executable.names, self.executable.run_list(leaves, seed, step, offset), strict=True))


class InterpreterProgram:
    """`staged` is `compiler.Stages`; `threads` is a stored count, or None to choose by rule."""

    device = "cpu"

    def __init__(self, staged: Any, threads: int | None):
        self.staged, self.traced, self.config = staged, staged.traced, staged.run
        self.threads = threads or torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.dtype = torch.float64 if self.config.precision == "f64" else torch.float32
        self.updates = 0
        self.values: dict[str, Any] = {}  # state names -> tensors
        self._graphs: dict[Any, Any] = {}
        self._full = {f"param/{n}": ("param", _path(s)) for n, s in self.traced.params.items()}
        self._full |= {f"state/{n}": ("state", _path(s)) for n, s in self.traced.states.items()}
        self._full |= {f"opt/{n}": ("opt", n) for n in self.traced.slots}
        self._full |= {f"ema/{n}": ("ema", n) for n in self.traced.averages}
        self._weights = {e.name: e.weights for e in self.config.evals}
        for logged in (False, True):  # compile now: a mistake must not wait for the first logged step
            self._step_graphs(logged)

    def _graph(self, key: Any, make: Any) -> Any:
        if key not in self._graphs:
            self._graphs[key] = make()
        return self._graphs[key]

    def _step_graphs(self, logged: bool) -> tuple[Compiled, Compiled | None]:
        if self.config.accumulate == 1:
            return self._graph(("whole", logged), lambda: Compiled(self.staged.whole(logged))), None
        micro = self._graph(("micro", logged), lambda: Compiled(self.staged.micro(logged)))
        return micro, self._graph("update", lambda: Compiled(self.staged.update()))

    # --- state ---

    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        retyped = {"f32": "f64"} if self.config.precision == "f64" else {}
        specs = {f"param/{n}": s for n, s in self.traced.params.items()} | {f"state/{n}": s for n, s in self.traced.states.items()}
        schema = {name: (retyped.get(s.dtype, s.dtype), s.shape) for name, s in specs.items()}
        for name, slot in self.traced.slots.items():
            schema[f"opt/{name}"] = (retyped.get(slot.leaf.type.dtype, slot.leaf.type.dtype), slot.leaf.type.shape)
        for name, leaf in self.traced.averages.items():
            schema[f"ema/{name}"] = (retyped.get(leaf.type.dtype, leaf.type.dtype), leaf.type.shape)
        return schema

    def initialise(self) -> None:
        inits = {f"param/{n}": (s.init, _path(s)) for n, s in self.traced.params.items()}
        inits |= {f"state/{n}": (s.init, _path(s)) for n, s in self.traced.states.items()}
        inits |= {f"opt/{n}": (s.init, f"opt/{n}") for n, s in self.traced.slots.items()}
        self.values = {}
        for name, (dtype, shape) in self.schema().items():
            if name.startswith("ema/"):  # an average starts at the parameter itself
                self.values[name] = self.values["param/" + name.removeprefix("ema/")].clone()
                continue
            init, path = inits[name]
            key = draw_key(self.config.seed, path, 0, "init")
            value = initial_value(init.kind, dict(init.settings), shape, key)
            self.values[name] = torch.from_numpy(np.array(value)).to(TORCH[dtype])
        self.updates = 0

    def state(self) -> dict[str, Any]:
        return dict(self.values)

    def load(self, state: Mapping[str, Any], step: int) -> None:
        self.values = {name: state[name].contiguous() for name in self.schema()}
        self.updates = step

    # --- steps ---

    def _leaves(self, batch: Mapping[str, Any], rows: slice | None = None) -> dict[tuple[str, str], Any]:
        values = {self._full[name]: tensor for name, tensor in self.values.items()}
        for name, array in batch.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array if rows is None else array[rows]))
            if tensor.dtype == torch.float32:
                tensor = tensor.to(self.dtype)
            values[("input", name)] = tensor
        return values

    def step(self, batch: Mapping[str, Any], logged: bool) -> Result:
        """One optimizer step over a whole batch."""
        with torch.no_grad():
            first, second = self._step_graphs(logged)
            if second is None:
                out = first.run(self._leaves(batch), self.config.seed, self.updates)
                parts = [out]
            else:
                parts, out = self._accumulated(first, second, batch)
            return self._finish(out, parts)

    def _accumulated(self, micro: Compiled, update: Compiled, batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        size = self.traced.samples
        parts: list[dict[str, Any]] = []
        for part in range(self.config.accumulate):
            rows = slice(part * size, (part + 1) * size)
            parts.append(micro.run(self._leaves(batch, rows), self.config.seed, self.updates, part * size))
        leaves = self._leaves({})
        for name in self.traced.gradients:
            total = parts[0][f"gradient/{name}"]
            for part in parts[1:]:
                total = total + part[f"gradient/{name}"]
            leaves[("gradient", name)] = total
        leaves[("input", "count")] = _total(parts, "count", self.dtype)
        out = update.run(leaves, self.config.seed, self.updates)
        states = [k for k in parts[0] if k.startswith("state/")]
        return parts, out | {k: _merged([p[k] for p in parts]) for k in states}

    def _finish(self, out: dict[str, Any], parts: list[dict[str, Any]]) -> Result:
        total, count = float(_total(parts, "loss", self.dtype)), float(_total(parts, "count", self.dtype))
        loss = total / count if count else math.nan
        norm = float(out["gradient-norm"])
        fell = "" if math.isfinite(loss) and math.isfinite(norm) else "gradient norm" if math.isfinite(loss) else "loss"
        rates = {k.removeprefix("learning-rate/"): float(v) for k, v in out.items() if k.startswith("learning-rate/")}
        if not fell:
            for name in self.values:
                if name in out:
                    self.values[name] = out[name]
            self.updates += 1
        metrics = {n: t / c if c else math.nan for n, (t, c) in _metrics(parts).items()}
        taps = {k.removeprefix("tap/"): sum(float(p[k]) for p in parts) / len(parts) for k in parts[0] if k.startswith("tap/")}
        return Result(loss, norm, rates, not fell, metrics, taps, count if "count" in parts[0] else None, fell)

    def evaluate(self, name: str, batch: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        samples = len(next(iter(batch.values())))
        entries, compiled = self._graph(("eval", name, samples), lambda: self._evaluation(name, samples))
        with torch.no_grad():
            leaves = self._leaves(batch)
            if self._weights[name] == "ema":
                for path in self.traced.averages:
                    leaves[self._full[f"param/{path}"]] = self.values[f"ema/{path}"]
            out = compiled.run(leaves, self.config.seed, self.updates)
        weights = {e.name: samples for e in entries if e.count is None}
        return {n: (t * weights[n], weights[n]) if n in weights else (t, c) for n, (t, c) in _metrics([out]).items()}

    def _evaluation(self, name: str, samples: int) -> tuple[Any, Compiled]:
        entries, results = self.staged.evaluation(name, samples)
        return entries, Compiled(results)

    def close(self) -> None:
        self._graphs.clear()


def _path(spec: Any) -> str:
    return str(spec.node.attrs["path"])


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

"""A training step once more, op by op: the graphs of the step with their origins, bound to a saved state and a batch.

Any device's step can be replayed so: the interpreter is the definition, and state and batch are plain CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.interpreter.program import Compiled
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ir import Node

#: (node, operand values, value)
Walk = Iterator[tuple[Node, list[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class StepGraphs:
    """What decides whether a step is finite, after every pass, with `traced.origins` kept through them.

    `whole`: results `loss`, `count` (where the loss counts) and `gradient-norm`. A batch cut into micro-batches has
    `micro` (`loss`, `count`, `gradient/<p>`) and `update` (`gradient-norm`) instead.
    """

    traced: TracedRun
    whole: Mapping[str, Node] | None = None
    micro: Mapping[str, Node] | None = None
    update: Mapping[str, Node] | None = None


@dataclass(frozen=True)
class Part:
    """One graph of the step. `offset`: the batch's sample that is row 0 here; `walk` runs it."""

    name: str  # step, micro-batch 2 of 4, update
    results: Mapping[str, Node]
    offset: int
    walk: Callable[[], Walk]


def parts(graphs: StepGraphs, state: Mapping[str, torch.Tensor], updates: int, batch: Mapping[str, Any]) -> Iterator[Part]:
    """The graphs of update `updates + 1` in the order in which they run; each must be walked before the next is asked for.

    `state` needs the names `param/…` and `state/…`; `batch` is {field: array}, axis 0 the samples.
    """
    run = graphs.traced.run
    dtype = torch.float64 if run.precision == "f64" else torch.float32
    bound = _state(graphs.traced, state)
    if graphs.whole is not None:
        yield _part("step", graphs.whole, bound | _fields(batch, dtype), run.seed, updates, 0, {})
        return
    assert graphs.micro is not None and graphs.update is not None
    sums: dict[str, torch.Tensor] = {}
    size, count = graphs.traced.samples, run.accumulate
    for i in range(count):
        rows = {name: values[i * len(values) // count : (i + 1) * len(values) // count] for name, values in batch.items()}
        values = bound | _fields(rows, dtype)
        yield _part(f"micro-batch {i + 1} of {count}", graphs.micro, values, run.seed, updates, i * size, sums)
    gradients: dict[tuple[str, str], Any] = {("gradient", n.removeprefix("gradient/")): t for n, t in sums.items() if n.startswith("gradient/")}
    total = sums.get("count", torch.tensor(float(count), dtype=dtype))
    yield _part("update", graphs.update, bound | gradients | {("input", "count"): total}, run.seed, updates, 0, {})


def _part(name: str, results: Mapping[str, Node], values: Mapping[tuple[str, str], Any], seed: int, updates: int,
          offset: int, sums: dict[str, torch.Tensor]) -> Part:
    def walk() -> Walk:
        compiled = Compiled(dict(results))
        bindings = {leaf: values[source] for leaf, source in zip(compiled.executable.leaves, compiled.sources, strict=True)}
        wanted: dict[Node, list[str]] = {}
        for key, node in results.items():
            wanted.setdefault(node, []).append(key)
        for node, operands, value in compiled.executable.walk(bindings, seed, updates, offset):
            for key in wanted.get(node, ()):
                sums[key] = sums[key] + value if key in sums else value
            yield node, operands, value

    return Part(name, results, offset, walk)


def _state(traced: TracedRun, state: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], Any]:
    bound: dict[tuple[str, str], Any] = {}
    for kind, specs in (("param", traced.params), ("state", traced.states)):
        for name, spec in specs.items():
            bound[kind, str(spec.node.attrs["path"])] = state[f"{kind}/{name}"].cpu()
    dtype = torch.float64 if traced.run.precision == "f64" else torch.float32
    return bound | {("statistic", name): torch.tensor(value, dtype=dtype) for name, value in traced.run.statistics.items()}


def _fields(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[tuple[str, str], Any]:
    fields: dict[tuple[str, str], Any] = {}
    for name, array in batch.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        fields["input", name] = tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
    return fields

"""A training step and an inference on the CPU by phase: every op timed on its own, without the fusion that a run has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.interpreter.program import Compiled, InterpreterProgram
from sexpgpu.backends.phases import Part, Piece, part
from sexpgpu.backends.state import sources
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND
from sexpgpu.passes.phases import Item, inferred, phases

REPEATS = 3
Values = Mapping[tuple[str, str], Any]


def training(program: InterpreterProgram, staged: Any, batch: Mapping[str, Any]) -> Part:
    """A step of an initialised program, whose state is as before; `staged`: the stages that it was made from."""
    before = {name: tensor.clone() for name, tensor in program.state().items()}
    seconds = _median(lambda: program.step(batch, False))
    program.load(before, 0)
    traced, run = staged.traced, staged.run
    values: dict[tuple[str, str], Any] = {source: before[name] for name, source in sources(traced).items()}
    kind = next(iter(traced.params.values())).node.type.dtype
    dtype = torch.float64 if run.precision == "f64" or kind == "f64" else torch.float32
    values |= {("statistic", name): torch.tensor(value, dtype=dtype) for name, value in run.statistics.items()}
    rows = {name: array[: len(array) // run.accumulate] for name, array in batch.items()}
    values |= {("input", name): _field(array, dtype) for name, array in rows.items()}
    micro = staged.micro(False)
    pieces, made = _timed(micro, values, traced.origins, ["loss"], run.seed, None)
    values |= {("gradient", name.removeprefix("gradient/")): value for name, value in made.items() if name.startswith("gradient/")}
    values["input", "count"] = made.get("count", torch.tensor(1.0, dtype=dtype))
    divided = "count" in made or run.accumulate > 1
    pieces = pieces * run.accumulate + _timed(staged.update(divided), values, traced.origins, [], run.seed, "update")[0]
    return part("training", seconds, pieces)


def inference(results: dict[str, Node], values: Values, origins: Origins, call: Callable[[], Any]) -> Part:
    """`call` is the whole as it runs."""
    return part("inference", _median(call), _timed(results, values, origins, list(results), 0, None)[0])


def _median(call: Callable[[], Any]) -> float:
    call()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _field(array: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def _timed(results: dict[str, Node], values: Values, origins: Origins, targets: Sequence[str], seed: int, named: str | None) -> tuple[list[Piece], dict[str, Any]]:
    """Pieces, one an op, and the results' values. `named`: the phase of all of them."""
    compiled = Compiled(results)
    bindings = {leaf: values[source] for leaf, source in zip(compiled.executable.leaves, compiled.sources, strict=True)}
    order = postorder(results.values())
    fixed: set[Node] = set()  # equal constants are one node, whichever phase made it first
    for node in order:
        if node.op in ("constant", "iota") or (node.inputs and all(x in fixed for x in node.inputs)):
            fixed.add(node)
    items = [Item(node.inputs, (node,), node not in fixed and origins.of(node).phase == "backward") for node in order]
    found = phases(items, [results[name] for name in targets])
    phase = dict(zip(order, found if "loss" in targets else inferred(found), strict=True))
    wanted: dict[Node, list[str]] = {}
    for name, node in results.items():
        wanted.setdefault(node, []).append(name)
    pieces: list[Piece] = []
    made: dict[str, Any] = {}
    start = time.perf_counter()
    for node, _, value in compiled.executable.walk(bindings, seed, 0, 0):
        seconds = time.perf_counter() - start
        for name in wanted.get(node, ()):
            made[name] = value
        if node.op not in BOUND and table()[node.op].lowering.kind not in ("view", "leaf"):
            paths = origins.of(node).paths
            pieces.append(Piece(node.op, _plain(paths[0]) if paths else "", named or phase[node], seconds, table()[node.op].cost(node)[1]))
        start = time.perf_counter()
    return pieces, made


def _plain(path: str) -> str:
    """A model path without call numbers."""
    return "/".join(word for word in path.split("/") if not word.isdigit())

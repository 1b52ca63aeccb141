"""A graph as launches over tensors of one device. `run` gives the results; a plan of memory and capture lie above it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.emit import Emitter, choose_blocks
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.schedule.fuse import Call, Kernel, Schedule, fuse


@dataclass
class Step:
    """One launch made ready: `go(tensors)`, the tensors it makes beside its stores."""

    launch: Any
    function: Any = None
    arguments: list[tuple] | None = None
    grid: tuple[int, int] = (1, 1)
    warps: int = 4
    partials: Mapping[Node, tuple[int, int]] | None = None


class Executable:
    """The launches of `results` on `device` ("cuda", or "cpu" under Triton's interpreter)."""

    def __init__(self, results: Mapping[str, Node], device: str = "cuda"):
        self.device = device
        self.results = decompose(results)
        self.schedule: Schedule = fuse(self.results)
        self.steps = [self._step(launch) for launch in self.schedule.launches]

    def _step(self, launch: Any) -> Step:
        if isinstance(launch, Call):
            return Step(launch)
        emitted = Emitter(launch, choose_blocks(launch, self.device)).emit()
        function = modules.load(emitted.source, "kernel")
        return Step(launch, function, emitted.arguments, emitted.grid, emitted.warps, emitted.partials)

    def run(self, bindings: Mapping[Node, torch.Tensor], draws: Any = None) -> dict[str, torch.Tensor]:
        """Runs every launch on fresh tensors: for tests."""
        values: dict[Node, torch.Tensor] = {leaf: t.to(self.device) for leaf, t in bindings.items()}
        for step in self.steps:
            if isinstance(step.launch, Call):
                values[step.launch.node] = call(step.launch, values, self.device)
            else:
                self._launch(step, values, draws)
        return {name: values[node] if node.op != "constant" else table()["constant"].reference(torch, node, []) for name, node in self.results.items()}

    def _launch(self, step: Step, values: dict[Node, torch.Tensor], draws: Any) -> None:
        kernel: Kernel = step.launch
        for unit in kernel.units:
            if unit in kernel.stores or (step.partials and unit in step.partials):
                values[unit] = torch.empty(unit.type.shape, dtype=TORCH[unit.type.dtype], device=self.device)
        rest: list[tuple[Node, torch.Tensor]] = []
        arguments = []
        for what, *parts in step.arguments or []:
            if what in ("read", "store"):
                tensor = values[parts[0]]
                arguments.append(tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor)
            elif what == "partial":
                unit = parts[0]
                programs, elements = (step.partials or {})[unit]
                dtype = torch.int32 if unit.type.dtype == "bool" else torch.float32 if unit.type.dtype in ("bf16", "f16") else TORCH[unit.type.dtype]
                partial = torch.empty((programs, elements), dtype=dtype, device=self.device)
                rest.append((unit, partial))
                arguments.append(partial)
            else:
                arguments.append(draws(what, parts))
        step.function[step.grid](*arguments, num_warps=step.warps)
        for unit, partial in rest:
            values[unit].copy_(_whole(unit, partial).reshape(unit.type.shape))


def _whole(unit: Node, partial: torch.Tensor) -> torch.Tensor:
    if unit.op == "sum":
        return partial.sum(0)
    if unit.op == "prod":
        return partial.prod(0)
    low = unit.op in ("reduce-min", "reduce-all")
    return partial.amin(0) if low else partial.amax(0)


def call(launch: Call, values: Mapping[Node, torch.Tensor], device: str) -> torch.Tensor:
    """A library call by the op's reference."""
    node = launch.node
    operands = []
    for o in launch.operands:
        base = values[o.base] if o.base.op != "constant" else table()["constant"].reference(torch, o.base, [])
        operands.append(torch.as_strided(base, o.shape, o.strides, o.start))
    with torch.device(device):
        return table()[node.op].reference(torch, node, operands).contiguous()


__all__ = ["BOUND", "Executable", "call"]

"""A training step's launches and an inference's, timed by phase on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.cuda.profile import REPEATS, measured, plain_path, times
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.cuda.report import Row, rows
from sexpgpu.backends.phases import Part, Piece, part
from sexpgpu.ir import Origins
from sexpgpu.passes.phases import Item, inferred, phases


def training(program: CudaProgram, batch: Mapping[str, Any]) -> Part:
    """A step of an initialised program; its state is as before."""
    step, found = measured(program, batch)
    pieces: list[Piece] = []
    for compiled, timed in found:
        if "loss" in compiled.results and any(name.startswith("gradient/") for name in compiled.results):
            pieces += _pieces(timed, by_phase(compiled, program.traced.origins, ["loss"]))
        else:
            pieces += _pieces(timed, ["update"] * len(compiled.schedule.launches))
    return part("training", step, pieces)


def inference(bound: Bound, replay: Callable[[], None], origins: Origins) -> Part:
    """Energies and forces of fields that are there."""
    device = bound.device.type == "cuda"
    names = inferred(by_phase(bound.compiled, origins, list(bound.compiled.results)))
    pieces = _pieces(times(bound, rows(bound.compiled, origins), device), names)
    return part("inference", _whole(replay, device), pieces)


def by_phase(compiled: Compiled, origins: Origins, targets: Sequence[str]) -> list[str]:
    """The phase of each launch. One that stores values of the energy beside their derivatives is of the energy; what depends on no
    tensor of the step is of no gradient."""
    items = []
    for launch in compiled.schedule.launches:
        derived = bool(launch.reads) and all(origins.of(node).phase == "backward" for node in launch.stores)
        items.append(Item(launch.reads, launch.stores, derived))
    return phases(items, [compiled.results[name] for name in targets])


def _pieces(timed: Sequence[tuple[Row, float]], names: Sequence[str]) -> list[Piece]:
    return [Piece(row.name if row.kind == "kernel" else f"library {row.name}", plain_path(row.path), names[row.number], seconds, row.bytes) for row, seconds in timed]


def _whole(replay: Callable[[], None], device: bool) -> float:
    wait = torch.cuda.synchronize if device else lambda: None
    found = []
    for _ in range(20 if device else REPEATS):
        wait()
        start = time.perf_counter()
        replay()
        wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found)

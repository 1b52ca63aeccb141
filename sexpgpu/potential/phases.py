"""Energies and forces of a packed batch, timed by phase: what `sexpgpu profile --phases` calls inference."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from sexpgpu.backends.interpreter import phases as on_host
from sexpgpu.backends.interpreter.program import Compiled
from sexpgpu.backends.phases import Part
from sexpgpu.potential.model import ON_DEVICE, Potential

ON_CUDA = "sexpgpu.backends.cuda.phases"


def inference(potential: Potential, batch: Mapping[str, Any]) -> Part:
    """`batch`: the fields of a packed batch, whose capacity the graph is compiled for."""
    results = potential.graph((len(batch["graph-mask"]), len(batch["positions"]), len(batch["senders"])))
    fields = {name: torch.from_numpy(array) for name, array in batch.items()}
    fields = {name: x.to(potential.dtype) if x.is_floating_point() else x for name, x in fields.items()}
    if potential.place is None:
        compiled = Compiled(results)
        values = potential.known | {("input", name): x for name, x in fields.items()}
        return on_host.inference(results, values, potential.traced.origins, lambda: compiled.run(values, 0, 0))
    made = import_module(ON_DEVICE).OnDevice(results, potential.known, potential.place, potential.traced.origins, potential.dtype)
    made.fill(fields)
    found: Part = import_module(ON_CUDA).inference(made.bound, made.replay.run, potential.traced.origins)
    return found

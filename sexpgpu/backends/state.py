"""The tensors of a run by name: their types, what leaf of the graph each stands for, and their initial values."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ops.initial import initial_value
from sexpgpu.ops.philox import draw_key

Source = tuple[str, str]


def sources(traced: TracedRun) -> dict[str, Source]:
    """State name (`param/<p>` …) -> what its leaf stands for."""
    found: dict[str, Source] = {f"param/{n}": ("param", str(s.node.attrs["path"])) for n, s in traced.params.items()}
    found |= {f"state/{n}": ("state", str(s.node.attrs["path"])) for n, s in traced.states.items()}
    found |= {f"opt/{n}": ("opt", n) for n in traced.slots}
    return found | {f"ema/{n}": ("ema", n) for n in traced.averages}


def schema(traced: TracedRun, precision: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """State name -> (dtype, shape); under f64 every f32 is f64."""
    retyped = {"f32": "f64"} if precision == "f64" else {}
    specs = {f"param/{n}": s for n, s in traced.params.items()} | {f"state/{n}": s for n, s in traced.states.items()}
    found = {name: (retyped.get(s.dtype, s.dtype), s.shape) for name, s in specs.items()}
    for name, slot in traced.slots.items():
        found[f"opt/{name}"] = (retyped.get(slot.leaf.type.dtype, slot.leaf.type.dtype), slot.leaf.type.shape)
    for name, leaf in traced.averages.items():
        found[f"ema/{name}"] = (retyped.get(leaf.type.dtype, leaf.type.dtype), leaf.type.shape)
    return found


def initialise(traced: TracedRun, seed: int, tensors: dict[str, Any]) -> None:
    """Writes every tensor's initial value; an average starts at its parameter."""
    inits = {f"param/{n}": (s.init, str(s.node.attrs["path"])) for n, s in traced.params.items()}
    inits |= {f"state/{n}": (s.init, str(s.node.attrs["path"])) for n, s in traced.states.items()}
    inits |= {f"opt/{n}": (s.init, f"opt/{n}") for n, s in traced.slots.items()}

    def value(name: str) -> Any:
        init, path = inits[name]
        if init.kind == "zeros":
            return None
        return initial_value(init.kind, dict(init.settings), tuple(tensors[name].shape), draw_key(seed, path, 0, "init"))

    names = [name for name in tensors if not name.startswith("ema/")]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NumPy leaves the interpreter's lock while it computes
        for name, found in zip(names, pool.map(value, names), strict=True):
            if found is None:
                tensors[name].zero_()
            else:
                tensors[name].copy_(torch.from_numpy(np.array(found)))
    for name, tensor in tensors.items():
        if name.startswith("ema/"):
            tensor.copy_(tensors["param/" + name.removeprefix("ema/")])

"""The tensors of a run by name: their types, what leaf of the graph each stands for, and their initial values."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from sexpgpu.backends import initial
from sexpgpu.backends.leaves import schema, sources
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ops.initial import pieces
from sexpgpu.ops.philox import draw_key

__all__ = ["initialise", "schema", "sources"]


def initialise(traced: TracedRun, seed: int, tensors: dict[str, Any]) -> None:
    """Writes every tensor's initial value; an average starts at its parameter. How many threads there are decides no bit."""
    inits = {f"param/{n}": (s.init, str(s.node.attrs["path"])) for n, s in traced.params.items()}
    inits |= {f"state/{n}": (s.init, str(s.node.attrs["path"])) for n, s in traced.states.items()}
    inits |= {f"opt/{n}": (s.init, f"opt/{n}") for n, s in traced.slots.items()}
    made: list[tuple[torch.Tensor, torch.Tensor, list[Future[None]]]] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NumPy leaves the interpreter's lock while it computes
        for name, (init, path) in inits.items():
            tensor = tensors[name]
            if init.kind == "zeros":
                tensor.zero_()
                continue
            key = draw_key(seed, path, 0, "init")
            if tensor.device.type == "cuda" and init.kind in initial.DRAWN:
                initial.drawn(init.kind, dict(init.settings), key, tensor)
                continue
            here = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64)
            target = tensor.detach() if here else torch.empty(tensor.shape, dtype=torch.float32)
            writes = pieces(init.kind, dict(init.settings), tuple(tensor.shape), key, target.view(-1).numpy())
            made.append((tensor, target, [pool.submit(write) for write in writes]))
        for tensor, target, parts in made:  # copied while those behind it are still being made
            for part in parts:
                part.result()
            if target.data_ptr() != tensor.data_ptr():
                tensor.copy_(target)
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.empty_cache()  # of what the draws were made in: the plan knows nothing of it
    for name, tensor in tensors.items():
        if name.startswith("ema/"):
            tensor.copy_(tensors["param/" + name.removeprefix("ema/")])

"""What the benchmarks of a GPU share: a run of ours without its data, batches, timed blocks, JSON lines."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from sexpgpu import compiler
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.compiler import Selection, load


class Block(nn.Module):
    """A pre-norm transformer block in PyTorch, as examples/gpt2.lisp has it: the other side of the comparisons."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


def say(name: str, **fields: Any) -> None:
    """One JSON object a line; times in ms unless a key says otherwise."""
    print(json.dumps({"name": name, **fields}), flush=True)


def program_of(file: str, sets: Sequence[str] = (), deterministic: bool = True) -> CudaProgram:
    """The program of a file's only run, initialised; its data is not opened."""
    loaded = load(file, Selection(sets=tuple(sets)))
    run = dataclasses.replace(next(iter(loaded.experiment.runs.values())), deterministic=deterministic)
    program = CudaProgram(compiler.stages(loaded, run, "cuda"), 1)
    program.initialise()
    return program


def tokens(count: int, batch: int, context: int, vocabulary: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Batches of a stream in which each token mostly decides the next: a model learns it."""
    rng = np.random.default_rng(seed)
    follow = rng.permutation(vocabulary)
    found = []
    for _ in range(count):
        stream = np.empty((batch, context + 1), np.int32)
        stream[:, 0] = rng.integers(0, vocabulary, batch)
        noise = rng.random((batch, context)) < 0.2
        random = rng.integers(0, vocabulary, (batch, context))
        for t in range(context):
            stream[:, t + 1] = np.where(noise[:, t], random[:, t], follow[stream[:, t]])
        found.append({"tokens": stream[:, :-1].copy(), "targets": stream[:, 1:].copy()})
    return found


def ours(program: CudaProgram, batches: Sequence[dict[str, np.ndarray]], together: int) -> Callable[[int], float]:
    """A function that makes so many steps, `together` of them a replay, and gives the last loss."""

    def steps(count: int) -> float:
        before, loss = None, float("nan")
        for start in range(0, count, together):
            flight = program.launch([batches[(start + i) % len(batches)] for i in range(together)], False)
            if before is not None:
                loss = program.collect(before)[-1].loss
            before = flight
        return program.collect(before)[-1].loss if before is not None else loss

    return steps


def alternate(sides: dict[str, Callable[[int], float]], steps: int, rounds: int) -> dict[str, list[float]]:
    """ms a step of each side, in blocks that take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(max(10, steps // 6))
    torch.cuda.synchronize()
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            start = time.perf_counter()
            sides[name](steps)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3 / steps)
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times), "blocks": len(times)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of theirs over ours, block by block: above 1 ours is faster."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))

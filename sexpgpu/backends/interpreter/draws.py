"""The masks of dropout, drawn ahead of their step.

A draw depends on the seed, its path, the step and the element alone, so those of the next step are made in a thread of
their own while a step runs: the same bits as when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.plan import LEAST_AHEAD
from sexpgpu.ir import Node
from sexpgpu.ops import table
from sexpgpu.ops.random import DrawContext

LEAST = LEAST_AHEAD  # elements of a step's masks: fewer are drawn before a thread has begun


@dataclass(frozen=True)
class Mask:
    """`factor` where the draw holds, else 0, in `dtype`; as drawn (bool) where `factor` is None."""

    node: Node
    factor: float | None = None
    dtype: str = "bool"

    def draw(self, context: DrawContext) -> Any:
        drawn = table()[self.node.op].reference(torch, self.node, [context])
        return drawn if self.factor is None else drawn.to(TORCH[self.dtype]).mul_(self.factor)


Key = tuple[int, int, Mask]  # step, offset, mask


@dataclass
class Ahead:
    """Masks under way, by step, offset and mask."""

    seed: int
    samples: int
    pending: dict[Key, Future] = field(default_factory=dict)
    thread: ThreadPoolExecutor | None = None

    def ask(self, masks: Sequence[Mask], step: int, offset: int = 0) -> None:
        """Begins to draw these masks of a step."""
        if sum(mask.node.type.size for mask in masks) < LEAST:
            return
        if self.thread is None:
            self.thread = ThreadPoolExecutor(1, "sexpgpu-draws")
        context = DrawContext(self.seed, step, offset, self.samples)
        for mask in masks:
            if (step, offset, mask) not in self.pending:
                self.pending[step, offset, mask] = self.thread.submit(mask.draw, context)

    def take(self, mask: Mask, context: DrawContext) -> Any:
        """A mask, drawn before or now. It is given once: its taker may write over it."""
        future = self.pending.pop((context.step, context.offset, mask), None)
        return mask.draw(context) if future is None else future.result()

    def forget(self) -> None:
        """Drops what nothing took: the step it was drawn for is past, or was never made."""
        for future in self.pending.values():
            future.cancel()
        self.pending.clear()

    def close(self) -> None:
        self.forget()
        if self.thread is not None:
            self.thread.shutdown(wait=False)


@dataclass(frozen=True)
class StepContext(DrawContext):
    """A draw context whose masks may be under way. `open`: what was known before the call lets its results be written."""

    ahead: Ahead | None = None
    open: bool = True

    def passes(self, *values: Any) -> bool:
        """Whether the first of the values is finite, and so was all before."""
        return self.open and bool(torch.isfinite(values[0]))


def draw(context: DrawContext, mask: Mask) -> Any:
    """What the generated source calls for a mask."""
    ahead = getattr(context, "ahead", None)
    return mask.draw(context) if ahead is None else ahead.take(mask, context)

"""The best evaluation so far, by `:keep-best`: what the loop asks, a manifest records, and a resume goes on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sexpgpu.experiment.model import KeepBest
from sexpgpu.run.events import EvalDone


class Best:
    """Starts from a manifest's record where that is of the same evaluation, metric and direction.

    A checkpoint of the best is written while training goes on, so whether it came to be is known later: until then the
    one before is remembered.
    """

    def __init__(self, wanted: KeepBest, recorded: Mapping[str, Any] | None = None):
        self._wanted = wanted
        self._kind = {"eval": wanted.eval, "metric": wanted.metric, "largest": wanted.largest}
        same = recorded is not None and all(recorded[key] == value for key, value in self._kind.items())
        self._found: list[tuple[int, float]] = [(recorded["step"], recorded["value"])] if recorded and same else []

    def take(self, done: EvalDone) -> bool:
        """Whether this evaluation improves on the best, which it then is. Ties and values that are not finite do not."""
        if done.name != self._wanted.eval:
            return False
        value = done.metrics[self._wanted.metric]
        if not math.isfinite(value):
            return False
        if self._found:
            before = self._found[-1][1]
            better = value > before if self._wanted.largest else value < before
            if not better:
                return False
        self._found.append((done.step, value))
        return True

    def kept(self, step: int) -> None:
        """The checkpoint of this step is durable: none before it is asked for again."""
        steps = [s for s, _ in self._found]
        if step in steps:
            del self._found[: steps.index(step)]

    def lost(self, step: int) -> None:
        """The checkpoint of this step was not written: where it was the best, the one before is."""
        self._found = [pair for pair in self._found if pair[0] != step]

    def record(self) -> dict[str, Any] | None:
        return None if not self._found else self._kind | {"step": self._found[-1][0], "value": self._found[-1][1]}

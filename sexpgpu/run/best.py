"""The best evaluation so far, by `:keep-best`: what the loop asks, a manifest records, and a resume goes on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sexpgpu.experiment.model import KeepBest
from sexpgpu.run.events import EvalDone


class Best:
    """Starts from a manifest's record where that is of the same evaluation, metric and direction."""

    def __init__(self, wanted: KeepBest, recorded: Mapping[str, Any] | None = None):
        self._wanted = wanted
        self._kind = {"eval": wanted.eval, "metric": wanted.metric, "largest": wanted.largest}
        same = recorded is not None and all(recorded[key] == value for key, value in self._kind.items())
        self._now: tuple[int, float] | None = (recorded["step"], recorded["value"]) if recorded and same else None
        self._before = self._now

    def take(self, done: EvalDone) -> bool:
        """Whether this evaluation improves on the best, which it then is. Ties and values that are not finite do not."""
        if done.name != self._wanted.eval:
            return False
        value = done.metrics[self._wanted.metric]
        if not math.isfinite(value):
            return False
        if self._now is not None:
            better = value > self._now[1] if self._wanted.largest else value < self._now[1]
            if not better:
                return False
        self._before, self._now = self._now, (done.step, value)
        return True

    def undo(self) -> None:
        """The checkpoint of the best was not written: the one before stays the best."""
        self._now = self._before

    def record(self) -> dict[str, Any] | None:
        return None if self._now is None else self._kind | {"step": self._now[0], "value": self._now[1]}

"""The small protocol of a metrics target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Resume:
    """A run that goes on after `step` updates. `same_trajectory`: records beyond it that are there already stand."""

    step: int
    same_trajectory: bool = True


class Target(Protocol):
    """Takes records of one run. Its constructor fails with a code if it cannot be opened, before step 1."""

    trouble: str  # why a record was not delivered; empty while all were

    def write(self, record: Mapping[str, Any]) -> None:
        """One record without its `seq`, which the target counts. Never raises for a failing device."""

    def sync(self) -> None:
        """What was written is on the disk when this returns."""

    def close(self) -> None: ...

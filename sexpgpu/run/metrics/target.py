"""The small protocol of a metrics target, and what the `syvain` one needs of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sexpgpu.settings import SYVAIN_HOST, Secret, Settings


@dataclass(frozen=True)
class Resume:
    """A run that goes on after `step` updates. `lineage`: of what it goes on with (`record.lineage`); records beyond the step
    that are there already stand if they are of the same."""

    step: int
    lineage: str


@dataclass(frozen=True)
class Service:
    """How the hosted service is reached, and `state`, the user's state folder, where spools lie."""

    key: Secret | None = None
    folder: str | None = None
    host: str = SYVAIN_HOST
    state: Path = Path(os.path.expanduser("~"), ".local", "state")


def service_of(settings: Settings) -> Service:
    """The `Service` of these settings."""
    state = Path(settings.xdg_state_home).absolute() if settings.xdg_state_home else Service.state
    return Service(settings.syvain_metrics_api_key, settings.syvain_metrics_folder_id, settings.syvain_metrics_host, state)


class Target(Protocol):
    """Takes records of one run. Its constructor fails with a code if it cannot be opened, before step 1."""

    trouble: str  # why a record was not delivered; empty while all were

    def write(self, record: Mapping[str, Any]) -> None:
        """One record without its `seq`, which the target counts. Never raises for a failing device, never waits."""

    def sync(self) -> None:
        """What was written is on the disk when this returns."""

    def hurry(self) -> None:
        """`close` is to take no time: the user asked twice for the end."""

    def close(self) -> None:
        """Bounded in time; once `trouble` is final. A second call does nothing."""

"""The FLASHCART_* settings of the kernels, read once a process at first use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sexpgpu.diagnostics import SexpErrors
from sexpgpu.settings import read

SPLIT_RANK = 5  # from this result rank on, `full` launches unless a setting says otherwise
EDGES_A_SLOT, MOST_SLOTS = 32, 64


@dataclass(frozen=True)
class Config:
    """What docs/environment.md says of each variable; budgets in components a channel."""

    l_max: int = 3
    folder: Path = Path()
    scatter: str = "csr"
    csr_budget: int = 100
    bwd_budget: int = 100
    dbwd_budget: int | None = None
    least_degree: int = 64
    slots: int | None = None
    bwd_split: str | None = None
    dbwd_split: str | None = None
    peak_aware: bool = True

    @property
    def fused_second(self) -> int:
        """The budget of a launch of the second derivative that makes the result's cotangent and more."""
        return min(self.csr_budget, self.bwd_budget) // 2 if self.dbwd_budget is None else self.dbwd_budget

    def slots_of(self, edges: int, nodes: int) -> int:
        """Programs that share the edges of one node in the backward passes."""
        if self.slots is not None:
            return self.slots
        mean = edges // max(1, nodes)
        return 1 if mean < self.least_degree else min(MOST_SLOTS, -(-mean // EDGES_A_SLOT))

    def split(self, second: bool, top: int) -> str:
        """`fused` or `full`, for a result of ranks up to `top`."""
        return (self.dbwd_split if second else self.bwd_split) or ("full" if top >= SPLIT_RANK else "fused")


def from_environment(environ: Mapping[str, str]) -> Config:
    """The settings of these variables; raises every malformed one of ours at once (E-ENV-001)."""
    settings = read(environ)
    ours = [p for p in settings.problems if "FLASHCART_" in p.message]
    if ours:
        raise SexpErrors(ours)
    s = settings
    home = s.xdg_cache_home or "~/.cache"
    folder = Path(s.flashcart_cache_dir or f"{home}/flashcart").expanduser()
    return Config(
        s.flashcart_kernel_l_max, folder, s.flashcart_tp_scatter_kernel, s.flashcart_tp_csr_group_budget, s.flashcart_tp_bwd_group_budget,
        s.flashcart_tp_dbwd_group_budget, s.flashcart_tp_bwd_csr_min_deg, s.flashcart_tp_bwd_csr_slots, s.flashcart_tp_bwd_split,
        s.flashcart_tp_dbwd_split, s.flashcart_tp_peak_aware_groups,
    )


@cache
def config() -> Config:
    """The process's settings."""
    return from_environment(os.environ)

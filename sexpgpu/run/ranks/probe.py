"""`doctor --distributed`: what the links between the ranks do, and whether the ranks see the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sexpgpu.diagnostics import Diagnostic, note_warning
from sexpgpu.run.data import open_source
from sexpgpu.run.ranks.team import Team

SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 16, 1 << 20, 1 << 24, 25 << 20, 1 << 28)}  # bytes of the sums that are timed
SECONDS = 1.0  # at most, a size
APART = 2.0  # seconds between clocks that are a finding


@dataclass(frozen=True)
class Probe:
    """latency: seconds of a sum of one number; bandwidth: bytes -> bytes a second that a rank sends; clocks: seconds by which a
    rank's clock is ahead of rank 0's, as exact as the latency."""

    ranks: int
    nodes: int
    latency: float
    bandwidth: dict[int, float]
    clocks: tuple[float, ...]

    def findings(self) -> list[Diagnostic]:
        far = [(abs(ahead), rank) for rank, ahead in enumerate(self.clocks) if abs(ahead) > APART]
        if not far:
            return []
        most, rank = max(far)
        return [note_warning("E-NET-032", f"the clock of rank {rank} is {most:.1f} s from that of rank 0", help="timedatectl set-ntp true, on both machines")]


def probe(team: Team, device: str = "cpu") -> Probe:
    """Measures on `cpu` or `cuda`; every rank calls it, and each gets the same."""
    collectives, place = team.collectives, team.place
    one = torch.zeros(1, device=device)
    for _ in range(3):
        collectives.sum_(one)
    latency = statistics.median(_timed(team, one) for _ in range(50))
    bandwidth = {}
    for size in SIZES[device]:
        tensor = torch.zeros(size // 4, device=device)
        first = _timed(team, tensor)
        many = 1 + int(collectives.sum_floats([SECONDS / first if place.rank == 0 else 0.0])[0])
        times = [_timed(team, tensor) for _ in range(min(20, many))]
        bandwidth[size] = 2 * (place.ranks - 1) / place.ranks * size / statistics.median(times)
    collectives.wait_for_all()
    clocks = [0.0] * place.ranks
    clocks[place.rank] = time.time()
    clocks = collectives.sum_floats(clocks)
    slowest = collectives.sum_floats([latency if place.rank == 0 else 0.0])[0]
    return Probe(place.ranks, place.nodes, slowest, bandwidth, tuple(c - clocks[0] for c in clocks))


def _timed(team: Team, tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    team.collectives.sum_(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return max(1e-9, time.perf_counter() - begin)


def data_facts(sources: Sequence[Any]) -> dict[str, str]:
    """Digest of each source, read here."""
    return {f"the digest of data {source.name}": open_source(source).digest for source in sources}

"""Places in one arena for tensors that live from one launch to another.

The largest first, each at the lowest place that no tensor alive with it covers ("greedy by size", Pisarchyk and Lee,
"Efficient memory management for deep neural net inference", 2020).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

ALIGN = 256  # bytes


@dataclass(frozen=True)
class Life:
    """Bytes, and the first and last launch that touch them."""

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """offsets: tensor -> byte in the arena of `size` bytes; peak: the most bytes alive at once."""

    offsets: Mapping[Hashable, int]
    size: int
    peak: int


def plan(lives: Mapping[Hashable, Life]) -> Plan:
    """Offsets of all of them; deterministic, by size and then by order."""
    offsets: dict[Hashable, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # start, stop, first, last
    order = sorted(enumerate(lives.items()), key=lambda item: (-item[1][1].size, item[0]))
    for _, (name, life) in order:
        size = aligned(life.size)
        start = 0
        for low, high, first, last in placed:
            if first <= life.last and life.first <= last:
                if start + size <= low:
                    break
                start = max(start, high)
        offsets[name] = start
        placed.append((start, start + size, life.first, life.last))
        placed.sort()
    return Plan(offsets, max((stop for _, stop, _, _ in placed), default=0), at_peak(lives)[1])


def at_peak(lives: Mapping[Any, Life]) -> tuple[int, int]:
    """The first launch at which the most bytes are alive, and how many."""
    changes: dict[int, int] = {}
    for life in lives.values():
        size = aligned(life.size)
        changes[life.first] = changes.get(life.first, 0) + size
        changes[life.last + 1] = changes.get(life.last + 1, 0) - size
    alive = peak = moment = 0
    for at in sorted(changes):
        alive += changes[at]
        if alive > peak:
            peak, moment = alive, at
    return moment, peak


def aligned(size: int) -> int:
    """Bytes that a tensor takes in an arena."""
    return -(-size // ALIGN) * ALIGN

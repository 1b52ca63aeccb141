"""Places in one arena for tensors that live from one launch to another.

The largest first, each at the lowest place that no tensor alive with it covers ("greedy by size", Pisarchyk and Lee,
"Efficient memory management for deep neural net inference", 2020). What a kernel stores over a value that it reads for the last time
(`over.py`) shares its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
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


def plan(lives: Mapping[Any, Life], over: Mapping[Any, Any] | None = None) -> Plan:
    """Offsets of all of them; deterministic, by size and then by order. over: tensor -> the one in whose place it is stored."""
    over = over or {}
    offsets: dict[Hashable, int] = {}
    given, lives = lives, together(lives, over)
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
    return Plan({name: offsets[_first(name, over)] for name in given}, max((stop for _, stop, _, _ in placed), default=0), at_peak(lives)[1])


def together(lives: Mapping[Any, Life], over: Mapping[Any, Any]) -> dict[Any, Life]:
    """Tensors that take each other's place as one, that which is there first, from its first launch to the last one's last."""
    found: dict[Any, Life] = {}
    for name, life in lives.items():
        place = _first(name, over)
        known = found.get(place, life)
        found[place] = Life(max(known.size, life.size), min(known.first, life.first), max(known.last, life.last))
    return found


def _first(name: Any, over: Mapping[Any, Any]) -> Any:
    while name in over:
        name = over[name]
    return name


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


def in_turn(
    needs: Sequence[set[int]], reads: Sequence[Sequence[Any]], makes: Sequence[Sequence[Any]], size: Callable[[Any], int],
    rank: Sequence[int], together: Sequence[Hashable] | None = None,
) -> list[int]:  # fmt: skip
    """An order of work: what a piece needs first, and among those that may run one that leaves fewer bytes alive than before, else
    the one of the least rank.

    reads: the values that go where they were read last; makes: those that come, of `size` bytes, results left out: they stay for
    good, whenever they come. together: pieces of an equal key
    that is not None follow one another.
    """
    users: list[list[int]] = [[] for _ in needs]
    for i, above in enumerate(needs):
        for j in above:
            users[j].append(i)
    left = [len(n) for n in needs]
    readers: dict[Any, set[int]] = {}
    for i, values in enumerate(reads):
        for value in values:
            readers.setdefault(value, set()).add(i)
    groups: dict[Hashable, list[int]] = {}
    keys = [i if together is None or together[i] is None else ("", together[i]) for i in range(len(needs))]
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)

    def frees(i: int) -> bool:
        gone = sum(size(v) for v in dict.fromkeys(reads[i]) if readers[v] == {i})
        return not makes[i] or gone > sum(map(size, makes[i]))

    ready = [(not frees(i), rank[i], i) for i, n in enumerate(left) if not n]
    heapq.heapify(ready)
    done: list[int] = []
    made: set[int] = set()
    while ready:
        alone: list[int] = []
        for i in groups[keys[heapq.heappop(ready)[2]]]:
            if i in made:
                break
            made.add(i)
            done.append(i)
            for value in reads[i]:
                readers[value].discard(i)
                alone += readers[value] if len(readers[value]) == 1 else ()
            for j in users[i]:
                left[j] -= 1
                if not left[j]:
                    heapq.heappush(ready, (not frees(j), rank[j], j))
        for j in alone:  # the last reader of something
            if not left[j] and frees(j):
                heapq.heappush(ready, (False, rank[j], j))
    assert len(done) == len(needs), "a cycle"
    return done

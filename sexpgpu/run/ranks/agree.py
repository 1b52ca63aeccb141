"""Decisions that every rank makes alike: a signal to one of them stops all at the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sexpgpu.run.best import Best
from sexpgpu.run.checkpoints.writer import Outcome
from sexpgpu.run.data.feed import EvalFeed, Feed
from sexpgpu.run.events import EvalDone
from sexpgpu.run.loop import Controls
from sexpgpu.run.program import Program
from sexpgpu.run.ranks.collectives import Collectives
from sexpgpu.run.signals import Halted


class AgreedControls:
    """The loop asks at the same places on every rank. The first answer is waited for; each later one was begun at the
    question before, so that a step does not wait for it: a signal takes effect one step later."""

    def __init__(self, own: Controls, team: Collectives):
        self._own, self._team = own, team
        self._stop: int | None = None
        self._save = False
        self._coming: Callable[[], list[int]] | None = None

    def stopping(self) -> int | None:
        if self._stop is None:
            if self._coming is None:
                self._ask()
            assert self._coming is not None
            stop, save = self._coming()
            self._coming = None
            self._save = self._save or bool(save)
            self._stop = stop or None
            if self._stop is None:
                self._ask()
        return self._stop

    def take_save_request(self) -> bool:
        asked, self._save = self._save, False
        return asked

    def settle(self) -> None:
        """Takes what is still coming, so that no rank leaves while another waits."""
        if self._coming is not None:
            self._coming()
            self._coming = None

    def _ask(self) -> None:
        self._coming = self._team.begin_largest([self._own.stopping() or 0, int(self._own.take_save_request())])


class AgreedBest:
    """Rank 0 knows which checkpoints were written, and so which evaluation is the best."""

    def __init__(self, own: Best, team: Collectives):
        self._own, self._team = own, team
        self.kept, self.lost, self.record = own.kept, own.lost, own.record

    def take(self, done: EvalDone) -> bool:
        better = self._own.take(done)
        return bool(self._team.sum_floats([float(better) if self._team.rank == 0 else 0.0])[0])


class AgreedFeed:
    """A feed whose batches may wait for their data: a rank goes on with one when every rank has its own. Where a signal ended the wait
    of one, the others leave theirs too (Halted), and none stays alone in the sums of a step. `largest`: of the ranks' numbers;
    the thread that makes batches ahead asks, too, so no other question goes that way."""

    def __init__(self, feed: Feed, largest: Callable[[int], int]):
        self._feed, self._largest = feed, largest

    def batch(self, step: int) -> dict[str, np.ndarray]:
        with together(self._largest):
            return self._feed.batch(step)

    def cursor(self, step: int) -> tuple[int, int]:
        return self._feed.cursor(step)

    def ready(self, step: int) -> None:
        self._feed.ready(step)

    def numbers(self, step: int) -> np.ndarray:
        return self._feed.numbers(step)


@contextmanager
def together(largest: Callable[[int], int]) -> Iterator[None]:
    """Raises Halted on every rank where it was raised on one."""
    halted = None
    try:
        yield
    except Halted as stop:
        halted = stop
    if largest(int(halted is not None)):
        raise Halted


class Shares:
    """An evaluation's feed, its batches dealt out to the ranks in turn; None where there is none left for this rank.

    Whole batches, so that each has the numbers that it has on one device. `largest`: of the ranks' numbers, where a batch may wait
    for its data.
    """

    def __init__(self, feed: EvalFeed, rank: int, ranks: int, largest: Callable[[int], int] | None = None):
        self._feed, self._rank, self._ranks, self._largest = feed, rank, ranks, largest

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self._feed), self._ranks):
            number = first + self._rank
            if self._largest is None:
                yield self._own(number)
                continue
            with together(self._largest):
                batch = self._own(number)
            yield batch

    def _own(self, number: int) -> Any:
        return self._feed.batch(number) if number < len(self._feed) else None

    def joined(self, team: Collectives, names: Sequence[str], own: Sequence[Mapping[str, tuple[float, float]]]) -> list[dict[str, tuple[float, float]]]:
        """The metrics of every batch in order, from those of this rank's."""
        width = 2 * len(names)
        flat = [0.0] * (len(self._feed) * width)
        for i, metrics in enumerate(own):
            at = (i * self._ranks + self._rank) * width
            if metrics:
                flat[at : at + width] = [value for name in names for value in metrics[name]]
        flat = team.sum_floats(flat)
        return [{name: (flat[b * width + 2 * i], flat[b * width + 2 * i + 1]) for i, name in enumerate(names)} for b in range(len(self._feed))]


class Silent:
    """The checkpoints of a rank other than 0: it gives its share of the state, and writes nothing."""

    def __init__(self, program: Program):
        self._program = program

    def begin(self, step: int, owed: tuple[str, ...] = ()) -> list[Outcome]:
        self._program.state()
        return []

    def poll(self) -> list[Outcome]:
        return []

    def finish(self) -> list[Outcome]:
        return []

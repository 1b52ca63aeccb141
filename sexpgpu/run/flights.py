"""Steps on their way. A program that takes the next steps while the last ones run is kept busy: two launches at most are in the air,
and short steps are launched several at a time (docs/decisions/0049). One that only steps is asked for one step at a time.

Nothing flies over a boundary, which is a step after which the state is looked at: an evaluation, a save, the end.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Run
from sexpgpu.run.data.feed import Feed, fill
from sexpgpu.run.program import Flying, Program, StepResult
from sexpgpu.run.signals import Halted

MOST = 16  # steps of a launch
TARGET = 3e-3  # seconds that a launch is to last
MEASURED = 4  # launches of one step before the number is chosen; the first is left out
SLOW = 0.5  # seconds of a step from which launches go one at a time: a signal waits for no more than one
AHEAD = 3  # launches whose batches are made ahead: a new epoch's order takes a while
PAYS = 10  # launches of several steps that must be left: each kind is captured once


class Made(NamedTuple):
    """One step that came back; `seconds`: of the wall clock since the one before, fetching the batch included."""

    step: int
    logged: bool
    result: StepResult
    seconds: float


class _Launch(NamedTuple):
    at: int  # updates made before it
    logged: tuple[bool, ...]
    flight: Any


class Flights:
    """The steps of a run from `start` to `stop`. `saves`: checkpoints are made; `largest`: of the ranks' numbers.

    sent: updates that were launched; together: how many go at once; trouble: why the next launch cannot go, to be raised when
    everything in the air has come back.
    """

    def __init__(self, program: Program, run: Run, feed: Feed, start: int, stop: int, saves: bool, clock: Callable[[], float],
                 largest: Callable[[int], int] = lambda number: number):
        self._program, self._run, self._feed, self._stop, self._clock, self._largest = program, run, feed, stop, clock, largest
        self._flying: Flying | None = program if hasattr(program, "launch") else None  # type: ignore[assignment]
        self._cadences = {n for n in (run.checkpoint_every if saves else None, *(e.every for e in run.evals)) if n}
        self._air: deque[_Launch] = deque()
        self._back: Made | None = None  # of a program that only steps: the step that was made
        self._depth, self._mark = 1, 0.0
        self._times: list[float] | None = [] if self._flying is not None else None
        self._loader: Loader | None = None
        self.sent, self.together = start, 1
        self.trouble: BaseException | None = None

    def __bool__(self) -> bool:
        """Whether any step is in the air."""
        return bool(self._air) or self._back is not None

    def fill(self) -> None:
        """Launches what may go now."""
        if self._flying is None:
            self._step()
            return
        boundary = self._boundary(self._air[0].at if self._air else self.sent)
        while self.trouble is None and len(self._air) < self._depth and self.sent < boundary:
            if not self._air:
                self._mark = self._clock()
            try:
                self._launch(self._count(self.sent))
            except (Halted, Exception) as error:  # the steps before it are told first
                self.trouble = error

    def collect(self) -> list[Made]:
        """The steps of the oldest launch, up to the first that is not finite; waits for them."""
        if self._flying is None:
            made, self._back = self._back, None
            assert made is not None
            return [made]
        launch = self._air.popleft()
        try:
            results = self._flying.collect(launch.flight)
        except SexpError as error:
            raise _at(error, launch.at, len(launch.logged)) from None
        now = self._clock()
        each, self._mark = (now - self._mark) / len(launch.logged), now
        if self._times is not None:
            self._measure(launch.flight.seconds)
        return [Made(launch.at + i, logged, result, each) for i, (logged, result) in enumerate(zip(launch.logged, results, strict=False), 1)]

    def drop(self) -> None:
        """Waits for what is in the air and forgets it: after a step that was not finite none of it changed anything."""
        self.close()
        while self._air:
            launch = self._air.popleft()
            if self._flying is not None:
                self._flying.collect(launch.flight)

    def close(self) -> None:
        """Nothing more is launched; waits until nothing touches the feed any more."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        self.together = 1

    def leave(self) -> None:
        """The end, however it comes; waits for nothing."""
        if self._loader is not None:
            self._loader.leave()

    def _boundary(self, at: int) -> int:
        """The first boundary after so many updates."""
        return min(self._stop, *((at // n + 1) * n for n in self._cadences)) if self._cadences else self._stop

    def _count(self, at: int) -> int:
        """Steps of the launch after so many updates. It depends on nothing else, so that batches can be made ahead."""
        whole = at % self.together == 0 and at + self.together <= self._boundary(at)
        return self.together if whole else 1

    def _logged(self, step: int) -> bool:
        every = self._run.log_every
        return step == self._stop or (every is not None and every > 0 and step % every == 0)

    def _step(self) -> None:
        """One step of a program that only steps."""
        if self.trouble is not None or self.sent >= self._stop:
            return
        step, start = self.sent + 1, self._clock()
        logged = self._logged(step)
        try:
            result = self._program.step(self._feed.batch(self.sent), logged)
        except (Halted, Exception) as error:
            self.trouble = error
            return
        self.sent, self._back = step, Made(step, logged, result, self._clock() - start)

    def _launch(self, count: int) -> None:
        assert self._flying is not None
        at, batches = self.sent, self._batches(self.sent, count)
        logged = tuple(self._logged(at + i + 1) for i in range(count))
        try:
            flight = self._flying.launch(batches, logged)
        except SexpError as error:
            raise _at(error, at, count) from None
        self._air.append(_Launch(at, logged, flight))
        self.sent += count
        if self._loader is not None:
            self._ask(self._loader)

    def _ask(self, loader: Loader) -> None:
        """Has the batches of the next launches made, as far as they are of several steps."""
        at = max(self.sent, loader.until)
        while loader.waiting < AHEAD and at < self._stop and (count := self._count(at)) > 1:
            loader.ask(at, count)
            at += count

    def _batches(self, at: int, count: int) -> Sequence[Mapping[str, Any]]:
        if self._loader is not None and count > 1:
            return self._loader.take(at, count)
        return [self._feed.batch(at + i) for i in range(count)]

    def _measure(self, seconds: float) -> None:
        """Chooses once, by what the device took for a step; every rank alike."""
        assert self._times is not None
        self._times.append(seconds)
        if len(self._times) < MEASURED:
            return
        step = self._largest(math.ceil(min(self._times[1:]) * 1e9)) / 1e9
        self._times = None
        self._depth = 1 if step > SLOW else 2
        assert self._flying is not None
        chosen = together(step, self._cadences, self._run.log_every if self._flying.apart else None, self._stop - self.sent)
        if chosen > 1 and self._flying.room(chosen) is not None:
            self.together, self._loader = chosen, Loader(self._feed, self._flying.room)


def _at(error: SexpError, at: int, count: int) -> SexpError:
    """A mistake of a launch, with the steps that it was of."""
    steps = f"step {at + 1}" if count == 1 else f"steps {at + 1} … {at + count}"
    d = error.diagnostic
    return SexpError(replace(d, notes=(*d.notes, f"{steps} of the run {'was' if count == 1 else 'were'} under way; {at} updates were made before")))


def together(seconds: float, cadences: set[int], log_every: int | None, left: int) -> int:
    """How many steps of so many seconds go at once. The fewest launches a step, no launch much longer than TARGET.

    Launches begin at multiples of the number, and what a boundary would cut goes step by step. `log_every`: where logged steps are
    other graphs than the rest, it and the number divide each other, so that two kinds of launches do.
    """
    most = min(MOST, math.ceil(TARGET / max(seconds, 1e-9)), left // PAYS)
    fits = [k for k in range(2, most + 1) if not log_every or log_every % k == 0 or k % log_every == 0]

    def launches(k: int) -> float:
        return 1 / k + sum((k - 1) / n for n in cadences if n % k)

    best = min(fits, key=lambda k: (launches(k), k), default=1)
    return best if best > 1 and launches(best) < 1 else 1


class Loader:
    """Makes the batches of the next launches on a thread while others are in the air, right where the program takes them from.

    The thread makes no call of the device. `room`: `Flying.room`. until: updates up to which batches were asked for.
    """

    def __init__(self, feed: Feed, room: Callable[[int], Sequence[Mapping[str, Any]] | None]):
        self._feed, self._room = feed, room
        self._asked: deque[tuple[int, int]] = deque()
        self.until = 0
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._jobs.put, None)  # nobody need close it
        self._thread = threading.Thread(target=_make, args=(feed, self._jobs, self._made), name="sexpgpu-launches", daemon=True)
        self._thread.start()

    def ask(self, at: int, count: int) -> None:
        """Begins to make the batches of `count` updates after `at`."""
        room = self._room(count)
        assert room is not None
        self._asked.append((at, count))
        self.until = at + count
        self._jobs.put((at, room))

    @property
    def waiting(self) -> int:
        """Launches that were asked for and not taken."""
        return len(self._asked)

    def take(self, at: int, count: int) -> Sequence[Mapping[str, Any]]:
        """Those batches; what went wrong in making them is raised here."""
        while self._asked and self._asked[0] != (at, count):
            self._asked.popleft()
            self._made.get()
        if not self._asked:
            self.ask(at, count)
        self._asked.popleft()
        found = self._made.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Returns when the thread touches the feed no more."""
        self._end()
        self._thread.join()

    def leave(self) -> None:
        """The thread ends after what it was asked for."""
        self._end()


def _make(feed: Feed, jobs: queue.SimpleQueue[Any], made: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        at, room = job
        try:
            for i, out in enumerate(room):
                fill(feed, at + i, out)
            made.put(room)
        except BaseException as error:
            made.put(error)
        del job, room  # while waiting for the next one

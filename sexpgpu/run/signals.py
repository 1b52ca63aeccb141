"""SIGINT, SIGTERM, SIGUSR1 and --max-time as flags that the loop reads between steps.

The first SIGINT or SIGTERM, in whatever phase, asks for an orderly end. A second one ends at once, and so does
the first, after a moment, where long work stands before the first step (`at_once`): it raises `Interrupted`, so that the
status file still says `stopped`. A third leaves without a word.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from sexpgpu.diagnostics import fail

GRACE = 2.0  # seconds in which what stands before the first step may still end by itself
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", re.ASCII)


class Interrupted(BaseException):
    """A second SIGINT or SIGTERM. Not an Exception, so that no handler of mistakes swallows it."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


class Halted(BaseException):
    """A wait for data was ended by the first signal. The loop then ends as it does between two steps."""


class Signals:
    """Flags of one process. `deadline_seconds` from now acts as SIGTERM."""

    def __init__(self, deadline_seconds: float | None = None):
        self._stop: int | None = None
        self._save = False
        self._count = 0
        self._hasty = False
        self._old: dict[int, Any] = {}
        self._deadline: float | None = None
        self.limit(deadline_seconds)

    def limit(self, seconds: float | None) -> None:
        """Sets --max-time, counted from now."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def install(self) -> Signals:
        """Takes the signals over; outside the main thread Python allows none, and there it does nothing."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._old[signum] = signal.signal(signum, self._on_stop)
            if hasattr(signal, "SIGUSR1"):
                self._old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def restore(self) -> None:
        for signum, old in self._old.items():
            signal.signal(signum, old)
        self._old.clear()

    def stopping(self) -> int | None:
        if self._stop is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop = int(signal.SIGTERM)
        return self._stop

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, GRACE seconds after the first stop, whenever it came, the process ends as by a second one.

        For long work before the first step: nothing was made that could be lost.
        """
        if not self._old or not hasattr(signal, "SIGALRM"):  # outside the main thread
            yield
            return
        began, older = time.monotonic(), signal.signal(signal.SIGALRM, self._on_alarm)
        rest, interval = signal.setitimer(signal.ITIMER_REAL, 0)
        self._hasty = True
        if self._stop is not None:
            signal.setitimer(signal.ITIMER_REAL, GRACE)
        elif self._deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, max(0.0, self._deadline - began) + GRACE)
        try:
            yield
        finally:
            self._hasty = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, older)
            if rest:  # somebody else's
                signal.setitimer(signal.ITIMER_REAL, max(0.001, rest - (time.monotonic() - began)), interval)

    def take_save_request(self) -> bool:
        asked, self._save = self._save, False
        return asked

    def _on_stop(self, signum: int, frame: Any) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(128 + signum)
        if self._count == 2:
            raise Interrupted(signum)
        if self._stop is None:
            self._stop = signum
        if self._hasty:
            signal.setitimer(signal.ITIMER_REAL, GRACE)

    def _on_alarm(self, signum: int, frame: Any) -> None:
        raise Interrupted(self.stopping() or int(signal.SIGTERM))

    def _on_save(self, signum: int, frame: Any) -> None:
        self._save = True


def parse_duration(text: str) -> float:
    """Seconds of `3h`, `90m`, `45s`, `1h30m`; anything else is E-RUN-002."""
    match = _DURATION.fullmatch(text.strip())
    if not match or not any(match.groups()):
        fail("E-RUN-002", f"`{text}` is not a length of time", help="write it as 3h, 90m, 45s or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        fail("E-RUN-002", f"`{text}` leaves no time for a step", help="write it as 3h, 90m, 45s or 1h30m")
    return total

"""SIGINT, SIGTERM, SIGUSR1 and --max-time as flags that the loop reads between steps.

The first SIGINT or SIGTERM, in whatever phase, asks for an orderly end. A second one, or the first while data are read
before the first step, ends at once: it raises `Interrupted`, so that the status file still says `stopped`. A third leaves without a word.
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
        """Inside, the first SIGINT or SIGTERM ends the process as a second one does: nothing was made that could be lost."""
        if self._stop is not None:
            raise Interrupted(self._stop)
        self._hasty = True
        try:
            yield
        finally:
            self._hasty = False

    def take_save_request(self) -> bool:
        asked, self._save = self._save, False
        return asked

    def _on_stop(self, signum: int, frame: Any) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(128 + signum)
        if self._count == 2 or self._hasty:
            raise Interrupted(signum)
        if self._stop is None:
            self._stop = signum

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

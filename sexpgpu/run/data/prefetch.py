"""Batches made ahead on a thread, so that no step waits for a disk. What they are does not depend on it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

DEPTH = 3  # batches that wait at most


class Prefetched:
    """A feed whose next DEPTH batches are made while a step runs. Asked for another step, it starts from there."""

    def __init__(self, feed: Any, depth: int = DEPTH):
        self._feed, self._depth = feed, depth
        self._next = -1
        self._line: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The feed's batch of that step; what went wrong in making it is raised here."""
        if step != self._next:
            self._begin(step)
        found = self._line.get()
        self._next = step + 1
        if isinstance(found, BaseException):
            self._next = -1
            raise found
        return found

    def fill(self, step: int, out: Mapping[str, np.ndarray]) -> bool:
        """The feed's own `fill`, at once, for who makes batches ahead on a thread already; false, and nothing, where it has none."""
        if not hasattr(self._feed, "fill") or not self._feed.fill(step, out):
            return False
        if self._next >= 0:
            self.close()
        return True

    def cursor(self, step: int) -> tuple[int, int]:
        return self._feed.cursor(step)

    def ready(self, step: int) -> None:
        self._feed.ready(step)

    def numbers(self, step: int) -> np.ndarray:
        return self._feed.numbers(step)

    def close(self) -> None:
        """Ends the thread, soon."""
        self._stop.set()
        self._next = -1

    def _begin(self, step: int) -> None:
        self._stop.set()
        self._stop, self._line = threading.Event(), queue.Queue(self._depth)
        weakref.finalize(self, self._stop.set)  # nobody need close it
        threading.Thread(target=_fill, args=(self._feed, step, self._line, self._stop), name="sexpgpu-batches", daemon=True).start()


def _fill(feed: Any, step: int, line: queue.Queue[Any], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            found: Any = feed.batch(step)
        except BaseException as error:
            found = error
        while not stop.is_set():
            try:
                line.put(found, timeout=0.5)
                break
            except queue.Full:
                continue
        if isinstance(found, BaseException):
            return
        step += 1

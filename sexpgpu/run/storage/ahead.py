"""Requests on their way while earlier answers are used: reads ahead, parts of an upload side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

DEPTH = 4  # requests on their way at a time
R = TypeVar("R")
T = TypeVar("T")


class Ahead:
    """`work(item)` for each item, in order, up to DEPTH on their way on daemon threads: an end of the process waits for none."""

    def __init__(self, work: Callable[[T], R], items: Iterable[T]):
        self._work, self._items = work, iter(items)
        self._pending: deque[Future[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._pending.append(self._launch(item))
            if len(self._pending) >= DEPTH:
                yield self._pending.popleft().result()
        while self._pending:
            yield self._pending.popleft().result()

    def settle(self) -> None:
        """Waits for what is on its way, whatever became of it."""
        while self._pending:
            self._pending.popleft().exception()

    def _launch(self, item: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def go() -> None:
            try:
                future.set_result(self._work(item))
            except BaseException as error:  # noqa: BLE001 - handed to whoever takes the result
                future.set_exception(error)

        threading.Thread(target=go, name="s3", daemon=True).start()
        return future

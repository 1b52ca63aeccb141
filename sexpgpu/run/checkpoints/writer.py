"""Checkpoints written beside the training: the state is copied at a step's boundary, a thread writes the copy.

At most one is in flight. One that is asked for meanwhile waits for it: so which checkpoints a run leaves never depends
on how fast the disk is, and memory holds one copy of the state (docs/decisions/0007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sexpgpu.diagnostics import SexpError
from sexpgpu.run.events import Saved

#: (step, evaluations of it that were not made) -> what writes it, the state copied when this returns
Prepare = Callable[[int, tuple[str, ...]], Callable[["Cancel"], Saved]]


class Abandoned(Exception):
    """The process ends at once: nothing more is committed."""


class Cancel:
    """Asked between the files and the manifest, so that a process that ends at once commits nothing any more."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises Abandoned."""
        if self._event.is_set():
            raise Abandoned


@dataclass(frozen=True)
class Outcome:
    """One of the two: a durable checkpoint, or why there is none."""

    step: int
    saved: Saved | None = None
    error: SexpError | None = None


class Writer:
    """`durable` hears of each durable checkpoint at once, on the writing thread."""

    def __init__(self, prepare: Prepare, durable: Callable[[Saved], None] = lambda saved: None):
        self._prepare, self._durable = prepare, durable
        self._thread: threading.Thread | None = None
        self._cancel = Cancel()
        self._done: list[Outcome] = []
        self._bug: BaseException | None = None

    def begin(self, step: int, owed: tuple[str, ...] = ()) -> list[Outcome]:
        """Waits for the one in flight, copies the state, and lets a thread write it. What ended meanwhile."""
        ended = self.finish()
        write = self._prepare(step, owed)
        self._thread = threading.Thread(target=self._run, args=(step, write), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        return ended

    def poll(self) -> list[Outcome]:
        """What ended since the last call; never waits."""
        if self._thread is not None and self._thread.is_alive():
            return []
        return self.finish()

    def finish(self) -> list[Outcome]:
        """Waits until nothing is in flight; a bug of ours in the thread is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        ended, self._done = self._done, []
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug
        return ended

    def close(self, at_once: bool = False) -> None:
        """The one in flight is waited for; `at_once`: it is abandoned where it stands, before its manifest."""
        if at_once:
            self._cancel.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(1.0 if at_once else None)

    def _run(self, step: int, write: Callable[[Cancel], Saved]) -> None:
        try:
            saved = write(self._cancel)
            self._durable(saved)
            self._done.append(Outcome(step, saved))
        except Abandoned:
            return
        except SexpError as error:
            self._done.append(Outcome(step, error=error))
        except BaseException as error:  # the loop's thread says it
            self._bug = error

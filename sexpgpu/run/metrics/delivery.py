"""Delivery of one run's records to the service: a thread that follows the metrics file, so that no step ever waits.

The file (the `jsonl:` target's, else a spool) is the truth and the queue in one: whatever happens to the service or to
this process, what has not arrived is read from it again, and `cursor` says from where. One request is under way at a
time and records go in the file's order. Ids are deterministic (`messages`), so what is sent twice arrives once.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sexpgpu.run.metrics.cursor import load_cursor, save_cursor
from sexpgpu.run.metrics.messages import Lineage, Message, message_of, opening
from sexpgpu.run.metrics.read import Tail
from sexpgpu.run.metrics.syvain import MAX_BYTES, MAX_EVENTS, Client, Experiment, ServiceError, envelope

FLUSH = 5.0  # seconds between looks at the file; a lifecycle event or an annotation is looked for at once
FIRST_PAUSE, MAX_PAUSE = 0.5, 10.0  # seconds before a repetition; doubled each time
FRESH = 60.0  # seconds in which a token is not renewed for its age again: this machine's time may be wrong
IN_A_ROW = 20  # records refused one after another: then it is not the records


class Clock:
    """Time as delivery sees it; a test's runs faster."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> None:
        event.wait(seconds)


class GaveUp(Exception):
    """The end came, or the service wants no more: what is left stays in the file."""


@dataclass
class Delivery:
    """Sends records of `run_id` in `path`. `start` begins the thread; `finish` is bounded and ends it."""

    client: Client
    path: Path
    run_id: str
    folder: str | None = None
    clock: Clock = field(default_factory=Clock)
    flush: float = FLUSH
    grow: bool = True  # the file grows; else delivery ends by itself at its end
    progress: Callable[[int], None] | None = None  # called with the number of records dealt with
    trouble: str = ""  # what went wrong last; empty again after a success
    dead: str = ""  # why nothing more is sent
    nonfinite: dict[str, int] = field(default_factory=dict)
    refusal: str = ""  # what the service said to a record that it refused

    def __post_init__(self) -> None:
        self.cursor = load_cursor(self.path, self.run_id, self.client.host)
        self.cursor.folder = self.folder or self.cursor.folder
        self.finished = False  # all there was has been dealt with
        self._about: dict[str, Any] = {}
        self._lineage = Lineage()
        self._experiment: Experiment | None = None
        self._new = True  # no experiment of this run was opened before
        self._end: float | None = None
        self._wake = threading.Event()
        self._refused_in_row = 0
        self._renewed = -FRESH
        self._fresh = 0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name="metrics", daemon=True)

    # -- called by the run

    def start(self) -> None:
        self._tail = Tail(self.path)  # now: a file that is deleted later is still read to its end
        self._thread.start()

    def wake(self, urgent: bool) -> None:
        """The file has one more record."""
        self._fresh += 1
        if urgent or self._fresh >= MAX_EVENTS:
            self._fresh = 0
            self._wake.set()

    def finish(self, seconds: float) -> None:
        """Sends what is left for at most so long. In a forked child nothing: the thread is the parent's."""
        if os.getpid() != self._pid or self._thread.ident is None:
            return
        self._end = self.clock.now() + seconds
        self._wake.set()
        while self._thread.is_alive() and self.clock.now() < self._end:
            self._thread.join(0.05)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def undelivered(self) -> int:
        """Records of the run in the file that were not dealt with."""
        tail = Tail(self.path)
        try:
            return sum(r["run_id"] == self.run_id and r.get("seq", 0) >= self.cursor.seq for r in tail)
        finally:
            tail.close()

    # -- the thread

    def _main(self) -> None:
        try:
            self._follow()
            self.finished = True
        except GaveUp:
            pass
        except OSError as error:
            self.dead = f"{self.path}: {error.strerror or error}"
        except Exception as error:  # metrics end no run, not even by a mistake of ours
            self.dead = f"a bug of sexpgpu: {type(error).__name__}"
        finally:
            if self._experiment is not None:
                self.client.revoke(self._experiment)
            self.client.close()

    def _follow(self) -> None:
        tail = self._tail
        try:
            while True:
                ending = self._end is not None or not self.grow  # before the look: what came later is seen in the next
                records = tail.read()
                self._deliver_all([r for r in records if r["run_id"] == self.run_id])
                if records:
                    continue
                if ending:
                    return
                self._pause(self.flush)
        finally:
            tail.close()

    def _pause(self, seconds: float) -> None:
        """Waits, or less when there is something to do or the end is near."""
        if self._end is not None:
            seconds = min(seconds, self._end - self.clock.now())
        if seconds > 0:
            self.clock.wait(self._wake, seconds)
        self._wake.clear()

    def _rest(self, seconds: float) -> None:
        """The pause before a repetition: new records do not shorten it, the end's beginning does, once."""
        until, ending = self.clock.now() + seconds, self._end is not None
        while (left := until - self.clock.now()) > 0:
            if self._end is not None and (not ending or self.clock.now() >= self._end):
                return
            self._pause(left)

    def _deliver_all(self, records: Sequence[dict[str, Any]]) -> None:
        batch: list[Message] = []
        size = 0
        for record in records:
            if record["type"] == "run":
                self._lineage.take(record)
                if record.get("event") in ("start", "resume"):
                    self._about = record
            if record.get("seq", 0) < self.cursor.seq:
                self._new = False
                continue
            message = message_of(record, self._opened().id, self._lineage)
            length = len(json.dumps(message.event)) + 1
            if batch and (message.alone or batch[-1].alone or len(batch) == MAX_EVENTS or size + length > MAX_BYTES - 2):
                self._deliver(batch)
                batch, size = [], 0
            batch.append(message)
            size += length
        if batch:
            self._deliver(batch)

    def _deliver(self, batch: list[Message]) -> None:
        """A whole batch, however long it takes; GaveUp if the end comes first."""
        self._check_end()
        for message in batch:
            if message.nonfinite:
                self.nonfinite[message.nonfinite] = self.nonfinite.get(message.nonfinite, 0) + 1
        self._send([m for m in batch if m.event is not None])
        last = batch[-1]
        self.cursor.seq, self.cursor.time = last.seq + 1, last.time
        self._save()
        if self.progress is not None:
            self.progress(len(batch))

    def _send(self, todo: list[Message]) -> None:
        pause, renewals = FIRST_PAUSE, 0
        while todo:
            try:
                wrong = self.client.send(self._current(), [m.event or {} for m in todo], self._timeout())
            except ServiceError as error:
                if error.kind in ("denied", "absent"):
                    renewals += 1
                    if renewals > 2:
                        self._die(error)
                    self._renew(reopen=renewals == 2 or error.kind == "absent")
                    continue
                if not error.transient:
                    return self._halve(todo, error)
                after, why = error.after, error.text
            else:
                refused = [(m, e) for m in todo if (e := wrong.get(_id(m))) is not None and not e.transient]
                again = [m for m in todo if (e := wrong.get(_id(m))) is not None and e.transient]
                if len(refused) < len(todo):
                    self._refused_in_row = 0
                for _, refusal in refused:
                    self._refuse(refusal)
                if not again:
                    self.trouble = ""
                    return
                if len(again) + len(refused) < len(todo):
                    pause = FIRST_PAUSE
                todo, after, why = again, max(wrong[_id(m)].after for m in again), wrong[_id(again[0])].text
            self.trouble = why
            self._check_end()
            self._rest(max(pause, after))
            pause = min(2 * pause, MAX_PAUSE)
            self._check_end()

    def _halve(self, todo: list[Message], error: ServiceError) -> None:
        """A request that is refused as a whole: one bad record costs no other."""
        if len(todo) == 1:
            return self._refuse(error)
        self._send(todo[: len(todo) // 2])
        self._send(todo[len(todo) // 2 :])

    def _refuse(self, error: ServiceError) -> None:
        self._refused_in_row += 1
        if self._refused_in_row >= IN_A_ROW:
            self._die(error)
        self.cursor.refused += 1
        self.refusal = error.text

    def _die(self, error: ServiceError) -> None:
        self.dead = error.text
        raise GaveUp

    # -- the experiment

    def _opened(self) -> Experiment:
        if self._experiment is None:
            slug, description, meta = opening({"slug": self.run_id, **self._about})
            experiment = self._insist(lambda: self.client.open(slug, description, meta))
            if self.cursor.folder:
                self._place(experiment.id, self.cursor.folder)
            self._experiment, self.cursor.experiment = experiment, experiment.id
            if self._new:
                self._new = False
                self._announce(experiment)
        return self._experiment

    def _place(self, experiment: str, folder: str) -> None:
        try:
            self._insist(lambda: self.client.move(experiment, folder), dead=False)
        except ServiceError as error:
            self.trouble = f"the experiment could not be put into its folder: {error.text}"

    def _announce(self, experiment: Experiment) -> None:
        """As the vendor's client does; that it fails is of no account."""
        try:
            self.client.send(experiment, [envelope("annotate", {
                "experimentId": experiment.id, "annotation": "experiment opened", "meta": {}})], self._timeout())
        except ServiceError:
            pass

    def _current(self) -> Experiment:
        experiment = self._opened()
        if experiment.stale and self.clock.now() >= self._renewed + FRESH:
            self._renew(reopen=False)
        return self._opened()

    def _renew(self, reopen: bool) -> None:
        """A new token; if the service refuses, the experiment is opened again, once."""
        experiment, self._renewed = self._opened(), self.clock.now()
        if not reopen:
            try:
                self._experiment = self._insist(lambda: self.client.refresh(experiment), dead=False)
                return
            except ServiceError:
                pass
        self._experiment = None
        self._opened()

    def _insist(self, call: Callable[[], Any], dead: bool = True) -> Any:
        """What a call answers, repeated while what keeps it passes; a refusal ends delivery, or is raised."""
        pause = FIRST_PAUSE
        while True:
            self._check_end()
            try:
                return call()
            except ServiceError as error:
                if not error.transient:
                    if dead:
                        self._die(error)
                    raise
                self.trouble = error.text
                self._rest(max(pause, error.after))
                pause = min(2 * pause, MAX_PAUSE)

    def _timeout(self) -> float:
        if self._end is None:
            return self.client.timeout
        return max(0.5, min(self.client.timeout, self._end - self.clock.now()))

    def _check_end(self) -> None:
        if self._end is not None and self.clock.now() >= self._end:
            raise GaveUp

    def _save(self) -> None:
        save_cursor(self.path, self.run_id, self.cursor)


def _id(message: Message) -> str:
    return message.event["messageId"] if message.event else ""

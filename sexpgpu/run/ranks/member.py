"""A rank's line to its supervisor: heartbeats from a thread of their own in every phase, and meetings of all ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from sexpgpu.diagnostics import SexpError
from sexpgpu.run.events import PhaseChanged, Started, StepDone
from sexpgpu.run.ranks.layout import Place
from sexpgpu.run.ranks.wire import Closed, Wire

BEAT = 1.0  # seconds
ORPHANED = 30.0  # seconds without a word from the supervisor
FRAMES = 12  # of the stack in a heartbeat
OWN = ("OutOfMemoryError", "AcceleratorError")  # torch's, of this rank's device: no other rank's doing
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The system ends this process when its supervisor's ends, even while it is paused. Linux only; else the line tells."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Member:
    """A listener of the run, too: what the loop does is what the heartbeats say. `ranks`: what rank 0 hears of all ranks."""

    def __init__(self, place: Place, beat: float = BEAT):
        die_with_parent()
        self.place = place
        self.on_table: Callable[[list[dict[str, Any]]], None] = lambda table: None
        self.on_end: Callable[[Mapping[str, Any]], None] = lambda verdict: None
        self._wire = Wire(socket.socket(fileno=place.channel))
        self._lock = threading.Lock()
        self._answers: dict[str, dict[str, Any]] = {}
        self._answered = threading.Condition()
        self._phase, self._step, self._made, self._done = "starting", 0, 0, 0
        self._collective, self._number, self._waiting = "", 0, 0  # waiting: how many of its threads do
        self._counting = threading.Lock()
        self._device = False
        self._waited = 0.0  # seconds in collectives, in all
        self._mark = (time.monotonic(), 0.0)
        self._own: deque[float] = deque(maxlen=20)  # seconds a step without waiting
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(beat,), name="heartbeat", daemon=True)
        self._thread.start()

    # -- what the run does

    def on(self, event: Any) -> None:
        match event:
            case Started():
                self._step = event.step
                self._mark = (time.monotonic(), self._waited)
            case PhaseChanged():
                self.phase(event.state)
                self._mark = (time.monotonic(), self._waited)  # evaluations and saves are not of a step
            case StepDone():
                self._step, self._made = event.step, self._made + 1
                now, (at, waited) = time.monotonic(), self._mark
                self._own.append(now - at - (self._waited - waited))
                self._mark = (now, self._waited)
        self.progress()

    def close(self) -> None:
        """The last heartbeat; the supervisor learns of the end by the process's."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(5)

    def phase(self, name: str) -> None:
        self._phase = name
        self.progress()

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase inside another."""
        before = self._phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def progress(self) -> None:
        """Something was done."""
        self._done += 1

    @contextlib.contextmanager
    def collective(self, name: str, waits: bool = True, device: bool = False) -> Iterator[None]:
        """Around a collective. One that breaks ends in `lost`; `waits` is false where it is only begun. device: the host waits for its
        device, which has work of its own, too."""
        self._number += 1
        self._collective, begin = f"{name} {self._number}", time.monotonic()
        self._done += 1
        self._wait(int(waits))
        self._device = device
        try:
            yield
        except RuntimeError as error:
            if type(error).__name__ in OWN:
                raise
            self.lost(str(error))
        finally:
            self._wait(-int(waits))
            self._device = False
        self._done += 1
        if not device:
            self._waited += time.monotonic() - begin

    def waited(self, seconds: float) -> None:
        """So long a device waited for other ranks."""
        self._waited += seconds

    def _wait(self, more: int) -> None:
        with self._counting:
            self._waiting += more

    # -- what it tells

    def meet(self, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Waits until every rank is here, with the same facts; what rank 0's `_…` facts say. Ends the process otherwise."""
        self._collective = f"meeting {name}"
        self._wait(1)
        self._send({"meet": name, "facts": dict(facts)})
        with self._answered:
            self._answered.wait_for(lambda: name in self._answers)
        self._wait(-1)
        self.progress()
        return self._answers.pop(name)

    def failed(self, error: SexpError) -> None:
        """A mistake ends this rank; its supervisor learns which before the process ends."""
        d = error.diagnostic
        with contextlib.suppress(Closed):
            self._send({"failed": {"code": d.code, "message": d.message, "help": list(d.help), "exit_code": d.exit_code}})

    def lost(self, why: str) -> NoReturn:
        """A collective broke: the cause is elsewhere, and the supervisors will find it. This process waits for its end."""
        with contextlib.suppress(Closed):
            self._wait(1)
            self._send({"beat": self._facts()})
            self._send({"lost": why.splitlines()[0][:300] if why else "the connection broke"})
        time.sleep(2 * ORPHANED)
        os._exit(3)

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._wire.send(message)

    # -- the thread

    def _listen(self, beat: float) -> None:
        heard = due = time.monotonic()
        told = ""
        try:
            while not self._ended.is_set():
                now = time.monotonic()
                if now >= due or self._phase != told:
                    told = self._phase
                    self._send({"beat": self._facts()})
                    due = now + beat
                if now - heard > ORPHANED:
                    break
                if select.select([self._wire], [], [], min(0.2, beat))[0]:
                    for message in self._wire.receive():
                        heard = time.monotonic()
                        self._take(message)
            else:
                self._send({"beat": self._facts()})
                return
        except Closed:
            if self._ended.is_set():
                return
        os._exit(3)  # the supervisor is gone: nobody would end this process, nor know of it

    def _take(self, message: Mapping[str, Any]) -> None:
        if "answer" in message:
            with self._answered:
                self._answers[message["answer"]] = message["facts"]
                self._answered.notify_all()
        elif "ranks" in message:
            self.on_table(message["ranks"])
        elif "end" in message:
            with contextlib.suppress(Closed):
                self._send({"beat": self._facts()})  # where it was
            try:
                self.on_end(message["end"])
            finally:
                os._exit(3)

    def _facts(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main) if self._main is not None else None
        stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
        own = list(self._own)
        return {"phase": self._phase, "step": self._step, "made": self._made, "done": self._done, "collective": self._collective,
                "waiting": self._waiting > 0, "device": self._device, "seconds": round(sum(own) / len(own), 6) if own else None,
                "stack": [f"{_short(s.filename)}:{s.lineno} {s.name}" for s in stack]}


def _short(path: str) -> str:
    """A file's last three parts: enough to find it, and no folder of a user's."""
    return "/".join(path.split(os.sep)[-3:])

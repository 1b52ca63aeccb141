"""The status file: one JSON object, replaced atomically, with a heartbeat from a thread of its own in every phase.

It is written for readers that may be anywhere: `read_status` and `Seen` are their side of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import SexpError, fail
from sexpgpu.run.events import Failed, Finished, PhaseChanged, Saved, Started, StepDone, Stopped

HEARTBEAT = 2.0  # seconds; contracts.md allows 5
MAX_BYTES = 1 << 26  # of a status file that is there already
WINDOW = 20.0  # seconds of the rate
SILENT = 30.0  # seconds without a heartbeat after which a reader gives a run up
ENDED = ("done", "failed", "stopped")
#: seconds that a phase usually stays under; one that takes longer is noted, once, and goes on. `running` is one step.
DEADLINES: Mapping[str, float] = {"starting": 300.0, "compiling": 600.0, "running": 900.0, "evaluating": 3600.0, "saving": 900.0}
_FIELDS = ("state", "slug", "run_id", "run", "step", "steps", "loss", "rate", "eta_seconds", "knobs", "checkpoint",
           "device", "pid", "host", "updated", "error", "since", "overdue", "ranks")


def _is_ours(path: Path) -> bool:
    """Whether a file may be replaced: an empty one, or one that an earlier run left. A person's file is not."""
    try:
        if path.stat().st_size == 0:
            return True
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"state", "run_id", "updated"} <= found.keys()


def spoken(seconds: float) -> str:
    """A length of time as a person says it, to about a tenth."""
    for size, word in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {word}"
    return f"{seconds:.3g} s"


def failed_event(error: SexpError, step: int = 0) -> Failed:
    """The event that ends a run with this mistake."""
    d = error.diagnostic
    return Failed(step, d.code, d.message, d.span.place if d.span else None)


@dataclass(frozen=True)
class Seen:
    """What a reader makes of a status file. `state`: the file's, `dead` for a run that ended without a word, `silent`
    where only its silence is known."""

    path: str
    facts: Mapping[str, Any]
    state: str
    why: str = ""

    @property
    def ended(self) -> bool:
        return self.state in (*ENDED, "dead", "silent")


def read_status(path: str | Path, now: float | None = None) -> Seen:
    """The status file at `path`, judged by its pid, host and the time of its text. E-RUN-021 if there is none."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # a pipe is no wait
            facts = json.loads(file.read(MAX_BYTES) or b"")
    except OSError as error:
        fail("E-RUN-021", f"the status file {path} cannot be read: {error.strerror}", help="give the path after --status of a run")
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not {"state", "run_id", "updated", "pid", "host"} <= facts.keys():
        fail("E-RUN-021", f"{path} is no status file", help="give the path after --status of a run")
    return Seen(str(path), facts, *_judge(facts, time.time() if now is None else now))


def _judge(facts: Mapping[str, Any], now: float) -> tuple[str, str]:
    state, updated, pid = str(facts["state"]), facts["updated"], facts["pid"]
    if state in ENDED:
        return state, ""
    silence = now - updated if isinstance(updated, int | float) else math.inf
    here = facts["host"] == socket.gethostname()
    if here and isinstance(pid, int) and not _alive(pid):
        return "dead", f"process {pid} ended without a word, in `{state}`"
    if silence > SILENT:
        known = f"process {pid} is there but silent" if here else f"nothing heard from {facts['host']}"
        return "silent", f"{known} for {spoken(silence)}, in `{state}`"
    return state, str(facts.get("overdue") or "")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _rival(path: Path) -> int | None:
    """The process of this machine that lives and writes this file, by what it says of itself; ours is none."""
    try:
        seen = read_status(path)
    except SexpError:
        return None
    pid = seen.facts["pid"]
    return pid if not seen.ended and seen.facts["host"] == socket.gethostname() and isinstance(pid, int) and pid != os.getpid() else None


def close_status(path: str | Path, state: str, error: Mapping[str, Any] | None, ranks: list[dict[str, Any]]) -> None:
    """Ends the status file of a run whose rank 0 could not: it keeps what that had said. A person's file is left alone."""
    place = Path(os.path.realpath(path))
    facts: dict[str, Any] = dict.fromkeys(_FIELDS) | {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    if place.exists():
        if not place.is_file() or not _is_ours(place):
            return
        with contextlib.suppress(OSError, ValueError), place.open("rb") as file:
            facts |= json.loads(file.read(MAX_BYTES) or b"{}")
    facts |= {"state": state, "error": error, "eta_seconds": None, "ranks": ranks or facts.get("ranks"), "updated": time.time()}
    scratch = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(facts, allow_nan=False, default=str, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, place)


class StatusFile:
    """A listener. The constructor writes the file once (`starting`), or fails with E-RUN-020 (exit 2)."""

    def __init__(self, path: str | Path, heartbeat: float = HEARTBEAT, deadlines: Mapping[str, float] = DEADLINES):
        self.path = Path(os.path.realpath(path))
        self._facts: dict[str, Any] = dict.fromkeys(_FIELDS)
        self._facts |= {"state": "starting", "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        self._deadlines = deadlines
        self._began = time.monotonic()  # of the phase, or of the step while `running`
        self.note: Callable[[str], None] | None = None  # told of a phase that takes long, from the heartbeat's thread
        self._seen: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self.trouble = ""
        self._refuse_odd_paths()
        self.rival = _rival(self.path)  # a live process that writes this file too, or None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._replace()
        except OSError as error:
            folder = isinstance(error, FileExistsError | NotADirectoryError)
            reason = f"{self.path.parent} is no folder" if folder else error.strerror or error
            fail("E-RUN-020", f"the status file {path} cannot be written: {reason}",
                 help="name a file in a folder that you may write to")
        self._thread = threading.Thread(target=self._beat, args=(heartbeat,), name="status", daemon=True)
        self._thread.start()

    def _refuse_odd_paths(self) -> None:
        if self.path.exists() and not self.path.is_file():
            fail("E-RUN-020", f"the status file {self.path} is there already and is no plain file")
        if self.path.is_file() and not _is_ours(self.path):
            fail("E-RUN-020", f"{self.path} is there already and is no status file; it is left as it is",
                 help="name another file for the status")

    def set(self, **facts: Any) -> None:
        """Changes fields of the file and writes it."""
        with self._lock:
            if facts.get("state", self._facts["state"]) != self._facts["state"]:
                facts |= {"since": time.time(), "overdue": None}
                self._began = time.monotonic()
            self._facts |= facts
        self._write()

    def on(self, event: Any) -> None:
        match event:
            case Started():
                self.set(step=event.step, steps=event.steps)
            case PhaseChanged():
                self.set(state=event.state, step=event.step)
            case StepDone():
                self._stepped(event)
            case Saved():
                self.set(checkpoint={"location": event.location, "step": event.step, "durable": True})
            case Failed():
                error = {"code": event.code or None, "message": event.message, "place": event.place}
                self.set(state="failed", error=error, eta_seconds=None)
            case Stopped():
                self.set(state="stopped", step=event.step, eta_seconds=None)
            case Finished():
                self.set(state="done", step=event.step, eta_seconds=0.0)

    def close(self) -> None:
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(timeout=5)
        self._write()

    def _stepped(self, event: StepDone) -> None:
        """Only remembers: the file is written at most a few times a second, or steps would wait for the disk."""
        now = time.monotonic()
        with self._lock:
            self._facts["step"], self._facts["steps"], self._facts["overdue"] = event.step, event.steps, None
            self._began = now
            loss = event.result.loss
            self._facts["loss"] = loss if math.isfinite(loss) else None
            self._seen.append((now, event.step))
            while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW:
                self._seen.popleft()
            first, at = self._seen[0][1], self._seen[0][0]
            rate = (event.step - first) / (now - at) if now > at and event.step > first else None
            self._facts["rate"] = rate
            self._facts["eta_seconds"] = (event.steps - event.step) / rate if rate else None

    def _beat(self, seconds: float) -> None:
        while not self._end.wait(seconds):
            self._check_deadline()
            self._write()

    def _check_deadline(self) -> None:
        with self._lock:
            state, limit = self._facts["state"], self._deadlines.get(self._facts["state"])
            if limit is None or self._facts["overdue"] or time.monotonic() - self._began <= limit:
                return
            what = "a step" if state == "running" else state
            text = f"{what} has taken more than {spoken(limit)}"
            self._facts["overdue"] = text
        if self.note is not None:
            self.note(f"note: {text}; the run goes on")

    def _write(self) -> None:
        try:
            self._replace()
        except OSError as error:  # a full disk later on does not end a run
            self.trouble = f"{self.path}: {error.strerror or error}"

    def _replace(self) -> None:
        with self._lock:
            self._facts["updated"] = time.time()
            text = json.dumps(self._facts, allow_nan=False, default=str, indent=1) + "\n"
            scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            try:
                scratch.write_text(text, encoding="utf-8")
                os.replace(scratch, self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    scratch.unlink(missing_ok=True)
                raise

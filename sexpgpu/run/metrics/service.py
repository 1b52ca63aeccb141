"""`syvain`, `syvain:<folder-id>`: the hosted service. The key is checked and the folder found before the first step."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import SexpError, fail, problem
from sexpgpu.run.metrics.cursor import cursor_path
from sexpgpu.run.metrics.delivery import Clock, Delivery
from sexpgpu.run.metrics.jsonl import JsonlTarget, lock
from sexpgpu.run.metrics.syvain import Client, ServiceError, usable
from sexpgpu.run.metrics.target import Resume, Service
from sexpgpu.settings import Secret

START_SECONDS, END_SECONDS, HURRY_SECONDS = 25.0, 15.0, 1.0
CONNECT_SECONDS = 5.0  # in which a connection must come about at all


class SyvainTarget:
    """Its truth is the file of a `jsonl:` target, or a spool of its own when there is none."""

    def __init__(self, argument: str, run_id: str, resume: Resume | None, service: Service, slug: str, truth: Path | None):
        self.trouble = ""
        self.notes: list[str] = []
        folder = argument or service.folder
        client = connect(service, folder)
        self._spool: JsonlTarget | None = None
        if truth is None:
            truth = spool_path(service.state, slug)
            self._spool = JsonlTarget(str(truth), run_id, resume, mode=0o600)
        self.path = truth
        self._delivery = Delivery(client, truth, run_id, folder)
        self._seconds = END_SECONDS
        self._open = True
        self._delivery.start()

    def write(self, record: Mapping[str, Any]) -> None:
        if self._spool is not None:
            self._spool.write(record)
        self._delivery.wake(urgent=record["type"] != "metric")

    def sync(self) -> None:
        if self._spool is not None:
            self._spool.sync()

    def hurry(self) -> None:
        self._seconds = HURRY_SECONDS

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        delivery = self._delivery
        try:
            delivery.finish(self._seconds)
        finally:
            self._settle(delivery)

    def page(self) -> str:
        """Where a person looks at the experiment; empty before it is open."""
        return self._delivery.client.page(self._delivery.cursor.experiment) if self._delivery.cursor.experiment else ""

    def _settle(self, delivery: Delivery) -> None:
        """What is said at exit, and the spool's end."""
        left, gone = 0, False
        if not delivery.finished:
            try:
                left = delivery.undelivered()
            except OSError:
                gone = True
        if self._spool is not None:
            self._spool.close()
            if left == 0 and not self._spool.trouble:
                remove_spool(self.path)
        self.notes = nonfinite_notes(delivery, self.path if self._spool is None else None)
        if self._spool is not None:
            self.notes += [f"a run that was killed left metrics behind: sexpgpu metrics push {shlex.quote(str(path))}"
                           for path in leftovers(self.path.parent) if path != self.path]
        parts = [self._spool.trouble] if self._spool is not None and self._spool.trouble else []
        if gone:
            parts.append(f"{self.path} is gone, and with it what had not reached syvain")
        if left:
            why = delivery.dead or delivery.trouble or "the time at the end was too short"
            parts.append(f"{left} records of {self.path} did not reach syvain ({why}); "
                         f"send them with: sexpgpu metrics push {shlex.quote(str(self.path))}")
        if delivery.cursor.refused:
            parts.append(refused_text(delivery))
        self.trouble = "; ".join(parts)


def nonfinite_notes(delivery: Delivery, kept: Path | None) -> list[str]:
    """One line a metric whose values the service cannot hold."""
    where = f"; they are in {kept}" if kept is not None else ""
    return [f"syvain: {count} values of `{name}` were not finite and were not sent{where}"
            for name, count in delivery.nonfinite.items()]


def refused_text(delivery: Delivery) -> str:
    said = f" ({delivery.refusal})" if delivery.refusal else ""
    return f"syvain refused {delivery.cursor.refused} records{said}"


def spool_path(state: Path, slug: str) -> Path:
    """Where the records of a run wait; its folder is made, for this user only."""
    folder = state / "sexpgpu" / "spool"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
    except OSError as error:
        fail("E-RUN-013", f"the folder {folder} for metrics on their way cannot be made: {error.strerror}",
             help="set XDG_STATE_HOME, or add jsonl:<path> to the targets")
    return folder / f"{slug}.jsonl"


def leftovers(folder: Path) -> list[Path]:
    """Spools that no living run writes to."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            lock(file.fileno())
            found.append(path)
    return found


def remove_spool(path: Path) -> None:
    for gone in (path, cursor_path(path)):
        with contextlib.suppress(OSError):
            gone.unlink(missing_ok=True)


def connect(service: Service, folder: str | None, seconds: float = START_SECONDS, clock: Clock | None = None) -> Client:
    """A client whose key the service takes, and whose folder is there. Fails with E-NET-040 … 045 within `seconds`."""
    key = _key(service.key)
    if folder is not None:
        _check_folder_id(folder)
    client, clock = Client(service.host, key), clock or Clock()
    probe = _Probe(client, folder, seconds, clock)
    thread = threading.Thread(target=probe.run, name="metrics-start", daemon=True)
    thread.start()
    until = clock.now() + seconds
    while thread.is_alive() and clock.now() < until:
        thread.join(0.02)
    error = ServiceError("slow", "no answer") if thread.is_alive() and probe.error is None else probe.error
    if isinstance(error, ServiceError):
        raise _refusal(service.host, error)
    if error is not None:
        raise error
    if folder is not None and not probe.found:
        fail("E-NET-042", f"the metrics service has no folder {folder}",
             help="copy the id from the folder's address; syvain:<id> wins over SYVAIN_METRICS_FOLDER_ID")
    return client


class _Probe:
    """Asks until it is answered, in a thread: a name server or a dripping reply may take longer than any timeout."""

    def __init__(self, client: Client, folder: str | None, seconds: float, clock: Clock):
        self._client, self._folder, self._clock = client, folder, clock
        self._begin = clock.now()
        self._until = self._begin + seconds
        self.error: Exception | None = None
        self.found = False

    def run(self) -> None:
        try:
            self._insist(self._client.check_key)
            if self._folder is not None:
                folder = self._folder
                self.found = self._insist(lambda: self._client.has_folder(folder))
        except Exception as error:
            self.error = error
        else:
            self.error = None

    def _insist(self, call: Callable[[], Any]) -> Any:
        pause = 0.5
        while True:
            try:
                return call()
            except ServiceError as error:
                self.error = error
                wait = max(pause, error.after)
                limit = self._begin + CONNECT_SECONDS if error.kind == "unreachable" else self._until
                if not error.transient or self._clock.now() + wait >= limit:
                    raise
                self._clock.wait(threading.Event(), wait)
                pause *= 2


def _key(key: Secret | None) -> Secret:
    text = key.reveal().strip() if key is not None else ""
    if not text:
        fail("E-NET-040", "the metrics target `syvain` needs SYVAIN_METRICS_API_KEY, which is not set",
             help=("export SYVAIN_METRICS_API_KEY=ak_…", "or keep the numbers here: --metrics jsonl:metrics.jsonl"))
    if not usable(text):
        fail("E-NET-040", "SYVAIN_METRICS_API_KEY holds blanks or characters that no key has",
             help="copy the key again; it is one line of letters, digits and signs")
    return Secret(text)


def _check_folder_id(folder: str) -> None:
    try:
        whole = str(uuid.UUID(folder)) == folder.lower()
    except ValueError:
        whole = False
    if not whole:
        fail("E-NET-042", f"`{folder}` is no folder id of the metrics service",
             help="a folder id looks like 019e0000-0000-7000-8000-0000000000f0; copy it from the folder's address")


def _refusal(host: str, error: ServiceError) -> SexpError:
    """What a person can do about it, by kind."""
    later = ("try again later, or keep the numbers here: --metrics jsonl:metrics.jsonl",
             "and send them when it is back: sexpgpu metrics push metrics.jsonl")
    match error.kind:
        case "denied":
            return problem("E-NET-041", f"{host} does not take the key in SYVAIN_METRICS_API_KEY ({error.text})",
                           help="make a new key in the service's settings, or check that it is of this host")
        case "absent" | "refused":
            return problem("E-NET-045", f"{host} does not answer as the metrics service does ({error.text})",
                           help="unset SYVAIN_METRICS_HOST, or set it to the service's origin")
        case "unreachable":
            return problem("E-NET-043", f"the metrics service at {host} cannot be reached ({error.text})", help=later)
    return problem("E-NET-044", f"the metrics service at {host} did not answer well within {START_SECONDS:g} s ({error.text})", help=later)

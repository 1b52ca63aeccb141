"""One writer of a place in a bucket: an object that its owner renews, with conditional writes and without clocks.

Whoever finds the object there watches it: renewed within LEASE seconds means alive, and the place is refused; not
renewed means dead, and the object is overwritten on condition that it still is the one that was watched. A dead
process of this same machine is seen at once. An owner whose object was overwritten learns it from `check`, which is
called before anything is committed. No two machines' clocks are compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sexpgpu.run.storage import Entry, Missing, StorageError, Taken, storage_error

NAME = ".writer"
BEAT = 10.0  # seconds from one renewal to the next
LEASE = 45.0  # seconds without a renewal after which a writer counts as dead


class Lease:
    """The hold of this process; raises Taken (E-CKPT-011) when another one is alive. `storage`: an S3Storage."""

    def __init__(self, storage: Any, owner: Mapping[str, Any], say: Callable[[str], None]):
        self._storage, self._say = storage, say
        self._owner = {**owner, "id": uuid.uuid4().hex, **identity()}
        self._beats, self._lost = 0, False
        self._guard = threading.Lock()
        self._entry = self._acquire()
        if not self._conditional():
            say(
                f"{storage.url}: this server has no conditional writes, so two runs that begin here at one moment are not told apart"
            )
        self._brief = storage.within(BEAT / 2)  # a beat that fails is tried again by the next one
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="s3-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Taken if the place is another's now."""
        with self._guard:
            entry = self._storage.head(NAME)
            if self._lost or entry is None or entry.tag != self._entry.tag:
                self._lost = True
                raise self._taken(self._read(entry), "took over")

    def release(self) -> None:
        self._end.set()
        with self._guard:
            try:
                entry = self._brief.head(NAME)
                if not self._lost and entry is not None and entry.tag == self._entry.tag:
                    self._brief.delete([NAME])
            except StorageError:
                pass  # it expires by itself

    def _body(self) -> bytes:
        self._beats += 1
        return json.dumps({**self._owner, "beat": self._beats}, sort_keys=True).encode()

    def _acquire(self) -> Entry:
        watched, since, told = "", 0.0, False
        self._storage.head(NAME)  # a bucket that is not there is an error, also where a server would make it by a write
        while True:
            try:
                return self._storage.put(NAME, self._body(), absent=True)
            except Taken:
                entry = self._storage.head(NAME)
            if entry is None:
                continue
            other = self._read(entry)
            if entry.tag != watched:
                if watched and other.get("id") != self._owner["id"]:
                    raise self._taken(other, "writes")
                watched, since = entry.tag, time.monotonic()
            if is_dead(other) or time.monotonic() - since > LEASE:
                try:
                    return self._storage.put(NAME, self._body(), tag=entry.tag)
                except (Taken, Missing):
                    continue
            if is_alive(other):
                raise self._taken(other, "writes")
            if not told:
                told = True
                self._say(
                    f"{self._storage.url} was being written by {_who(other)}; waiting up to {LEASE:.0f} s to see whether it still is"
                )
            time.sleep(min(1.0, LEASE / 10))

    def _conditional(self) -> bool:
        try:
            self._entry = self._storage.put(NAME, self._body(), absent=True)
        except Taken:
            return True
        return False

    def _renew(self) -> None:
        while not self._end.wait(BEAT):
            with self._guard:
                if self._end.is_set():
                    return
                try:
                    self._entry = self._brief.put(NAME, self._body(), tag=self._entry.tag)
                except (Taken, Missing):
                    self._lost = True
                    return
                except StorageError:
                    continue  # the next beat tries again; `check` finds out whether it was too late

    def _read(self, entry: Entry | None) -> dict[str, Any]:
        if entry is None or entry.size > 1 << 16:
            return {}
        try:
            found = json.loads(self._storage.read(NAME))
        except (Missing, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _taken(self, other: Mapping[str, Any], does: str) -> StorageError:
        verb = "writes checkpoints to" if does == "writes" else "took over"
        return storage_error(
            "E-CKPT-011",
            f"another run that is still alive, {_who(other)}, {verb} {self._storage.url}",
            kind=Taken,
            reason="another run writes there",
            help="wait for it, stop it, or put {slug} in the location: one folder a run",
        )


def _who(other: Mapping[str, Any]) -> str:
    words = [str(other.get(name, "?"))[:80] for name in ("slug", "host", "pid")]
    return f"{words[0]} on {words[1]} (process {words[2]})"


def identity() -> dict[str, Any]:
    """This process among all: `machine` holds the boot and the namespace of process numbers."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


def _machine() -> str:
    """Empty where it cannot be told; then only the watching decides."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the boot; empty where there is none, it has ended, or may not be looked at."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _hidden(pid: int) -> bool:
    """Whether a process that cannot be looked at is there all the same: another user's, on a system that hides those."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _near(other: Mapping[str, Any]) -> bool:
    return bool(other.get("machine")) and other.get("machine") == _machine() and isinstance(other.get("pid"), int)


def is_dead(other: Mapping[str, Any]) -> bool:
    """Whether the writer ran on this machine and no longer does. A number that another process has by now is no sign of life."""
    if not _near(other):
        return False
    started = _started(other["pid"])
    return started != other.get("started") and not (started == "" and _hidden(other["pid"]))


def is_alive(other: Mapping[str, Any]) -> bool:
    """Whether the writer runs on this machine."""
    return _near(other) and not is_dead(other)

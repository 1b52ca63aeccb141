"""Whether a role can do at a location what a run will ask of it: what `doctor` tries."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sexpgpu.diagnostics import printable
from sexpgpu.run.storage import Missing, Storage, StorageError, Taken, open_object, open_storage, split, storage_error
from sexpgpu.run.storage.lease import NAME as LEASE
from sexpgpu.run.storage.lease import is_alive, is_dead

NAME = ".sexpgpu-probe"
LOCK = ".lock"  # of a folder's writer
PATIENCE = 15.0  # seconds without progress after which a server counts as not reached


def data(location: str, folder: str) -> list[str]:
    """Asks for a source's size, its first bytes, and its name in a listing. StorageError or SexpError where that fails; lines of what
    was found. A role that may not list is said, and no mistake: a run reads objects by name."""
    storage, name = open_object(location, "data", folder)
    _hasten(storage)
    try:
        entry = storage.head(name)
        first = storage.read(name, 0, 64)
        size = f"{entry.size:,} bytes, " if entry is not None else ""
        lines = [f"{printable(location)}: readable ({size}{len(first)} of its first bytes read)"]
        if storage.scheme != "file":
            try:
                there = any(one.name == name for one in storage.entries(name))
                lines.append(f"{printable(location)}: {'listed' if there else 'not in the listing'}")
            except StorageError as error:
                lines.append(f"{printable(location)}: not listed ({error.reason}), which no run needs")
        return lines
    finally:
        storage.close()


def checkpoints(location: str, folder: str) -> list[str]:
    """Lists, writes, reads back, replaces on condition and removes an object below a location (before its `{slug}`), and sees whether
    another run writes there: E-CKPT-011."""
    root = location.partition("{slug}")[0].rstrip("/") or "/"
    storage = open_storage(root, "checkpoint", folder)
    _hasten(storage)
    try:
        lines = [] if "{slug}" in location else writer(storage)
        with _no_new_folders(root, folder):
            return lines + _checkpoints(storage, f"{NAME}-{secrets.token_hex(6)}")
    finally:
        storage.close()


def _hasten(storage: Storage) -> None:
    link = getattr(storage, "link", None)
    if link is not None:
        link.patience = PATIENCE


@contextmanager
def _no_new_folders(root: str, folder: str) -> Iterator[None]:
    """Folders that a probe had to make are gone afterwards."""
    scheme, rest = split(root, folder)
    made = []
    if scheme == "file":
        path = Path(rest)
        while not path.exists() and path != path.parent:
            made.append(path)
            path = path.parent
    try:
        yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _checkpoints(storage: Storage, name: str) -> list[str]:
    steps = storage.folders()
    content = secrets.token_bytes(1024)
    storage.put(name, content, absent=True)
    try:
        if storage.read(name) != content:
            raise storage_error(
                "E-NET-020",
                f"{storage.url} gives back other bytes than it was given",
                reason="it gives back other bytes",
            )
        conditional = _refuses_second(storage, name)
    finally:
        storage.delete([name])
    lines = [f"{storage.url}: listed ({len(steps)} folders), written, read back and removed"]
    if not conditional:
        lines.append(
            f"{storage.url}: the server has no conditional writes: two runs that begin at one moment are not told apart"
        )
    return lines


def _refuses_second(storage: Storage, name: str) -> bool:
    try:
        storage.put(name, b"second", absent=True)
    except (Taken, Missing):
        return True
    return False


def writer(storage: Storage) -> list[str]:
    """Who writes at a place now: nobody (no line), one that may be alive (a line), one that is (E-CKPT-011). The place is not taken."""
    if storage.scheme == "file":
        return _local_writer(Path(storage.url))
    entry = storage.head(LEASE)
    if entry is None or entry.size > 1 << 16:
        return []
    try:
        other = json.loads(storage.read(LEASE))
    except (Missing, ValueError, RecursionError):
        return []
    if not isinstance(other, dict) or is_dead(other):
        return []
    who = printable(f"{str(other.get('slug', '?'))[:80]} on {str(other.get('host', '?'))[:80]}")
    if is_alive(other):
        raise _taken(storage.url, f", {who},")
    return [f"{storage.url}: {who} wrote there, and may still; a run waits to see"]


def _local_writer(root: Path) -> list[str]:
    try:
        descriptor = os.open(root / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []  # no lock, no writer; what else is wrong is told by what is tried next
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        raise _taken(str(root), "") from None
    finally:
        os.close(descriptor)
    return []


def _taken(url: str, who: str) -> StorageError:
    return storage_error(
        "E-CKPT-011",
        f"another run that is still alive{who} writes checkpoints to {url}",
        kind=Taken,
        reason="another run writes there",
        help="wait for it, stop it, or put {slug} in the location: one folder a run",
    )

"""Whether a role can do at a location what a run will ask of it: what `doctor` tries on request."""

from __future__ import annotations

import secrets

from sexpgpu.run.storage import Missing, Storage, Taken, open_object, open_storage, storage_error

NAME = ".doctor-probe"


def data(location: str, folder: str) -> list[str]:
    """Reads the first bytes of a source. StorageError or SexpError where that fails; lines of what was found."""
    storage, name = open_object(location, "data", folder)
    try:
        first = storage.read(name, 0, 64)
        return [f"{location}: readable ({len(first)} of its first bytes read)"]
    finally:
        storage.close()


def checkpoints(location: str, folder: str) -> list[str]:
    """Lists, writes, reads back, replaces on condition and removes an object below a location (before its `{slug}`)."""
    storage = open_storage(location.partition("{slug}")[0].rstrip("/"), "checkpoint", folder)
    try:
        return _checkpoints(storage, f"{NAME}-{secrets.token_hex(6)}")
    finally:
        storage.close()


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

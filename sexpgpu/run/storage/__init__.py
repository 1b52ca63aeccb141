"""Where checkpoints lie and sources may lie: one protocol, one backend a scheme.

A `Storage` is a place (a folder, or a bucket and prefix) with named objects in it; a name may have `/` in it. Every
method that fails raises `StorageError` (a coded mistake; `reason` is its clause), `Missing` where an object is not
there, `Taken` where a conditional write lost. Retries, deadlines and prefetch are the backend's business.

How S3 is reached, and where the user's cache is, is given once, by `grant`, when a command has read its settings; nothing
here reads the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, fail, problem, suggestion
from sexpgpu.settings import Credentials, Settings, missing_values, read

#: scheme -> opener(location without its scheme, Credentials or None) -> Storage
BACKENDS = {"file": "sexpgpu.run.storage.file:open_folder", "s3": "sexpgpu.run.storage.s3:open_bucket"}
REMOTE = ("s3",)

Buffer = bytes | bytearray | memoryview


class StorageError(SexpError):
    """A storage could not do what it was asked. `reason`: a clause for a message of the caller's own."""

    def __init__(self, diagnostic: Diagnostic, reason: str = ""):
        super().__init__(diagnostic)
        self.reason = reason or diagnostic.message


class Missing(StorageError):
    """There is no such object."""


class Taken(StorageError):
    """A conditional write found the object there, or changed; or the hold on a place was lost."""


@dataclass(frozen=True)
class Entry:
    """An object: its name below the place, its bytes, and a tag that changes with its content."""

    name: str
    size: int
    tag: str


class Hold(Protocol):
    """This process is the only writer of a place, until `release`."""

    def check(self) -> None:
        """Taken if another process took the place over meanwhile (this one was thought dead). Before a commit."""

    def release(self) -> None:
        """Gives the place back; never raises."""


class Storage(Protocol):
    """A place with objects. `url` is how a person writes it."""

    scheme: str
    url: str

    def at(self, name: str) -> Storage:
        """The place below, over the same connection; it need not exist."""

    def entries(self, prefix: str = "") -> list[Entry]:
        """Every object whose name begins with `prefix`, at any depth, in name order; [] where nothing is there.

        Names with a component that begins with a dot are the storage's own, and not shown.
        """

    def folders(self) -> list[str]:
        """First components of the names below, in name order: what `ls` shows as folders."""

    def head(self, name: str) -> Entry | None:
        """The object, or None."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of an object, to its end for None; Missing."""

    def stream(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The same in order, block by block, with blocks fetched ahead; one version of the object or an error."""

    def put(self, name: str, data: Buffer | Sequence[Buffer], *, absent: bool = False, tag: str | None = None) -> Entry:
        """Writes a whole object, seen by readers only when it is whole, and durable on return.

        `data` in pieces is one object (a header and tensors, nothing joined); large ones go in parts. `absent`: only
        if there is none yet; `tag`: only if it still is that version; else Taken.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects; absent ones are none of its business."""

    def unique(self, name: str) -> str:
        """`name` as this process's own attempt writes it: where a killed one may have left the same name half
        written or half overwritten, with a suffix no other attempt has (`part.safetensors` ->
        `part.3f9c….safetensors`)."""

    def sweep(self) -> int:
        """Clears what killed writers left here and no name shows (files aside, parts of uploads); how many. Only
        under a hold."""

    def hold(self, owner: Mapping[str, Any], say: Callable[[str], None] = ...) -> Hold:
        """Makes this process the only writer; Taken, naming the other one. `owner`: run_id, slug. May wait (and
        say so) to see whether the other one is alive."""

    def close(self) -> None:
        """Ends connections and threads."""


# --- opening ------------

_granted: Settings | None = None
_credentials: dict[str, Credentials] = {}  # by role: places of one role share a client


def grant(settings: Settings) -> None:
    """From here on S3 is reached, and the cache found, as these settings say."""
    global _granted
    _granted = settings
    _credentials.clear()


def granted() -> Settings:
    """What a command has read; before that, no variable at all."""
    return _granted if _granted is not None else read({})


def split(location: str, folder: str | Path = ".") -> tuple[str, str]:
    """(scheme, the rest): a folder's path made absolute, or `bucket/key`. E-NET-002 for a scheme there is not."""
    scheme, mark, rest = location.partition("://")
    if not mark:
        return "file", str((Path(folder) / location).absolute())
    if scheme.lower() not in BACKENDS:
        fail(
            "E-NET-002",
            f"`{location}`: there is no storage scheme `{scheme}`",
            help=suggestion(scheme, BACKENDS, "schemes"),
        )
    if scheme.lower() == "file":
        return "file", str((Path(folder) / rest).absolute())
    return scheme.lower(), rest


def is_remote(location: str) -> bool:
    """Whether a location is not a path of this machine."""
    return location.partition("://")[0].lower() in REMOTE and "://" in location


def open_storage(location: str, role: str, folder: str | Path = ".") -> Storage:
    """The place a location names; `role` (`data`, `checkpoint`) chooses the credentials. Nothing is sent yet.

    E-NET-002, and for S3 E-NET-010 (values missing), E-NET-016 and 017 (the endpoint), E-NET-022 (no bucket).
    """
    scheme, rest = split(location, folder)
    credentials: Credentials | None = None
    if scheme in REMOTE:
        credentials = credentials_for(role, location)
    module, name = BACKENDS[scheme].split(":")
    return getattr(import_module(module), name)(rest, credentials)


def warm(role: str) -> None:
    """Begins, on a thread, what the first request of a role would wait for: boto3 is large, and so is its client."""
    settings = granted()
    if missing_values(settings, role, "s3://"):
        return  # said by whoever opens something

    def make() -> None:
        with contextlib.suppress(Exception):  # the first request raises it where it can be told
            import_module("sexpgpu.run.storage.client").client_of(credentials_for(role, "s3://"))

    threading.Thread(target=make, name="s3", daemon=True).start()


def open_object(location: str, role: str, folder: str | Path = ".") -> tuple[Storage, str]:
    """The place an object lies in, and its name there: the bucket and the key as it is written, or folder and file."""
    scheme, rest = split(location, folder)
    place, _, name = rest.partition("/") if scheme in REMOTE else rest.rpartition("/")
    if scheme not in REMOTE:
        place = place or "/"
    if not place or not name or name.endswith("/"):
        fail("E-NET-022", f"`{location}` names no object", help="write s3://bucket/path/to/file" if scheme in REMOTE else "name a file, not a folder")
    if scheme in REMOTE:
        credentials_for(role, location)  # says the whole location
    return open_storage(f"{scheme}://{place}", role), name


def local_copy(location: str, role: str) -> Path:
    """A remote object as a file of this process, under its own name; gone when the process ends. Missing, StorageError.

    For formats that are mapped or need to seek. Its folder is private; `TMPDIR` says on which disk.
    """
    storage, name = open_object(location, role)
    folder = tempfile.mkdtemp(prefix="sexpgpu-object-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / name.rpartition("/")[2]
    found, free = storage.head(name), shutil.disk_usage(folder).free
    if found is not None and found.size > free:
        raise storage_error(
            "E-NET-024",
            f"{location} takes {found.size:,} bytes, and {folder} has {free:,} free",
            reason="the disk is too small",
            help="TMPDIR names a folder on another disk",
        )
    try:
        with path.open("xb") as file:
            for block in storage.stream(name):
                file.write(block)
    except OSError as error:
        raise storage_error(
            "E-NET-024",
            f"{location} cannot be copied to {folder}: {error.strerror or error}",
            reason=error.strerror or "",
            help="TMPDIR names a folder on another disk",
        ) from None
    return path


def credentials_for(role: str, location: str) -> Credentials:
    """What a role reaches S3 with; E-NET-010 names every value that is missing."""
    settings = granted()
    missing = missing_values(settings, role, location)
    if missing:
        raise SexpErrors(missing)
    return _credentials.setdefault(role, settings.credentials(role))


def storage_error(
    code: str,
    message: str,
    *,
    reason: str = "",
    kind: type[StorageError] = StorageError,
    help: str | Iterable[str] = (),
    notes: Iterable[str] = (),
) -> StorageError:  # noqa: A002
    """A `StorageError` of a coded mistake."""
    return kind(problem(code, message, help=help, notes=notes).diagnostic, reason)

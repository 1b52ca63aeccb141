"""Where data lies: a file of this machine, or an object in a bucket, told by the location's scheme.

Paths and keys are raw: nothing in them is percent-decoded, so a key with a literal `%20` is found.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import fail, printable
from sexpgpu.run.storage import credentials_for, is_remote, open_storage, split

CHUNK = 1 << 20


@dataclass(frozen=True)
class Found:
    """What is known of an object without reading it. `etag` with its quotes; empty for a file."""

    size: int
    etag: str = ""


@dataclass(frozen=True)
class LocalPlace:
    """A file."""

    path: Path

    @property
    def text(self) -> str:
        return str(self.path)

    def stat(self) -> Found | None:
        """None where there is no such file; raises OSError otherwise. A pipe or device would never end."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a folder or device, not a file")
        return Found(found.st_size)

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces; raises OSError."""
        with open(self.path, "rb") as file:
            while piece := file.read(CHUNK):
                yield piece


@dataclass(frozen=True)
class RemotePlace:
    """An object of a bucket, read with the credentials of the role `data`."""

    bucket: str
    key: str

    @property
    def text(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def stat(self) -> Found | None:
        """None where there is no such object; raises StorageError otherwise."""
        found = bucket(self.bucket, self.text).head(self.key)
        return None if found is None else Found(found.size, found.tag)

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces; raises StorageError."""
        yield from bucket(self.bucket, self.text).stream(self.key)


Place = LocalPlace | RemotePlace


_opened: dict[str, tuple[Any, Any]] = {}  # bucket -> the credentials it was opened with, and its storage


def bucket(name: str, location: str) -> Any:
    """One connection a bucket, as long as it is reached with the same credentials. `location`: for what is said of them."""
    known = credentials_for("data", location)
    held = _opened.get(name)
    if held is None or held[0] is not known:
        held = _opened[name] = (known, open_storage(f"s3://{name}", "data"))
    return held[1]


def place(location: str, folder: str | Path = ".") -> Place:
    """The place a location names; a relative one by `folder`. E-NET-002 for an unknown scheme, E-NET-022 for no object."""
    if not is_remote(location):
        return LocalPlace(Path(split(location, folder)[1]))
    name, _, key = location.partition("://")[2].partition("/")
    if not name or not key:
        fail("E-NET-022", f"`{location}` names no object", help="write s3://bucket/path/to/file")
    return RemotePlace(name, key)


def beside(manifest: Place, uri: str) -> Place:
    """The place of a URI that stands in a manifest: absolute, or relative to the manifest's folder.

    A manifest in a bucket names no files of this machine (E-DATA-021): whoever wrote it does not choose what is read here.
    """
    if isinstance(manifest, LocalPlace):
        return place(uri, manifest.path.parent)
    if is_remote(uri):
        return place(uri)
    if "://" in uri or uri.startswith("/"):
        fail("E-DATA-021", f"the manifest {manifest.text} lies in a bucket and names a file of this machine: {printable(uri)}",
             help="its shards are s3://… or relative to it")
    folder, slash, _ = manifest.key.rpartition("/")
    return RemotePlace(manifest.bucket, f"{folder}{slash}{uri}")

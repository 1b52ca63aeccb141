"""Files that are made once: whole or not there, left as they are when they hold the same, never written over otherwise."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from sexpgpu.diagnostics import fail, printable


class Once:
    """A file that is being made. `with Once(path) as once: once.write(…)`; E-DATA-046 where other content is there."""

    def __init__(self, path: Path):
        self.path, self.size = path, 0
        self._hash, self._md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        self._stage = path.with_name(f".{path.name}.{os.getpid()}.part")

    def __enter__(self) -> Once:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._stage, "wb")  # noqa: SIM115 - closed in __exit__
        except OSError as error:
            cannot_write(self.path, error)
        return self

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            cannot_write(self.path, error)
        self.size += len(data) if isinstance(data, bytes) else data.nbytes
        self._hash.update(data)
        self._md5.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def md5(self) -> str:
        return self._md5.hexdigest()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                self._publish()
        except OSError as error:
            cannot_write(self.path, error)
        finally:
            self._stage.unlink(missing_ok=True)

    def _publish(self) -> None:
        try:
            os.link(self._stage, self.path)  # fails where something is there already
        except FileExistsError:
            with open(self.path, "rb") as there:
                if hashlib.file_digest(there, "sha256").hexdigest() != self.sha256:
                    fail("E-DATA-046", f"{printable(str(self.path))} is there and holds something else",
                         help="name another --out, or move that file away")


def write_once(path: Path, data: bytes) -> Once:
    """The whole content in one go."""
    with Once(path) as once:
        once.write(data)
    return once


def cannot_write(path: Path, error: OSError) -> None:
    fail("E-DATA-016" if error.errno == 28 else "E-DATA-046", f"{printable(str(path))} cannot be written: {error.strerror or error}",
         help="name another --out")

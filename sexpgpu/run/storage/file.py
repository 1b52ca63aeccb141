"""Places in a local folder: written aside, synced, then renamed, so that a crash leaves the old ones whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sexpgpu.run.storage import Buffer, Entry, Missing, StorageError, Taken, storage_error

STEP = re.compile(r"step-(0|[1-9]\d{0,17})", re.ASCII)
_LOCK = ".lock"


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """A folder and those above it, each of them durable: a new name is in the folder above."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    sync_file(folder.parent)


def step_folders(root: Path) -> dict[int, Path]:
    """step -> folder, by number; empty where there is no such location. Raises OSError where it cannot be read."""
    if not root.exists():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := STEP.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


BLOCK = 8 << 20
_ASIDE = ".tmp-"


def open_folder(rest: str, credentials: object = None) -> FolderStorage:
    """The folder of that path; it need not exist."""
    return FolderStorage(Path(rest))


class FolderStorage:
    """A folder as a place with objects. Files and folders whose names begin with a dot are not shown."""

    scheme = "file"

    def __init__(self, root: Path):
        self.root = root
        self.url = str(root)

    def at(self, name: str) -> FolderStorage:
        return FolderStorage(self.root / name)

    def close(self) -> None:
        """Nothing is open between calls."""

    def entries(self, prefix: str = "") -> list[Entry]:
        found = []
        try:
            for folder, folders, files in os.walk(self.root, onerror=_unlisted):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for name in files:
                    path = Path(folder, name)
                    full = path.relative_to(self.root).as_posix()
                    if full.startswith(prefix) and not name.startswith(".") and not path.is_symlink():
                        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                            found.append(_entry(full, path.stat()))
        except OSError as error:
            self._failed(self.root, error)
        return sorted(found, key=lambda entry: entry.name)

    def folders(self) -> list[str]:
        try:
            return sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._failed(self.root, error)

    def head(self, name: str) -> Entry | None:
        path = self.root / name
        try:
            return _entry(name, path.stat()) if path.is_file() else None
        except OSError as error:
            self._failed(path, error)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return b"".join(self.stream(name, start, stop))

    def stream(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        path = self.root / name
        try:
            with path.open("rb") as file:
                file.seek(start)
                left = None if stop is None else max(0, stop - start)
                while block := file.read(BLOCK if left is None else min(BLOCK, left)):
                    left = None if left is None else left - len(block)
                    yield block
        except OSError as error:
            self._failed(path, error)

    def put(self, name: str, data: Buffer | Sequence[Buffer], *, absent: bool = False, tag: str | None = None) -> Entry:
        path = self.root / name
        aside = path.with_name(f"{_ASIDE}{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            make_folder(path.parent)
            with aside.open("xb") as file:
                for piece in [data] if isinstance(data, Buffer) else data:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if tag is not None and ((entry := self.head(name)) is None or entry.tag != tag):
                raise self._taken(path)
            if absent:
                os.link(aside, path)
            else:
                os.replace(aside, path)
            sync_file(path.parent)
            return _entry(name, path.stat())
        except FileExistsError:
            raise self._taken(path) from None
        except OSError as error:
            self._failed(path, error)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def delete(self, names: Iterable[str]) -> None:
        """And the folders that are empty then."""
        for name in names:
            path = self.root / name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._failed(path, error)
            with contextlib.suppress(OSError):
                if path.parent != self.root:
                    path.parent.rmdir()

    def unique(self, name: str) -> str:
        """The name itself: what a killed process left is never half an object here."""
        return name

    def sweep(self) -> int:
        left = [path for path in self.root.rglob(f"{_ASIDE}*") if not path.is_symlink()] if self.root.is_dir() else []
        for path in left:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(left)

    def hold(self, owner: Mapping[str, Any], say: Callable[[str], None] = lambda text: None) -> _Flock:
        try:
            make_folder(self.root)
            descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._failed(self.root, error)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise storage_error(
                "E-CKPT-011",
                f"another run that is still alive writes checkpoints to {self.root}",
                kind=Taken,
                reason="another run writes there",
                help="wait for it, stop it, or put {slug} in the location: one folder a run",
            ) from None
        return _Flock(descriptor)

    def _taken(self, path: Path) -> StorageError:
        return storage_error(
            "E-NET-023", f"{path}: another writer was there first", kind=Taken, reason="another writer was there first"
        )

    def _failed(self, path: Path, error: OSError) -> NoReturn:
        why = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            raise storage_error(
                "E-NET-019", f"there is no file {path}", kind=Missing, reason="there is no such file"
            ) from None
        raise storage_error("E-NET-024", f"{path}: {why}", reason=why) from None


class _Flock:
    """The kernel gives it back when the process ends, however it ends."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def check(self) -> None:
        """Nobody can take it over."""

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _unlisted(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _entry(name: str, stat: os.stat_result) -> Entry:
    return Entry(name, stat.st_size, f"{stat.st_mtime_ns}-{stat.st_size}-{stat.st_ino}")

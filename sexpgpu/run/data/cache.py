"""The content cache: what was parsed once is mapped the next time.

A key is a digest of the content and of what was asked of it, so an entry never goes stale; a changed file has another
key. The folder is `$XDG_CACHE_HOME/sexpgpu/data` (0700). It is not used when another user owns it or anyone may write
to it: then, as when it cannot be written, parsed data goes to a private temporary folder that ends with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import note_warning, printable, render
from sexpgpu.run import storage

VERSION = 1  # of what is stored: another one, other keys
UNUSED = 30 * 86400  # seconds after which an entry that nobody opened is removed
Say = Callable[[str], None]


def silent(text: str) -> None:
    """Nobody listens."""


def key_of(*what: Any) -> str:
    """A name for content and question: SHA-256 of the words in `what`, in hex."""
    return hashlib.sha256(json.dumps(["sexpgpu-cache", VERSION, *what], sort_keys=True, default=str).encode()).hexdigest()


class Cache:
    """A folder of blocks. `lasting`: whether the next process finds them too."""

    def __init__(self, folder: Path, lasting: bool):
        self.folder, self.lasting = folder, lasting

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.block"

    def used(self, path: Path) -> None:
        """Marks an entry as opened, so that it stays."""
        with contextlib.suppress(OSError):
            os.utime(path)

    def tidy(self, now: float | None = None) -> int:
        """Removes entries that were not opened for a month, and torn ones of a day ago; how many."""
        now, removed = time.time() if now is None else now, 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    age = now - entry.stat(follow_symlinks=False).st_mtime
                    if age > (86400 if entry.name.startswith(".") else UNUSED):
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def free(self) -> int:
        """Bytes free where the entries lie."""
        return shutil.disk_usage(self.folder).free


_temporary: list[Cache] = []


def open_cache(say: Say = silent) -> Cache:
    """The user's cache, or a temporary one with a warning that says why. Raises OSError where neither can be made."""
    why = ""
    home = home_folder()
    for folder in (home / "sexpgpu", home / "sexpgpu" / "data"):
        why = why or _unusable(folder)
    if not why:
        return Cache(home / "sexpgpu" / "data", True)
    if not _temporary:
        say(warned("for this run only", why))
        folder = Path(tempfile.mkdtemp(prefix="sexpgpu-data-"))
        atexit.register(shutil.rmtree, folder, True)
        _temporary.append(Cache(folder, False))
    return _temporary[0]


def warned(how: str, why: str) -> str:
    """E-DATA-015 as a line: how parsed data is kept, and why not in the cache."""
    return render(note_warning("E-DATA-015", f"parsed data is kept {how}: {printable(why)}"))


def home_folder() -> Path:
    """`XDG_CACHE_HOME`, or ~/.cache; a relative one is ignored, as its standard says."""
    given = Path(str(storage.granted().xdg_cache_home or ""))
    return given if given.is_absolute() else Path(os.path.expanduser("~")) / ".cache"


def _unusable(folder: Path) -> str:
    """Why a folder cannot be trusted or written; empty if it can. Makes it where it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if found.st_mode & 0o022:
        return f"others may write to {folder}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def size(count: int) -> str:
    """Bytes as people say them: 1.5 GiB."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"

"""Sources of kernels on disk: FLASHCART_CACHE_DIR/product_<key>.py, whose first line is the digest of the rest.

The key is over the files of the generator's own package and of the algebra's, and all that decides a kernel, so another version writes another file. A file whose digest
does not fit, cut short or edited, is written anew. Files appear whole (written aside, then renamed), so processes may share a folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

from sexpgpu.diagnostics import Diagnostic, note_warning, printable

MARK = "# sexpgpu "


@cache
def generation() -> str:
    """The digest of what writes sources: all of the folders that the generator stands in and takes its algebra from, so that no file is forgotten."""
    here = Path(__file__)
    digest = sha256()
    for folder in (here.parent, here.parents[3] / "ops" / "cartesian"):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class Cache:
    """A folder of sources. `say` gets a warning, once, where the folder cannot be written."""

    def __init__(self, folder: Path, say: Callable[[Diagnostic], None]):
        self.folder, self.say, self.usable = folder, say, True

    def source(self, what: str, make: Callable[[], str]) -> str:
        """The source of `what`, a text that decides it; from the folder if it is there and whole."""
        if not self._trusted():
            return make()
        path = self.folder / f"product_{sha256((generation() + what).encode()).hexdigest()[:24]}.py"
        found = self._read(path)
        if found is None:
            found = make()
            self.write(path, f"{MARK}{sha256(found.encode()).hexdigest()}\n{found}")
        return found

    def _trusted(self) -> bool:
        """Whether what lies in the folder may be run: it is ours, and others may not write into it."""
        if not self.usable:
            return False
        try:
            facts = self.folder.stat()
        except OSError:
            return True  # not there yet
        if facts.st_uid != os.geteuid():
            self._refuse("it belongs to another user")
        elif facts.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not facts.st_mode & stat.S_ISVTX:
            self._refuse("others may write into it")
        return self.usable

    @staticmethod
    def _read(path: Path) -> str | None:
        try:
            first, _, rest = path.read_text().partition("\n")
        except (OSError, UnicodeDecodeError):
            return None
        return rest if first == MARK + sha256(rest.encode()).hexdigest() else None

    def write(self, path: Path, text: str) -> None:
        """The file, whole or not at all."""
        if not self.usable:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, aside = tempfile.mkstemp(dir=self.folder, prefix=path.name, suffix=".new")
            try:
                with os.fdopen(handle, "w") as stream:
                    stream.write(text)
                os.replace(aside, path)
            except BaseException:
                Path(aside).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._refuse(error.strerror or type(error).__name__)

    def _refuse(self, why: str) -> None:
        """Goes on without the folder, and says so once."""
        self.usable = False
        self.say(note_warning("E-DEV-007", f"the cache of generated kernels, {printable(str(self.folder))}, is not used: {why}",
                              notes=("kernels are written anew by every process",), help="export FLASHCART_CACHE_DIR=<a folder of your own>"))

"""`jsonl:<path>`: one record a line, one write a line, one live writer a file; a resume repeats no record."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.run.metrics.record import key_of, line_of, lineage
from sexpgpu.run.metrics.target import Resume


def lock(fd: int) -> None:
    """One writer, or one sender of what a run left behind, at a time. OSError if another one lives."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class JsonlTarget:
    """Opens (and locks) the file at once; E-RUN-013 if it cannot, E-RUN-014 if another live run writes to it."""

    def __init__(self, argument: str, run_id: str, resume: Resume | None, mode: int = 0o644):
        self.path = Path(argument)
        self._mode = mode
        self.trouble = ""
        self._run_id = run_id
        self._resume = resume
        self._seq = 0
        self._there: set[tuple[Any, ...]] = set()
        self.supersedes = False  # the file's latest records of this run are of another lineage
        self._created = not self.path.exists()
        self._written = False
        self._cut: int | None = None  # where a torn last line begins; cut at the first write, not before
        self._fd = self._open()
        try:
            self.regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if self.regular:
                self._lock()
                self._read_back()
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        if record["type"] == "metric" and key_of(record) in self._there:
            return
        if self.trouble:
            return
        line = line_of({**record, "seq": self._seq})
        try:
            if self._cut is not None:
                os.ftruncate(self._fd, self._cut)
                self._cut = None
            wrote = os.write(self._fd, line)
            if wrote != len(line):
                if self.regular:  # a full disk: leave no half line
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size - wrote)
                raise OSError(28, "no space left")
        except BrokenPipeError:
            self.trouble = f"{self.path}: nobody reads it any more"
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror or error}"
        else:
            self._seq += 1
            self._written = True

    def sync(self) -> None:
        if self.regular and not self.trouble:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self.trouble = f"{self.path}: {error.strerror or error}"

    def hurry(self) -> None:
        pass

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._created and not self._written and self.regular:
            self.path.unlink(missing_ok=True)  # a run that never started leaves no empty file
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)
        except OSError as error:
            fail("E-RUN-013", f"the metrics file {self.path} cannot be opened: {error.strerror}",
                 help="name a file in a folder that you may write to")

    def _lock(self) -> None:
        try:
            lock(self._fd)
        except OSError:
            fail("E-RUN-014", f"another run that is still alive writes to the metrics file {self.path}",
                 help="wait for it, stop it, or name another file")

    def _read_back(self) -> None:
        """Finds a torn last line and learns what this run has already said."""
        size, cut = os.fstat(self._fd).st_size, 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._take(number, line)
                cut += len(line)
            else:
                return
        if cut == 0 and size and not line.startswith(b'{"type":'):
            self._not_ours(1)
        self._cut = cut

    def _take(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            kind = record["type"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self._not_ours(number)
        if record.get("run_id") != self._run_id:
            return
        self._seq = max(self._seq, int(record.get("seq", -1)) + 1)
        resume = self._resume
        if resume is None:
            return
        if kind == "run" and record.get("event") in ("start", "resume"):
            self.supersedes = lineage(str(record.get("trajectory", "")), record.get("accepted") or ()) != resume.lineage
            if self.supersedes:
                self._there.clear()
        elif self.supersedes:
            return
        elif kind == "metric" and record.get("step", 0) > resume.step:
            self._there.add(key_of(record))

    def _not_ours(self, number: int) -> None:
        fail("E-RUN-013", f"{self.path}, line {number}, is no metrics record; the file is left as it is",
             help="name another file for the metrics")

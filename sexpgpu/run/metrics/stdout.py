"""`stdout`: records as lines on standard output. A reader that goes away is no mistake: the run goes on quietly."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from sexpgpu.run.metrics.record import line_of
from sexpgpu.run.metrics.target import Resume


class StdoutTarget:
    def __init__(self, argument: str, run_id: str, resume: Resume | None):
        self.trouble = ""
        self._seq = 0
        self._open = True

    def write(self, record: Mapping[str, Any]) -> None:
        if not self._open:
            return
        try:
            sys.stdout.flush()
            _write_all(sys.stdout.fileno(), line_of({**record, "seq": self._seq}))
            self._seq += 1
        except BrokenPipeError:
            self._open = False
            # else the interpreter complains when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            self._open = False
            self.trouble = f"standard output: {error.strerror or error}"

    def sync(self) -> None:
        pass

    def hurry(self) -> None:
        pass

    def close(self) -> None:
        self._open = False


def _write_all(fd: int, data: bytes) -> None:
    """One write, and the rest if a pipe took only a part."""
    while data:
        data = data[os.write(fd, data) :]

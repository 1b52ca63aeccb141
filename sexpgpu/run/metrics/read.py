"""Reading a metrics file, live or finished: whole lines only, and what a resume superseded left out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import fail

BLOCK = 1 << 20
MOST = sys.float_info.max  # JSON's whole numbers may be larger than any float
#: types of what is read of a record; a line with others was written by somebody else
_COMMON: dict[str, tuple[type, ...]] = {"seq": (int,), "time": (int, float)}
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "metric": {"name": (str,), "step": (int,), "value": (int, float, type(None)), "metadata": (dict,)},
    "annotation": {"text": (str,), "metadata": (dict,)},
    "run": {"event": (str,), "slug": (str,), "knobs": (dict,), "trajectory": (str,), "accepted": (list,), "supersedes_after": (int,)},
}


class Tail:
    """Follows a file that grows by whole lines. A last line without its end is left for a later `read`."""

    def __init__(self, path: str | Path):
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe nobody writes to is no wait, but an error of `read`
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The next records, of about a mebibyte of lines; empty at the present end. Lines that are no records are skipped."""
        size = BLOCK
        while True:
            block = os.pread(self._fd, size, self._offset)
            end = block.rfind(b"\n") + 1
            if end or len(block) < size:
                break
            size *= 2  # a line longer than that
        self._offset += end
        return [record for line in block[:end].split(b"\n") if (record := _record(line)) is not None]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every record there is by now."""
        while records := self.read():
            yield from records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("run_id"), str):
        return None
    kind = found.get("type")
    fields = _COMMON | (_FIELDS.get(kind, {}) if isinstance(kind, str) else {})
    if any(name in found and type(found[name]) not in kinds for name, kinds in fields.items()):
        return None
    if kind == "metric" and (not {"name", "step"} <= found.keys() or abs(found.get("value") or 0) > MOST or abs(found["step"]) > 1 << 62):
        return None
    return found


@dataclass
class RunRecords:
    """One run of a file: its latest start or resume, and its metrics in order, those superseded left out."""

    run_id: str
    about: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    end: str = ""  # `done`, `error` or `stopped`; empty: it goes on, or was killed

    @property
    def slug(self) -> str:
        return str(self.about.get("slug") or self.run_id[:8])

    def take(self, record: dict[str, Any]) -> None:
        kind = record.get("type")
        if kind == "metric":
            self.metrics.append(record)
        elif kind == "annotation":
            self.annotations.append(record)
        elif kind == "run":
            self._run(record)

    def _run(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event in ("start", "resume"):
            self.about, self.end = record, ""
            beyond = record.get("supersedes_after")
            if isinstance(beyond, int):
                self.metrics = [m for m in self.metrics if isinstance(m.get("step"), int) and m["step"] <= beyond]
        else:
            self.end = str(event)


def read_runs(path: str | Path) -> dict[str, RunRecords]:
    """The runs of a file by run_id, in the order in which they began. E-RUN-015 if it cannot be read or has none."""
    try:
        tail = Tail(path)
    except OSError as error:
        fail("E-RUN-015", f"the metrics file {path} cannot be read: {error.strerror or error}",
             help="give the path after `jsonl:` of the run, or of the spool that it named at its end")
    runs: dict[str, RunRecords] = {}
    try:
        for record in tail:
            runs.setdefault(record["run_id"], RunRecords(record["run_id"])).take(record)
    except OSError as error:
        fail("E-RUN-015", f"the metrics file {path} cannot be read: {error.strerror or error}", help="give a file, no folder")
    finally:
        tail.close()
    if not runs:
        fail("E-RUN-015", f"{path} holds no metrics records", help="give a file that a run wrote with --metrics jsonl:<path>")
    return runs

"""`<file>.sent` beside a metrics file: how much of each of its runs has arrived. Lost, it costs a repetition, no point."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sexpgpu.run.metrics.read import Tail


@dataclass
class Cursor:
    """Of one run. All records before `seq` are dealt with, the last of them made at `time`; `refused` of them are not wanted."""

    seq: int = 0
    time: float = 0.0
    refused: int = 0
    host: str = ""
    folder: str | None = None
    experiment: str = ""


def cursor_path(path: Path) -> Path:
    return path.with_name(path.name + ".sent")


def load_cursor(path: Path, run_id: str, host: str) -> Cursor:
    """The cursor of a run in the metrics file `path`, if it fits what the file holds and this host; else a new one."""
    found = _all(path).get(run_id)
    known = {f.name: type(f.default) for f in fields(Cursor)}
    if not isinstance(found, dict) or not known.keys() <= found.keys() or found["host"] != host:
        return Cursor(host=host)
    try:
        cursor = Cursor(int(found["seq"]), float(found["time"]), int(found["refused"]), host,
                        found["folder"] and str(found["folder"]), str(found["experiment"]))
    except (ValueError, TypeError):
        return Cursor(host=host)
    return cursor if cursor.seq == 0 or _fits(path, run_id, cursor) else Cursor(host=host, folder=cursor.folder)


def save_cursor(path: Path, run_id: str, cursor: Cursor) -> None:
    """Replaces the cursor of one run. A folder that cannot be written to is no mistake: see above."""
    with contextlib.suppress(OSError):
        entries = _all(path) | {run_id: asdict(cursor)}
        target = cursor_path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, path.stat().st_mode & 0o777)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(entries, file)
            os.replace(scratch, target)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


def runs_begun(path: Path) -> set[str]:
    """Runs of the file that were sent to a service."""
    return set(_all(path))


def _all(path: Path) -> dict:
    try:
        found = json.loads(cursor_path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _fits(path: Path, run_id: str, cursor: Cursor) -> bool:
    """Whether the record before the cursor is the one it was made after; a file begun anew holds another."""
    try:
        tail = Tail(path)
    except OSError:
        return False
    try:
        for record in tail:
            if record["run_id"] == run_id and record.get("seq") == cursor.seq - 1:
                return record.get("time") == cursor.time
    finally:
        tail.close()
    return False

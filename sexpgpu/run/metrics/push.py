"""`sexpgpu metrics push FILE`: what a run left in its file or spool goes to the service, each record once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sexpgpu.diagnostics import fail
from sexpgpu.run.metrics.cursor import load_cursor, runs_begun
from sexpgpu.run.metrics.delivery import Delivery
from sexpgpu.run.metrics.jsonl import lock
from sexpgpu.run.metrics.read import RunRecords, read_runs
from sexpgpu.run.metrics.service import connect, nonfinite_notes, refused_text, remove_spool
from sexpgpu.run.metrics.target import Service

STILL = 60.0  # seconds without progress after which a push gives up


@dataclass(frozen=True)
class Pushed:
    """What became of one run's records."""

    slug: str
    sent: int
    left: int
    lines: tuple[str, ...] = ()


def push(file: Path, service: Service, folder: str | None, everything: bool, note: Callable[[str], None],
         still: float = STILL) -> list[Pushed]:
    """Sends the last run of `file` and those that were begun, or all of them. `folder` wins over the run's own.

    E-RUN-014 while the run that writes the file lives; E-NET-040 … 045 as at a run's start.
    """
    runs = read_runs(file)
    with open(file, "rb") as held:
        try:
            lock(held.fileno())
        except OSError:
            fail("E-RUN-014", f"a run that is still alive writes to {file}, and sends what it holds itself",
                 help="wait for its end")
        begun, last = runs_begun(file), list(runs)[-1]
        chosen = [run for name, run in runs.items() if everything or name == last or name in begun]
        pushed = [_push_run(file, run, service, folder, note, still) for run in chosen]
        if file.parent.absolute() == service.state / "sexpgpu" / "spool" and not any(p.left for p in pushed):
            remove_spool(file)
    return pushed


def _push_run(file: Path, run: RunRecords, service: Service, folder: str | None, note: Callable[[str], None], still: float) -> Pushed:
    known = load_cursor(file, run.run_id, service.host)
    where = folder or known.folder or service.folder
    client = connect(replace(service, folder=where), where)
    moved = time.monotonic()
    sent = 0

    def progress(count: int) -> None:
        nonlocal moved, sent
        moved, sent = time.monotonic(), sent + count

    delivery = Delivery(client, file, run.run_id, where, grow=False, progress=progress)
    delivery.start()
    told = moved
    try:
        while delivery.alive() and time.monotonic() - moved < still:
            time.sleep(0.02)
            if time.monotonic() - told > 5.0:
                told = time.monotonic()
                note(f"{run.slug}: {sent} records sent{f', waiting ({delivery.trouble})' if delivery.trouble else ''}")
    finally:
        delivery.finish(0.0 if delivery.alive() else 1.0)
    left = 0 if delivery.finished else delivery.undelivered()
    lines = nonfinite_notes(delivery, file)
    if delivery.cursor.refused:
        lines.append(refused_text(delivery))
    if left:
        lines.append(f"{left} records are left ({delivery.dead or delivery.trouble})")
    elif not run.end:
        lines.append("the file holds no end of this run: the service shows it as running")
    elif delivery.cursor.experiment:
        lines.append(client.page(delivery.cursor.experiment))
    return Pushed(run.slug, sent, left, tuple(lines))

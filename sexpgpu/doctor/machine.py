"""Cores, memory, and room on the disks that a run writes to."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sexpgpu.diagnostics import Diagnostic, note_warning, printable
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.run.data.cache import home_folder, size

LITTLE_DISK = 64 << 20  # bytes below which not even logs and small checkpoints are safe
LITTLE_MEMORY = 400 << 20  # bytes: torch alone takes about 300 MiB


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-ENV-021 where memory or a disk is nearly full."""
    yield "system", platform.platform()
    yield "cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    total, free = memory()
    if total:
        yield "memory", f"{size(free)} of {size(total)} free"
        if free < LITTLE_MEMORY:
            yield note_warning("E-ENV-021", f"{size(free)} of memory is free; torch alone takes about 300 MiB", help="end what else runs here, or take a larger machine")
    for what, path in folders(ask).items():
        root = existing(path)
        try:
            left = shutil.disk_usage(root).free
        except OSError:
            continue  # whoever opens it says what is wrong
        yield f"disk of {what}", f"{size(left)} free at {printable(str(root))}"
        if left < LITTLE_DISK:
            yield note_warning("E-ENV-021", f"{printable(str(root))} has {size(left)} free, where a run writes {what}", help="free some space there, or name another folder")


def folders(ask: Ask) -> dict[str, Path]:
    """What a run writes -> where, for what lies on this machine."""
    found = {"temporary files": Path(tempfile.gettempdir()), "parsed data": home_folder()}
    location = ask.settings.checkpoint_dir or ""
    if location and "://" not in location:
        found["checkpoints"] = Path(ask.folder) / location.partition("{slug}")[0]
    return found


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def memory() -> tuple[int, int]:
    """Bytes in all and free, by the system and the container's limit; (0, 0) where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = limit - used + int(cached.get("inactive_file", 0))
        return min(total, limit), max(0, min(free, left))
    except (OSError, ValueError):  # no limit
        return total, free


CHECK = Check("machine", "machine", "warning", 20, run)

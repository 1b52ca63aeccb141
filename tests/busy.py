"""Waiting until another process works, by its own clock: how soon it is given a processor does not matter."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """What a process has used of a processor, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until_busy(pid: int, seconds: float = 0.4, patience: float = 120.0) -> None:
    """Until the process has used so much more of a processor than now."""
    begin, end = cpu_seconds(pid), time.monotonic() + patience
    while cpu_seconds(pid) - begin < seconds:
        assert time.monotonic() < end, f"process {pid} does not work"
        time.sleep(0.02)

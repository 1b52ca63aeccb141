"""GPUs: the driver, and a kernel compiled on each, its result compared with the CPU's and between the devices."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sexpgpu.diagnostics import Diagnostic, printable
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.child import kernels

SECONDS = 180.0
DRIVER = Path("/proc/driver/nvidia/version")
QUERY = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"]


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """Where there is a driver, or `cuda` is asked for: E-DEV-001 … 011, as warnings where a run would not use a GPU."""
    if ask.settings.device != "cuda" and not DRIVER.exists():
        yield "GPUs", "no driver is loaded"
        return
    try:
        listed = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        listed = []
    for line in listed:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5:
            yield f"GPU {printable(parts[0])}", printable(f"{parts[1]}, driver {parts[2]}, {parts[4]} of {parts[3]} in use")
    question = {"devices": list(ask.settings.devices or ()), "asked": ask.settings.device == "cuda"}
    for said in kernels(ask, question, SECONDS - 10):
        if isinstance(said, Diagnostic) and not question["asked"]:  # a run on the CPU works all the same
            yield replace(said, severity="warning")
        else:
            yield said


CHECK = Check("devices", "devices", "error", SECONDS, run)

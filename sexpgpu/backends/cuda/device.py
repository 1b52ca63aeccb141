"""Which GPU a run takes, and what is wrong where it can take none: each condition is a coded mistake (E-DEV-…)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from sexpgpu.diagnostics import fail, printable, problem

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A GPU that is open: its ordinal after CUDA_VISIBLE_DEVICES, name, and bytes in all. `interpreted`: none, kernels run on
    the CPU under Triton's interpreter."""

    ordinal: int
    name: str
    total: int
    interpreted: bool = False

    @property
    def label(self) -> str:
        """What manifests, status files and messages call it."""
        return f"cuda {self.name}"


INTERPRETED = Device(0, "(interpreted)", 0, True)


def interpreted() -> bool:
    """Whether kernels run on the CPU (docs/contributing.md, "Test without a GPU")."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def open_device(chosen: Sequence[int] | None = None) -> Device:
    """The GPU that `SEXPGPU_DEVICES` names, or the only one; makes it torch's current one. Raises E-DEV-001 … 005 and 008."""
    if find_spec("triton") is None:
        fail("E-DEV-008", "Triton is not installed, and kernels for `cuda` need it", help="pip install triton, or --device cpu")
    if interpreted():
        return INTERPRETED
    _require_build()
    count = _visible()
    names = [f"{i}: {torch.cuda.get_device_name(i)}" for i in range(count)]
    if chosen is None and count > 1:
        fail("E-DEV-005", f"{count} GPUs are visible, and none is chosen", notes=names, help=("export SEXPGPU_DEVICES=0", "or several: SEXPGPU_DEVICES=0,1"))
    ordinal = 0 if chosen is None else chosen[0]
    if ordinal >= count:
        limit = os.environ.get("CUDA_VISIBLE_DEVICES")
        counted = f" (numbered after CUDA_VISIBLE_DEVICES={printable(limit)})" if limit is not None else ""
        there = "there is one GPU, number 0" if count == 1 else f"there are {count} GPUs, 0 … {count - 1}"
        fail("E-DEV-004", f"SEXPGPU_DEVICES names device {ordinal}, and {there}{counted}", notes=names, help="export SEXPGPU_DEVICES=0")
    torch.cuda.set_device(ordinal)
    return Device(ordinal, torch.cuda.get_device_name(ordinal), torch.cuda.mem_get_info(ordinal)[1])


def _require_build() -> None:
    if torch.version.cuda is None:
        fail(
            "E-DEV-001",
            f"torch {torch.__version__} is built without CUDA",
            help=("install a CUDA build of torch: its site has the command for each CUDA version", "--device cpu runs without a GPU"),
        )


def _visible() -> int:
    """How many GPUs there are; raises E-DEV-002 where there is none, and E-DEV-003 for a driver that is too old."""
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        text = printable(str(error).strip().split("\n")[0])
        if "driver" in text and "too old" in text:
            fail("E-DEV-003", f"the NVIDIA driver is too old for torch {torch.__version__}, which needs one for CUDA {torch.version.cuda}", notes=[text],
                 help=("update the driver, or install a torch for an older CUDA", "--device cpu runs without a GPU"))
        _none([text])
    if not count:
        _none([])
    return count


def _none(notes: list[str]) -> None:
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limit is not None:
        notes = [*notes, f"CUDA_VISIBLE_DEVICES is `{printable(limit)}`"]
    fail("E-DEV-002", "no GPU is visible", notes=notes, help=("nvidia-smi lists what the driver sees", "--device cpu runs without a GPU"))


def free_memory(device: Device) -> int:
    """Bytes that a program may use: what is free, with what torch holds already."""
    free, _ = torch.cuda.mem_get_info(device.ordinal)
    return int(free + torch.cuda.memory_reserved(device.ordinal))


def neighbours() -> list[str]:
    """Other processes on the GPUs, as the driver's tool lists them; empty where it cannot be asked."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") >= 2]
    return [f"process {row[0]} ({printable(row[1])}) uses {row[-1]}" for row in rows if row[0] != str(os.getpid())]


@contextmanager
def memory_errors(plan: Any = None) -> Iterator[None]:
    """Turns torch's out-of-memory error into E-MEM-003 with the plan (`memory.MemoryPlan`, or None) and who else is there; and a device
    that failed, which nothing in the process can use any more, into E-DEV-013."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        notes = [printable(str(error).strip().split("\n")[0])]
        if plan is not None:
            notes += plan.lines()
        others = neighbours()
        notes += others or ["no other process is seen on the device"]
        raise problem(
            "E-MEM-003", "the device has no memory left for this step", notes=notes, exit_code=3,
            help=("end the other process" if others else "a smaller :batch, or the same batch cut by :accumulate",),
        ) from None
    except RuntimeError as error:
        if not _failed(error):
            raise
        raise problem(
            "E-DEV-013", "the device failed", notes=[printable(str(error).strip().split("\n")[0])], exit_code=3,
            help=("the system's log (dmesg) says whether the GPU reported an error (Xid)", "go on from the latest checkpoint: --resume latest"),
        ) from None


def _failed(error: RuntimeError) -> bool:
    """An error of the device itself: torch, the vendor's libraries and Triton each say it in their way."""
    known = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or str(error).startswith(known)

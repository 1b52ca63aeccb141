"""What must stand in the environment before torch is imported. This module imports neither torch nor numpy.

Idle OpenMP threads spin by default; on a small shared machine that made steps a hundred times slower, so here they
sleep. The number of threads is a rule over cores and work, never a timing, because it decides the order of sums:
two starts of a file on one machine choose alike, and a resume takes what the manifest says.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import MutableMapping
from glob import escape, glob
from pathlib import Path
from typing import Any

SMALL = 50_000_000  # operations a step, below which waking a second thread costs more than it gives
MOST = 16
MANIFEST_BYTES = 64 * 2**20


def cores() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def choose(cores: int, operations: int | None) -> int:
    """The thread count of a new run. `operations`: of one step; None when not known, and then one thread."""
    if operations is None or operations < SMALL:
        return 1
    return max(1, min(cores, MOST, 1 + operations // SMALL))


def prepare(environ: MutableMapping[str, str], operations: int | None, stored: int | None = None) -> int:
    """Set what is not set; the thread count. What the user set stands; then the checkpoint's count; then the rule.

    Call it with `os.environ` before the first import of torch.
    """
    threads = stored or choose(cores(), operations)
    given = environ.get("OMP_NUM_THREADS", "")
    if given.split(",")[0].isdecimal() and int(given.split(",")[0]) > 0:
        threads = int(given.split(",")[0])
    else:
        environ["OMP_NUM_THREADS"] = str(threads)
    defaults = {"OMP_WAIT_POLICY": "passive", "MKL_NUM_THREADS": str(threads)}
    if not environ.get("PYTORCH_ALLOC_CONF"):
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in defaults.items():
        if not environ.get(name):
            environ[name] = value
    return threads


def stored_threads(resume: str | None, location: str | None) -> int | None:
    """The thread count in the manifest that a resume will read; None when there is none, or none that can be read.

    Only a first look, without torch: the real reader checks everything and says what is wrong.
    """
    if not resume:
        return None
    folder = _newest(location) if resume == "latest" else Path(resume)
    if folder is None:
        return None
    threads = _manifest(folder / "manifest.json").get("threads")
    return threads if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= 4096 else None


def _newest(location: str | None) -> Path | None:
    if not location:
        return None
    pattern = "*".join(escape(part) for part in location.split("{slug}"))
    found = [Path(p) for p in glob(os.path.join(pattern, "step-*", "manifest.json"))]
    steps = [(p.stat().st_mtime_ns, p.parent) for p in found if re.fullmatch(r"step-[0-9]+", p.parent.name)]
    return max(steps)[1] if steps else None


def _manifest(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MANIFEST_BYTES:
            return {}
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

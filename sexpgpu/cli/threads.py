"""What must stand in the environment before torch is imported. This module imports neither torch nor numpy.

Idle OpenMP threads spin by default; on a small shared machine that made steps a hundred times slower, so here they
sleep. The number of threads is a rule over cores and work, never a timing, because it decides the order of sums:
two starts of a file on one machine choose alike, and a resume takes what the manifest says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# The one rule: it must be known before torch is imported, so it lives here and not in the backend.
SMALL_STEP = 200_000_000
PER_THREAD = 100_000_000
MOST = 32


def cores() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def choose(cores: int, operations: int | None) -> int:
    """The thread count of a new run. `operations`: of one step; None when not known, and then one thread."""
    if operations is None or operations < SMALL_STEP:
        return 1
    return max(1, min(cores, MOST, operations // PER_THREAD))


def wanted(environ: Mapping[str, str], operations: int | None, stored: int | None = None, processes: int = 1) -> int:
    """The thread count that a run would have: what the user set; then the checkpoint's; then the rule."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return stored or choose(max(1, cores() // processes), operations)


def prepare(environ: MutableMapping[str, str], operations: int | None, stored: int | None = None, processes: int = 1) -> int:
    """Set what is not set; the thread count. What the user set stands; then the checkpoint's count; then the rule.

    `processes`: that share this machine's cores, each doing so many operations.

    Call it with `os.environ` before the first import of torch.
    """
    threads = wanted(environ, operations, stored, processes)
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not (given.isdecimal() and int(given) > 0):
        environ["OMP_NUM_THREADS"] = str(threads)
    defaults = {"OMP_WAIT_POLICY": "passive", "MKL_NUM_THREADS": str(threads)}
    if not environ.get("PYTORCH_ALLOC_CONF"):
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in defaults.items():
        if not environ.get(name):
            environ[name] = value
    return threads

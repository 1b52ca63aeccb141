"""How long and how large does each evaluation bomb get under the whole budget? One JSON line a bomb."""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

from sexpgpu.diagnostics import SexpError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "lisp"))


def measure(name: str) -> None:
    """Evaluate one bomb in this process and print what it took."""
    from helpers_lisp import evaluator  # the path is set above, in the child too
    from test_budget import BOMBS

    start, code = time.perf_counter(), "none"
    try:
        evaluator(BOMBS[name]).load_main()
    except SexpError as mistake:
        code = mistake.diagnostic.code
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    seconds = round(time.perf_counter() - start, 2)
    print(json.dumps({"bomb": name, "code": code, "seconds": seconds, "peak_mib": peak}), flush=True)


if __name__ == "__main__":
    from test_budget import BOMBS

    for bomb in BOMBS:
        child = multiprocessing.get_context("spawn").Process(target=measure, args=(bomb,))
        child.start()
        child.join()

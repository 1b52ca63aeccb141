"""What it takes to start: `--help`, and `explain` of the 124M model. One JSON line each; the aims are 0.15 s and 5 s on 2 cores.

    python benchmarks/explain_time.py [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = {  # name -> (arguments, seconds aimed at)
    "help": (["--help"], 0.15),
    "explain a code": (["explain", "E-SHAPE-003"], 0.15),
    "explain gpt2": (["explain", "examples/gpt2.lisp"], 5.0),
    "explain gpt2 on cuda": (["explain", "examples/gpt2.lisp", "--device", "cuda"], 5.0),
    "explain gpt2, a line": (["explain", "examples/gpt2.lisp:58"], 5.0),
    "explain gpt2, a parameter": (["explain", "examples/gpt2.lisp", "--why", "gpt2/token"], 5.0),
}


def measure(arguments: list[str], repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of whole processes, by the clock and of the processor, which a busy machine changes less. The first process, which
    may read from disk, is left out."""
    seconds, worked = [], []
    for _ in range(repeat + 1):
        begin, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "sexpgpu", *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
        after = os.times()
        worked.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return seconds[1:], worked[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    for name, (arguments, aim) in CASES.items():
        seconds, worked = measure(arguments, repeat)
        print(json.dumps({"case": name, "median_s": round(statistics.median(seconds), 3), "least_s": round(min(seconds), 3),
                          "processor_s": round(min(worked), 3), "aim_s": aim,
                          "repeat": repeat, "load": round(os.getloadavg()[0], 1)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

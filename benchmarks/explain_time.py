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
    "explain gpt2, a line": (["explain", "examples/gpt2.lisp:58"], 5.0),
    "explain gpt2, a parameter": (["explain", "examples/gpt2.lisp", "--why", "gpt2/token"], 5.0),
}


def measure(arguments: list[str], repeat: int) -> list[float]:
    """Seconds of whole processes, the first one, which may read from disk, left out."""
    seconds = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "sexpgpu", *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    for name, (arguments, aim) in CASES.items():
        seconds = measure(arguments, repeat)
        print(json.dumps({"case": name, "median_s": round(statistics.median(seconds), 3), "least_s": round(min(seconds), 3), "aim_s": aim,
                          "repeat": repeat, "load": round(os.getloadavg()[0], 1)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

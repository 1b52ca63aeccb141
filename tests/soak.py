"""Long proof of exact resume; not part of the test line. Prints one JSON line a check and a summary.

For every k in 1..59 of a 60-step run: stop at k with `--steps k`, resume, compare the final state's digest and the
metrics with those of the run without a stop; so for char_lm.lisp too, whose variant tiny has dropout 0.1. Then SIGTERMs and kill -9 at random moments, three in four of them between the first step
and the last, which the status file shows. Shuffling and clipping are on; the model is wide, so that steps take time.

    python tests/soak.py [--every 1] [--signals 10] [--seed 0] [--only steps|char-lm|signals|kills]

Kill points in a folder and in a bucket are in `kills.py`, which `--only kills` runs too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kills import both

HERE = Path(__file__).parent
STEPS = 60
#: program -> what its command line has
SETTINGS = {"digits": ("--set", "hidden=2048"), "char_lm": ("--variant", "tiny")}


def program(folder: Path) -> Path:
    """digits with clipping and 60 steps, slowed by nothing; data beside it."""
    text = (HERE.parent / "examples" / "digits.lisp").read_text(encoding="utf-8")
    text = text.replace(":steps 500", f":steps {STEPS}\n  :clip-norm 0.5").replace(":checkpoint-every 100", ":checkpoint-every 7")
    (folder / "data").mkdir(parents=True)
    shutil.copy(HERE.parent / "examples" / "data" / "digits.csv.gz", folder / "data")
    path = folder / "digits.lisp"
    path.write_text(text, encoding="utf-8")
    return path


def language_model(folder: Path) -> Path:
    """char_lm as it stands, with dropout; its corpus beside it."""
    (folder / "data").mkdir(parents=True)
    shutil.copy(HERE.parent / "examples" / "data" / "corpus.txt.gz", folder / "data")
    return Path(shutil.copy(HERE.parent / "examples" / "char_lm.lisp", folder))


def command(file: Path, name: str, *more: str) -> list[str]:
    base = file.parent
    return [sys.executable, "-m", "sexpgpu", "run", str(file), *SETTINGS[file.stem], "--status", str(base / f"{name}.status"), "--checkpoint-dir", str(base / name), "--metrics",
            f"jsonl:{base / name}.jsonl", *more]


def run(file: Path, name: str, *more: str) -> int:
    return subprocess.run(command(file, name, *more), capture_output=True).returncode


def digest(file: Path, name: str, step: int = STEPS) -> str:
    manifest = json.loads((file.parent / name / f"step-{step}" / "manifest.json").read_text(encoding="utf-8"))
    return manifest["digest"]


def records(file: Path, name: str) -> dict[tuple, float]:
    """(name, split, tap's path, step) -> value; a repeated record is a failure of the file's contract."""
    found: dict[tuple, float] = {}
    for line in (file.parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        r = json.loads(line)
        if r["type"] != "metric" or r["name"].endswith(("-seconds", "per-second")):
            continue
        key = (r["name"], r["metadata"].get("split"), r["metadata"].get("path"), r["step"])
        assert key not in found, f"twice: {key}"
        found[key] = r["value"]
    return found


def looping(file: Path) -> float:
    """Seconds from the first record to the last of the whole run."""
    times = [json.loads(line)["time"] for line in (file.parent / "whole.jsonl").read_text(encoding="utf-8").splitlines()]
    return times[-1] - times[0]


def stopped_at(file: Path, k: int) -> bool:
    name = f"k{k}"
    first, second = run(file, name, "--steps", str(k)), run(file, name, "--resume", "latest")
    if first or second or digest(file, name) != digest(file, "whole"):
        return False
    made, wanted = records(file, name), records(file, "whole")  # a stop logs and evaluates too
    return all(made.get(key) == value for key, value in wanted.items())


def every_step(file: Path, check: str, every: int) -> int:
    """Stops at each k, a line of output a k; how many resumes differ."""
    assert run(file, "whole") == 0
    failures = 0
    for k in range(1, STEPS, every):
        same = stopped_at(file, k)
        failures += not same
        print(json.dumps({"check": check, "k": k, "identical": same}), flush=True)
    return failures


def stepping(file: Path, name: str) -> bool:
    """Whether the status file says that a step was made."""
    try:
        status = json.loads((file.parent / f"{name}.status").read_text(encoding="utf-8"))
    except OSError:
        return False
    return status["state"] in ("running", "saving", "evaluating", "done") and bool(status["step"] or status["state"] != "running")


def interrupted(file: Path, name: str, number: int, after: float, early: bool) -> dict[str, object]:
    """Sends a signal `after` seconds into the process (`early`) or into the stepping, then resumes."""
    process = subprocess.Popen(command(file, name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not early and process.poll() is None and not stepping(file, name):
        time.sleep(0.002)
    time.sleep(after)
    process.send_signal(number)
    first = process.wait(60)
    kept = sorted(int(p.parent.name[5:]) for p in (file.parent / name).glob("step-*/manifest.json"))
    second = run(file, name, "--resume", "latest")
    same = second == 0 and digest(file, name) == digest(file, "whole") and records(file, name) == records(file, "whole")
    return {"after": round(after, 3), "early": early, "exit": first, "newest": kept[-1:], "resume_exit": second, "identical": same}


def signals(file: Path, count: int) -> int:
    """SIGTERM and kill -9 at random moments, `count` of each; how many resumes differ."""
    start = time.perf_counter()
    assert run(file, "whole") == 0
    seconds, loop, failures = time.perf_counter() - start, looping(file), 0
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for i in range(count):
            early = i % 4 == 3
            row = interrupted(file, f"{kind.name}{i}", kind, random.uniform(0.0, seconds - loop if early else loop), early)
            failures += not row["identical"]
            print(json.dumps({"check": kind.name, **row}), flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--signals", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("steps", "char-lm", "signals", "kills"))
    options = parser.parse_args()
    random.seed(options.seed)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "steps"):
            failures += every_step(program(Path(folder) / "p"), "steps", options.every)
        if options.only in (None, "char-lm"):
            failures += every_step(language_model(Path(folder) / "c"), "char-lm", options.every)
        if options.only in (None, "signals"):
            failures += signals(program(Path(folder) / "s"), options.signals)
        if options.only in (None, "kills"):
            failures += both(Path(folder) / "k", 50, 20)
    print(json.dumps({"failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main())

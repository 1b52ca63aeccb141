"""The proof of a resume: a run that was stopped, resumed, killed and resumed ends in the same bits as one that was not."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import Diagnostic, fail, printable, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.child import environment, finished, started
from sexpgpu.run.children import python
from sexpgpu.settings import scrub

SECONDS = 3600.0
TRIES = 5  # to kill a run while it trains
FIRST, MORE = 3, 4  # updates before the stop, and after it
FINAL = ("done", "failed", "stopped")


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-CKPT-040 where the digests differ. Each of FILE's runs, a few steps, in the scratch folder; the data is the run's own."""
    until = time.monotonic() + SECONDS
    for name, whole in ask.known.get("runs", {}).items():
        if whole.steps < 2:
            yield f"run {name}", "has one step: nothing to resume"
            continue
        first = min(FIRST, whole.steps // 2)
        last = min(first + MORE, whole.steps)
        place = ask.scratch / f"resume-{len(list(ask.scratch.glob('resume-*')))}"
        place.mkdir()
        straight, broken = place / "straight", place / "broken"
        _end(until, ask, name, straight, last)
        _end(until, ask, name, broken, first)
        killed = _kill(until, ask, name, broken, last, first)
        _end(until, ask, name, broken, last, "--resume", "latest")
        digests = [_digest(folder / f"step-{last}") for folder in (straight, broken)]
        how = f"stopped after step {first}, {'killed (kill -9)' if killed else 'resumed'}, resumed, and at step {last}"
        if digests[0] == digests[1]:
            yield f"run {name}", f"{how} the same bits as a run without a break: {digests[0][:16]}"
        else:
            yield problem("E-CKPT-040", f"the run `{name}`, {how}, has other bits than a run without a break", whole.span, notes=(f"digests {digests[0][:16]} and {digests[1][:16]}",),
                          help=("set OMP_NUM_THREADS, so that sums are taken in one order", "please report it with the file: a resume is exact, or it is a bug")).diagnostic


def _words(ask: Ask, name: str, folder: Path, steps: int, *more: str) -> list[str]:
    assert ask.file is not None
    return [*python(), "-m", "sexpgpu", "run", ask.file, name, *ask.words, "--device", ask.settings.device, "--steps", str(steps), "--metrics", "",
            "--status", str(folder) + ".json", "--checkpoint-dir", str(folder), *more]


def _end(until: float, ask: Ask, name: str, folder: Path, steps: int, *more: str) -> None:
    """A run to its end; E-CKPT-040 with what it said where it has another one, E-ENV-020 where it has none by `until`."""
    try:
        code, _, err = finished(_words(ask, name, folder, steps, *more), ask, environment(ask), max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        fail("E-ENV-020", f"the proof of a resume of `{name}` was not through within {SECONDS:.0f} s", help="smaller knobs, by --set, or a variant made for it")
    if code:
        said = [printable(line) for line in scrub(err, ask.environ).strip().splitlines()[-6:]]
        fail("E-CKPT-040", f"`sexpgpu run` of `{name}`, a part of the proof of its resume, ended with {code}", notes=said, help="mend what it says, and try again")


def _kill(until: float, ask: Ask, name: str, folder: Path, steps: int, first: int) -> bool:
    """Resumes and kills it once it trains; whether it was killed before its end. A run that was quicker is set back and tried again."""
    for _ in range(TRIES):
        if _kill_once(until, ask, name, folder, steps, first):
            return True
        for made in folder.glob("step-*"):
            if made.name != f"step-{first}":
                shutil.rmtree(made)
    return False


def _kill_once(until: float, ask: Ask, name: str, folder: Path, steps: int, first: int) -> bool:
    with started(_words(ask, name, folder, steps, "--resume", "latest"), ask, environment(ask), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and time.monotonic() < until:
            facts = _status(Path(str(folder) + ".json"))
            if facts.get("pid") == child.pid and (facts.get("state") == "running" or (facts.get("step") or 0) > first) and facts.get("state") not in FINAL:
                break
            time.sleep(0.002)
        alive = child.poll() is None
        child.kill()
        return alive and child.wait() == -9


def _status(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(folder: Path) -> str:
    try:
        return str(json.loads((folder / "manifest.json").read_bytes())["digest"])
    except (OSError, ValueError, KeyError):
        fail("E-CKPT-040", f"{folder.name} of the proof of a resume has no checkpoint", help="please report it with the file")


CHECK = Check("resume", "resume", "error", SECONDS + 60, run)

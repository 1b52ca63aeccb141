"""Runs of several ranks as processes: starting them, finding the ranks, hurting them, and what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = """(import "nn" "optim" "loss")
(defknob lr 0.02 "learning rate")
(defdata pts (csv "d.csv" :fields ((x f32 [4]) (y f32) (n f32))) :split ((train 4/5) (valid 1/5)))
(deflayer net (x)
  (let ((h (dropout (tanh (linear x 8 :name "in")) 0.2)))
    (tap "size" (mean (square h)))
    (linear h 1 :name "out")))
(defun off (x y) (abs (- (squeeze (net x) :axis 1) y)))
(defun weighed (x y n) (list (sum (* n (square (off x y)))) (sum n)))
(defun plain (x y) (mean (off x y)))
(defrun train :data (batches pts :split train :batch 16 :shuffle true) :loss weighed
  :optimizer (adamw :lr lr) :clip-norm 0.5 :ema 0.9 :seed 3 :steps {steps} :checkpoint-every {every} :log-every 1 :diagnostics (**)
  :metrics ((plain plain)){keys})
(defeval valid :data (batches pts :split valid :batch 5) :every 20 :metrics ((plain plain) (weighed weighed)) :weights ema)
"""


def write(folder: Path, steps: int = 50, every: int = 20, keys: str = "", program: str = PROGRAM) -> Path:
    """The file and its data: 100 rows, of which the evaluation has 20, in 4 batches; counts differ from row to row."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["x_0,x_1,x_2,x_3,y,n"]
    for i in range(113):
        x = [((i * k * 7919) % 211) / 105 - 1 for k in (1, 2, 3, 5)]
        rows.append(",".join(f"{v:.5f}" for v in (*x, x[0] - x[1] * x[2], i % 4)))
    (folder / "d.csv").write_text("\n".join(rows) + "\n")
    path = folder / "r.lisp"
    path.write_text(program.format(steps=steps, every=every, keys=keys))
    return path


class Process:
    """One `sexpgpu` command; under `ip netns exec` where `space` names a network namespace."""

    def __init__(self, folder: Path, words: Sequence[str], space: str = "", **environ: str):
        self.folder = folder
        self.log = folder / f"log-{time.monotonic_ns()}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SEXPGPU_")}
        prefix = ["ip", "netns", "exec", space] if space else []
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "sexpgpu", *words], cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=clean | {"OMP_NUM_THREADS": "1"} | environ)

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 90) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def ranks(self) -> list[int]:
        """The processes of its ranks, in their order."""
        return [int(p) for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def run(folder: Path, *flags: str, ranks: int = 2, name: str = "m", space: str = "", **environ: str) -> Process:
    """`sexpgpu run` in `folder`; metrics go to NAME.jsonl, the status to NAME.json."""
    if ranks > 1:
        environ = {"SEXPGPU_DEVICES": ",".join(map(str, range(ranks)))} | environ
    return Process(folder, ["run", "r.lisp", "--metrics", f"jsonl:{name}.jsonl", "--status", f"{name}.json", *flags], space, **environ)


def hurt(folder: Path, rank: int, code: str) -> dict[str, str]:
    """Variables with which `code` runs first in the process of this rank."""
    text = "\n".join(f"    {line}" for line in code.strip().splitlines())
    (folder / "sitecustomize.py").write_text(f"import json, os\nif json.loads(os.environ.get('_SEXPGPU_PLACE', '{{}}')).get('rank') == {rank}:\n{text}\n")
    return {"PYTHONPATH": str(folder)}


def status(folder: Path, name: str = "m") -> dict[str, Any]:
    try:
        return json.loads((folder / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def until(what: Any, process: Process, seconds: float = 60) -> Any:
    """Waits for a true answer while the process lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = what()
        if answer:
            return answer
        assert process.process.poll() is None, process.text()
        time.sleep(0.05)
    raise AssertionError(f"nothing came in {seconds} s:\n{process.text()}")


def points(folder: Path, name: str = "m") -> dict[tuple[Any, ...], Any]:
    """{(name, path, split, step): value} of what measures no time."""
    found: dict[tuple[Any, ...], Any] = {}
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        r = json.loads(line)
        if r["type"] == "metric" and not r["name"].endswith(("-seconds", "per-second")):
            found[r["name"], r["metadata"].get("path"), r["metadata"].get("split"), r["step"]] = r["value"]
    return found


def farthest(a: dict[tuple[Any, ...], Any], b: dict[tuple[Any, ...], Any]) -> tuple[float, Any]:
    """The largest relative difference of two runs' points, and where it is."""
    assert a.keys() == b.keys(), sorted(map(str, a.keys() ^ b.keys()))[:5]
    return max((abs(a[k] - b[k]) / max(abs(a[k]), 1e-6), k) for k in a)


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run; one that ended and was not waited for by its parent does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found

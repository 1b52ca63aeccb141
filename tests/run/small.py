"""A small experiment for the real command: linear regression on 40 rows, shuffled, with an evaluation and checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sexpgpu.cli.main import perform

PROGRAM = """(import "nn" "optim" "loss")
(defknob lr 0.05 "learning rate")
(defknob width 4 "units")
(defdata pts (csv "d.csv" :fields ((x f32 [2]{scale}) (y f32))) :split ((train 4/5) (valid 1/5)))
(deflayer net (x) (linear (tanh (linear x width :name "in")) 1 :name "out"))
(defun fit (x y) (mean (square (- (squeeze (net x) :axis 1) y))))
(defun off (x y) (mean (abs (- (squeeze (net x) :axis 1) y))))
(defrun train :data (batches pts :split train :batch 8 :shuffle true) :loss fit
  :optimizer (adamw :lr lr) :steps {steps} :seed 1 :checkpoint-every {every}{keys})
(defeval valid :data (batches pts :split valid :batch 4) :every 10 :metrics ((loss fit) (off off)))
"""


def write(folder: Path, steps: int = 20, every: int = 5, keys: str = "", scale: str = "", rows: int = 40) -> Path:
    """The file and its data; the same data each time."""
    numbers = random.Random(0)
    lines = ["x_0,x_1,y"]
    for _ in range(rows):
        a, b = numbers.gauss(0, 1), numbers.gauss(0, 1)
        lines.append(f"{a:.4f},{b:.4f},{a - 0.5 * b:.4f}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "d.csv").write_text("\n".join(lines) + "\n")
    path = folder / "r.lisp"
    path.write_text(PROGRAM.format(steps=steps, every=every, keys=keys, scale=scale))
    return path


def run(folder: Path, *flags: str, location: str | None = "ck") -> int:
    """One call of `sexpgpu run`, its exit code; relative to `folder` go checkpoints, metrics and status."""
    place = [] if location is None else ["--checkpoint-dir", location if "://" in location else str(folder / location)]
    return perform(["run", str(folder / "r.lisp"), *place, "--status", str(folder / "s.json"), "--metrics", f"jsonl:{folder}/m.jsonl", *flags])


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "s.json").read_text())


def manifest(folder: Path, step: int, location: str = "ck") -> dict[str, Any]:
    return json.loads((folder / location / f"step-{step}" / "manifest.json").read_text())


def steps(folder: Path, location: str = "ck") -> list[int]:
    """Steps with a manifest."""
    return sorted(int(p.parent.name[5:]) for p in (folder / location).glob("step-*/manifest.json"))


def points(folder: Path) -> dict[tuple[Any, ...], Any]:
    """{(name, split, step): value} of what measures no time; a point twice is a failure."""
    found: dict[tuple[Any, ...], Any] = {}
    for line in (folder / "m.jsonl").read_text().splitlines():
        r = json.loads(line)
        if r["type"] == "metric" and not r["name"].endswith(("-seconds", "per-second")):
            key = (r["name"], r["metadata"].get("split"), r["step"])
            assert key not in found, key
            found[key] = r["value"]
    return found

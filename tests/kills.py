"""Kill points: runs that are killed (-9) again and again at random moments, and what is left of them. Part of `soak.py`.

Checkpoints follow one another so closely that most of the time one is being written; they go to a folder, or to a bucket
of a real server. After each kill the newest usable checkpoint must be no older than what the status file called durable;
at the end of a chain of kills, state and metrics must be those of the run that nothing happened to. One JSON line a kill.

    python tests/kills.py [--local 50] [--s3 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 120
EVERY = 2
STARTS = 60  # processes that a chain may take: with more it does not get on
PROGRAM = """(import "nn" "optim" "loss")
(defknob wide {wide} "units; with 1500 a checkpoint has about 20 MiB")
(defdata pts (csv "d.csv" :fields ((x f32 [16]) (y f32))))
(deflayer net (x) (linear (relu (linear (relu (linear x wide :name "in")) 1024 :name "mid")) 1 :name "out"))
(defun fit (x y) (mean (square (- (squeeze (net x) :axis 1) y))))
(defrun train :data (batches pts :batch 16 :shuffle true) :loss fit :optimizer (adamw :lr 1e-3)
  :steps {steps} :seed 1 :checkpoint-every {every} :log-every 1)
(defeval all :data (batches pts :batch 50) :every 7 :metrics ((loss fit)))
"""


@dataclass(frozen=True)
class Chain:
    """One run that is killed and resumed. `location`: a folder or an s3 place; `environ`: how it is reached."""

    folder: Path
    name: str
    location: str
    environ: dict[str, str]

    def start(self) -> subprocess.Popen[bytes]:
        at = self.folder / self.name
        command = [sys.executable, "-m", "sexpgpu", "run", str(self.folder / "c.lisp"), "--status", f"{at}.status", "--metrics",
                   f"jsonl:{at}.jsonl", "--checkpoint-dir", self.location, "--resume", "latest"]
        with open(f"{at}.out", "ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **self.environ})

    def said(self) -> str:
        return (self.folder / f"{self.name}.out").read_text(errors="replace")[-3000:]

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / f"{self.name}.status").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def newest(self) -> tuple[int, list[str]]:
        """The step that `latest` would go on from, loaded and its digest computed anew; and what it says of others."""
        from sexpgpu.run.checkpoints.find import Wanted, choose
        from sexpgpu.run.checkpoints.store import load

        self._grant()
        choice = choose(Wanted("latest", self.location, self.folder, ("c",), "train"))
        if choice.found is None:
            return 0, list(choice.notes)
        load(choice.found)
        return choice.found.manifest.step, list(choice.notes)

    def digest(self, steps: int) -> str:
        """Of the last checkpoint."""
        from sexpgpu.run.checkpoints.find import at_path

        self._grant()
        return at_path(f"{self.location}/step-{steps}").manifest.digest

    def points(self) -> dict[tuple[Any, ...], Any]:
        """(name, split, step) -> value of what measures no time; a point twice is a failure of the file's contract.

        A kill before the first checkpoint leaves nothing to resume: what comes after is another run in the same file, and
        readers take the last one.
        """
        found: dict[tuple[Any, ...], Any] = {}
        run_id = None
        for line in (self.folder / f"{self.name}.jsonl").read_text(encoding="utf-8").splitlines():
            r = json.loads(line)
            if r["run_id"] != run_id:
                run_id, found = r["run_id"], {}
            if r["type"] == "metric" and not r["name"].endswith(("-seconds", "per-second")):
                key = (r["name"], r["metadata"].get("split"), r["metadata"].get("eval"), r["step"])
                assert key not in found, f"twice: {key}"
                found[key] = r["value"]
        return found

    def _grant(self) -> None:
        from sexpgpu.run.storage import grant
        from sexpgpu.settings import load

        grant(load({name: value for name, value in self.environ.items() if "AWS_" in name}, {}))


def write_program(folder: Path, steps: int, every: int, wide: int) -> None:
    folder.mkdir(parents=True)
    numbers = random.Random(0)
    lines = [",".join([*(f"x_{i}" for i in range(16)), "y"])]
    lines += [",".join(f"{numbers.gauss(0, 1):.5f}" for _ in range(17)) for _ in range(100)]
    (folder / "d.csv").write_text("\n".join(lines) + "\n")
    (folder / "c.lisp").write_text(PROGRAM.format(steps=steps, every=every, wide=wide))


def kill_once(chain: Chain, loop: float, early: bool) -> dict[str, Any] | None:
    """Starts the run again, kills it, and looks at what is left. None: it ended before the kill.

    `loop`: seconds of the stepping of a whole run. `early`: the kill falls in the start of the process.
    """
    process = chain.start()
    begin, ready = time.monotonic(), early
    while not ready and process.poll() is None:
        found = chain.status()
        ready = found.get("pid") == process.pid and found.get("state") in ("running", "saving", "evaluating")
        time.sleep(0.01)
    time.sleep(random.uniform(0.0, 3.0 if early else loop / 3))
    if process.poll() is not None:
        assert process.returncode == 0, chain.said()
        return None
    process.kill()
    process.wait(60)
    told = chain.status()
    checkpoint = told.get("checkpoint") or {}
    durable = checkpoint["step"] if checkpoint.get("durable") else 0
    step, notes = chain.newest()
    return {"after": round(time.monotonic() - begin, 2), "early": early, "state": told.get("state"), "at": told.get("step"), "durable": durable,
            "newest": step, "torn": sum("not a whole" in note for note in notes), "ok": step >= durable}


def kill_points(folder: Path, count: int, place: Callable[[str], str], environ: dict[str, str], kind: str, *, steps: int = STEPS,
                every: int = EVERY, wide: int = 1500, say: Callable[[dict[str, Any]], None] = lambda row: print(json.dumps(row), flush=True)) -> int:
    """Failures of `count` kills. A chain of kills ends when its run does; then the next one begins, in another place."""
    write_program(folder, steps, every, wide)
    whole = Chain(folder, "whole", str(folder / "whole"), {})
    process = whole.start()
    while not (whole.status().get("step") or 0) and process.poll() is None:
        time.sleep(0.01)
    begin = time.monotonic()
    assert process.wait(600) == 0, whole.said()
    loop = time.monotonic() - begin
    expected, points = whole.digest(steps), whole.points()
    failures = kills = number = 0
    while kills < count:
        chain = Chain(folder, f"{kind}{number}", place(f"{kind}{number}"), environ)
        number, starts, ended = number + 1, 0, False
        while not ended:
            starts += 1
            assert starts < STARTS, f"{chain.name} does not get on"
            if kills >= count:
                assert chain.start().wait(600) == 0, chain.said()
                ended = True
            elif (row := kill_once(chain, loop, early=starts % 4 == 0)) is None:
                ended = True
            else:
                kills += 1
                failures += not row["ok"]
                say({"check": f"kill {kind}", "kill": kills, "chain": chain.name, **row})
        same = chain.digest(steps) == expected and chain.points() == points
        failures += not same
        say({"check": f"chain {kind}", "chain": chain.name, "starts": starts, "identical": same})
    return failures


def s3_kill_points(folder: Path, count: int, **keys: Any) -> int:
    """The same in a bucket of a real server."""
    sys.path.insert(0, str(HERE / "s3"))
    from seaweed import Server

    server = Server(folder / "server").start().make_buckets()
    try:
        environ = server.environ("checkpoint")
        return kill_points(folder / "s3", count, lambda name: f"s3://checkpoints/{name}", environ, "s3", **keys)
    finally:
        server.stop()


def both(folder: Path, local: int, s3: int) -> int:
    """Failures of so many kills of each kind."""
    failures = kill_points(folder / "local", local, lambda name: str(folder / "local" / name), {}, "local") if local else 0
    return failures + (s3_kill_points(folder, s3) if s3 else 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", type=int, default=50)
    parser.add_argument("--s3", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        failures = both(Path(folder), options.local, options.s3)
    print(json.dumps({"failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

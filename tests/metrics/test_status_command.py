"""The status file in every phase, its readers' judgement, and `sexpgpu status`."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sexpgpu.cli.main import perform
from sexpgpu.diagnostics import SexpError
from sexpgpu.run.events import Failed, Finished, PhaseChanged, StepDone, Stopped
from sexpgpu.run.program import StepResult
from sexpgpu.run.status import SILENT, StatusFile, read_status

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, **facts) -> Path:
    known = {"state": "running", "slug": f"{path.stem}-slug", "run_id": "r", "run": "train", "step": 5, "steps": 10, "loss": 0.25, "rate": 2.0,
             "eta_seconds": 125.0, "knobs": {}, "checkpoint": {"location": "ck", "step": 4, "durable": True}, "device": "cpu",
             "pid": os.getpid(), "host": socket.gethostname(), "updated": time.time(), "error": None}
    path.write_text(json.dumps(known | facts))
    return path


def a_dead_pid() -> int:
    return int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True).stdout)


def step(n: int) -> StepDone:
    return StepDone(n, 10, True, StepResult(1.0, 1.0, {"": 0.1}, True, {}, {}), 0.1, 1, 8)


@pytest.mark.parametrize(("facts", "code", "state", "words"), [
    ({"state": "done"}, 0, "done", []),
    ({"state": "failed", "error": {"code": "E-RUN-001", "message": "the loss is nan", "place": "a.lisp:3:1"}}, 3, "failed",
     ["E-RUN-001", "the loss is nan", "a.lisp:3:1"]),
    ({"state": "stopped"}, 4, "stopped", []),
    ({}, 5, "running", ["5/10", "0.25", "2:05", "step-4"]),
    ({"state": "compiling", "step": 0, "loss": None, "rate": None, "eta_seconds": None, "checkpoint": None}, 5, "compiling", []),
    ({"overdue": "a step has taken more than 15 min"}, 5, "running", ["more than 15 min"]),
    ({"pid": "dead"}, 1, "dead", ["ended without a word"]),
    ({"updated": 1.0}, 1, "silent", ["silent"]),
    ({"host": "elsewhere", "pid": 1}, 5, "running", []),
    ({"host": "elsewhere", "updated": 1.0}, 1, "silent", ["nothing heard from elsewhere"]),
], ids=str)  # fmt: skip
def test_exit_code_by_state(tmp_path, capsys, facts, code, state, words):
    if facts.get("pid") == "dead":
        facts = {**facts, "pid": a_dead_pid()}
    path = write(tmp_path / "s.json", **facts)
    assert perform(["status", str(path)]) == code
    out = capsys.readouterr().out
    assert state in out and "s-slug" in out and all(word in out for word in words)
    assert perform(["status", "--json", str(path)]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["judged"] == state and said["step"] == json.loads(path.read_text())["step"]


def test_several_at_once(tmp_path, capsys):
    paths = [str(write(tmp_path / f"{name}.json", state=name)) for name in ("done", "failed", "running")]
    assert perform(["status", "--once", *paths]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("run") and len({line.index("5/10") for line in lines[1:]}) == 1
    assert perform(["status", paths[0], paths[2]]) == 5
    assert perform(["status", "--json", *paths]) == 3
    out = capsys.readouterr().out
    assert [s["judged"] for s in json.loads(out[out.index("["):])] == ["done", "failed", "running"]


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"state": "done"}', "dear diary"])
def test_no_status_file(tmp_path, capsys, text):
    path = tmp_path / "s.json"
    if text is not None:
        path.write_text(text)
    assert perform(["status", str(path)]) == 2
    assert "E-RUN-021" in capsys.readouterr().err
    with pytest.raises(SexpError):
        read_status(tmp_path)


def test_live_on_a_terminal(tmp_path):
    """In a terminal it redraws until the run has ended; two runs, one of which dies without a word."""
    first, second = StatusFile(tmp_path / "a.json", heartbeat=0.1), write(tmp_path / "b.json", state="running")
    first.set(run_id="r", slug="first-run")
    first.on(PhaseChanged("running", 1))
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "sexpgpu", "status", str(tmp_path / "a.json"), str(second)], stdout=follower, stderr=follower,
                               cwd=ROOT, env={**os.environ, "COLUMNS": "140", "TERM": "xterm"})
    os.close(follower)
    seen = bytearray()

    def collect():
        try:
            while data := os.read(leader, 65536):
                seen.extend(data)
        except OSError:
            pass

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()

    def wait(text: bytes) -> None:
        until = time.monotonic() + 120
        while text not in seen and time.monotonic() < until:
            time.sleep(0.05)
        assert text in seen, bytes(seen[-2000:])

    wait(b"running")
    first.on(step(7))
    wait(b"7/10")
    first.on(PhaseChanged("evaluating", 7))
    wait(b"evaluating")
    first.on(Finished(10))
    first.close()
    wait(b"done")
    write(second, pid=a_dead_pid())
    assert process.wait(timeout=120) == 1
    wait(b"ended without a word")


def test_heartbeat_and_deadlines(tmp_path):
    said: list[str] = []
    def wait(what):
        until = time.monotonic() + 60
        while not what(json.loads((tmp_path / "s.json").read_text())) and time.monotonic() < until:
            time.sleep(0.02)
        return json.loads((tmp_path / "s.json").read_text())

    status = StatusFile(tmp_path / "s.json", heartbeat=0.02, deadlines={"compiling": 0.15, "running": 3.0})
    status.note = said.append
    status.on(PhaseChanged("compiling", 0))
    facts = wait(lambda facts: facts["overdue"])
    assert facts["state"] == "compiling" and facts["overdue"] == "compiling has taken more than 0.15 s"
    assert 0.15 <= facts["updated"] - facts["since"] < 60
    status.on(PhaseChanged("running", 0))
    assert json.loads((tmp_path / "s.json").read_text())["overdue"] is None
    for n in range(1, 8):
        time.sleep(0.05)
        status.on(step(n))
    assert said == ["note: compiling has taken more than 0.15 s; the run goes on"]
    assert "a step" in wait(lambda facts: facts["overdue"])["overdue"]
    assert wait(lambda _: len(said) == 2) and len(said) == 2
    status.on(step(8))
    assert wait(lambda facts: facts["overdue"] is None)["overdue"] is None
    status.on(Stopped(8, signal.SIGTERM, True))
    status.close()
    assert json.loads((tmp_path / "s.json").read_text())["state"] == "stopped" and len(said) == 2


def test_a_busy_compiler_does_not_stop_the_heartbeat(tmp_path):
    """The phase is one long stretch of Python that never waits: the heartbeat's thread still gets its turn."""
    status = StatusFile(tmp_path / "s.json", heartbeat=0.1)
    status.on(PhaseChanged("compiling", 0))
    gaps, last, until = [], time.time(), time.monotonic() + 1.5
    while time.monotonic() < until:
        sum(i * i for i in range(20_000))
        updated = json.loads((tmp_path / "s.json").read_text())["updated"]
        if updated != last:
            gaps.append(updated - last)
            last = updated
    status.on(Failed(0, "E-X", "m"))
    status.close()
    assert len(gaps) >= 2 and max(gaps) < SILENT


def test_the_status_says_how_compiling_went(tmp_path, monkeypatch, capsys):
    """From the command line the file is there before the program is read, and a mistake in it is in the status."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.lisp").write_text("(defmodel m [x] (linear x))\n")
    seen = []
    original = StatusFile.set

    def spy(self, **facts):
        seen.append(facts.get("state"))
        original(self, **facts)

    monkeypatch.setattr(StatusFile, "set", spy)
    assert perform(["run", "a.lisp", "--status", "s.json"]) == 2
    facts = json.loads((tmp_path / "s.json").read_text())
    code = capsys.readouterr().err
    assert seen[0] == "compiling" and facts["state"] == "failed" and facts["error"]["code"] in code

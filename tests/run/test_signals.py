"""Real processes: SIGTERM, a second one, SIGUSR1, kill -9, two writers, a broken pipe."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_session import go, points, records, weights

from sexpgpu.diagnostics import SexpError

SCRIPT = Path(__file__).with_name("fake_run.py")
ROOT = SCRIPT.parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
FILES = ("checkpoint_dir=ck", "metrics=jsonl:m.jsonl", "status=s.json", "resume=latest")


def start(folder, *words, **keys):
    command = [sys.executable, SCRIPT, folder, *words]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, **keys)


def until(folder, step, process):
    """Waits for the first records of `step`, however long the start takes."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        path = folder / "m.jsonl"
        if path.exists() and f'"step":{step},' in path.read_text():
            return
        time.sleep(0.005)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert go(folder) == 0
    return folder


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
def test_stopped_and_resumed(tmp_path, straight, which):
    process = start(tmp_path, *FILES, "delay=0.01")
    until(tmp_path, 10, process)
    time.sleep(random.random() * 0.3)
    process.send_signal(which)
    _, said = process.communicate(timeout=120)
    if which != signal.SIGKILL:
        assert process.returncode == 4, said
        assert "--resume latest" in said
        assert json.loads((tmp_path / "s.json").read_text())["state"] == "stopped"
        assert records(tmp_path / "m.jsonl")[-1]["event"] == "stopped"
    assert go(tmp_path, resume="latest") == 0
    a, b = weights(straight / "ck/step-60"), weights(tmp_path / "ck/step-60")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert points(tmp_path / "m.jsonl") == points(straight / "m.jsonl")
    assert not list((tmp_path / "ck").glob(".tmp-*"))


def test_without_a_location_and_twice(tmp_path):
    process = start(tmp_path, "metrics=jsonl:m.jsonl", "status=s.json", "delay=0.02", "steps=5000")
    until(tmp_path, 10, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert json.loads((tmp_path / "s.json").read_text())["state"] == "stopped"
    process = start(tmp_path, "metrics=jsonl:n.jsonl", "status=s.json", "checkpoint_dir=ck", "delay=8")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and json.loads((tmp_path / "s.json").read_text())["state"] != "running":
        time.sleep(0.02)
    time.sleep(1.5)  # into the first step: before it, the run would end in good order
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert json.loads((tmp_path / "s.json").read_text())["state"] == "stopped"
    assert not list((tmp_path / "ck").glob("step-*"))


def test_usr1_saves_and_two_writers_are_refused(tmp_path):
    process = start(tmp_path, *FILES, "delay=0.02", "steps=5000")
    until(tmp_path, 10, process)
    with pytest.raises(SexpError) as error:
        go(tmp_path, status=None, metrics=None, resume="latest", steps=10**6)
    assert error.value.diagnostic.code == "E-CKPT-011"
    with pytest.raises(SexpError) as error:
        go(tmp_path, status=None, checkpoint_dir=None)
    assert error.value.diagnostic.code == "E-RUN-014"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 4
    first = json.loads((tmp_path / "s.json").read_text())["checkpoint"]["step"]
    process = start(tmp_path, *FILES, "delay=0.02", "steps=100000", "cadence=1000000")  # no checkpoint but those asked for

    def wait(what):
        end, found = time.monotonic() + 60, {}
        while time.monotonic() < end and process.poll() is None and not what(found):
            time.sleep(0.01)
            found = json.loads((tmp_path / "s.json").read_text())
        assert what(found), found
        return found

    wait(lambda s: s.get("state") == "running" and s["pid"] == process.pid)
    process.send_signal(signal.SIGUSR1)
    saved = wait(lambda s: s and s["checkpoint"]["durable"] and s["checkpoint"]["step"] > first)["checkpoint"]["step"]
    assert (tmp_path / f"ck/step-{saved}/manifest.json").exists()
    wait(lambda s: s.get("step", 0) > saved)  # it goes on
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 4
    steps = {int(p.name[5:]) for p in (tmp_path / "ck").glob("step-*")}
    assert len({step for step in steps if step > first}) == 2  # the one asked for, and the last one


def test_a_broken_pipe_is_quiet(tmp_path):
    process = start(tmp_path, "metrics=stdout", stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert "Broken" not in said and "Traceback" not in said

"""Metrics targets, records, status file, slugs, durations."""

import fcntl
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from sexpgpu.diagnostics import SexpError, entry
from sexpgpu.diagnostics.catalogue import ckpt, data, net, run
from sexpgpu.run.events import PhaseChanged
from sexpgpu.run.metrics import TargetSpec, open_targets, parse_targets
from sexpgpu.run.metrics.record import line_of, metric, tap_name
from sexpgpu.run.signals import parse_duration
from sexpgpu.run.slug import head_of, new_slug, stamp_of
from sexpgpu.run.status import StatusFile

PROGRAM = """(defdata d (csv "d.csv" :fields ((x f32) (y f32))))
(deflayer net (x) (* x (param "w" [] :init ones)))
(defun fit (x y) (mean (square (- (net x) y))))
(import "optim")
(defrun train :data (batches d :batch 2) :loss fit :optimizer (sgd :lr 0.1) :steps 2 :seed 1)
"""


def code_of(call):
    with pytest.raises(SexpError) as error:
        call()
    return error.value.diagnostic.code


def test_syntax():
    assert parse_targets(None) == parse_targets("") == ()
    both = (TargetSpec("jsonl", "/w/a,b.jsonl"), TargetSpec("stdout"))
    assert parse_targets(r"jsonl:a\,b.jsonl, stdout", "/w") == both
    assert parse_targets("syvain: f ,syvain".split(",")[0], "/w") == (TargetSpec("syvain", "f"),)
    for text, code in (("json:x", "E-RUN-011"), ("jsonl", "E-RUN-011"), ("stdout:x", "E-RUN-011"),
                       ("stdout,", "E-RUN-011"), ("stdout,stdout", "E-RUN-012"),
                       ("jsonl:a,jsonl:./a", "E-RUN-012"), ("syvain:", "E-RUN-011"), ("syvain,syvain:f", "E-RUN-012"),
                       ("sylvain", "E-RUN-011")):
        assert code_of(lambda text=text: parse_targets(text, "/w")) == code, text


def test_files_that_cannot_be_used(tmp_path):
    def target(name):
        return lambda: open_targets(parse_targets(f"jsonl:{tmp_path / name}"), "id", None)

    (tmp_path / "plain").write_text("")
    assert code_of(target("plain/where.jsonl")) == "E-RUN-013"
    for name, text in (("notes.txt", "dear diary\n"), ("half.txt", "dear diary"), ("list.json", "[1]\n")):
        (tmp_path / name).write_text(text)
        assert code_of(target(name)) == "E-RUN-013"
        assert (tmp_path / name).read_text() == text
    with open(tmp_path / "live.jsonl", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert code_of(target("live.jsonl")) == "E-RUN-014"
    for t in target("empty.jsonl")():
        t.close()
    assert not (tmp_path / "empty.jsonl").exists()


def test_records():
    assert metric("a", math.nan, 1, {}) | {"time": 0} == {
        "type": "metric", "name": "a", "value": None, "step": 1, "metadata": {}, "nonfinite": "nan", "time": 0}
    assert metric("a", -math.inf, 1, {})["nonfinite"] == "-inf"
    assert json.loads(line_of({"type": "annotation", "text": "a\nü\ud800"}))["type"] == "annotation"
    assert line_of({"text": "a\nb"}).count(b"\n") == 1
    assert tap_name("gpt/block/3/attention/norm") == "attention/norm"
    assert tap_name("gpt/block/3/norm") == "block/norm" and tap_name("norm") == "norm"


def test_status_is_valid_at_every_moment(tmp_path):
    path = tmp_path / "s.json"
    status = StatusFile(path, heartbeat=0.02)
    end = threading.Event()

    def change():
        while not end.is_set():
            status.on(PhaseChanged("running", 3))

    thread = threading.Thread(target=change)
    thread.start()
    first = json.loads(path.read_text())["updated"]
    for _ in range(500):
        json.loads(path.read_text())
    end.set()
    thread.join()
    time.sleep(0.1)
    assert json.loads(path.read_text())["updated"] > first
    status.close()
    assert set(json.loads(path.read_text())) == {
        "state", "slug", "run_id", "run", "step", "steps", "loss", "rate", "eta_seconds", "knobs", "checkpoint",
        "device", "pid", "host", "updated", "error", "since", "overdue", "ranks"}
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_status_not_writable(tmp_path):
    (tmp_path / "plain").write_text("")
    assert code_of(lambda: StatusFile(tmp_path / "plain" / "s.json")) == "E-RUN-020"
    assert code_of(lambda: StatusFile(tmp_path)) == "E-RUN-020"
    assert code_of(lambda: StatusFile(os.devnull)) == "E-RUN-020"


def test_a_status_file_of_two_live_runs(tmp_path):
    path = tmp_path / "s.json"
    other = subprocess.Popen(["sleep", "60"])
    try:
        facts = {"state": "running", "run_id": "a", "updated": time.time(), "pid": other.pid, "host": socket.gethostname()}
        for change, rival in (({}, other.pid), ({"state": "done"}, None), ({"host": "elsewhere"}, None), ({"pid": os.getpid()}, None)):
            path.write_text(json.dumps(facts | change))
            status = StatusFile(path)
            status.close()
            assert status.rival == rival, change
        path.write_text(json.dumps(facts))
        (tmp_path / "a.lisp").write_text(PROGRAM)
        (tmp_path / "d.csv").write_text("x,y\n1,2\n3,4\n")
        done = subprocess.run([sys.executable, "-m", "sexpgpu", "run", "a.lisp", "--status", "s.json"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and f"W-RUN-005] status file of two runs: process {other.pid} writes" in done.stderr, done.stderr
    finally:
        other.kill()
        other.wait()


def test_slugs():
    slug = new_slug("my file", "train", True, 0)
    assert re.fullmatch(r"my-file-train-19700101-000000-[0-9a-f]{4}", slug)
    assert head_of(slug) == "my-file-train" and stamp_of(slug) == "19700101-000000"
    assert len(new_slug("x" * 300, "train", False)) == 120
    assert new_slug("../..", "r", False).startswith("-") is True and head_of("plain") is None


def test_durations():
    for text, seconds in (("3h", 10800), ("90m", 5400), ("45s", 45), ("1h30m", 5400), ("1.5h", 5400)):
        assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "m", "1d", "-1h", "0s", "1m1h", "1 h"])
def test_not_durations(text):
    assert code_of(lambda: parse_duration(text)) == "E-RUN-002"


def test_every_code_has_a_page():
    for module in (data, ckpt, run, net):
        for code, known in module.CODES.items():
            assert entry(code) == known and known.title
            assert "Wrong:" in known.page and "Right:" in known.page and "Why:" in known.page


def test_folders_of_a_metrics_or_status_file_are_made(tmp_path):
    open_targets(parse_targets(f"jsonl:{tmp_path / 'a' / 'b' / 'm.jsonl'}", "/w"), "id", None)
    StatusFile(tmp_path / "c" / "d" / "s.json").close()
    assert (tmp_path / "a/b/m.jsonl").exists() and (tmp_path / "c/d/s.json").exists()

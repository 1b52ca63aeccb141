"""The metrics file under two live readers, and its readers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from support_metrics import RUN, append, note, points, run_record

from sexpgpu.diagnostics import SexpError
from sexpgpu.run.metrics import open_targets, parse_targets
from sexpgpu.run.metrics.read import Tail, read_runs
from sexpgpu.run.metrics.record import metric

READER = """
import json, sys, time
path, wanted = sys.argv[1], int(sys.argv[2])
seen, torn, until = 0, 0, time.monotonic() + 120
with open(path, "rb") as file:
    rest = b""
    while seen < wanted and time.monotonic() < until:
        data = file.read(1 << 16)
        if not data:
            time.sleep(0.002)
            continue
        *lines, rest = (rest + data).split(b"\\n")
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                torn += 1
                continue
            torn += record["seq"] != seen
            seen += 1
print(seen, torn)
"""


def test_100_000_records_and_two_readers(tmp_path):
    """One reader a process that knows nothing of us, one ours: no torn line, no lost record, none twice."""
    count, path = 100_000, tmp_path / "m.jsonl"
    (target,) = open_targets(parse_targets(f"jsonl:{path}"), RUN, None)
    process = subprocess.Popen([sys.executable, "-c", READER, str(path), str(count)], stdout=subprocess.PIPE, text=True)
    ours: list[int] = []

    def follow():
        tail = Tail(path)
        until = time.monotonic() + 120
        while len(ours) < count and time.monotonic() < until:
            records = tail.read()
            ours.extend(r["seq"] for r in records)
            if not records:
                time.sleep(0.002)
        tail.close()

    thread = threading.Thread(target=follow)
    thread.start()
    metadata = {"split": "train", "path": "gpt/block/3/attention/norm"}
    for step in range(count):
        target.write({"type": "metric", "run_id": RUN, "time": 0.5, **metric("attention/norm", step / 7, step, metadata)})
    assert process.communicate(timeout=120)[0].split() == [str(count), "0"]
    thread.join(60)
    target.close()
    assert ours == list(range(count)) and target.trouble == ""


def test_two_writers_are_refused(tmp_path):
    specs = parse_targets(f"jsonl:{tmp_path}/m.jsonl")
    (first,) = open_targets(specs, RUN, None)
    with pytest.raises(SexpError) as caught:
        open_targets(specs, "b" * 32, None)
    assert caught.value.diagnostic.code == "E-RUN-014"
    script = "import sys; from sexpgpu.run.metrics import *; open_targets(parse_targets(sys.argv[1]), 'c', None)"
    done = subprocess.run([sys.executable, "-c", script, f"jsonl:{tmp_path}/m.jsonl"], capture_output=True, text=True)
    assert done.returncode == 1 and "E-RUN-014" in done.stderr
    first.close()
    (again,) = open_targets(specs, RUN, None)
    again.close()


def test_a_line_that_is_not_whole_yet_is_left(tmp_path):
    path = tmp_path / "m.jsonl"
    append(path, points(2))
    tail = Tail(path)
    with path.open("ab") as file:
        file.write(b'{"type":"metric","run_id":"a","name":"loss","step":1,"val')
        file.flush()
        assert len(tail.read()) == 2 and tail.read() == []
        file.write(b'ue":1.0}\nno json\n[1]\n')
    assert [r["value"] for r in tail.read()] == [1.0] and tail.read() == []
    tail.close()


def test_a_line_longer_than_a_block(tmp_path):
    path = tmp_path / "m.jsonl"
    append(path, [note("x" * 3_000_000), *points(1)])
    tail = Tail(path)
    assert [r["type"] for r in tail] == ["annotation", "metric"]
    tail.close()


def test_superseded_records_are_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    append(path, [run_record("start"), *points(6), run_record("resume", supersedes_after=3), *points(2, 4), run_record("done")])
    append(path, [run_record("start", slug="other"), *points(1)], "b" * 32)
    runs = read_runs(path)
    assert list(runs) == [RUN, "b" * 32] and [r.end for r in runs.values()] == ["done", ""]
    assert [m["step"] for m in runs[RUN].metrics] == [1, 2, 3, 4, 5] and runs["b" * 32].slug == "other"

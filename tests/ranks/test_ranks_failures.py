"""A rank that dies, falls silent or differs ends the whole run in time, by name; signals stop all ranks at one step."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_ranks import PROGRAM, Process, alive, hurt, run, status, until, write

from sexpgpu.run import children
from sexpgpu.run.data.manifest.build import build, parse_input

LONG = 1_000_000  # steps


def ended(process: Process, folder: Path, pids: list[int], code: str, *words: str, seconds: float = 60, exit_code: int = 3) -> dict[str, Any]:
    """The run ended with this error, said on standard error and in the status; nothing is left of it. The limits are the judge's, whose
    words say how long it waited; `seconds` leaves a loaded machine time to end processes."""
    begin = time.monotonic()
    assert process.wait(seconds + 10) == exit_code, process.text()
    assert time.monotonic() - begin < seconds
    text = process.text()
    assert f"[{code}]" in text and all(word in text for word in words), text
    assert "Traceback" not in text, text
    assert not alive(pids)
    facts = status(folder)
    assert facts["state"] == "failed" and facts["error"]["code"] == code, facts
    assert all(word in facts["error"]["message"] + str(facts["error"].get("notes")) for word in words), facts["error"]
    return facts


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Process, list[int]]]:
    write(tmp_path, steps=LONG)
    with run(tmp_path) as process:
        until(lambda: (status(tmp_path).get("step") or 0) > 20 and status(tmp_path)["ranks"], process)
        yield process, process.ranks()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run(training, tmp_path, rank):
    process, pids = training
    os.kill(pids[rank], signal.SIGKILL)
    facts = ended(process, tmp_path, pids, "E-RUN-060", f"rank {rank} (node 0, {socket.gethostname()})", "SIGKILL", "last collective")
    assert facts["error"]["rank"] == rank and len(facts["ranks"]) == 2 and facts["step"] > 20
    assert all(any(".py:" in line for line in row["stack"]) for row in facts["ranks"]), facts["ranks"]


def test_a_paused_rank_ends_the_run(tmp_path):
    write(tmp_path, steps=LONG)
    with run(tmp_path, "--deadline", "silent=5s") as process:
        until(lambda: (status(tmp_path).get("step") or 0) > 5, process)
        pids = process.ranks()
        os.kill(pids[1], signal.SIGSTOP)
        ended(process, tmp_path, pids, "E-RUN-061", "rank 1 (node 0", "been silent for", "last collective")


PAUSED = """
import signal, time
from sexpgpu import compiler
real = compiler.train_graph
def pause(*args, **keys):
    time.sleep(2)  # the phase was told
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args, **keys)
compiler.train_graph = pause
"""


def test_a_rank_paused_while_it_compiles_ends_the_run(tmp_path):
    write(tmp_path, steps=LONG)
    with run(tmp_path, "--deadline", "silent=4s", **hurt(tmp_path, 1, PAUSED)) as process:
        pids = until(process.ranks, process)
        ended(process, tmp_path, pids, "E-RUN-061", "rank 1", "compiling")


def test_a_supervisor_that_is_killed_leaves_no_rank(training, tmp_path):
    process, pids = training
    os.kill(pids[1], signal.SIGSTOP)  # also one that could not end itself
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 10
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(pids)


def saved(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "ck").glob("step-*/manifest.json")}


def test_signals_reach_every_rank_at_one_step(tmp_path):
    """SIGUSR1 saves and goes on; SIGTERM saves and stops."""
    write(tmp_path, steps=LONG, every=LONG)
    with run(tmp_path, "--checkpoint-dir", "ck") as process:
        until(lambda: (status(tmp_path).get("step") or 0) > 5, process)
        pids = process.ranks()
        process.process.send_signal(signal.SIGUSR1)
        (first,) = until(lambda: saved(tmp_path), process)
        until(lambda: status(tmp_path)["step"] > int(first.removeprefix("step-")) + 5, process)
        process.process.terminate()
        assert process.wait() == 4, process.text()
        assert not alive(pids)
    assert saved(tmp_path) == {first, f"step-{status(tmp_path)['step']}"}
    assert status(tmp_path)["state"] == "stopped"


HELD = """
from sexpgpu.run.data.manifest import index, reader
from sexpgpu.run.data.place import LocalPlace
import threading
chunks = LocalPlace.chunks
def held(self):
    if "part-00002" in self.path.name:
        threading.Event().wait()
    return chunks(self)
LocalPlace.chunks = held
index.LARGE = reader.LARGE = 0
"""


def test_a_signal_ends_the_wait_of_one_rank_for_a_shard(tmp_path):
    """Rank 1 waits for the third shard and rank 0 for rank 1; the steps before it are saved."""
    program = PROGRAM.replace('(csv "d.csv" :fields ((x f32 [4]) (y f32) (n f32)))', '(manifest "m/data-manifest-v1.json" :fields ((x f32 [4]) (y f32) (n f32)))')
    program = program.replace(" :split ((train 4/5) (valid 1/5))", "").replace(" :shuffle true", "").replace(" :split valid", " :split train").replace(" :every 20", " :every 0")
    write(tmp_path, steps=LONG, every=LONG, program=program)
    rows = [{"x": [i / 50, 0.5, -i / 50, 1.0], "y": i / 60, "n": float(i % 4)} for i in range(64)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build([parse_input(f"train={tmp_path / 'in.jsonl'}")], tmp_path / "m", 16, None)
    with run(tmp_path, "--checkpoint-dir", "ck", XDG_CACHE_HOME=str(tmp_path / "cache"), **hurt(tmp_path, 1, HELD)) as process:
        until(lambda: status(tmp_path).get("step") == 2, process)
        process.process.terminate()
        assert process.wait() == 4, process.text()
    assert saved(tmp_path) == {"step-2"} and status(tmp_path)["state"] == "stopped"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nodes(folders: list[Path], *flags: list[str], **environ: str) -> list[Process]:
    where = f"127.0.0.1:{free_port()}"
    return [run(folder, *more, ranks=1, SEXPGPU_NODES="2", SEXPGPU_NODE_RANK=str(i), SEXPGPU_RENDEZVOUS=where, **environ)
            for i, (folder, more) in enumerate(zip(folders, flags, strict=True))]


def test_another_program_on_a_node_is_refused_by_name(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    write(folders[0])
    write(folders[1], keys=" :keep 7 ")
    a, b = nodes(folders, [], ["--set", "lr=0.5"])
    with a, b:
        for process in (a, b):
            assert process.wait() == 2, process.text()
            text = process.text()
            assert "E-NET-031" in text and "node 1" in text and "knob lr is 0.5" in text and "the text of r.lisp" in text, text


def test_a_node_that_never_comes_is_waited_for_so_long(tmp_path):
    write(tmp_path)
    with run(tmp_path, "--deadline", "rendezvous=3s", ranks=1, SEXPGPU_NODES="2", SEXPGPU_RENDEZVOUS=f"127.0.0.1:{free_port()}") as process:
        assert process.wait() == 2
        assert "[E-NET-030]" in process.text() and "node 1 did not come" in process.text() and "3 s" in process.text()
    with run(tmp_path, "--deadline", "rendezvous=2s", ranks=1, SEXPGPU_NODES="2", SEXPGPU_NODE_RANK="1", SEXPGPU_RENDEZVOUS=f"127.0.0.1:{free_port()}") as process:
        assert process.wait() == 2
        assert "[E-NET-030]" in process.text() and "was not reached" in process.text()


def test_a_batch_that_ranks_do_not_divide_is_refused_once(tmp_path):
    write(tmp_path)
    with run(tmp_path, ranks=3) as process:
        assert process.wait() == 2
        assert process.text().count("E-RUN-104") == 2 and "3 ranks do not divide :batch 16" in process.text(), process.text()
    assert status(tmp_path)["state"] == "failed"


def test_a_rank_without_memory_ends_the_run_by_name(tmp_path):
    """Each evaluation makes a matrix of 100 MB, which no allocator gives out of what it has: the next one after the limit fails."""
    large = '(defun large (x y) (mean (matmul (broadcast (mean x) [5000 4]) (broadcast (mean y) [4 5000]))))\n(defeval valid'
    program = PROGRAM.replace("(defeval valid", large).replace("(weighed weighed)) :weights", "(weighed weighed) (large large)) :weights")
    write(tmp_path, steps=LONG, program=program)
    with run(tmp_path) as process:
        until(lambda: (status(tmp_path).get("step") or 0) > 5, process)
        pids = process.ranks()
        resource.prlimit(pids[1], resource.RLIMIT_AS, (1, 1))
        assert process.wait(40) == 3, process.text()
    text = process.text()
    assert "rank 1" in text and not alive(pids), text


def test_a_signal_before_the_nodes_have_met_ends_at_once(tmp_path):
    write(tmp_path)
    with run(tmp_path, ranks=1, SEXPGPU_NODES="2", SEXPGPU_RENDEZVOUS=f"127.0.0.1:{free_port()}") as process:
        until(lambda: status(tmp_path).get("state"), process)
        process.process.terminate()
        assert process.wait(10) == 143, process.text()
    assert status(tmp_path)["state"] == "stopped"


def test_a_node_whose_supervisor_is_killed_ends_the_other(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write(folder, steps=LONG)
    a, b = nodes(folders, [], [])
    with a, b:
        until(lambda: (status(folders[0]).get("step") or 0) > 5, a)
        pids = a.ranks() + b.ranks()
        b.process.kill()
        assert a.wait(20) == 3, a.text()
    assert "E-RUN-060" in a.text() and "rank 1" in a.text() and not alive(pids), a.text()


def test_files_of_the_folder_are_not_modules(tmp_path):
    """Ranks are processes of their own; a file beside the experiment may have the name of any module."""
    write(tmp_path, steps=3, every=3)
    for name in ("grp", "queue", "csv"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the folder has its own {name}')\n")
    words = [sys.executable, "-P", "-m", "sexpgpu", "run", "r.lisp", "--metrics", ""]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SEXPGPU_")} | {"OMP_NUM_THREADS": "1", "SEXPGPU_DEVICES": "0,1"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "done at step 3" in done.stdout + done.stderr, done.stdout + done.stderr


def test_the_working_directory_is_looked_in_only_where_the_package_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(children.ROOT)
    assert children.python() == [sys.executable]
    monkeypatch.chdir(tmp_path)
    assert children.python() == [sys.executable, "-P"]
    tmp_path.rmdir()
    assert children.python() == [sys.executable, "-P"]

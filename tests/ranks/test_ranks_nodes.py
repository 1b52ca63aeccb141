"""Two nodes in network namespaces of their own, joined by one link. Needs root and iproute2, and fails without them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_ranks import Process, alive, farthest, points, run, status, until, write

PORT = "29517"
LONG = 1_000_000  # steps


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two namespaces, 10.213.7.1 and 10.213.7.2, that reach nothing but each other."""
    assert shutil.which("ip"), "the tests of several nodes need iproute2"
    assert os.geteuid() == 0, "the tests of several nodes need root, for network namespaces"
    a, b = (f"sexpgpu-{os.getpid()}-{n}" for n in "ab")
    made = []
    try:
        for name in (a, b):
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", f"sx{os.getpid()}a", "netns", a, "type", "veth", "peer", "name", f"sx{os.getpid()}b", "netns", b)
        for name, letter, address in ((a, "a", "10.213.7.1/24"), (b, "b", "10.213.7.2/24")):
            ip("-n", name, "addr", "add", address, "dev", f"sx{os.getpid()}{letter}")
            ip("-n", name, "link", "set", f"sx{os.getpid()}{letter}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield a, b
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def node(number: int, folder: Path, space: str, *flags: str, ranks: int = 1, **environ: str) -> Process:
    return run(folder, *flags, ranks=ranks, space=space, SEXPGPU_NODES="2", SEXPGPU_NODE_RANK=str(number), SEXPGPU_RENDEZVOUS=f"10.213.7.1:{PORT}", **environ)


def both(tmp_path: Path, steps: int, keys: str = "") -> list[Path]:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        write(folder, steps=steps, keys=keys)
    return folders


def listening(space: str) -> list[str]:
    """Local addresses of TCP sockets that listen there."""
    out = subprocess.run(["ip", "netns", "exec", space, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()[1:]]
    return [".".join(str(int(r[1][i : i + 2], 16)) for i in (6, 4, 2, 0)) for r in rows if r[3] == "0A"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], Any]:
    """The points of one device, 20 steps."""
    folder = tmp_path_factory.mktemp("one")
    write(folder, steps=20)
    with run(folder, ranks=1) as alone:
        assert alone.wait() == 0, alone.text()
    return points(folder)


def test_two_nodes_train_as_one_device_does_and_a_signal_to_either_stops_both(tmp_path, spaces, one):
    folders = both(tmp_path, LONG)
    with node(0, folders[0], spaces[0], "--checkpoint-dir", "ck") as a, node(1, folders[1], spaces[1], "--checkpoint-dir", "ck") as b:
        until(lambda: (status(folders[0]).get("step") or 0) >= 20, a)
        assert set(listening(spaces[0])) == {"10.213.7.1"} and set(listening(spaces[1])) <= {"10.213.7.2"}
        os.kill(b.pid, signal.SIGTERM)
        assert a.wait() == 4, a.text()
        assert b.wait() == 4, b.text()
    two = points(folders[0])
    assert farthest(one, {k: v for k, v in two.items() if k in one})[0] < 1e-5
    step = status(folders[0])["step"]
    assert [p.name for p in (folders[0] / "ck").glob("step-*")].count(f"step-{step}") == 1 and not (folders[1] / "ck").exists()
    assert not (folders[1] / "m.jsonl").exists()
    assert not listening(spaces[0]) and not listening(spaces[1])


def test_a_link_that_drops_ends_both_nodes_in_time(tmp_path, spaces):
    folders = both(tmp_path, LONG)
    with node(0, folders[0], spaces[0], "--deadline", "silent=6s") as a, node(1, folders[1], spaces[1], "--deadline", "silent=6s") as b:
        until(lambda: (status(folders[0]).get("step") or 0) >= 5, a)
        pids = a.ranks() + b.ranks()
        ip("-n", spaces[1], "link", "set", f"sx{os.getpid()}b", "down")
        begin = time.monotonic()
        assert a.wait(40) == 3, a.text()
        assert b.wait(40) == 3, b.text()
        assert time.monotonic() - begin < 60  # 6 s and what a loaded machine takes
    assert "E-RUN-061" in a.text() and "from node 1" in a.text(), a.text()
    assert "E-RUN-061" in b.text() and "from node 0 at 10.213.7.1" in b.text(), b.text()
    assert not alive(pids) and status(folders[0])["error"]["code"] == "E-RUN-061"


def test_gradients_rounded_between_nodes_train_nearly_the_same(tmp_path, spaces, one):
    folders = both(tmp_path, 20)
    with node(0, folders[0], spaces[0], SEXPGPU_NODE_GRADIENTS="bf16", ranks=2) as a, node(1, folders[1], spaces[1], SEXPGPU_NODE_GRADIENTS="bf16", ranks=2) as b:
        assert a.wait() == 0, a.text()
        assert b.wait() == 0, b.text()
    far = farthest(one, points(folders[0]))[0]
    assert 1e-6 < far < 0.05, far

"""Questions that cannot be answered as they are put, of `doctor`, `explain` and `run`: each has its code and what to do instead."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sexpgpu.cli.main import perform
from sexpgpu.run.ranks.layout import TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "examples/digits.lisp")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("SEXPGPU_") or n in TORCHRUN]:
        monkeypatch.delenv(name)


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a server that answers whatever comes as a web server would."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        try:
            while True:
                sock, _ = listener.accept()
                held.append(sock)
                sock.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n")
        except OSError:  # closed
            return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for sock in held:
        sock.close()


def findings(capsys: Any, *words: str) -> tuple[int, list[dict[str, Any]]]:
    code = perform(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)["findings"]


def told(capsys: Any, *words: str) -> tuple[int, str]:
    code = perform(list(words))
    said = capsys.readouterr()
    return code, said.out + said.err


def test_doctor_divides_the_batch_as_a_run_does(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SEXPGPU_DEVICES", "0,1,2")
    code, found = findings(capsys, DIGITS)
    assert code == 1 and [f["code"] for f in found] == ["E-RUN-104"] and "3 ranks do not divide" in found[0]["message"]


def test_doctor_plans_the_memory_of_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    perform(["doctor", DIGITS, "--json"])
    alone = dict(json.loads(capsys.readouterr().out)["checks"]["program"]["facts"])["memory of run train"]
    monkeypatch.setenv("SEXPGPU_DEVICES", "0,1")
    perform(["doctor", DIGITS, "--json"])
    shared = dict(json.loads(capsys.readouterr().out)["checks"]["program"]["facts"])["memory of run train"]
    assert float(shared.split()[0]) < float(alone.split()[0])


def test_weights_are_of_a_potential(tmp_path: Path, capsys: Any) -> None:
    code, found = findings(capsys, DIGITS, "--weights", str(tmp_path))
    assert code == 1 and [f["code"] for f in found] == ["E-ENV-006"] and "--weights" in found[0]["message"]


def test_local_probes_say_what_to_do(tmp_path: Path, capsys: Any) -> None:
    for location in (f"{tmp_path}/none", "/no-such-file-here", str(tmp_path)):
        code, found = findings(capsys, "--probe-data", location)
        assert code == 1 and found[0]["code"] in ("E-NET-019", "E-NET-024") and found[0]["help"] == ["check the path"], found


def test_a_status_file_has_the_code_that_run_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SEXPGPU_STATUS", str(tmp_path))
    code, found = findings(capsys)
    assert code == 1 and [f["code"] for f in found] == ["E-RUN-020"]


def test_a_finding_names_its_page_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SEXPGPU_DEVICES", "0,0")
    code, text = told(capsys, "doctor")
    assert code == 1 and text.count("sexpgpu explain E-ENV-001") == 1


def test_stages_that_are_equal_are_said_to_be(capsys: Any) -> None:
    assert told(capsys, "explain", DIGITS, "--diff", "forms", "Expanded") == (0, "nothing differs between forms and expanded\n")


@pytest.mark.parametrize(
    "words, said",
    [(["--device", "gpu"], "no such device\n  help: known devices: cpu, h200, cuda\n"),
     (["--assume", "bandwith=1e9"], "there is no number `bandwith` to assume\n  help: did you mean `bandwidth`?\n"),
     (["--assume", "bandwidth"], "expected name=value\n  help: for example --assume bandwidth=2e10\n")],
)  # fmt: skip
def test_devices_and_assumptions(words: list[str], said: str, capsys: Any) -> None:
    code, text = told(capsys, "explain", DIGITS, *words)
    assert code == 2 and said in text


def test_torchrun_beside_our_variables_is_told_before_what_ours_lack(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SEXPGPU_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    for words in (["run", DIGITS], ["doctor", "--distributed"]):
        code, text = told(capsys, *words)
        assert code == 2 and "E-ENV-015" in text and "SEXPGPU_NODES is set" in text and "E-ENV-003" not in text


def test_a_stranger_at_the_rendezvous(stranger: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"SEXPGPU_NODES": "2", "SEXPGPU_NODE_RANK": "1", "SEXPGPU_RENDEZVOUS": f"127.0.0.1:{stranger}"}.items():
        monkeypatch.setenv(name, value)
    code, text = told(capsys, "run", DIGITS)
    assert code == 2 and "E-NET-030" in text and f"what listens at 127.0.0.1:{stranger} is no `sexpgpu` of node 0" in text


def test_a_file_without_a_run_has_no_lines_to_explain_and_would_not_run(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "part.lisp").write_text("(defun twice (x) (* 2 x))\n", "utf-8")
    code, text = told(capsys, "explain", f"{tmp_path}/part.lisp:1")
    assert code == 2 and "E-RUN-103" in text
    code, found = findings(capsys, f"{tmp_path}/part.lisp")
    assert code == 1 and [f["code"] for f in found] == ["E-RUN-103"]

"""Every command, whatever is typed after it: a code or a result, suggestions, JSON lines, terminals and pipes of all kinds."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from cases import CSV, GOOD

from sexpgpu.cli import main
from sexpgpu.diagnostics import Diagnostic, entry
from sexpgpu.doctor import laws

BEYOND = "\u202ea\x1b[31m"


def commands() -> dict[str, click.Command]:
    """Every command and subcommand by the words that call it."""
    found: dict[str, click.Command] = {}
    context = click.Context(main.cli)
    for name in main.cli.list_commands(context):
        command = main.cli.get_command(context, name)
        parts = command.commands if isinstance(command, click.Group) else {}
        found |= {f"{name} {part}": c for part, c in parts.items()} or {name: command}
    return found


COMMANDS = commands()
#: what a command needs beside the file that is wrong, where `{}` stands
LINES = {
    "run": "run {}", "eval": "eval {} --resume ck", "predict": "predict p.lisp f --resume ck/step-3 --input {} --out y.npz", "export": "export {} w.safetensors",
    "data tokenize": "data tokenize {} --vocab 300 --out tok", "data build": "data build {} --out man", "data inspect": "data inspect {}",
    "data verify": "data verify {}", "autopsy": "autopsy {}", "check": "check {}", "explain": "explain {}", "doctor": "doctor {}", "repl": "repl {}",
    "status": "status {}", "profile": "profile {}", "plot": "plot {}", "metrics push": "metrics push {}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SYVAIN_METRICS_API_KEY", "k")
    monkeypatch.setenv("SYVAIN_METRICS_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    (tmp_path / "d.csv").write_text(CSV, "utf-8")
    (tmp_path / "p.lisp").write_text(GOOD, "utf-8")


def perform(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.perform(list(words))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert all(c.isprintable() or c in "\n\r" for c in text), ascii(text)
        assert "Traceback" not in text and "bug in SexpGPU" not in text, text
    return code, out, err


def test_the_lines_are_of_every_command() -> None:
    assert set(LINES) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_suggested_and_errors_are_json_where_asked(capsys: pytest.CaptureFixture[str], name: str) -> None:
    flags = [o for p in COMMANDS[name].params for o in p.opts if o.startswith("--")]
    assert "--json" in flags
    longest = max(flags, key=len)
    code, _, err = perform(capsys, *name.split(), longest[:-2] + longest[-1] + longest[-2])
    assert code == 2 and f"did you mean `{longest}`?" in err
    code, out, err = perform(capsys, *name.split(), "--nothing-like-it", "--json")
    (said,) = [json.loads(line) for line in err.splitlines()]
    assert (code, out, said["code"]) == (2, "", "E-ENV-006")


@pytest.mark.parametrize(("words", "help_"), [
    (["data", "verfy"], "did you mean `verify`?"), (["metrics", "pusch"], "did you mean `push`?"), (["statsu"], "did you mean `status`?"), (["data", "xyz"], "commands: "),
    (["help"], "sexpgpu <command> --help"), (["p.lisp"], "sexpgpu run p.lisp"), (["a b;.lisp"], "sexpgpu run 'a b;.lisp'"), (["e-eval-001"], "sexpgpu explain E-EVAL-001"),
], ids=str)  # fmt: skip
def test_commands_are_suggested(capsys: pytest.CaptureFixture[str], words: list[str], help_: str) -> None:
    code, _, err = perform(capsys, *words)
    assert code == 2 and f"help: {help_}" in err


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("what", ["missing", "nothing", "folder", "fifo", "endless", "binary", "empty", "link", "name"])
def test_files_that_are_not_what_they_should_be(capsys: pytest.CaptureFixture[str], name: str, what: str) -> None:
    path = {"nothing": "", "name": f"{BEYOND}\n{{}}'\"", "endless": "/dev/zero"}.get(what, "wrong")
    if what == "folder":
        Path(path).mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        Path(path).symlink_to(path)
    elif what in ("binary", "empty"):
        Path(path).write_bytes(bytes(range(256)) * 9 if what == "binary" else b"")
    code, out, err = perform(capsys, *(path if word == "{}" else word for word in LINES[name].split()))
    fine = {("empty", c) for c in ("check", "explain", "repl", "doctor", "data tokenize")} | {("nothing", "doctor")}
    if (what, name) not in fine:
        assert code in (1, 2), (out, err)
        codes = [word.split("[")[1].split("]")[0] for word in err.split() + out.split() if word.startswith("error[")]
        assert codes and all(entry(c) is not None for c in codes), (out, err)


def test_doctor_misses_a_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "lark":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("sexpgpu.doctor.settings.version", version)
    code, out, _ = perform(capsys, "doctor")
    assert code == 1 and "E-ENV-011" in out and "-m pip install lark" in out


def test_doctor_says_which_law_of_a_potential_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(name="train", data=SimpleNamespace(source=SimpleNamespace(structures=True)))
    loaded = SimpleNamespace(experiment=SimpleNamespace(runs={"train": run}), ev=SimpleNamespace(main=SimpleNamespace(env=SimpleNamespace(lookup=lambda name: 1))))
    found = [SimpleNamespace(law=law, deviation=d, bound=1e-6, holds=d < 1e-6) for law, d in (("translation", 1e-9), ("rotation", 0.5))]
    monkeypatch.setattr("sexpgpu.doctor.laws.check", lambda make: found)
    ask = SimpleNamespace(file="p.lisp", selection=SimpleNamespace(sets=(), variant=None), weights=None, known={"loaded": loaded})
    (broken,) = [said for said in laws.run(ask) if isinstance(said, Diagnostic)]  # type: ignore[arg-type]
    assert broken.code == "E-RUN-056" and "rotation is off by 5.0e-01" in broken.message and broken.help


def start(*words: str, **more: object) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.Popen([sys.executable, "-c", "from sexpgpu.cli.main import main; main()", *words], **pipes)  # type: ignore[call-overload]


@pytest.mark.parametrize("words", [("explain", "p.lisp", "--ir"), ("check", "p.lisp"), ("run", "--help"), ("repl",)], ids=str)
def test_a_reader_that_goes_away(words: tuple[str, ...]) -> None:
    """`| head`: quiet, and no exit code that means something else (1 would be findings)."""
    reader, writer = os.pipe()
    os.close(reader)
    child = start(*words, stdout=writer)
    os.close(writer)
    _, err = child.communicate(b"(+ 1 2)\n(+ 3 4)\n", timeout=60)
    assert (child.returncode, err) == (0, b"")


@pytest.mark.parametrize("words", [("check", "p.lisp"), ("repl",)], ids=str)
def test_a_full_disk_behind_the_output(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        _, err = start(*words, stdout=full).communicate(b"(+ 1 2)\n", timeout=60)
    assert b"E-ENV-012" in err and b"bug" not in err and b"Traceback" not in err


@pytest.mark.parametrize("words", [("repl",), ("status", "s.json")], ids=str)
def test_ctrl_c(words: tuple[str, ...]) -> None:
    """A command that waits ends quietly at the first Ctrl-C; at a terminal, `status` leaves with what it has."""
    facts = {"state": "running", "slug": "s", "run": "r", "run_id": "i", "step": 1, "steps": 2, "updated": time.time(), "pid": os.getpid(), "host": os.uname().nodename}
    Path("s.json").write_text(json.dumps(facts), "utf-8")
    main_end, child_end = os.openpty()
    quiet = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20"}
    child = start(*words, stdout=child_end, stdin=subprocess.PIPE, env={**os.environ, **quiet})
    os.close(child_end)
    time.sleep(3)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    child.stdin, stdin = None, child.stdin  # the pipe stays open: the signal is what ends it
    _, err = child.communicate(timeout=60)
    stdin.close()  # type: ignore[union-attr]
    said = b""
    try:
        while part := os.read(main_end, 65536):
            said += part
    except OSError:
        pass  # the terminal's other end is closed
    os.close(main_end)
    assert b"Traceback" not in err + said and b"\x1b[3" not in said
    assert child.returncode in (5, 130) if words[0] == "status" else child.returncode in (0, 130), (err, said)

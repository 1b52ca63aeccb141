"""A start: where bytecode is kept, when Python's garbage collector is on, what is imported by the first step, what is made ready ahead."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from sexpgpu.cli import bytecode, device, entry, main
from sexpgpu.run import collector

ROOT = Path(__file__).resolve().parents[2]
FILE = """(import "nn" "optim" "loss")
(defdata pts (csv "d.csv" :fields ((x f32 [2]) (y f32))))
(deflayer net (x) (linear x 1 :name "out"))
(defun fit (x y) (mean (square (- (squeeze (net x) :axis 1) y))))
(defrun r :loss fit :data (batches pts :batch 4) :optimizer (sgd :lr 0.01) :steps 3 :log-every 1 :seed 1)
"""
#: what a run needs none of, unless it is asked for
OTHERS = ("sexpgpu.explain", "sexpgpu.doctor", "sexpgpu.plot", "sexpgpu.potential", "sexpgpu.repl", "sexpgpu.python", "sexpgpu.ase", "sexpgpu.backends.cuda",
          "triton", "matplotlib", "boto3", "requests", "pygments", "prompt_toolkit", "ase", "scipy", "pyarrow")


def clean(**more: str) -> dict[str, str]:
    """The environment without what says where bytecode goes."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONDONTWRITE", "PYTHONPYCACHE", "SEXPGPU_"))}
    return {**plain, "OMP_NUM_THREADS": "1", **more}


# --- bytecode ---


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages before all others, whose torch has no bytecode, under a Python that makes none."""
    package = tmp_path / "image" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(SourceFileLoader, "set_data", SourceFileLoader.set_data)  # as it is now, afterwards
    return package


def test_bytecode_has_a_folder_where_python_makes_none(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "cache" / "sexpgpu" / "bytecode"
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert bytecode.place(environ) == str(where) and where.stat().st_mode & 0o777 == 0o700
    bytecode.keep(environ)
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(where), False)
    assert bytecode.place(environ) is None  # there is a place now
    monkeypatch.setattr(sys, "pycache_prefix", None)
    where.chmod(0o770)
    assert bytecode.place(environ) is None  # others may write there what would be run


def test_what_others_could_change_is_never_run(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder itself and those above it, as they stand and as links show them; bytecode read from there is code."""
    home = tmp_path / "home"
    environ, ours = {"XDG_CACHE_HOME": str(home)}, home / "sexpgpu"
    for number, (place, mode, used) in enumerate((
        (home, 0o777, False),  # anybody may put another `sexpgpu` there
        (home, 0o1777, True),  # as /tmp: what is ours stays
        (home, 0o775, True),  # a group of one's own, under umask 002
        (ours, 0o777, False),
        (ours / "bytecode", 0o755, False),  # folders within may be open: made under the umask
        (ours / "bytecode", 0o1777, False),
        (ours / "bytecode", 0o700, True),
    )):
        assert bytecode.place(environ) == str(ours / "bytecode"), number
        place.chmod(mode)
        assert (bytecode.place(environ) is not None) == used, number
        place.chmod(0o700)
    elsewhere = tmp_path / "open"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    (ours / "bytecode").rmdir()
    (elsewhere / "kept").mkdir(mode=0o700)
    (ours / "bytecode").symlink_to(elsewhere / "kept")
    assert bytecode.place(environ) is None
    elsewhere.chmod(0o755)
    assert bytecode.place(environ) == str(elsewhere / "kept")  # the name that was looked at, not the link
    monkeypatch.setattr(bytecode.os, "geteuid", lambda: os.getuid() + 1)
    assert bytecode.place(environ) is None
    monkeypatch.chdir(tmp_path)
    assert bytecode.place({"XDG_CACHE_HOME": "here"}) is None and not (tmp_path / "here").exists()


def test_half_a_file_of_bytecode_is_none(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full takes the beginning of a file; Python 3.11 keeps that, and ends at it from then on."""
    plain, whole, room = SourceFileLoader.set_data, tmp_path / "a.pyc", [3]

    def full(self: SourceFileLoader, path: str, data: bytes, **more: Any) -> None:
        plain(self, path, data[: room[0]], **more)

    loader = SourceFileLoader("a", str(tmp_path / "a.py"))
    monkeypatch.setattr(bytecode, "_WRITE", lambda *given, **more: full(*given, **more))
    bytecode.keep({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    loader.set_data(str(whole), b"12345")
    assert not whole.exists()
    room[0] = 5
    loader.set_data(str(whole), b"12345")
    assert whole.read_bytes() == b"12345"


def test_bytecode_stays_where_python_has_it(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    beside = Path(cache_from_source(str(image / "__init__.py")))
    beside.parent.mkdir()
    beside.write_bytes(b"")
    assert bytecode.place(environ) is None
    beside.unlink()
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert bytecode.place(environ) is None and not (tmp_path / "cache").exists()
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "file").write_text("")
    assert bytecode.place({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None  # no folder can be made
    assert bytecode.place(environ) is not None


def test_the_command_keeps_its_bytecode(image: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sexpgpu", "--version"]
    paths = os.pathsep.join([str(image.parent), str(ROOT)])
    for more, kept in (({"PYTHONPYCACHEPREFIX": str(tmp_path / "other")}, False), ({}, True)):
        done = subprocess.run(words, env=clean(PYTHONPATH=paths, PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME=str(tmp_path / "cache"), **more),
                              capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 and done.stdout.startswith("sexpgpu "), done.stderr
        names = {path.name.split(".")[0] for path in (tmp_path / "cache").rglob("*.pyc")}
        assert ({"main", "core", "settings"} <= names) if kept else not names
    assert not (tmp_path / "other").exists()  # the user's place and the user's wish not to have any: both stand


# --- a stop during imports, and an end of file, which is none ---


def test_ctrl_c_during_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    for name in ("prepare", "import_module"):
        with monkeypatch.context() as patch:
            patch.setattr(entry, "prepare", lambda: None)
            patch.setattr(entry, name, stopped)
            with pytest.raises(SystemExit) as end:
                entry.main()
            assert end.value.code == 130


def test_an_end_of_file_is_a_bug_and_ctrl_c_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """click makes one exception of both."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(gc, "set_threshold", lambda *limits: None)
    for error, code, said in ((EOFError("marshal data too short"), 70, "marshal data too short"), (KeyboardInterrupt(), 130, "")):

        def broken(*given: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(main, "import_module", broken)
        assert main.perform(["status"]) == code
        told = capsys.readouterr().err
        assert said in told and ("bug" in told) == (code == 70)


# --- the collector, and what is imported ---

WATCH = """
import gc, json, sys
from sexpgpu.cli import entry
from sexpgpu.run import loop
seen, plain = [], loop.settle
def settle():
    before = gc.get_threshold()[0]
    plain()
    seen.append([before, gc.get_threshold()[0], gc.isenabled(), gc.get_freeze_count() > 0])
loop.settle = settle
try:
    entry.main()
except SystemExit as end:
    print(json.dumps({"code": end.code, "seen": seen, "modules": sorted(sys.modules)}))
"""


def test_a_run_collects_garbage_from_its_first_step_and_imports_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "a.lisp").write_text(FILE)
    (tmp_path / "d.csv").write_text("x_0,x_1,y\n" + "".join(f"{i},{i + 1},{i * 2}\n" for i in range(8)))
    done = subprocess.run([sys.executable, "-c", WATCH, "run", "a.lisp"], env=clean(PYTHONPATH=str(ROOT)), cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["code"] == 0, done.stderr
    assert told["seen"][0] == [1_000_000, 100_000, True, True] and len(told["seen"]) >= 2
    assert all(seen == [100_000, 100_000, True, True] for seen in told["seen"][1:])
    assert [name for name in OTHERS if any(m == name or m.startswith(name + ".") for m in told["modules"])] == []


def test_the_start_of_other_commands_is_over_with_their_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector.gc, "freeze", lambda: None)
    context, before = click.Context(main.cli), gc.get_threshold()
    try:
        for name, limit in (("run", collector.START), *((other, collector.STEADY) for other in ("status", "explain", "data"))):
            collector.begin()
            assert main.cli.get_command(context, name) is not None
            assert gc.get_threshold() == limit and gc.isenabled(), name
        gc.set_threshold(7, 7, 7)  # somebody else's: left alone
        collector.settle()
        assert gc.get_threshold() == (7, 7, 7)
    finally:
        gc.set_threshold(*before)


# --- the device ---


class Driver:
    """Stands for CUDA's driver; says what was asked of it."""

    def __init__(self, devices: int = 1, broken: bool = False):
        self.devices, self.broken = devices, broken
        self.asked: list[object] = []

    def cuInit(self, flags: int) -> int:
        self.asked.append("start")
        return 100 if self.broken else 0

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self.devices
        return 0

    def cuDeviceGet(self, handle: object, ordinal: int) -> int:
        self.asked.append(ordinal)
        return 0 if ordinal < self.devices else 101

    def cuDevicePrimaryCtxRetain(self, context: object, handle: object) -> int:
        self.asked.append("context")
        return 0


def woken(monkeypatch: pytest.MonkeyPatch, driver: object, devices: tuple[int, ...] | None = None, ordinal: int | None = None, kind: str = "cuda") -> bool:
    def library(name: str) -> object:
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(device.ctypes, "CDLL", library)
    thread = device.wake(SimpleNamespace(device=kind, devices=devices), ordinal)
    if thread is not None:
        thread.join()
    return thread is not None


def test_a_file_with_a_mistake_does_not_wait_for_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def woken_up(*given: object) -> None:
        sys.exit(9)

    monkeypatch.setattr(device, "wake", woken_up)
    monkeypatch.setattr(gc, "set_threshold", lambda *limits: None)
    (tmp_path / "whole.lisp").write_text(FILE)
    (tmp_path / "half.lisp").write_text(FILE[:-3])
    for name in ("half.lisp", "none.lisp"):
        assert main.perform(["run", str(tmp_path / name), "--device", "cuda"]) == 2
    with pytest.raises(SystemExit, match="9"):
        main.perform(["run", str(tmp_path / "whole.lisp"), "--device", "cuda"])


def test_the_gpu_is_opened_ahead_where_it_is_known_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for driver, devices, ordinal, asked in (
        (Driver(), None, None, ["start", 0, "context"]),
        (Driver(4), None, None, ["start"]),  # which one is asked for later, E-DEV-005
        (Driver(4), (2,), None, ["start", 2, "context"]),
        (Driver(4), (2, 3), 3, ["start", 3, "context"]),
        (Driver(2), (5,), None, ["start", 5]),  # E-DEV-004
        (Driver(1, broken=True), None, None, ["start"]),
    ):
        assert woken(monkeypatch, driver, devices, ordinal)
        assert driver.asked == asked
    assert woken(monkeypatch, OSError("no such library")) and woken(monkeypatch, SimpleNamespace())
    idle = Driver()
    assert not woken(monkeypatch, idle, kind="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not woken(monkeypatch, idle) and idle.asked == []

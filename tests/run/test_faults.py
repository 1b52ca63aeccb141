"""What may go wrong around a run, each through the real command: signals in every phase, disks, reads, clocks, writers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small import manifest, points, run, status, steps, write

from sexpgpu.run.checkpoints.store import Store
from sexpgpu.run.storage.file import FolderStorage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    assert run(folder) == 0
    return folder


def same_as(whole: Path, folder: Path) -> None:
    assert manifest(folder, 20)["digest"] == manifest(whole, 20)["digest"]
    assert points(folder) == points(whole)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


#: phase -> (what is called in it, on which of its calls the signal falls)
PHASES = {
    "starting": ("sexpgpu.run.session.choose", 1),
    "compiling": ("sexpgpu.compiler.stages", 1),
    "running": ("sexpgpu.backends.interpreter.program.InterpreterProgram.step", 7),
    "evaluating": ("sexpgpu.backends.interpreter.program.InterpreterProgram.evaluate", 1),
    "saving": ("sexpgpu.run.checkpoints.store.Store.save", 2),
}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_every_phase(tmp_path, whole, monkeypatch, capsys, phase, signum):
    name, nth = PHASES[phase]
    place, attribute = name.rsplit(".", 1)
    owner = _resolve(place)
    real, calls = getattr(owner, attribute), []

    def signalled(*args, **keys):
        calls.append(1)
        if len(calls) == nth:
            send(signum)
        return real(*args, **keys)

    monkeypatch.setattr(owner, attribute, signalled)
    write(tmp_path)
    assert run(tmp_path) == 4, capsys.readouterr().err
    monkeypatch.undo()
    said = status(tmp_path)
    assert said["state"] == "stopped" and said["checkpoint"] == {
        "location": str(tmp_path / "ck"), "step": said["step"], "durable": True}
    assert steps(tmp_path)[-1] == said["step"] < 20
    if phase == "evaluating":
        assert manifest(tmp_path, 10)["owed"] == ["valid"]
    assert run(tmp_path, "--resume", "latest") == 0
    same_as(whole, tmp_path)


def _resolve(path: str):
    from importlib import import_module

    try:
        return import_module(path)
    except ModuleNotFoundError:
        place, _, attribute = path.rpartition(".")
        return getattr(_resolve(place), attribute)


def test_a_second_signal_while_a_checkpoint_is_written_commits_nothing(tmp_path, whole, monkeypatch):
    began, sent, real = threading.Event(), threading.Event(), FolderStorage.put

    def slow(self, name, data, **keys):
        if name.startswith("step-20/part"):
            began.set()
            sent.wait(60)
            time.sleep(1.0)  # the signal is being acted on
        return real(self, name, data, **keys)

    def twice():
        began.wait(60)
        send(signal.SIGTERM)
        time.sleep(0.5)  # two that come together are one to Python
        send(signal.SIGTERM)
        sent.set()

    monkeypatch.setattr(FolderStorage, "put", slow)
    threading.Thread(target=twice, daemon=True).start()
    write(tmp_path)
    assert run(tmp_path) == 143
    assert status(tmp_path)["state"] == "stopped" and status(tmp_path)["checkpoint"]["step"] == 15
    time.sleep(1.5)
    assert steps(tmp_path) == [5, 10, 15]
    monkeypatch.undo()
    assert run(tmp_path, "--resume", "latest") == 0
    same_as(whole, tmp_path)
    assert not (list((tmp_path / "ck").rglob(".tmp-*")))


def failing(monkeypatch, number: int, when) -> None:
    """`os.fsync` fails with this errno for the checkpoint steps that `when` holds of."""
    real = os.fsync

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        parts = [p for p in Path(path).parts if p.startswith("step-")]
        if parts and when(int(parts[0][5:])):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO])
def test_a_disk_that_fails_for_a_while(tmp_path, whole, monkeypatch, capsys, number):
    write(tmp_path)
    failing(monkeypatch, number, lambda step: step == 10)
    assert run(tmp_path) == 0
    said = capsys.readouterr().err
    assert "E-CKPT-012" in said and os.strerror(number) in said and "step 10" in said and "help:" in said
    assert steps(tmp_path) == [5, 15, 20]
    same_as(whole, tmp_path)


def test_a_disk_that_is_full_at_the_end(tmp_path, whole, monkeypatch, capsys):
    write(tmp_path)
    failing(monkeypatch, errno.ENOSPC, lambda step: step > 10)
    assert run(tmp_path) == 3
    said = capsys.readouterr().err
    assert "error[E-CKPT-012]" in said and ":keep 1" in said and "MiB" in said
    found = status(tmp_path)
    assert found["state"] == "failed" and found["error"]["code"] == "E-CKPT-012"
    assert found["checkpoint"]["step"] == 10 == steps(tmp_path)[-1]
    assert not [p for p in (tmp_path / "ck").rglob("*") if "step-15" in str(p) or "step-20" in str(p)]
    monkeypatch.undo()
    assert run(tmp_path, "--resume", "latest") == 0
    same_as(whole, tmp_path)


def test_stopped_by_a_signal_with_a_full_disk_is_3(tmp_path, monkeypatch):
    write(tmp_path)
    failing(monkeypatch, errno.ENOSPC, lambda step: True)
    place = "sexpgpu.backends.interpreter.program.InterpreterProgram"
    real, calls = _resolve(place).step, []

    def step(program, batch, logged):
        calls.append(1)
        if len(calls) == 7:
            send(signal.SIGTERM)
        return real(program, batch, logged)

    monkeypatch.setattr(f"{place}.step", step)
    assert run(tmp_path) == 3
    assert steps(tmp_path) == [] and status(tmp_path)["checkpoint"]["durable"] is False


def mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True).returncode == 0


def test_a_real_disk_that_is_full_or_read_only(tmp_path, capsys):
    write(tmp_path)
    disk = tmp_path / "disk"
    if not mounted(disk, "64k"):
        pytest.skip("needs the right to mount a small disk")
    try:
        assert run(tmp_path, location="disk/ck") == 3  # a checkpoint has about 20 KiB: three have no room
        said = capsys.readouterr().err
        assert "No space left on device" in said and ":keep 1" in said
        assert steps(tmp_path, "disk/ck")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert run(tmp_path, "--resume", "latest", location="disk/ck") == 2
        assert "E-CKPT-010" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_limit_on_the_size_of_files(tmp_path):
    write(tmp_path, keys=" :keep 1")
    text = (tmp_path / "r.lisp").read_text().replace("(defknob width 4", "(defknob width 20000")
    (tmp_path / "r.lisp").write_text(text)
    command = f"ulimit -f 100; exec {sys.executable} -m sexpgpu run r.lisp --checkpoint-dir ck --steps 3"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 3 and "ulimit -f unlimited" in done.stderr, done.stderr
    assert steps(tmp_path) == []


def test_reads_that_end_early_or_give_other_bytes(tmp_path, whole, monkeypatch, capsys):
    write(tmp_path)
    assert run(tmp_path) == 0
    real = FolderStorage.stream

    def cut(self, name, start=0, stop=None):
        blocks = list(real(self, name, start, stop))
        if "step-20" in self.url and name.startswith("part") and start == 0 and stop is None:
            blocks[-1] = blocks[-1][:-4]
        yield from blocks

    monkeypatch.setattr(FolderStorage, "stream", cut)
    assert run(tmp_path, "--resume", str(tmp_path / "ck/step-20"), location=None) == 2
    assert "E-CKPT-002" in capsys.readouterr().err
    assert run(tmp_path, "--resume", "latest") == 0
    said = capsys.readouterr().err
    assert "step-20 is not a whole checkpoint" in said and "instead of" in said and "after step 15" in said
    monkeypatch.undo()
    same_as(whole, tmp_path)


def test_a_state_that_is_not_the_one_of_its_manifest(tmp_path, capsys):
    write(tmp_path)
    assert run(tmp_path) == 0
    path = tmp_path / "ck/step-20/manifest.json"
    path.write_text(path.read_text().replace(manifest(tmp_path, 20)["digest"], "0" * 64))
    assert run(tmp_path, "--resume", "latest", "--steps", "25") == 2
    said = capsys.readouterr().err
    assert "E-CKPT-002" in said and "digest" in said


def test_clocks_that_jump(tmp_path, whole, monkeypatch):
    real, jumps = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 86400.0 * 400)
    write(tmp_path)
    assert run(tmp_path, "--steps", "12") == 0
    assert run(tmp_path, "--resume", "latest", "--max-time", "10m") == 0
    monkeypatch.undo()
    assert manifest(tmp_path, 20)["digest"] == manifest(whole, 20)["digest"]


def test_two_writers(tmp_path, capsys):
    write(tmp_path)
    store = Store(str(tmp_path / "ck"), {"run_id": "other", "slug": "other"})
    try:
        assert run(tmp_path) == 2
        assert "E-CKPT-011" in capsys.readouterr().err
    finally:
        store.close()
    assert run(tmp_path) == 0


def test_a_run_that_ended_while_another_one_started(tmp_path, monkeypatch, capsys):
    """The second one saw an empty location; when it may write there, there are checkpoints of the first one."""
    write(tmp_path)
    session = _resolve("sexpgpu.run.session")
    real = session.Store

    def late(location, owner, say):
        monkeypatch.setattr(session, "Store", real)
        assert run(tmp_path, "--steps", "3") == 0
        return real(location, owner, say)

    monkeypatch.setattr(session, "Store", late)
    assert run(tmp_path) in (2, 3)
    assert "E-CKPT-007" in capsys.readouterr().err
    assert steps(tmp_path) == [3]

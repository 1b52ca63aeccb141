"""Checkpoints in a local folder: written aside, synced, then renamed, so that a crash leaves the old ones whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from sexpgpu.diagnostics import fail

STEP = re.compile(r"step-(0|[1-9]\d{0,17})", re.ASCII)
_LOCK = ".lock"


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def step_folders(root: Path) -> dict[int, Path]:
    """step -> folder, by number; empty where there is no such location. Raises OSError where it cannot be read."""
    if not root.exists():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := STEP.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


class FileStore:
    """One location, this process its only writer; E-CKPT-010 if it cannot be made, E-CKPT-011 if it is taken."""

    def __init__(self, root: Path):
        self.root = root
        self._made = not root.exists()
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            fail("E-CKPT-010", f"the checkpoint location {root} cannot be written: {error.strerror or error}",
                 help="name a folder that you may write to")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            fail("E-CKPT-011", f"another run that is still alive writes checkpoints to {root}",
                 help="wait for it, stop it, or put {slug} in the location: one folder a run")
        for left in root.glob(".tmp-*"):  # of a process that was killed: we hold the lock, so nobody writes them
            shutil.rmtree(left, ignore_errors=True)

    def stage(self, step: int) -> Path:
        """A new folder beside the checkpoints, not seen as one."""
        path = self.root / f".tmp-step-{step}-{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def publish(self, stage: Path, step: int) -> Path:
        """The staged folder, its files synced, as `step-<n>`; one of that name is replaced."""
        sync_file(stage)
        final = self.root / f"step-{step}"
        if final.exists():
            self.remove(step)
        os.rename(stage, final)
        sync_file(self.root)
        return final

    def remove(self, step: int) -> None:
        """Renamed first: a crash in the middle leaves no torn checkpoint behind."""
        trash = self.root / f".tmp-removed-{step}-{os.getpid()}"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(self.root / f"step-{step}", trash)
        shutil.rmtree(trash, ignore_errors=True)

    def close(self) -> None:
        """Gives the lock back; a location this process made and never used goes away again."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if self._made and [p.name for p in self.root.iterdir()] == [_LOCK]:
                (self.root / _LOCK).unlink()
                self.root.rmdir()
        os.close(self._fd)
        self._fd = -1

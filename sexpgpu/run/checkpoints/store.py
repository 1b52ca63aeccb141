"""Writing and reading checkpoints over a storage: the parts, verified, then the manifest, then what retention removes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.run.checkpoints.find import ROLE, Found, step_sizes, whole
from sexpgpu.run.checkpoints.header import unreadable
from sexpgpu.run.checkpoints.manifest import NAME, Manifest, Torn, read_file
from sexpgpu.run.checkpoints.tensors import (
    decode,
    encode,
    groups,
    health,
    state_digest,
)
from sexpgpu.run.checkpoints.writer import Cancel
from sexpgpu.run.storage import Buffer, Storage, StorageError, Taken, open_storage

_PART = re.compile(r"part-\d{5}-of-\d{5}.*\.safetensors", re.ASCII)
#: what the system says -> what mends it
_MENDS = {
    errno.ENOSPC: "free some space there (this checkpoint has {size}), or keep fewer: `:keep 1` in the run",
    errno.EDQUOT: "the quota is used up: remove something of yours (this checkpoint has {size}), or keep fewer: `:keep 1`",
    errno.EFBIG: "the limit on a file's size is below {size}: ulimit -f unlimited",
    errno.EROFS: "the disk has become read-only; name a folder on another one with --checkpoint-dir",
    errno.EACCES: "the folder may no longer be written: chmod u+rwx it",
}


class Store:
    """A location of which this process is the only writer: E-CKPT-010 if it cannot be made, E-CKPT-011 if it is taken."""

    def __init__(self, location: str, owner: Mapping[str, Any], say: Callable[[str], None] = lambda text: None):
        self.storage: Storage = open_storage(location, ROLE)
        self._unused = Path(location) if self.storage.scheme == "file" and not Path(location).exists() else None
        try:
            self._hold = self.storage.hold(owner, say)
            self.storage.sweep()
        except Taken:
            raise
        except StorageError as error:
            if self.storage.scheme != "file":
                raise
            raise problem("E-CKPT-010", f"the checkpoint location {location} cannot be written: {error.reason}",
                          help="name a folder that you may write to") from None

    @property
    def url(self) -> str:
        return self.storage.url

    def save(self, state: Mapping[str, torch.Tensor], manifest: Manifest, keep: int, cancel: Cancel) -> str:
        """Writes `step-<n>` durably and prunes to `keep`; returns its health. `state`: contiguous CPU tensors.

        `digest`, `health` and `files` of the manifest are filled in here. Raises E-CKPT-012 (exit 3); then the
        checkpoints of other steps are as they were.
        """
        written: list[str] = []
        size = sum(t.numel() * t.element_size() for t in state.values())
        try:
            filled = replace(manifest, digest=state_digest(state), health=health(state),
                             files=self._parts(manifest.step, state, written))
            cancel.check()
            self._hold.check()
            self._put(f"step-{manifest.step}/{NAME}", [filled.to_json().encode()])
        except StorageError as error:
            with contextlib.suppress(StorageError):
                self.storage.delete(written)
            raise self._not_written(manifest.step, size, error) from None
        self._unused = None
        with contextlib.suppress(SexpError):  # only room: the next save tries again
            self._tidy(manifest.step, {entry["name"] for entry in filled.files})
            prune(self.storage, manifest.run_id, manifest.step, keep, None if manifest.best is None else manifest.best["step"])
        return filled.health

    def close(self) -> None:
        """Gives the location back; one this process made and never used goes away again."""
        self._hold.release()
        if self._unused is not None:
            with contextlib.suppress(OSError):
                for name in os.listdir(self._unused):
                    if name.startswith("."):
                        (self._unused / name).unlink()
                self._unused.rmdir()
        self.storage.close()

    def _parts(self, step: int, state: Mapping[str, torch.Tensor], written: list[str]) -> list[dict[str, object]]:
        if self.storage.head(f"step-{step}/{NAME}") is not None:  # of a dead branch: without it the rest is nothing
            self.storage.delete([f"step-{step}/{NAME}"])
        entries: list[dict[str, object]] = []
        cut = groups(state)
        for i, group in enumerate(cut, 1):
            name = self.storage.unique(f"step-{step}/part-{i:05d}-of-{len(cut):05d}.safetensors")
            written.append(name)
            size, digest = self._put(name, encode(group))
            entries.append({"name": name.partition("/")[2], "size": size, "sha256": digest})
        return entries

    def _put(self, name: str, pieces: Sequence[Buffer]) -> tuple[int, str]:
        """Size and SHA-256 of an object that is durable and was verified: in a folder it is read again; a bucket
        compares a checksum with every part it is sent, and says the size."""
        digest, size = hashlib.sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
        entry = self.storage.put(name, pieces)
        wrong = entry.size != size
        if self.storage.scheme == "file":
            again = hashlib.sha256()
            for block in self.storage.stream(name):
                again.update(block)
            wrong = wrong or again.digest() != digest.digest()
        if wrong:
            raise StorageError(problem("E-CKPT-012", f"{self.url}/{name} reads back as something else",
                                       help="the disk may be failing", exit_code=3).diagnostic, "what was written reads back as something else")
        return size, digest.hexdigest()

    def _tidy(self, step: int, names: set[str]) -> None:
        """What an earlier attempt at this step left beside its files."""
        left = [n for n in step_sizes(self.storage).get(step, {}) if n not in names and _PART.fullmatch(n)]
        self.storage.delete(f"step-{step}/{name}" for name in left)

    def _not_written(self, step: int, size: int, error: StorageError) -> SexpError:
        number = getattr(error.__context__, "errno", None)
        said = f"{size / 2**20:,.1f} MiB"
        mend = _MENDS.get(number or 0, "see to the reason, then go on with --resume latest").format(size=said)
        return problem("E-CKPT-012", f"the checkpoint of step {step} in {self.url} could not be written: {error.reason}",
                       notes=error.diagnostic.notes, help=(*error.diagnostic.help, mend), exit_code=3)


def prune(storage: Storage, run_id: str, step: int, keep: int, best: int | None = None) -> None:
    """Leaves of this run's line up to `step` the newest `keep`, the newest healthy one and the one of step `best`.

    What another run wrote is never touched. Of this run's own beyond `step`, which a resume from an older one left
    behind, those that are suspect go; so do folders without a manifest, which a killed writer left.
    """
    found = [f for f in whole(storage)[0] if f.manifest.run_id == run_id]
    line = [f for f in found if f.manifest.step <= step]
    stays = {f.manifest.step for f in line[: max(1, keep)]} | {best}
    stays |= {f.manifest.step for f in [f for f in line if f.manifest.health == "healthy"][:1]}
    gone = [f.manifest.step for f in line if f.manifest.step not in stays]
    gone += [f.manifest.step for f in found if f.manifest.step > step and f.manifest.health != "healthy" and f.manifest.step != best]
    sizes = step_sizes(storage)
    gone += [n for n, names in sizes.items() if n < step and NAME not in names and all(_PART.fullmatch(x) for x in names)]
    for number in gone:
        names = sizes.get(number, {})
        storage.delete([f"step-{number}/{NAME}"] if NAME in names else [])  # first: a crash leaves no torn checkpoint behind
        storage.delete(f"step-{number}/{name}" for name in names if name != NAME)


def load(found: Found) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint whose schema was compared, the digest of the whole state computed anew.

    Raises E-CKPT-002 where a file or that digest is not the manifest's.
    """
    state = dict(tensors(found))
    digest = state_digest(state)
    if digest != found.manifest.digest:
        raise problem("E-CKPT-002", f"the state in {found.folder} has the digest {digest[:12]}…, its manifest says "
                      f"{found.manifest.digest[:12]}…", help="--resume latest takes the newest whole one of a location")
    return state


def tensors(found: Found) -> Iterator[tuple[str, torch.Tensor]]:
    """Each file is whole and its SHA-256 compared before anything of it is parsed. Raises E-CKPT-002."""
    for entry in found.manifest.files:
        try:
            data = found.files.pop(entry["name"], None)  # gone after this: the tensors keep it
            yield from decode(read_file(found.place, entry) if data is None else data)
        except (Torn, ValueError, KeyError, TypeError, RecursionError) as error:
            raise unreadable(found, entry, error) from None

"""Which checkpoint a run goes on from, and whether a location is free: the rules of contracts.md, Checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sexpgpu.diagnostics import SexpError, fail
from sexpgpu.run.checkpoints.manifest import NAME, Manifest, Torn, read_manifest, verify
from sexpgpu.run.slug import head_of, stamp_of
from sexpgpu.run.storage import resolve
from sexpgpu.run.storage.file import step_folders


@dataclass(frozen=True)
class Found:
    """A whole checkpoint (hashes verified). `folder` is `<location>/step-<n>`."""

    folder: Path
    manifest: Manifest

    @property
    def location(self) -> Path:
        return self.folder.parent


@dataclass(frozen=True)
class Wanted:
    """What is asked for: flags as given, the folder relative paths go by, and the heads a slug of this run may have."""

    resume: str | None
    location: str | None
    folder: str | Path
    heads: tuple[str, ...]
    run: str


@dataclass(frozen=True)
class Choice:
    """`found` None: start at step 0. `location` None: no checkpoints are written; it may still hold `{slug}`."""

    found: Found | None
    location: Path | None
    notes: tuple[str, ...] = ()


def choose(wanted: Wanted) -> Choice:
    """Where to start and where to save; every rule about resuming but those that need the program."""
    location = resolve(wanted.location, wanted.folder) if wanted.location else None
    if wanted.resume is None:
        if location is not None and "{slug}" not in str(location):
            _refuse_taken(location)
        return Choice(None, location)
    if wanted.resume == "latest":
        if location is None:
            fail("E-CKPT-004", "`--resume latest` looks in the checkpoint location, and none is given",
                 help="add --checkpoint-dir, or name a checkpoint: --resume PATH/step-100")
        return _latest(wanted, location)
    found = at_path(resolve(wanted.resume, wanted.folder))
    if location is not None:
        location = Path(str(location).replace("{slug}", found.manifest.slug))
        _refuse_fork(found, location)
    return Choice(found, location)


def at_path(path: Path) -> Found:
    """The checkpoint a person named: E-CKPT-001 if there is none, E-CKPT-002 if it is not whole."""
    if not (path / NAME).exists():
        try:
            steps = step_folders(path)
        except OSError as error:
            fail("E-CKPT-001", f"{path} cannot be read: {error.strerror or error}")
        if steps:
            newest = steps[max(steps)]
            fail("E-CKPT-001", f"{path} is a location with checkpoints, not one checkpoint",
                 help=(f"--resume latest --checkpoint-dir {path}", f"--resume {newest}"))
        fail("E-CKPT-001", f"there is no checkpoint at {path}" if not path.exists() else f"{path} has no {NAME}")
    try:
        manifest = read_manifest(path)
        verify(path, manifest)
    except Torn as torn:
        fail("E-CKPT-002", f"the checkpoint {path} is not whole: {torn}",
             help="--resume latest takes the newest whole one of a location")
    return Found(path, manifest)


def whole(location: Path) -> tuple[list[Found], list[str]]:
    """Checkpoints with a valid manifest and files of the right sizes, newest first; and a line for each other one."""
    found, notes = [], []
    try:
        folders = step_folders(location)
    except OSError as error:
        fail("E-CKPT-005", f"the checkpoint location {location} cannot be read: {error.strerror or error}")
    for _, folder in sorted(folders.items(), reverse=True):
        try:
            found.append(Found(folder, read_manifest(folder)))
        except Torn as torn:
            notes.append(f"{folder} is not a whole checkpoint: {torn}")
    return found, notes


def _latest(wanted: Wanted, location: Path) -> Choice:
    places: Iterable[Path] = [location]
    if "{slug}" in str(location):
        places = _slug_folders(location)
    notes: list[str] = []
    suspects: list[Path] = []
    for place in places:
        candidates, torn = whole(place)
        notes += torn
        if candidates and "{slug}" in str(location) and not _is_ours(candidates[0].manifest, wanted):
            continue
        owner = candidates[0].manifest.run_id if candidates else None
        for candidate in candidates:
            if candidate.manifest.run_id != owner:
                continue
            if candidate.manifest.health != "healthy":
                suspects.append(candidate.folder)
                notes.append(f"{candidate.folder} is suspect (not every number is finite): passed over")
                continue
            try:
                verify(candidate.folder, candidate.manifest)
            except Torn as why:
                notes.append(f"{candidate.folder} is not a whole checkpoint: {why}")
                continue
            return Choice(candidate, place, tuple(notes))
        if suspects:
            fail("E-CKPT-006", f"every whole checkpoint in {place} is suspect", notes=notes,
                 help=f"look into it, then resume from one by name: --resume {suspects[0]}")
    notes.append(f"no checkpoint in {location}: starting at step 0")
    return Choice(None, location, tuple(notes))


def _slug_folders(pattern: Path) -> list[Path]:
    """Folders that match a location with `{slug}`, the newest run first (by the time in its slug)."""
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if "{slug}" in part)
    base = Path(*parts[:first])
    if not base.is_dir():
        return []
    slug = "(?P<slug>[A-Za-z0-9._-]+)"
    name = re.compile(re.escape(parts[first]).replace(re.escape("{slug}"), slug, 1))
    found = []
    try:
        for folder in base.iterdir():
            match = name.fullmatch(folder.name)
            if match and folder.is_dir():
                rest = [part.replace("{slug}", match["slug"]) for part in parts[first + 1 :]]
                found.append((stamp_of(match["slug"]), folder.stat().st_mtime_ns, folder.joinpath(*rest)))
    except OSError as error:
        fail("E-CKPT-005", f"the checkpoint location {base} cannot be read: {error.strerror or error}")
    return [path for _, _, path in sorted(found, reverse=True)]


def _is_ours(manifest: Manifest, wanted: Wanted) -> bool:
    return manifest.run == wanted.run and head_of(manifest.slug) in wanted.heads


def _refuse_taken(location: Path) -> None:
    found, _ = whole(location)
    if found:
        slug = found[0].manifest.slug
        fail("E-CKPT-007", f"{location} holds checkpoints of another run, `{slug}`",
             help=("go on with it: --resume latest", "or give each run its own folder: --checkpoint-dir 'PATH/{slug}'"))


def _refuse_fork(found: Found, location: Path) -> None:
    if found.location.resolve() != location.resolve():
        fail("E-CKPT-008", f"the checkpoint lies in {found.location}, but new ones would go to {location}; "
             "such a fork comes in a later version", help=f"--checkpoint-dir {found.location}, or leave it out")
    newer = [f for f in whole(location)[0] if f.manifest.step > found.manifest.step]
    if newer:
        fail("E-CKPT-009", f"{location} has newer checkpoints, up to step {newer[0].manifest.step}; going on from step "
             f"{found.manifest.step} would mix two histories",
             help=("--resume latest goes on from the newest", "without --checkpoint-dir nothing is saved"))


def stored_threads(wanted: Wanted) -> int | None:
    """The thread count a resume re-uses, for whoever must set it before torch is imported.

    None at a first start, and where `choose` fails: `session.execute` says why, in its own turn.
    """
    if wanted.resume is None:
        return None
    try:
        found = choose(wanted).found
    except SexpError:
        return None
    return found.manifest.threads if found is not None else None

"""Which checkpoint a run goes on from, and whether a location is free: the rules of contracts.md, Checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from sexpgpu.diagnostics import fail
from sexpgpu.run.checkpoints.manifest import NAME, Manifest, Torn, read_files, read_manifest
from sexpgpu.run.slug import head_of, stamp_of
from sexpgpu.run.storage import Storage, StorageError, open_storage, split

STEP = re.compile(r"step-(0|[1-9]\d{0,17})", re.ASCII)
ROLE = "checkpoint"
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A whole checkpoint. `place` is `<location>/step-<n>`; `folder` and `location` are how a person writes them.

    `files`: those that were read and verified already, until `store.tensors` takes them: a checkpoint crosses a network once.
    """

    place: Storage
    manifest: Manifest
    files: dict[str, bytearray] = field(default_factory=dict, compare=False, repr=False)

    @property
    def folder(self) -> str:
        return self.place.url

    @property
    def location(self) -> str:
        return self.place.url.rstrip("/").rpartition("/")[0]


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
    """`found` None: start at step 0. `location` None: no checkpoints are written; it may still hold `{slug}`.

    `fork`: the checkpoint is of another location, and a new run begins from it. `steps`: which ones had a manifest in the
    location of the run that goes on, when it was chosen.
    """

    found: Found | None
    location: str | None
    notes: tuple[str, ...] = ()
    fork: bool = False
    steps: frozenset[int] = frozenset()


def absolute(location: str, folder: str | Path = ".") -> str:
    """The location as it is written everywhere: an absolute path, or a URL."""
    scheme, rest = split(location, folder)
    return rest if scheme == "file" else f"{scheme}://{rest}"


def choose(wanted: Wanted, read: bool = True) -> Choice:
    """Where to start and where to save; every rule about resuming but those that need the program.

    The chosen one is read and verified, unless `read` is false: then its manifest and its files' sizes say that it is whole.
    """
    location = absolute(wanted.location, wanted.folder) if wanted.location else None
    if wanted.resume is None:
        if location is not None and "{slug}" not in location:
            refuse_taken(location)
        return Choice(None, location)
    if wanted.resume == "latest":
        if location is None:
            fail("E-CKPT-004", "`--resume latest` looks in the checkpoint location, and none is given",
                 help="add --checkpoint-dir, or name a checkpoint: --resume PATH/step-100")
        return _latest(wanted, location, read)
    found = at_path(absolute(wanted.resume, wanted.folder), read)
    if location is None:
        return Choice(found, None)
    filled = location.replace("{slug}", found.manifest.slug)
    if _same(found.location, filled):
        steps = steps_at(filled)
        _refuse_older(found, filled)
        return Choice(found, filled, steps=steps)
    if "{slug}" not in location:
        refuse_taken(location)
    return Choice(found, location, fork=True)


def moved_on(choice: Choice) -> bool:
    """Whether the location is not as it was when `choice` was made: its writer wrote on before it ended. To be asked
    once nobody else can write there."""
    return choice.location is not None and not choice.fork and steps_at(choice.location) != choice.steps


def steps_at(location: str) -> frozenset[int]:
    """The steps with a manifest, by one listing."""
    storage = open_storage(location, ROLE)
    return _readable(storage, lambda: frozenset(step for step, names in step_sizes(storage).items() if NAME in names), frozenset())


def at_path(path: str | Path, read: bool = True) -> Found:
    """The checkpoint a person named: E-CKPT-001 if there is none, E-CKPT-002 if it is not whole."""
    place = open_storage(str(path), ROLE)
    try:
        if place.head(NAME) is None:
            _no_checkpoint(place)
        manifest = read_manifest(place)
        files = read_files(place, manifest) if read else {}
    except Torn as torn:
        location = place.url.rstrip("/").rpartition("/")[0]
        fail("E-CKPT-002", f"the checkpoint {place.url} is not whole: {torn}",
             help=f"the newest whole one of its location: --resume latest --checkpoint-dir {location}")
    except StorageError as error:
        if place.scheme != "file":
            raise
        fail("E-CKPT-001", f"{place.url} cannot be read: {error.reason}", help="name a folder step-<n> with a manifest.json")
    return Found(place, manifest, files)


def _no_checkpoint(place: Storage) -> None:
    steps = [int(match[1]) for name in place.folders() if (match := STEP.fullmatch(name))]
    if steps:
        fail("E-CKPT-001", f"{place.url} is a location with checkpoints, not one checkpoint",
             help=(f"--resume latest --checkpoint-dir {place.url}", f"--resume {place.url}/step-{max(steps)}"))
    there = bool(place.entries())
    fail("E-CKPT-001", f"{place.url} has no {NAME}" if there else f"there is no checkpoint at {place.url}",
         help="name a folder step-<n> with a manifest.json, or leave --resume out to start anew")


def whole(location: str | Path | Storage) -> tuple[list[Found], list[str]]:
    """Checkpoints with a valid manifest and files of the right sizes, newest first; and a line for each other one."""
    storage = open_storage(str(location), ROLE) if isinstance(location, str | Path) else location
    nothing: tuple[list[Found], list[str]] = ([], [])
    return _readable(storage, lambda: _whole(storage), nothing)


def _readable(storage: Storage, look: Callable[[], T], nothing: T) -> T:
    """What `look` finds in a location: E-CKPT-005 for a folder that cannot be read."""
    try:
        return look()
    except StorageError as error:
        if storage.scheme != "file":
            raise
        if isinstance(error.__context__, NotADirectoryError):  # nothing is there, and nothing can be: whoever writes says so
            return nothing
        fail("E-CKPT-005", f"the checkpoint location {storage.url} cannot be read: {error.reason}")


def step_sizes(storage: Storage) -> dict[int, dict[str, int]]:
    """step -> name -> bytes of what lies in its folder, by number."""
    steps: dict[int, dict[str, int]] = {}
    for entry in storage.entries("step-"):
        folder, _, name = entry.name.partition("/")
        if name and (match := STEP.fullmatch(folder)):
            steps.setdefault(int(match[1]), {})[name] = entry.size
    return dict(sorted(steps.items()))


def _whole(storage: Storage) -> tuple[list[Found], list[str]]:
    found, notes = [], []
    steps = step_sizes(storage)
    for step in sorted(steps, reverse=True):
        place = storage.at(f"step-{step}")
        try:
            found.append(Found(place, read_manifest(place, steps[step])))
        except Torn as torn:
            notes.append(f"{place.url} is not a whole checkpoint: {torn}")
    return found, notes


def _latest(wanted: Wanted, location: str, read: bool) -> Choice:
    pattern = "{slug}" in location
    places: Iterable[str] = [place for _, place in _slug_folders(location)] if pattern else [location]
    notes: list[str] = []
    suspects: list[str] = []
    steps: frozenset[int] = frozenset()
    for place in places:
        steps = steps_at(place)
        candidates, torn = whole(place)
        notes += torn
        if candidates and pattern and not _is_ours(candidates[0].manifest, wanted):
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
                files = read_files(candidate.place, candidate.manifest) if read else {}
            except Torn as why:
                notes.append(f"{candidate.folder} is not a whole checkpoint: {why}")
                continue
            return Choice(replace(candidate, files=files), place, tuple(notes), steps=steps)
        if suspects:
            fail("E-CKPT-006", f"every whole checkpoint in {place} is suspect", notes=notes,
                 help=f"look into it, then resume from one by name: --resume {suspects[0]}")
    notes.append(f"no checkpoint in {location}: starting at step 0")
    return Choice(None, location, tuple(notes), steps=frozenset() if pattern else steps)


def last_stamp(pattern: str, heads: tuple[str, ...]) -> str:
    """The latest time in the slugs of such runs in a location with `{slug}`; empty if there are none.

    A run that begins there takes a later one: then their order is that of their beginnings, also when a clock was set back.
    """
    return max((stamp_of(slug) for slug, _ in _slug_folders(pattern) if head_of(slug) in heads), default="")


def _slug_folders(pattern: str) -> list[tuple[str, str]]:
    """Slug and place of what matches a location with `{slug}`, the newest run first (by the time in its slug, then by name)."""
    scheme, mark, rest = pattern.partition("://") if "://" in pattern else ("", "", pattern)
    parts = rest.split("/")
    first = next(i for i, part in enumerate(parts) if "{slug}" in part)
    base = scheme + mark + ("/".join(parts[:first]) or "/")
    name = re.compile(re.escape(parts[first]).replace(re.escape("{slug}"), "(?P<slug>[A-Za-z0-9._-]+)", 1))
    storage, found = open_storage(base, ROLE), []
    try:
        for folder in storage.folders():
            if match := name.fullmatch(folder):
                below = [part.replace("{slug}", match["slug"]) for part in parts[first + 1 :]]
                found.append((stamp_of(match["slug"]), match["slug"], "/".join([base.rstrip("/"), folder, *below])))
    except StorageError as error:
        if storage.scheme != "file":
            raise
        fail("E-CKPT-005", f"the checkpoint location {base} cannot be read: {error.reason}")
    return [(slug, path) for _, slug, path in sorted(found, reverse=True)]


def _is_ours(manifest: Manifest, wanted: Wanted) -> bool:
    return manifest.run == wanted.run and head_of(manifest.slug) in wanted.heads


def _same(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()


def refuse_taken(location: str) -> None:
    """E-CKPT-007 where checkpoints lie that the run which is to begin there did not come from."""
    found, _ = whole(location)
    if found:
        slug = found[0].manifest.slug
        fail("E-CKPT-007", f"{location} holds checkpoints of another run, `{slug}`",
             help=("go on with it: --resume latest", "or give each run its own folder: --checkpoint-dir 'PATH/{slug}'"))


def _refuse_older(found: Found, location: str) -> None:
    newer = [f for f in whole(location)[0] if f.manifest.step > found.manifest.step]
    if newer:
        fail("E-CKPT-009", f"{location} has newer checkpoints, up to step {newer[0].manifest.step}; going on from step "
             f"{found.manifest.step} would mix two histories",
             help=("--resume latest goes on from the newest", "another --checkpoint-dir makes it a fork, a run of its own",
                   "without --checkpoint-dir nothing is saved"))


def stored_threads(wanted: Wanted) -> int | None:
    """The thread count a resume re-uses, for whoever must set it before torch is imported.

    None at a first start. Manifests alone are read; the same mistakes as of `choose`, so that a server which is not
    there is waited for once.
    """
    if wanted.resume is None:
        return None
    found = choose(wanted, read=False).found
    return found.manifest.threads if found is not None else None

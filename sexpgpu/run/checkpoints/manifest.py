"""`manifest.json`, format 1: what it says, and reading it without trusting it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.run.storage import Missing, Storage

FORMAT = 1
NAME = "manifest.json"
MAX_BYTES = 64 << 20
_FILE = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
OPTIONAL = {"parent", "steps", "best", "owed", "accepted", "shard"}
_SHA = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. `threads`, `kernels`, `device`, `ranks` and `versions` are what "bit for bit" depends on."""

    run_id: str
    slug: str
    run: str
    step: int
    cursor: Mapping[str, int]
    seed: int
    knobs: Mapping[str, Any]
    ir_hash: str
    program: list[dict[str, str]]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    ranks: int
    threads: int
    kernels: Mapping[str, Any]
    trajectory: Mapping[str, str]
    trajectory_hash: str
    digest: str
    health: str
    files: list[dict[str, Any]]
    parent: Mapping[str, Any] | None = None
    format: int = FORMAT
    steps: int | None = field(default=None)
    best: Mapping[str, Any] | None = None  # eval, metric, largest, step, value (`:keep-best`)
    owed: list[str] = field(default_factory=list)  # evaluations of this step that a signal cut off
    shard: str = ""  # what was divided over ranks; the files are the same
    accepted: list[int] = field(default_factory=list)  # steps of this run after which `--accept` changed its trajectory

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n"


class Torn(Exception):
    """Not a whole checkpoint; the message says why."""


def trajectory_hash(components: Mapping[str, str]) -> str:
    text = json.dumps(dict(sorted(components.items())), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(place: Storage, sizes: Mapping[str, int] | None = None) -> Manifest:
    """The manifest of a step's place, its types checked and its files there with their sizes (`sizes`: as listed).

    Raises Torn; an unknown `format` is E-CKPT-003. Hashes of files are not computed here (`verify`). A place that
    cannot be read is a StorageError, never a torn checkpoint.
    """
    try:
        if sizes is None:
            sizes = {entry.name: entry.size for entry in place.entries()}
        if NAME not in sizes:
            raise Torn(f"it has no {NAME}")
        if sizes[NAME] > MAX_BYTES:
            raise Torn(f"{NAME} is larger than 64 MiB")
        raw = json.loads(place.read(NAME))
    except Missing:
        raise Torn(f"it has no {NAME}") from None
    except (ValueError, RecursionError):
        raise Torn(f"{NAME} is not JSON") from None
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        fail("E-CKPT-003", f"{place.url}/{NAME} has format {raw.get('format')!r}; this version reads format {FORMAT}",
             help="use the version of sexpgpu that wrote it")
    manifest = _manifest(raw)
    folder = place.url.rstrip("/").rpartition("/")[2]
    if folder.startswith("step-") and folder != f"step-{manifest.step}":
        raise Torn(f"the folder is {folder}, but its manifest says step {manifest.step}")
    for entry in manifest.files:
        _check_file(sizes, entry)
    return manifest


def _manifest(raw: Any) -> Manifest:
    if not isinstance(raw, dict):
        raise Torn(f"{NAME} is no object")
    known = {f.name: f for f in fields(Manifest)}
    missing = sorted(set(known) - set(raw) - OPTIONAL)
    if missing:
        raise Torn(f"{NAME} lacks {', '.join(missing)}")
    kinds: dict[str, type | tuple[type, ...]] = {
        "step": int, "seed": int, "ranks": int, "threads": int, "files": list, "program": list,
        "cursor": dict, "knobs": dict, "data": dict, "versions": dict, "kernels": dict, "trajectory": dict}
    for name in set(known) - OPTIONAL - {"format"}:
        value, kind = raw[name], kinds.get(name, str)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Torn(f"{NAME}: `{name}` is not of its type")
    if raw["step"] < 0 or not 0 < raw["threads"] < 100_000:
        raise Torn(f"{NAME}: step or threads out of range")
    if raw["health"] not in ("healthy", "suspect") or not raw["files"]:
        raise Torn(f"{NAME}: health or files are not as they should be")
    if not isinstance(raw.get("shard", ""), str):
        raise Torn(f"{NAME}: `shard` is not of its type")
    _check_best(raw.get("best"))
    _check_list(raw, "owed", str)
    _check_list(raw, "accepted", int)
    _check_parent(raw.get("parent"))
    return Manifest(**{name: raw[name] for name in known if name in raw})


def _check_best(best: Any) -> None:
    kinds = {"eval": str, "metric": str, "largest": bool, "step": int, "value": float}
    if best is None:
        return
    if not isinstance(best, dict) or any(type(best.get(name)) is not kind for name, kind in kinds.items()):
        raise Torn(f"{NAME}: `best` is not as it should be")
    if best["step"] < 0 or not math.isfinite(best["value"]):
        raise Torn(f"{NAME}: `best` is out of range")


def _check_list(raw: Mapping[str, Any], name: str, kind: type) -> None:
    found = raw.get(name, [])
    if not isinstance(found, list) or any(type(item) is not kind for item in found):
        raise Torn(f"{NAME}: `{name}` is not as it should be")


def _check_parent(parent: Any) -> None:
    kinds = {"run_id": str, "step": int, "digest": str}
    if parent is not None and (not isinstance(parent, dict) or any(type(parent.get(n)) is not k for n, k in kinds.items())):
        raise Torn(f"{NAME}: `parent` is not as it should be")


def _check_file(sizes: Mapping[str, int], entry: Any) -> None:
    """Name, size and the form of the digest: before anything of the file is read."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not _FILE.fullmatch(entry["name"]) or entry["name"].startswith("."):
        raise Torn(f"{NAME} names a file in an odd way")
    if not isinstance(entry.get("size"), int) or not _SHA.fullmatch(str(entry.get("sha256"))):
        raise Torn(f"{NAME} has no size and SHA-256 for {entry['name']}")
    if entry["name"] not in sizes:
        raise Torn(f"{entry['name']} is missing")
    if sizes[entry["name"]] != entry["size"]:
        raise Torn(f"{entry['name']} has {sizes[entry['name']]} bytes instead of {entry['size']}")


def read_files(place: Storage, manifest: Manifest) -> dict[str, bytearray]:
    """The files, each read once and its SHA-256 compared; raises Torn, or StorageError where the place cannot be read."""
    return {entry["name"]: read_file(place, entry) for entry in manifest.files}


def read_file(place: Storage, entry: Mapping[str, Any]) -> bytearray:
    """One file of a manifest, whole and verified; the same errors."""
    data, digest, at = bytearray(entry["size"]), hashlib.sha256(), 0
    try:
        for block in place.stream(entry["name"]):
            digest.update(block)
            data[at : at + len(block)] = block
            at += len(block)
    except Missing:
        raise Torn(f"{entry['name']} is missing") from None
    if at != entry["size"]:
        raise Torn(f"{entry['name']} gave {at} bytes instead of {entry['size']}")
    if digest.hexdigest() != entry["sha256"]:
        raise Torn(f"{entry['name']} is damaged: its SHA-256 differs from the manifest's")
    return data

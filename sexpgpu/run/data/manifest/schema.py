"""The manifest, version 1: read strictly, with the path in the file named; keys that are unknown are noted, not refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sexpgpu.diagnostics import suggestion
from sexpgpu.run.data.records import Wrong

FORMATS = ("jsonl.gz", "parquet", "msgpack.zstf")
LIMIT = 1 << 30  # bytes of a manifest
NO_MANIFEST = "a manifest is the data-manifest-v1.json that `sexpgpu data build` writes"


@dataclass(frozen=True)
class Shard:
    """One file of records. `size`: bytes as stored; `etag` with its quotes, or empty; `at`: its path in the manifest."""

    uri: str
    records: int
    size: int
    etag: str = ""
    at: str = ""


@dataclass(frozen=True)
class Part:
    """A split, or a stage of its curriculum."""

    records: int
    shards: tuple[Shard, ...]
    stages: Mapping[str, Part] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """`digest`: SHA-256 of the file. `notes`: what is odd and no mistake."""

    format: str
    splits: Mapping[str, Part]
    digest: str
    notes: tuple[str, ...] = ()


class _Twice(ValueError):
    """One key twice in an object."""


def parse(data: bytes, name: str) -> Manifest:
    """The manifest in those bytes. Raises Wrong: E-DATA-020 (not JSON), 021 (not of this form), 044 (a shard twice)."""
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise Wrong("E-DATA-020", f"the manifest {name} is not UTF-8 (byte {error.start})", (NO_MANIFEST,)) from None
    except json.JSONDecodeError as error:
        raise Wrong("E-DATA-020", f"the manifest {name} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}", (NO_MANIFEST,)) from None
    except _Twice as error:
        raise Wrong("E-DATA-021", f"the manifest {name} has the key `{error}` twice in one object") from None
    except (ValueError, RecursionError):
        raise Wrong("E-DATA-020", f"the manifest {name} is not JSON that can be read (a number or depth beyond all use)", (NO_MANIFEST,)) from None
    return _Reader(name).manifest(found, hashlib.sha256(data).hexdigest())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _constant(word: str) -> NoReturn:
    raise json.JSONDecodeError(f"{word} is not JSON", word, 0)


@dataclass
class _Reader:
    name: str
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def bad(self, at: str, what: str, help: tuple[str, ...] = ()) -> NoReturn:  # noqa: A002 - the field's word
        raise Wrong("E-DATA-021", f"the manifest {self.name}, {at}: {what}", help)

    def manifest(self, found: Any, digest: str) -> Manifest:
        top = self.object(found, "the top", ("version", "data_format", "splits"))
        version = top.get("version")
        if version != 1 or isinstance(version, bool | float):
            self.bad("version", f"this reader knows version 1, and it is {_shown(version)}")
        form = top.get("data_format")
        if form not in FORMATS:
            self.bad("data_format", f"it is {_shown(form)}", suggestion(str(form), FORMATS, "formats"))
        splits = self.named(top, "splits")
        parts = {name: self.split(value, f"splits.{name}") for name, value in splits.items()}
        if self.unknown:
            more = f" and {len(self.unknown) - 5} more" if len(self.unknown) > 5 else ""
            self.notes.append(f"keys that are not known: {', '.join(self.unknown[:5])}{more}")
        return Manifest(form, parts, digest, tuple(self.notes))

    def named(self, owner: dict[str, Any], key: str) -> dict[str, Any]:
        value = owner.get(key)
        if not isinstance(value, dict) or not value:
            self.bad(key, f"an object with at least one name belongs here, and it is {_shown(value)}")
        if "" in value:
            self.bad(key, "a name is empty")
        return value

    def split(self, value: Any, at: str) -> Part:
        found = self.object(value, at, ("records", "shards", "curriculum"))
        stages = found.get("curriculum", {})
        if not isinstance(stages, dict) or "" in stages:
            self.bad(f"{at}.curriculum", f"an object of named stages belongs here, and it is {_shown(stages)}")
        parts = {name: self.stage(stage, f"{at}.curriculum.{name}") for name, stage in stages.items()}
        return Part(*self.counted(found, at), parts)

    def stage(self, value: Any, at: str) -> Part:
        found = self.object(value, at, ("records", "shards", "metadata"))
        metadata = found.get("metadata", {})
        if not isinstance(metadata, dict):
            self.bad(f"{at}.metadata", f"an object belongs here, and it is {_shown(metadata)}")
        return Part(*self.counted(found, at), {}, metadata)

    def counted(self, found: dict[str, Any], at: str) -> tuple[int, tuple[Shard, ...]]:
        records = self.positive(found, "records", at)
        listed = found.get("shards")
        if not isinstance(listed, list) or not listed:
            self.bad(f"{at}.shards", f"a list of at least one shard belongs here, and it is {_shown(listed)}")
        shards = tuple(self.shard(value, f"{at}.shards.{i}") for i, value in enumerate(listed))
        total = sum(shard.records for shard in shards)
        if total != records:
            self.bad(f"{at}.records", f"it is {records:,}, and the shards have {total:,} together")
        self.twice(shards, at)
        return records, shards

    def twice(self, shards: tuple[Shard, ...], at: str) -> None:
        seen: dict[str, Shard] = {}
        contents: dict[tuple[str, int], Shard] = {}
        equal: list[tuple[Shard, Shard]] = []
        for shard in shards:
            if shard.uri in seen:
                raise Wrong("E-DATA-044", f"the manifest {self.name}, {shard.at}: the shard {shard.uri} is already "
                            f"{seen[shard.uri].at}; its records would count twice")
            seen[shard.uri] = shard
            other = contents.setdefault((shard.etag, shard.size), shard) if shard.etag else shard
            if other is not shard:
                equal.append((shard, other))
        if equal:
            shard, other = equal[0]
            more = f" and {len(equal) - 1:,} more like it" if len(equal) > 1 else ""
            self.notes.append(f"{at}: the shard {shard.uri} has the content of {other.uri}, by its etag{more}")

    def shard(self, value: Any, at: str) -> Shard:
        found = self.object(value, at, ("uri", "records", "size_bytes", "etag"))
        uri, etag = found.get("uri"), found.get("etag", "")
        if not isinstance(uri, str) or not uri or "\0" in uri:
            self.bad(f"{at}.uri", f"a location belongs here, and it is {_shown(uri)}")
        scheme, mark, _ = uri.partition("://")
        if mark and scheme not in ("s3", "file"):
            self.bad(f"{at}.uri", f"there is no storage scheme `{scheme}`", suggestion(scheme, ("s3", "file"), "schemes"))
        if not isinstance(etag, str):
            self.bad(f"{at}.etag", f"a string belongs here, and it is {_shown(etag)}")
        return Shard(uri, self.positive(found, "records", at), self.positive(found, "size_bytes", at), etag, at)

    def positive(self, owner: dict[str, Any], key: str, at: str) -> int:
        value = owner.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.bad(f"{at}.{key}", f"a whole number above 0 belongs here, and it is {_shown(value)}")
        return value

    def object(self, value: Any, at: str, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.bad(at, f"an object belongs here, and it is {_shown(value)}")
        prefix = "" if at == "the top" else f"{at}."
        self.unknown += [f"{prefix}{key}" for key in value if key not in known]
        return value


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "…"


def all_parts(manifest: Manifest) -> Iterator[tuple[str, Part]]:
    """(its path in the manifest, part) of every split and every stage."""
    for name, split in manifest.splits.items():
        yield f"splits.{name}", split
        for stage, part in split.stages.items():
            yield f"splits.{name}.curriculum.{stage}", part


def text(form: str, splits: Mapping[str, Part]) -> str:
    """The manifest as the format's own writers lay it out; `metadata` only where there is some (older readers refuse it)."""

    def shards(part: Part) -> list[dict[str, Any]]:
        return [{"uri": s.uri, "records": s.records, "size_bytes": s.size, "etag": s.etag} for s in part.shards]

    def stage(part: Part) -> dict[str, Any]:
        more = {"metadata": dict(part.metadata)} if part.metadata else {}
        return {"records": part.records, "shards": shards(part)} | more

    found = {"version": 1, "data_format": form, "splits": {
        name: {"records": part.records, "shards": shards(part), "curriculum": {n: stage(p) for n, p in part.stages.items()}}
        for name, part in splits.items()}}
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"

"""`sexpgpu data inspect` and `verify`: what a manifest's shards hold, and whether they are what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sexpgpu.diagnostics import Diagnostic, SexpError, printable, problem
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.cache import Say, silent
from sexpgpu.run.data.files import whole_lines
from sexpgpu.run.data.manifest.reader import load
from sexpgpu.run.data.manifest.schema import Manifest, Part, Shard, all_parts
from sexpgpu.run.data.manifest.shards import arrow, fetch, msgpack_objects, one_member, parquet_objects
from sexpgpu.run.data.place import LocalPlace, Place, beside, place
from sexpgpu.run.data.records import KINDS, Wrong
from sexpgpu.run.data.workers import STALL, Progress, Task, default_workers, run_all

BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
LOOKED = 10_000  # records of a split that `inspect` looks at


def objects(path: str, shard: Shard, form: str) -> Iterator[Any]:
    """Every record of a shard as Python's values, whatever the format. Raises Wrong, naming shard and record."""
    if form == "parquet":
        arrow()
        for _, some in parquet_objects(path, shard, None):
            yield from some
    elif form == "msgpack.zstf":
        for offset, value in msgpack_objects(path, shard):
            if not isinstance(value, dict):
                raise Wrong("E-DATA-037", f"shard {shard.uri}, byte {offset}: a record is a map, and this is {_word(value)}")
            yield value
    else:
        yield from _json_objects(path, shard)


def _json_objects(path: str, shard: Shard) -> Iterator[Any]:
    line = record = byte = 0
    for piece in whole_lines(one_member(path, shard), 1 << 20):
        for text in piece.splitlines(keepends=True):
            line += 1
            if text.strip():
                record += 1
                try:
                    value = json.loads(text, parse_constant=_no_constant)
                except (ValueError, RecursionError) as error:
                    raise Wrong("E-DATA-037", f"shard {shard.uri}, record {record} (line {line}, byte {byte} of its text): not JSON "
                                f"({error})") from None
                if not isinstance(value, dict):
                    raise Wrong("E-DATA-037", f"shard {shard.uri}, record {record} (line {line}, byte {byte} of its text): a record is a "
                                f"JSON object, and this is {_word(value)}")
                yield value
            byte += len(text)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _word(value: Any) -> str:
    return KINDS.get(type(value), type(value).__name__)


def open_manifest(location: str, folder: Path) -> tuple[Place, Manifest]:
    """The manifest at a location, relative to `folder`."""
    where = place(location, folder)
    if isinstance(where, LocalPlace) and where.path.is_dir():
        where = LocalPlace(where.path / "data-manifest-v1.json")
    return where, load(where, DataSource("manifest", "manifest", location, str(folder), ()))


# verify


def verify(where: Place, manifest: Manifest, say: Say = silent, workers: int | None = None, stall: float = STALL) -> list[Diagnostic]:
    """Reads every shard of every split and stage; what is wrong, one finding a shard."""
    shards = {shard.uri: shard for _, part in all_parts(manifest) for shard in part.shards}
    total = sum(shard.size for shard in shards.values())
    count = default_workers(total, 16 << 20) if workers is None else workers
    found: list[Diagnostic] = []
    with TemporaryDirectory(prefix="sexpgpu-verify-") as folder:
        tasks = (_checking(where, manifest.format, shard, Path(folder) / str(i)) for i, shard in enumerate(shards.values()))
        for shard, finding in zip(shards.values(), run_all(tasks, count, stall), strict=True):
            if finding is not None:
                found.append(problem(finding[0], printable(finding[1]), help=finding[2]).diagnostic)
            else:
                say(f"{printable(shard.uri)}: whole")
    return found


def _checking(where: Place, form: str, shard: Shard, copy: Path) -> Task:
    target = beside(where, shard.uri)
    scrap = None if isinstance(target, LocalPlace) else copy

    def ready(progress: Progress) -> tuple[Any, ...]:
        try:
            return (str(fetch(target, shard, scrap, progress)), shard, form, None)
        except Wrong as wrong:
            return ("", shard, form, (wrong.code, wrong.message, wrong.help))
        except SexpError as error:
            d = error.diagnostic
            return ("", shard, form, (d.code, f"shard {shard.uri}: {d.message}", d.help))

    return Task("manifest.look:check_shard", prepare=ready, what=f"shard {shard.uri}", scrap=scrap)


def check_shard(path: str, shard: Shard, form: str, known: tuple[str, str, tuple[str, ...]] | None) -> tuple[str, str, tuple[str, ...]] | None:
    """(code, message, help) of what is wrong with a shard's records; `known` is what was found before."""
    if known is not None:
        return known
    try:
        count = sum(1 for _ in objects(path, shard, form))
        if count != shard.records:
            return "E-DATA-026", f"shard {shard.uri}: it has {count:,} records, and the manifest says {shard.records:,}", ()
    except Wrong as wrong:
        return wrong.code, wrong.message, wrong.help
    return None


# inspect


@dataclass
class Seen:
    """A key of the records: the kinds of its values, and the lengths of its lists and strings."""

    kinds: dict[str, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # least length of a bucket -> how many
    least: int | None = None
    most: int | None = None

    def add(self, value: Any) -> None:
        kind = KINDS.get(type(value), type(value).__name__)
        if isinstance(value, list):
            inner = sorted({KINDS.get(type(v), type(v).__name__) for v in value})
            kind = f"a list of {' or '.join(inner)}" if inner else "an empty list"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if isinstance(value, list | str):
            size = len(value)
            bucket = max(b for b in BUCKETS if b <= size)
            self.lengths[bucket] = self.lengths.get(bucket, 0) + 1
            self.least = size if self.least is None else min(self.least, size)
            self.most = size if self.most is None else max(self.most, size)


def inspect(where: Place, manifest: Manifest, first: int, looked: int = LOOKED) -> dict[str, Any]:
    """Counts, sizes, stages, and by split the keys, first records and lengths of its first `looked` records."""
    return {"location": where.text, "format": manifest.format, "digest": manifest.digest, "notes": list(manifest.notes),
            "splits": {name: _split(where, manifest.format, part, first, looked) for name, part in manifest.splits.items()}}


def _split(where: Place, form: str, part: Part, first: int, looked: int) -> dict[str, Any]:
    keys: dict[str, Seen] = {}
    firsts: list[Any] = []
    seen = 0
    for record in _some(where, form, part.shards, looked):
        seen += 1
        if len(firsts) < first:
            firsts.append(record)
        for key, value in record.items():
            keys.setdefault(str(key), Seen()).add(value)
    return {"records": part.records, "shards": len(part.shards), "bytes": sum(s.size for s in part.shards),
            "stages": {name: {"records": stage.records, "shards": len(stage.shards), "metadata": dict(stage.metadata)}
                       for name, stage in part.stages.items()},
            "looked_at": seen, "keys": {name: _told(one) for name, one in keys.items()}, "first": firsts}


def _told(seen: Seen) -> dict[str, Any]:
    found: dict[str, Any] = {"kinds": dict(sorted(seen.kinds.items()))}
    if seen.lengths:
        found["lengths"] = {"least": seen.least, "most": seen.most, "histogram": {str(k): n for k, n in sorted(seen.lengths.items())}}
    return found


def _some(where: Place, form: str, shards: Sequence[Shard], count: int) -> Iterator[Mapping[str, Any]]:
    with TemporaryDirectory(prefix="sexpgpu-inspect-") as folder:
        for i, shard in enumerate(shards):
            target = beside(where, shard.uri)
            path = fetch(target, shard, None if isinstance(target, LocalPlace) else Path(folder) / str(i), Progress())
            for record in objects(str(path), shard, form):
                if count < 1:
                    return
                count -= 1
                yield record



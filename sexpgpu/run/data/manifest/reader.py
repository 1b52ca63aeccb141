"""A manifest's shards as samples by number: each shard is parsed once into the content cache and mapped from then on.

The number of a record counts over the shards in the manifest's order, so the order of samples is a pure function of
(seed, epoch, index) and knows nothing of shards, workers or ranks. Every shard that a run needs is read when its feed
is made: what is wrong in any record is found before the first step, and no step waits for a shard.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, printable, suggestion
from sexpgpu.experiment.model import Batches, DataSource
from sexpgpu.run.data.block import Block, facts, open_block
from sexpgpu.run.data.cache import Cache, Say, key_of, open_cache, silent, size
from sexpgpu.run.data.convert import NUMPY, numpy_dtype
from sexpgpu.run.data.dataset import chunks
from sexpgpu.run.data.manifest.schema import LIMIT, Manifest, Part, Shard, parse
from sexpgpu.run.data.manifest.shards import ETAG, check_size, fetch, gone
from sexpgpu.run.data.parsed import asked
from sexpgpu.run.data.place import LocalPlace, Place, beside, place
from sexpgpu.run.data.records import Cut, Wrong, bare
from sexpgpu.run.data.workers import STALL, Progress, Task, default_workers, run_all

OPEN = 1024  # blocks mapped at a time
TELL = 5.0  # seconds between two lines about shards being read


def read(source: DataSource, folder: Path, say: Say = silent, workers: int | None = None, stall: float = STALL) -> Manifested:
    """The manifest, checked; no shard is read yet. Errors: E-DATA-001, 011, 020, 021, 044; of a bucket E-NET-…."""
    for f in source.fields:
        numpy_dtype(source, f)
    where = place(source.location, folder)
    manifest = load(where, source)
    for note in manifest.notes:
        say(f"data {source.name}: {printable(note)}")
    return Manifested(source, manifest, where, say, workers, stall)


def load(where: Place, source: DataSource) -> Manifest:
    """The manifest at a place."""
    span = source.location_span or source.span
    try:
        found = where.stat()
        if found is None:
            fail("E-DATA-001", f"data `{source.name}`: {where.text}: there is no such file", span)
        if found.size > LIMIT:
            fail("E-DATA-020", f"{where.text} has {size(found.size)}: that is no manifest", span)
        data = b"".join(where.chunks())
    except OSError as error:
        fail("E-DATA-001", f"data `{source.name}`: {where.text}: {error.strerror or error}", span)
    try:
        return parse(data, source.location)
    except Wrong as wrong:
        fail(wrong.code, printable(wrong.message), span, help=wrong.help)


@dataclass(eq=False)
class Manifested:
    """A manifest and the blocks of those of its shards that were asked for. `workers` None: as many as it is worth."""

    source: DataSource
    manifest: Manifest
    where: Place
    say: Say = silent
    workers: int | None = None
    stall: float = STALL
    blocks: dict[str, Path] = field(default_factory=dict)
    order: list[Shard] = field(default_factory=list)  # those prepared, with `firsts`: the number of their first record
    firsts: list[int] = field(default_factory=list)
    told: set[tuple[str, ...]] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    _numbered: set[str] = field(default_factory=set)
    cache: Cache | None = None

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def count(self) -> int:
        """Records of all splits."""
        return sum(part.records for part in self.manifest.splits.values())

    @property
    def statistics(self) -> dict[str, Any]:
        """What a checkpoint's manifest says beside the digest."""
        return {"splits": {name: part.records for name, part in self.manifest.splits.items()}}

    # -- which records

    def phases(self, data: Batches) -> list[tuple[int | None, tuple[Shard, ...]]]:
        """(last step or None, shards) one after another: one phase unless `:stages` switches."""
        split = self._split(data)
        stages = self.source.options.get("stages")
        if not stages:
            return [(None, split.shards)]
        return [(until, self._joined(split, names, data)) for names, until in stages]

    def _split(self, data: Batches) -> Part:
        splits, span = self.manifest.splits, data.span or self.source.span
        name = data.split or self.source.options.get("split")
        if name is None and len(splits) == 1:
            return next(iter(splits.values()))
        if name is None:
            fail("E-DATA-022", f"the manifest {self.source.location} has {len(splits)} splits, and none is chosen", span,
                 help=f"(batches {self.source.name} :split {next(iter(splits))} …); there are: {', '.join(splits)}")
        if name not in splits:
            fail("E-DATA-022", f"the manifest {self.source.location} has no split `{printable(name)}`", span,
                 help=suggestion(name, splits, "splits"))
        return splits[name]

    def _joined(self, split: Part, names: Sequence[str], data: Batches) -> tuple[Shard, ...]:
        """The stages' shards in the listed order; one that two stages have comes once."""
        found: dict[str, Shard] = {}
        for name in names:
            if name not in split.stages:
                fail("E-DATA-022", f"the manifest {self.source.location} has no stage `{printable(name)}` in this split",
                     self.source.span, help=suggestion(name, split.stages, "stages") or ("it has no stages at all",))
            for shard in split.stages[name].shards:
                found.setdefault(shard.uri, shard)
        return tuple(found.values())

    # -- their blocks

    def picked(self, shards: Sequence[Shard]) -> Picked:
        """Those shards' records as samples; what is not in the cache is read and parsed now."""
        self.prepare(shards)
        return Picked(self, tuple(shards))

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Errors: E-DATA-016, 018, 023 … 029, and those of records, each naming the shard."""
        span = self.source.location_span or self.source.span
        missing = [shard for shard in shards if shard.uri not in self.blocks]
        self._announce(missing)
        try:
            cache = self.cache = self.cache or open_cache(self.say)
            todo = [shard for shard in missing if not self._known(cache, shard)]
            if todo:
                cache.tidy()
                self._check_space(cache, todo)
                self._parse(cache, todo)
        except Wrong as wrong:
            fail(wrong.code, printable(wrong.message), span, help=wrong.help)
        except OSError as error:
            fail("E-DATA-016", f"data `{self.source.name}`: parsed shards cannot be written: {error.strerror or error}", span,
                 help="free some space, or name another folder in XDG_CACHE_HOME")
        for shard in missing:
            if shard.uri not in self._numbered:
                self._numbered.add(shard.uri)
                self.firsts.append(self.firsts[-1] + self.order[-1].records if self.order else 0)
                self.order.append(shard)
        self._tell_cuts(shards)

    def _announce(self, shards: Sequence[Shard]) -> None:
        """A folder or bucket other than the manifest's is printed before anything in it is opened."""
        local = isinstance(self.where, LocalPlace)
        home = self.where.path.parent.resolve() if isinstance(self.where, LocalPlace) else None
        for shard in shards:
            where = beside(self.where, shard.uri)
            if isinstance(where, LocalPlace):
                folder = where.path.parent.resolve()
                name = "" if home is not None and folder.is_relative_to(home) else str(folder)
            else:
                name = f"s3://{where.bucket}" if local or where.bucket != self.where.bucket else ""  # type: ignore[union-attr]
            if name and name not in self.named:
                self.named.add(name)
                self.say(f"data {self.source.name}: the manifest's shards are read from {printable(name)}")

    def _known(self, cache: Cache, shard: Shard) -> bool:
        """Whether the shard's block is in the cache; a file that is gone or has another size is an error even then."""
        where = beside(self.where, shard.uri)
        if isinstance(where, LocalPlace):
            found = where.stat()
            if found is None:
                raise gone(where, shard)
            check_size(shard, found.size)
        path = cache.path(self._key(where, shard))
        known = facts(path)
        if known is None or known.get("count") != shard.records:
            return False
        self.blocks[shard.uri] = path
        cache.used(path)
        return True

    def _key(self, where: Place, shard: Shard) -> str:
        """An etag made of MD5s tells the content; another one, or none, only together with the place."""
        identity: list[Any] = [shard.etag, shard.size, shard.records]
        if not ETAG.fullmatch(shard.etag):
            identity.append(where.text)
            if isinstance(where, LocalPlace) and not shard.etag:
                found = os.stat(where.path)
                identity += [found.st_mtime_ns, found.st_ino]
        return key_of("shard", self.manifest.format, identity, asked(self.source)[1])

    def _check_space(self, cache: Cache, shards: Sequence[Shard]) -> None:
        row = sum(np.dtype(NUMPY[f.dtype]).itemsize * int(np.prod(f.shape, dtype=np.int64)) for f in self.source.fields)
        need, free = row * sum(shard.records for shard in shards), cache.free()
        if need > free:
            raise Wrong("E-DATA-016", f"data `{self.source.name}`: its parsed records take {size(need)}, and {cache.folder} has "
                        f"{size(free)} free", ("free some space, or name another folder in XDG_CACHE_HOME",))

    def _parse(self, cache: Cache, shards: Sequence[Shard]) -> None:
        total = sum(shard.size for shard in shards)
        workers = default_workers(total, 16 << 20) if self.workers is None else self.workers
        if total >= 32 << 20:
            self.say(f"data {self.source.name}: reading {len(shards):,} shards, {size(total)}")
        told, done = time.monotonic(), 0
        for shard, _ in zip(shards, run_all(self._tasks(cache, shards), workers, self.stall), strict=True):
            self.blocks[shard.uri] = cache.path(self._key(beside(self.where, shard.uri), shard))
            done += 1
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                self.say(f"data {self.source.name}: {done:,} of {len(shards):,} shards are read")

    def _tasks(self, cache: Cache, shards: Sequence[Shard]) -> Iterator[Task]:
        fields = bare(self.source.fields)
        for shard in shards:
            where = beside(self.where, shard.uri)
            block = cache.path(self._key(where, shard))
            copy = None if isinstance(where, LocalPlace) else cache.folder / f".{block.name}.{os.getpid()}.shard"

            def ready(progress: Progress, shard: Shard = shard, where: Place = where, block: Path = block, copy: Path | None = copy) -> tuple[Any, ...]:
                path = fetch(where, shard, copy, progress)
                return (str(path), shard, self.manifest.format, fields, str(block))

            yield Task("manifest.shards:parse_shard", prepare=ready, what=f"shard {shard.uri}", scrap=copy)

    def _tell_cuts(self, shards: Sequence[Shard]) -> None:
        """What `:pad` did, once for a set of shards."""
        key = tuple(shard.uri for shard in shards)
        if key in self.told or all(f.pad is None for f in self.source.fields):
            return
        self.told.add(key)
        cuts: dict[str, Cut] = {}
        for shard in shards:
            for name, cut in (facts(self.blocks[shard.uri]) or {}).get("cuts", {}).items():
                cuts.setdefault(name, Cut()).join(cut)
        records = sum(shard.records for shard in shards)
        for name, cut in cuts.items():
            self.say(f"data {self.source.name}: of {records:,} lists of field `{name}`, {cut.cut:,} were cut and {cut.padded:,} "
                     f"filled up (the longest has {cut.longest:,})")

    # -- what `check_bound` asks

    def pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
        """Values of the shards whose least or greatest value is outside."""
        if all(f.name != name for f in self.source.fields):
            return
        for first, shard in zip(self.firsts, self.order, strict=True):
            known = facts(self.blocks[shard.uri]) or {}
            if not known or known["low"][name] < low or known["high"][name] > high:
                block = open_block(self.blocks[shard.uri])
                for start, part in chunks(block.arrays[name]) if block is not None else ():
                    yield first + start, part

    def place(self, row: int) -> str:
        i = bisect_right(self.firsts, row) - 1
        return f"record {row - self.firsts[i] + 1} of shard {self.order[i].uri}"


@dataclass(eq=False)
class Picked:
    """Samples: the records of some shards, one after another. Blocks are mapped when they are first needed."""

    data: Manifested
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        self._ends = np.cumsum([shard.records for shard in self.shards])
        self._open: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """{field: values of these records}, new arrays."""
        index = np.asarray(index, np.int64)
        which = np.searchsorted(self._ends, index, side="right")
        order = np.argsort(which, kind="stable")
        found: dict[str, np.ndarray] = {}
        for group in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
            number = int(which[group[0]])
            rows = index[group] - (int(self._ends[number - 1]) if number else 0)
            for name, values in self._block(number).arrays.items():
                if name not in found:
                    found[name] = np.empty((len(index), *values.shape[1:]), values.dtype)
                found[name][group] = values[rows]
        return {f.name: found[f.name] for f in self.data.source.fields}

    def _block(self, number: int) -> Block:
        block = self._open.get(number)
        if block is None:
            shard = self.shards[number]
            block = open_block(self.data.blocks[shard.uri])
            if block is None:  # somebody cleared the cache under us
                del self.data.blocks[shard.uri]
                self.data.prepare([shard])
                block = open_block(self.data.blocks[shard.uri])
                assert block is not None
            self._open[number] = block
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        return block

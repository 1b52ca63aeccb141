"""The blocks of a manifest's shards: read, checked and parsed on a thread, in the order in which they were asked for.

Whoever needs a shard waits for it. A mistake in any of them is raised at the next use of any, whether or not that
one is needed yet: nothing that was asked for is skipped.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from sexpgpu.diagnostics import SexpError, fail, printable
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.block import Block, facts, open_block
from sexpgpu.run.data.cache import Cache, Say, key_of, open_cache, silent, size
from sexpgpu.run.data.convert import NUMPY
from sexpgpu.run.data.dataset import FieldBound, check_bound, chunks
from sexpgpu.run.data.manifest.schema import Manifest, Shard
from sexpgpu.run.data.manifest.shards import ETAG, check_size, fetch, gone
from sexpgpu.run.data.parsed import asked
from sexpgpu.run.data.place import LocalPlace, Place, beside
from sexpgpu.run.data.records import Cut, Wrong, bare
from sexpgpu.run.data.workers import STALL, Progress, Task, default_workers, run_all
from sexpgpu.run.signals import Halted

LARGE = 32 << 20  # packed bytes from which reading is told of, and goes on while the run does
EACH = 16 << 20  # packed bytes from which a worker process is worth its start
TELL = 5.0  # seconds between two lines about shards being read
PATIENCE = 5.0  # seconds that `close` waits for the thread


class Index:
    """`blocks`: of the shards that are ready. `stopping`: the signal that asked for the run's end, or None."""

    def __init__(self, source: DataSource, manifest: Manifest, where: Place, say: Say = silent, workers: int | None = None,
                 stall: float = STALL, stopping: Callable[[], int | None] = lambda: None):
        self.source, self.manifest, self.where, self.say = source, manifest, where, say
        self.workers, self.stall, self.stopping = workers, stall, stopping
        self.blocks: dict[str, Path] = {}
        self._order: list[Shard] = []  # those asked for, with `_firsts`: the number of their first record
        self._firsts: list[int] = []
        self._asked: set[str] = set()
        self._queue: deque[Shard] = deque()
        self._left: dict[str, Shard] = {}  # asked for and not ready
        self._untold: dict[tuple[str, ...], tuple[tuple[Shard, ...], set[str]]] = {}  # of :pad: a set of shards, and those not ready
        self._told: set[tuple[str, ...]] = set()
        self._named: set[str] = set()
        self._bounds: list[FieldBound] = []
        self._change = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._cache: Cache | None = None

    # -- for whoever needs records

    def ask(self, shards: Sequence[Shard]) -> None:
        """What is not in the cache is read from here on. Errors: E-DATA-016, 023, 024."""
        fresh = [shard for shard in shards if shard.uri not in self._asked]
        self._announce(fresh)
        with self._mistakes():
            cache = self._cache = self._cache or open_cache(self.say)
            todo = [shard for shard in fresh if not self._known(cache, shard)]
            with self._change:
                self._asked.update(shard.uri for shard in fresh)
                for shard in fresh:
                    self._firsts.append(self._firsts[-1] + self._order[-1].records if self._order else 0)
                    self._order.append(shard)
                self._put(todo)
                key = tuple(shard.uri for shard in shards)
                if key not in self._told and any(f.pad is not None for f in self.source.fields):
                    self._told.add(key)
                    self._untold[key] = (tuple(shards), {uri for uri in key if uri in self._left})
        self._tell_cuts()

    def left(self) -> int:
        """Packed bytes that are still to be read."""
        return sum(shard.size for shard in list(self._left.values()))

    def check(self) -> None:
        """Raises what reading met, whoever it was for."""
        if self._error is not None:
            raise self._error

    def wait(self, shards: Sequence[Shard]) -> None:
        """Until those are ready. Raises what reading met; Halted when the run is to end."""
        for shard in shards:
            with self._change:
                self.check()
                while shard.uri not in self.blocks:
                    if self._closed or self.stopping() is not None:
                        raise Halted
                    self._change.wait(0.2)
                    self.check()

    def block(self, shard: Shard) -> Block:
        """Its records, mapped."""
        self.wait([shard])
        block = open_block(self.blocks[shard.uri])
        if block is None:  # somebody cleared the cache under us
            with self._change:
                del self.blocks[shard.uri]
                self._put([shard])
            self.wait([shard])
            block = open_block(self.blocks[shard.uri])
            assert block is not None
        return block

    def expect(self, bound: FieldBound) -> None:
        """E-DATA-014 for a value outside, now or when its shard is read."""
        with self._change:
            self._bounds.append(bound)
        check_bound(self, bound)

    def close(self) -> None:
        """Ends the reading, soon, and leaves nothing half made."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(PATIENCE)

    # -- what `check_bound` asks

    def pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
        """Values of the ready shards whose least or greatest value is outside."""
        if all(f.name != name for f in self.source.fields):
            return
        for first, shard in list(zip(self._firsts, self._order, strict=True)):
            path = self.blocks.get(shard.uri)
            known = None if path is None else facts(path)
            if path is not None and known and (known["low"][name] < low or known["high"][name] > high):
                block = open_block(path)
                for start, part in chunks(block.arrays[name]) if block is not None else ():
                    yield first + start, part

    def place(self, row: int) -> str:
        i = bisect_right(self._firsts, row) - 1
        return f"record {row - self._firsts[i] + 1} of shard {self._order[i].uri}"

    # -- what is there

    def _announce(self, shards: Sequence[Shard]) -> None:
        """A folder or bucket other than the manifest's is printed before anything in it is opened."""
        local = isinstance(self.where, LocalPlace)
        home = self.where.path.parent.resolve() if isinstance(self.where, LocalPlace) else None
        folders: dict[Path, str] = {}
        for shard in shards:
            where = beside(self.where, shard.uri)
            if isinstance(where, LocalPlace):
                parent = where.path.parent
                if parent not in folders:
                    folder = parent.resolve()
                    folders[parent] = "" if home is not None and folder.is_relative_to(home) else str(folder)
                name = folders[parent]
            else:
                name = f"s3://{where.bucket}" if local or where.bucket != self.where.bucket else ""  # type: ignore[union-attr]
            if name and name not in self._named:
                self._named.add(name)
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

    # -- the thread

    def _put(self, shards: Sequence[Shard]) -> None:
        """Into the queue, with the lock held."""
        if not shards:
            return
        assert self._cache is not None
        self._left.update((shard.uri, shard) for shard in shards)
        self._queue.extend(shards)
        self._check_space(self._cache)
        if self._thread is None:
            self._cache.tidy()
            self._thread = threading.Thread(target=self._work, name="sexpgpu-index", daemon=True)
            self._thread.start()

    def _check_space(self, cache: Cache) -> None:
        row = sum(np.dtype(NUMPY[f.dtype]).itemsize * int(np.prod(f.shape, dtype=np.int64)) for f in self.source.fields)
        need, free = row * sum(shard.records for shard in self._left.values()), cache.free()
        if need > free:
            raise Wrong("E-DATA-016", f"data `{self.source.name}`: its parsed records take {size(need)}, and {cache.folder} has "
                        f"{size(free)} free", ("free some space, or name another folder in XDG_CACHE_HOME",))

    def _work(self) -> None:
        try:
            with self._mistakes():
                while self._more():
                    self._read()
        except BaseException as error:
            with self._change:
                self._error, self._thread = error, None
                self._change.notify_all()

    def _more(self) -> bool:
        with self._change:
            if not self._queue or self._closed:
                self._thread = None
                return False
            return True

    def _read(self) -> None:
        """All that is in the queue, and what comes into it meanwhile."""
        total, count = self.left(), len(self._left)
        workers = default_workers(total, EACH) if self.workers is None else self.workers
        if total >= LARGE:
            self.say(f"data {self.source.name}: reading {count:,} shards, {size(total)}")
        told, done = time.monotonic(), 0
        taken: deque[tuple[Shard, Path]] = deque()
        for _ in run_all(self._tasks(taken), workers, self.stall, lambda: self._closed):
            self._done(*taken.popleft())
            done += 1
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                self.say(f"data {self.source.name}: {done:,} of {done + len(self._left):,} shards are read")

    def _tasks(self, taken: deque[tuple[Shard, Path]]) -> Iterator[Task]:
        assert self._cache is not None
        fields, tag = bare(self.source.fields), uuid4().hex
        while self._queue:
            shard = self._queue.popleft()
            where = beside(self.where, shard.uri)
            block = self._cache.path(self._key(where, shard))
            stage = block.with_name(f".{block.name}.{tag}")
            copy = None if isinstance(where, LocalPlace) else stage.with_name(f"{stage.name}.shard")

            def ready(progress: Progress, shard: Shard = shard, where: Place = where, block: Path = block, copy: Path | None = copy) -> tuple[Any, ...]:
                path = fetch(where, shard, copy, progress)
                return (str(path), shard, self.manifest.format, fields, str(block), tag)

            taken.append((shard, block))
            yield Task("manifest.shards:parse_shard", prepare=ready, what=f"shard {shard.uri}", scrap=copy, stage=stage)

    def _done(self, shard: Shard, block: Path) -> None:
        with self._change:
            self.blocks[shard.uri] = block
            self._left.pop(shard.uri, None)
            try:
                self._check_bounds(facts(block) or {} if self._bounds else {})
            except SexpError:
                del self.blocks[shard.uri]  # nobody takes it before the error is known
                raise
            for _, missing in self._untold.values():
                missing.discard(shard.uri)
            self._tell_cuts()  # with the lock held: said before anybody sees the last record
            self._change.notify_all()

    def _check_bounds(self, known: dict[str, Any]) -> None:
        for bound in self._bounds:
            low, high = (known.get(side, {}).get(bound.field) for side in ("low", "high"))
            if low is not None and high is not None and (low < bound.low or high > bound.high):
                check_bound(self, bound)

    def _tell_cuts(self) -> None:
        """What `:pad` did, once for a set of shards, when the last of them is ready."""
        for key, (shards, missing) in list(self._untold.items()):
            if missing or self._untold.pop(key, None) is None:
                continue
            cuts: dict[str, Cut] = {}
            for shard in shards:
                for name, cut in (facts(self.blocks[shard.uri]) or {}).get("cuts", {}).items():
                    cuts.setdefault(name, Cut()).join(cut)
            records = sum(shard.records for shard in shards)
            for name, cut in cuts.items():
                self.say(f"data {self.source.name}: of {records:,} lists of field `{name}`, {cut.cut:,} were cut and {cut.padded:,} "
                         f"filled up (the longest has {cut.longest:,})")

    @contextlib.contextmanager
    def _mistakes(self) -> Iterator[None]:
        """What is wrong with data or disk, at the place of the source in the file."""
        span = self.source.location_span or self.source.span
        try:
            yield
        except Wrong as wrong:
            fail(wrong.code, printable(wrong.message), span, help=wrong.help)
        except OSError as error:
            fail("E-DATA-016", f"data `{self.source.name}`: parsed shards cannot be written: {error.strerror or error}", span,
                 help="free some space, or name another folder in XDG_CACHE_HOME")

"""A manifest's shards as samples by number: each shard is parsed once into the content cache and mapped from then on.

The number of a record counts over the shards in the manifest's order, so the order of samples is a pure function of
(seed, epoch, index) and knows nothing of shards, workers or ranks. Shards are read from the moment that a feed over them
is made (index.py); where there is much to read, the run goes on meanwhile, and waits only for what it needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, printable, suggestion
from sexpgpu.experiment.model import Batches, DataSource
from sexpgpu.run.data.block import Block
from sexpgpu.run.data.cache import Say, silent, size
from sexpgpu.run.data.convert import numpy_dtype
from sexpgpu.run.data.dataset import FieldBound
from sexpgpu.run.data.manifest.index import LARGE, Index
from sexpgpu.run.data.manifest.schema import LIMIT, Manifest, Part, Shard, parse
from sexpgpu.run.data.place import Place, place
from sexpgpu.run.data.records import Wrong
from sexpgpu.run.data.workers import STALL

LARGEST = 1e300  # of a number of metadata that a program can take
OPEN = 1024  # blocks mapped at a time


def read(source: DataSource, folder: Path, say: Say = silent, workers: int | None = None, stall: float = STALL,
         stopping: Callable[[], int | None] = lambda: None) -> Manifested:
    """The manifest, checked; no shard is read yet. Errors: E-DATA-001, 011, 020, 021, 044; of a bucket E-NET-…."""
    for f in source.fields:
        numpy_dtype(source, f)
    where = place(source.location, folder)
    manifest = load(where, source)
    for note in manifest.notes:
        say(f"data {source.name}: {printable(note)}")
    return Manifested(source, manifest, where, say, workers, stall, stopping)


def load(where: Place, source: DataSource) -> Manifest:
    """The manifest at a place."""
    span = source.location_span or source.span
    try:
        found = where.stat()
        if found is None:
            fail("E-DATA-001", f"data `{source.name}`: {where.text}: there is no such file", span,
                 help="`sexpgpu data build` writes a data-manifest-v1.json; give its path or its folder")
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
    """A manifest and the index of those of its shards that were asked for. `workers` None: as many as it is worth."""

    source: DataSource
    manifest: Manifest
    where: Place
    say: Say = silent
    workers: int | None = None
    stall: float = STALL
    stopping: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        self.statistics: dict[str, Any] = {"splits": {name: part.records for name, part in self.manifest.splits.items()}}
        self.index = Index(self.source, self.manifest, self.where, self.say, self.workers, self.stall, self.stopping)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def count(self) -> int:
        """Records of all splits."""
        return sum(part.records for part in self.manifest.splits.values())

    def numbers(self, data: Batches) -> dict[str, float]:
        """`records`, and of each stage `easy/records` and the numbers of its metadata, `easy/weight`."""
        split = self._split(data)
        found: dict[str, float] = {"records": float(split.records)}
        for name, stage in split.stages.items():
            found |= {f"{name}/{key}": float(value) for key, value in stage.metadata.items()
                      if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST}
            found[f"{name}/records"] = float(stage.records)
        return found

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

    # -- their records

    def picked(self, shards: Sequence[Shard]) -> Picked:
        """Those shards' records as samples. What is not in the cache is read, now where it is soon done."""
        self.index.ask(shards)
        if self.index.left() < LARGE:
            self.index.wait(shards)
        return Picked(self, tuple(shards))

    def expect(self, bound: FieldBound) -> None:
        """E-DATA-014 for a value outside, now or when its shard is read."""
        self.index.expect(bound)

    def close(self) -> None:
        """Ends the reading of shards that nobody waits for."""
        self.index.close()


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

    def need(self, index: np.ndarray | None) -> None:
        """Waits until these records can be taken, or all of them."""
        which = range(len(self.shards)) if index is None else np.unique(np.searchsorted(self._ends, index, side="right")).tolist()
        self.data.index.wait([self.shards[i] for i in which])

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """{field: values of these records}, new arrays."""
        self.data.index.check()
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
            block = self._open[number] = self.data.index.block(self.shards[number])
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        return block

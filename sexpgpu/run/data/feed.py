"""Batches out of a source's samples: of the n-th update, and of an evaluation.

With several ranks each takes its own equal part of every batch, in rank order: the batch is the same whatever their
number. Nothing is kept between calls, so any step is as near as the next one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import Batches
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.order import batch_indices, cursor
from sexpgpu.run.data.prefetch import Prefetched
from sexpgpu.run.data.stream import Stream, windows
from sexpgpu.run.data.structures import Packed, Structures, packed

AHEAD = 64 << 20  # bytes of mapped data from which batches are made ahead: less stays in the page cache


class Samples(Protocol):
    """The samples of a part, by their number."""

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]: ...


class Feed(Protocol):
    """The batches of a run."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """{field: array [samples, …]} of update `step`, counted from 0."""

    def cursor(self, step: int) -> tuple[int, int]:
        """(epoch, index) of the first sample not yet used after `step` updates."""

    def ready(self, step: int) -> None:
        """Waits until update `step` can be made without waiting for data that are still being read."""

    def numbers(self, step: int) -> np.ndarray:
        """Of update `step`'s samples: their numbers in the source (rows, or the part's windows or records), from 0."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a dataset."""

    dataset: Dataset
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        return self.dataset.take(self.rows[index])

    def fill(self, index: np.ndarray, out: Mapping[str, np.ndarray]) -> bool:
        """As `take`, into `out`; false, and nothing, where a dtype differs."""
        fields, rows = self.dataset.fields, self.rows[index]
        if any(fields[name].dtype != values.dtype for name, values in out.items()):
            return False
        for name, values in out.items():
            np.take(fields[name], rows, axis=0, out=values, mode="clip")  # every row is there; `raise` would copy once more
        return True


@dataclass(frozen=True, eq=False)
class TrainFeed:
    """Every batch has `size` samples over all ranks; `size` is a multiple of `ranks`."""

    samples: Samples
    size: int
    seed: int
    shuffle: bool
    rank: int = 0
    ranks: int = 1

    def batch(self, step: int) -> dict[str, np.ndarray]:
        index = batch_indices(len(self.samples), self.seed, self.size, step, self.shuffle)
        return self.samples.take(own(index, self.rank, self.ranks))

    def fill(self, step: int, out: Mapping[str, np.ndarray]) -> bool:
        """The batch into `out`; false, and nothing, where the samples cannot be written so."""
        if not isinstance(self.samples, Rows):
            return False
        index = batch_indices(len(self.samples), self.seed, self.size, step, self.shuffle)
        return self.samples.fill(own(index, self.rank, self.ranks), out)

    def cursor(self, step: int) -> tuple[int, int]:
        return cursor(len(self.samples), self.size, step)

    def ready(self, step: int) -> None:
        need = getattr(self.samples, "need", None)
        if need is not None:  # a shuffle takes its samples from everywhere
            need(None if self.shuffle else batch_indices(len(self.samples), self.seed, self.size, step, False))

    def numbers(self, step: int) -> np.ndarray:
        index = own(batch_indices(len(self.samples), self.seed, self.size, step, self.shuffle), self.rank, self.ranks)
        return self.samples.rows[index] if isinstance(self.samples, Rows | Packed) else index


@dataclass(frozen=True, eq=False)
class StagedFeed:
    """Feeds one after another: the i-th until `untils[i]` updates are made, the last for ever. Each begins its own epochs."""

    feeds: tuple[TrainFeed, ...]
    untils: tuple[int, ...]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        feed, local = self._at(step)
        return feed.batch(local)

    def cursor(self, step: int) -> tuple[int, int]:
        feed, local = self._at(step)
        return feed.cursor(local)

    def ready(self, step: int) -> None:
        feed, local = self._at(step)
        feed.ready(local)

    def numbers(self, step: int) -> np.ndarray:
        feed, local = self._at(step)
        return feed.numbers(local)

    def _at(self, step: int) -> tuple[TrainFeed, int]:
        i = bisect_right(self.untils, step)
        return self.feeds[i], step - (self.untils[i - 1] if i else 0)


@dataclass(frozen=True, eq=False)
class EvalFeed:
    """All samples once, in order; the last batch has what remains. `limit` counts batches."""

    samples: Samples
    size: int
    limit: int | None = None

    def __len__(self) -> int:
        """Batches."""
        return len(self._starts())

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for number in range(len(self)):
            yield self.batch(number)

    def batch(self, number: int) -> dict[str, np.ndarray]:
        start = self._starts()[number]
        return self.samples.take(np.arange(start, min(start + self.size, len(self.samples))))

    def _starts(self) -> range:
        return range(0, len(self.samples), self.size)[: self.limit]


def fill(feed: Any, step: int, out: Mapping[str, np.ndarray]) -> None:
    """The batch of a step into arrays of its fields, of its shapes; written in one go where the feed can."""
    if hasattr(feed, "fill") and feed.fill(step, out):
        return
    for name, values in feed.batch(step).items():
        assert values.shape == out[name].shape
        np.copyto(out[name], values, casting="same_kind")


def own(index: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """A rank's part of a batch's sample numbers."""
    each = len(index) // ranks
    return index[rank * each : (rank + 1) * each]


def samples(dataset: Any, data: Batches) -> Samples:
    """The rows, windows or records that `data` asks for, once and in order."""
    if isinstance(dataset, Stream):
        return windows(dataset, data)
    if isinstance(dataset, Structures):
        return packed(dataset, data)
    if isinstance(dataset, Dataset):
        return Rows(dataset, dataset.rows(data.split, data.span))
    phases = dataset.phases(data)
    if len(phases) > 1:
        fail("E-DATA-022", f"the stages of data `{dataset.source.name}` switch by step, and an evaluation has no steps",
             data.span or dataset.source.span, help="evaluate on a source of its own, with :stages (easy hard)")
    return dataset.picked(phases[0][1])


def train_feed(dataset: Any, data: Batches, seed: int, rank: int = 0, ranks: int = 1) -> Feed:
    """The batches of a run; made ahead, on a thread, where they come from mapped files that memory may not hold."""
    feed: Feed
    if isinstance(dataset, Structures):
        parts = replace(data, parts=max(1, data.parts // ranks))  # a rank packs its own micro-batches
        return TrainFeed(packed(dataset, parts), data.batch, seed, data.shuffle, rank, ranks)
    if isinstance(dataset, Dataset | Stream):
        feed = TrainFeed(samples(dataset, data), data.batch, seed, data.shuffle, rank, ranks)
        return Prefetched(feed) if _mapped(dataset) >= AHEAD else feed
    phases = dataset.phases(data)
    feeds = tuple(TrainFeed(dataset.picked(shards), data.batch, seed, data.shuffle, rank, ranks) for _, shards in phases)
    feed = feeds[0] if len(feeds) == 1 else StagedFeed(feeds, tuple(until for until, _ in phases[:-1]))
    return Prefetched(feed)


def _mapped(dataset: Dataset | Stream) -> int:
    arrays = [dataset.tokens] if isinstance(dataset, Stream) else list(dataset.fields.values())
    return sum(array.nbytes for array in arrays if _is_mapped(array))


def _is_mapped(array: Any) -> bool:
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False


def eval_feed(dataset: Any, data: Batches) -> EvalFeed:
    return EvalFeed(samples(dataset, data), data.batch, data.limit)

"""Batches out of a source's samples: of the n-th update, and of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sexpgpu.experiment.model import Batches
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.order import batch_indices, cursor
from sexpgpu.run.data.stream import Stream, windows


class Samples(Protocol):
    """The samples of a part, by their number."""

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a dataset."""

    dataset: Dataset
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        return self.dataset.take(self.rows[index])


@dataclass(frozen=True, eq=False)
class TrainFeed:
    """Every batch has `size` samples; nothing is kept between calls, so any step is as near as the next."""

    samples: Samples
    size: int
    seed: int
    shuffle: bool

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """{field: array [size, …]} of update `step`, counted from 0."""
        return self.samples.take(batch_indices(len(self.samples), self.seed, self.size, step, self.shuffle))

    def cursor(self, step: int) -> tuple[int, int]:
        return cursor(len(self.samples), self.size, step)


@dataclass(frozen=True, eq=False)
class EvalFeed:
    """All samples once, in order; the last batch has what remains. `limit` counts batches."""

    samples: Samples
    size: int
    limit: int | None = None

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        count = len(self.samples)
        for start in range(0, count, self.size)[: self.limit]:
            yield self.samples.take(np.arange(start, min(start + self.size, count)))


def samples(dataset: Dataset | Stream, data: Batches) -> Samples:
    """The rows or windows that `data` asks for."""
    if isinstance(dataset, Stream):
        return windows(dataset, data)
    return Rows(dataset, dataset.rows(data.split, data.span))


def train_feed(dataset: Dataset | Stream, data: Batches, seed: int) -> TrainFeed:
    return TrainFeed(samples(dataset, data), data.batch, seed, data.shuffle)


def eval_feed(dataset: Dataset | Stream, data: Batches) -> EvalFeed:
    return EvalFeed(samples(dataset, data), data.batch, data.limit)

"""Batches out of a dataset: of the n-th update, and of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sexpgpu.experiment.model import Batches
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.order import batch_indices, cursor


@dataclass(frozen=True, eq=False)
class TrainFeed:
    """Every batch has `size` samples; nothing is kept between calls, so any step is as near as the next."""

    dataset: Dataset
    rows: np.ndarray
    size: int
    seed: int
    shuffle: bool

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """{field: array [size, …]} of update `step`, counted from 0."""
        return self.dataset.take(self.rows[batch_indices(len(self.rows), self.seed, self.size, step, self.shuffle)])

    def cursor(self, step: int) -> tuple[int, int]:
        return cursor(len(self.rows), self.size, step)


@dataclass(frozen=True, eq=False)
class EvalFeed:
    """All rows once, in order; the last batch has what remains. `limit` counts batches."""

    dataset: Dataset
    rows: np.ndarray
    size: int
    limit: int | None = None

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for start in list(range(0, len(self.rows), self.size))[: self.limit]:
            yield self.dataset.take(self.rows[start : start + self.size])


def train_feed(dataset: Dataset, data: Batches, seed: int) -> TrainFeed:
    return TrainFeed(dataset, dataset.rows(data.split, data.span), data.batch, seed, data.shuffle)


def eval_feed(dataset: Dataset, data: Batches) -> EvalFeed:
    return EvalFeed(dataset, dataset.rows(data.split, data.span), data.batch, data.limit)

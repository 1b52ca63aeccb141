"""Bind: opens what the run and its evaluations name, and checks it, before anything is compiled or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import printable
from sexpgpu.experiment.model import DataSource, Run
from sexpgpu.run.data import locate, open_source
from sexpgpu.run.data.dataset import FieldBound, check_bound
from sexpgpu.run.data.feed import EvalFeed, Feed, eval_feed, train_feed
from sexpgpu.run.data.structures import Structures
from sexpgpu.run.loop import Feeds


@dataclass(frozen=True, eq=False)
class BoundData:
    """Datasets by the name of their source, and the feeds over them."""

    datasets: dict[str, Any]  # a Dataset, a Stream or a Manifested
    feeds: Feeds
    capacities: dict[str, Any] = field(default_factory=dict)  # of packed training batches, by source
    whole: Callable[[], Feed] | None = None  # the whole batches, where `feeds` gives one rank's

    @property
    def waits(self) -> bool:
        """Whether a batch may have to wait for a shard that is still being read."""
        return any(hasattr(dataset, "index") for dataset in self.datasets.values())

    def close(self) -> None:
        """Ends the reading of what nobody waits for any more."""
        close(self.datasets)

    def digests(self) -> dict[str, dict[str, Any]]:
        """What a manifest says of the data."""
        return {name: {"digest": d.digest, "count": d.count, "location": d.source.location, "statistics": dict(d.statistics)}
                | ({"capacities": self.capacities[name]} if name in self.capacities else {}) for name, d in self.datasets.items()}


def bind(run: Run, bounds: Sequence[FieldBound] = (), say: Callable[[str], None] = lambda text: None, first: int | None = 0,
         stopping: Callable[[], int | None] = lambda: None, rank: int = 0, ranks: int = 1) -> BoundData:
    """Each source is read once; of a large manifest what update `first` needs, and the rest while the run goes on.

    `say` hears of a location outside the file's folder before it is opened. Halted once `stopping` gives a signal.
    `first` None: no update is made, and the evaluations' data come first. `rank` of `ranks`: whose part of each training
    batch the feed gives.
    """
    datasets: dict[str, Any] = {}
    try:
        return _bound(run, bounds, say, first, stopping, datasets, rank, ranks)
    except BaseException:
        close(datasets)
        raise


def close(datasets: dict[str, Any]) -> None:
    for dataset in datasets.values():
        if hasattr(dataset, "close"):
            dataset.close()


def _bound(run: Run, bounds: Sequence[FieldBound], say: Callable[[str], None], first: int | None, stopping: Callable[[], int | None],
           datasets: dict[str, Any], rank: int, ranks: int) -> BoundData:
    for batches in (run.data, *(evaluation.data for evaluation in run.evals)):
        source = batches.source
        if source.name not in datasets:
            if not source.scanned:  # else opened and announced by `measure`
                announce(source, say)
            datasets[source.name] = _with_statistics(open_source(source, say=say, stopping=stopping), run)

    def evals() -> dict[str, EvalFeed]:
        return {e.name: eval_feed(datasets[e.data.source.name], e.data) for e in run.evals}

    early = evals() if first is None else None
    train = train_feed(datasets[run.data.source.name], run.data, run.seed, rank, ranks)
    feeds = Feeds(train, evals() if early is None else early)
    for dataset in datasets.values():
        for bound in bounds:
            if hasattr(dataset, "expect"):  # a manifest, whose shards may be read later
                dataset.expect(bound)
            else:
                check_bound(dataset, bound)
    if first is not None:
        feeds.train.ready(first)
    capacities = {run.data.source.name: run.data.capacities} if run.data.capacities else {}
    return BoundData(datasets, feeds, capacities, lambda: train_feed(datasets[run.data.source.name], replace(run.data, parts=run.data.parts // ranks), run.seed))


def _with_statistics(dataset: Any, run: Run) -> Any:
    """Structures or shards with what `measure` found of them, which the manifest of a checkpoint keeps."""
    if not dataset.source.scanned:
        return dataset
    prefix = f"{dataset.source.name}/"
    found = {k.removeprefix(prefix): v for k, v in run.statistics.items() if k.startswith(prefix)}
    if isinstance(dataset, Structures):
        return replace(dataset, statistics=found)
    dataset.statistics |= found
    return dataset


def announce(source: DataSource, say: Callable[[str], None]) -> None:
    found, folder = locate(source), Path(source.folder).resolve()
    if found is None:
        say(f"data {source.name}: reading {printable(source.location)}")
        return
    path = found.resolve()
    if not path.is_relative_to(folder):
        say(f"data {source.name}: opening {printable(str(path))}, outside the experiment's folder")

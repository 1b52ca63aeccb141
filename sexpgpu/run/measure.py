"""What a program's shapes and numbers need of its data before it is traced: capacities and statistics (language.md, "Data").

Of a manifest these are the numbers that it says of its stages; no shard is read for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sexpgpu.experiment.model import Batches, DataSource, Run
from sexpgpu.experiment.structures import STATISTICS
from sexpgpu.run.bind import announce
from sexpgpu.run.data import open_source
from sexpgpu.run.data.structures import capacities, statistics


def measured(run: Run, say: Callable[[str], None] = lambda text: None) -> Run:
    """The run with the capacities of its packed batches, and the statistics of its structures and manifests; other data is
    not opened.

    Statistics are over the part that the run trains on, and over the whole of any other source.
    """
    opened: dict[str, Any] = {}
    for batches in (run.data, *(e.data for e in run.evals)):
        if batches.source.scanned and batches.source.name not in opened:
            announce(batches.source, say)
            opened[batches.source.name] = open_source(batches.source, say=say)
    if not opened:
        return run

    def sized(batches: Batches) -> Batches:
        if not batches.source.structures:
            return batches
        data = opened[batches.source.name]
        rows = data.rows(batches.split, batches.span)
        return replace(batches, capacities=capacities(data, rows, batches.batch // batches.parts, batches.buckets))

    found: dict[str, Any] = {}
    for batches in (run.data, *(e.data for e in run.evals)):
        if batches.source.scanned and not batches.source.structures:
            numbers = opened[batches.source.name].numbers(batches)
            found = {f"{batches.source.name}/{key}": value for key, value in numbers.items()} | found  # the run's split first
    for name, data in opened.items():
        if not data.source.structures:
            continue
        part = run.data.split if name == run.data.source.name else None
        found |= {f"{name}/{key}": value for key, value in statistics(data, data.rows(part)).items()}
    evals = tuple(replace(e, data=sized(e.data)) for e in run.evals)
    return replace(run, data=sized(run.data), evals=evals, statistics=found)


def remembered(run: Run, data: Mapping[str, Any]) -> Run:
    """The run with what a manifest's `data` says of its structures, instead of a look at them."""
    if not any(source.scanned for source in (run.data.source, *(e.data.source for e in run.evals))):
        return run
    found = {f"{source}/{name}": value for source, facts in data.items() for name, value in facts.get("statistics", {}).items()
             if not isinstance(value, dict)}
    sizes = tuple(tuple(size) for size in data.get(run.data.source.name, {}).get("capacities", ()))
    return replace(run, statistics=run.statistics | found, data=replace(run.data, capacities=run.data.capacities or sizes))


def unmeasured(sources: Iterable[DataSource]) -> dict[str, Any]:
    """Statistics where neither data nor a checkpoint says them: 1, and 0 for each element."""
    return {f"{source.name}/{name}": [0.0] * len(source.options["elements"]) if many else 1.0
            for source in sources if source.structures for name, many in STATISTICS.items()}

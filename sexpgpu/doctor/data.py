"""FILE's sources, read as a run reads them: parsed, labels in range, digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sexpgpu import compiler
from sexpgpu.diagnostics import Diagnostic, SexpError
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.run.bind import bind, close
from sexpgpu.run.data import open_source
from sexpgpu.run.data.dataset import FieldBound


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-DATA-… of each run's data. Of a large manifest the first update's shards are read."""
    said: set[Any] = set()
    for name, whole in ask.known.get("runs", {}).items():
        bounds = tuple(FieldBound(*bound) for bound in compiler.label_bounds(ask.known["traced"][name]))
        try:
            data = bind(whole, bounds)
        except SexpError as error:
            yield from (d for d in error.diagnostics if (d.code, d.message) not in said)
            said |= {(d.code, d.message) for d in error.diagnostics}
            continue
        try:
            data.feeds.train.batch(0)
            for source, dataset in data.datasets.items():
                if source not in said:
                    said.add(source)
                    yield source, f"{dataset.count:,} records, digest {dataset.digest[:16]}"
        finally:
            data.close()
    yield from unused(ask)


def unused(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """Sources that no run reads: their mistakes are warnings, since every run works."""
    loaded = ask.known.get("loaded")
    used = {batches.source.name for r in (loaded.experiment.runs.values() if loaded else ()) for batches in (r.data, *(e.data for e in r.evals))}
    for source in loaded.experiment.data.values() if loaded else ():
        if source.name in used:
            continue
        try:
            dataset = open_source(source)
        except SexpError as error:
            yield from (replace(d, severity="warning") for d in error.diagnostics)
            continue
        close({source.name: dataset})
        yield source.name, f"{dataset.count:,} records, digest {dataset.digest[:16]}, read by no run"


CHECK = Check("data", "data", "error", 3600, run)

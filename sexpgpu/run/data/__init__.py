"""Opening what `defdata` names: one reader a format, found by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import SexpError, fail, one_or_all, suggestion
from sexpgpu.experiment.model import DataSource
from sexpgpu.run import storage
from sexpgpu.run.data.cache import Say, silent

#: format -> reader(source, path, say), which gives a Dataset or a Stream; of `manifest`, reader(source, folder, say)
FORMATS = {
    "csv": "sexpgpu.run.data.csv:read",
    "jsonl": "sexpgpu.run.data.jsonl:read",
    "npy": "sexpgpu.run.data.npy:read",
    "text": "sexpgpu.run.data.text:read",
    "tokens": "sexpgpu.run.data.tokens:read",
    "manifest": "sexpgpu.run.data.manifest.reader:read",
    "extxyz": "sexpgpu.run.data.extxyz:read",
}


def locate(source: DataSource, folder: str | Path | None = None) -> Path | None:
    """Where a source of this machine lies; None for one in a bucket."""
    try:
        if storage.is_remote(source.location):
            return None
        return Path(storage.split(source.location, folder if folder is not None else source.folder)[1])
    except SexpError as mistake:  # an unknown scheme: the storage does not know whose location it is
        raise one_or_all(replace(d, span=d.span or source.location_span or source.span) for d in mistake.diagnostics) from None


def open_source(source: DataSource, folder: str | Path | None = None, say: Say = silent,
                stopping: Callable[[], int | None] = lambda: None) -> Any:
    """The source, read and checked: a Dataset, a Stream or a Manifested (its shards are read when a feed asks).

    `folder`: what its location is relative to, by default the source's own. `say` hears of what took long or is odd.
    `stopping`: whether the run is to end, asked while shards are waited for.
    """
    if source.format not in FORMATS:
        fail("E-DATA-010", f"`{source.format}` is not a data format of this version", source.span,
             help=suggestion(source.format, FORMATS, "formats"))
    module, name = FORMATS[source.format].split(":")
    reader = getattr(import_module(module), name)
    if source.format == "manifest":
        return reader(source, Path(folder if folder is not None else source.folder), say, stopping=stopping)
    path = locate(source, folder)
    return reader(source, path if path is not None else storage.local_copy(source.location, "data"), say)

"""Opening what `defdata` names: one reader a format, found by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.stream import Stream

#: format -> reader(source, path) -> Dataset, or Stream
FORMATS = {
    "csv": "sexpgpu.run.data.csv:read",
    "jsonl": "sexpgpu.run.data.jsonl:read",
    "npy": "sexpgpu.run.data.npy:read",
    "text": "sexpgpu.run.data.text:read",
    "tokens": "sexpgpu.run.data.tokens:read",
}


def locate(source: DataSource, folder: str | Path | None = None) -> Path:
    """Where the source lies; `s3://` is E-NET-001 in this version."""
    if "://" in source.location:
        fail("E-NET-001", f"`{source.location}`: data in a bucket comes in a later version", source.location_span,
             help="copy the file beside the experiment and name it there")
    return Path(folder if folder is not None else source.folder) / source.location


def open_source(source: DataSource, folder: str | Path | None = None) -> Dataset | Stream:
    """Reads the whole source. `folder`: what its location is relative to, by default the source's own."""
    if source.format not in FORMATS:
        fail("E-DATA-010", f"`{source.format}` is not a data format of this version", source.span,
             help=suggestion(source.format, FORMATS, "formats"))
    module, reader = FORMATS[source.format].split(":")
    return getattr(import_module(module), reader)(source, locate(source, folder))

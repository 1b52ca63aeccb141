"""From parts of rows to a dataset: in memory where the file is small, else parsed once into the content cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.block import BlockWriter, open_block
from sexpgpu.run.data.cache import Say, key_of, open_cache, silent, warned
from sexpgpu.run.data.dataset import Dataset
from sexpgpu.run.data.files import digest, no_rows
from sexpgpu.run.data.records import LINES

WORTH = 1 << 20  # bytes of a file from which its parsed rows are kept
Parts = Callable[[], Iterator[Mapping[str, np.ndarray]]]


def asked(source: DataSource) -> list[object]:
    """What of the source decides its arrays, beside the file's content."""
    fields = [[f.name, f.dtype, list(f.shape), None if f.scale is None else str(f.scale), f.pad] for f in source.fields]
    return [source.format, fields, source.options]


def dataset(source: DataSource, path: Path, parts: Parts, say: Say = silent) -> Dataset:
    """The rows of `parts`, under the digest of the file."""
    known = digest(source, path)
    arrays = cached(key_of(known, *asked(source)), path.stat().st_size, parts, say)
    if not arrays:
        no_rows(source, "no records")
    lines = arrays.pop(LINES, None)
    return Dataset(source, arrays, known, len(next(iter(arrays.values()))), lines=lines)


def cached(key: str, size: int, parts: Parts, say: Say = silent) -> dict[str, np.ndarray]:
    """Arrays that the parts make, mapped from the cache where the file has `size` of WORTH or more."""
    if size < WORTH:
        return joined(parts())
    try:
        cache = open_cache(say)
    except OSError as error:
        say(warned("in memory", str(error.strerror or error)))
        return joined(parts())
    path = cache.path(key)
    block = open_block(path)
    if block is None:
        cache.tidy()
        try:
            _write(path, parts())
        except OSError as error:  # the disk is full, most likely
            say(warned("in memory", f"{cache.folder}: {error.strerror or error}"))
            return joined(parts())
        block = open_block(path)
    cache.used(path)
    return dict(block.arrays) if block is not None else {}


def _write(path: Path, parts: Iterator[Mapping[str, np.ndarray]]) -> None:
    writer = BlockWriter(path)
    try:
        some = False
        for part in parts:
            writer.add(part)
            some = True
        if some:
            writer.finish({})
    finally:
        writer.drop()


def joined(parts: Iterator[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The parts as whole arrays in memory."""
    kept: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for name, array in part.items():
            kept.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for name, arrays in kept.items()}

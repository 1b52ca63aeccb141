"""A source that is one sequence of tokens, and the windows cut from a part of it.

Tokens stay as narrow as the file has them (bytes as uint8, token files mapped); i32 is made for one batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import Batches, DataSource
from sexpgpu.run.data.dataset import pieces_of
from sexpgpu.run.data.split import split_sizes
from sexpgpu.source import Span


@dataclass(frozen=True, eq=False)
class Stream:
    """`tokens`: a vector of unsigned integers. `digest`: SHA-256 of the file's bytes, in hex."""

    source: DataSource
    tokens: np.ndarray
    digest: str
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.tokens)

    def pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first token, tokens) of what the windows' fields take their values from, where it may leave low…high."""
        return pieces_of(self.tokens if name in ("tokens", "targets") else None, low, high)

    def place(self, row: int) -> str:
        return f"token {row + 1}"

    def part(self, name: str | None, span: Span | None = None) -> tuple[int, int]:
        """[start, stop) of a part: parts follow one another in file order."""
        if name is None:
            return 0, self.count
        start, sizes = 0, split_sizes(self.count, self.source.split, self.source.span)
        for part, size in sizes.items():
            if part == name:
                return start, start + size
            start += size
        fail("E-DATA-013", f"data `{self.source.name}` has no part `{name}`", span,
             help=suggestion(name, sizes, "parts"))


@dataclass(frozen=True, eq=False)
class Windows:
    """Window i has the `context` tokens from `start + i * stride` on, and as targets those one later."""

    tokens: np.ndarray
    start: int
    count: int
    context: int
    stride: int

    def __len__(self) -> int:
        return self.count

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """{tokens, targets: i32 [len(index), context]}."""
        first = self.start + np.asarray(index, np.int64) * self.stride
        block = self.tokens[first[:, None] + np.arange(self.context + 1)].astype(np.int32)
        return {"tokens": np.ascontiguousarray(block[:, :-1]), "targets": np.ascontiguousarray(block[:, 1:])}


def windows(stream: Stream, data: Batches) -> Windows:
    """The whole windows of a part; the last target lies within the part too. None is E-DATA-036."""
    assert data.context is not None
    stride = data.stride or data.context
    start, stop = stream.part(data.split, data.span)
    spare = stop - start - data.context - 1
    if spare < 0:
        part = f"part `{data.split}` of data `{stream.source.name}`" if data.split else f"data `{stream.source.name}`"
        fail("E-DATA-036",
             f"{part} has {stop - start:,} tokens; a window of {data.context:,} and its targets need "
             f"{data.context + 1:,}",
             data.span, help="a smaller :context, a larger share in :split, or more text")
    return Windows(stream.tokens, start, spare // stride + 1, data.context, stride)

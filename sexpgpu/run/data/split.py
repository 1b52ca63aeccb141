"""`:split` of independent rows: one permutation, fixed by the number of rows and never by the run's seed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sexpgpu.diagnostics import fail
from sexpgpu.run.data.order import permute, round_keys
from sexpgpu.source import Span


def split_sizes(count: int, shares: Sequence[tuple[str, Fraction]], span: Span | None = None) -> dict[str, int]:
    """Sizes by largest remainder (ties: the part named first); shares that do not sum to 1 are E-DATA-013."""
    total = sum((Fraction(share) for _, share in shares), Fraction(0))
    if total != 1 or any(share < 0 for _, share in shares):
        fail("E-DATA-013", f"the shares of the split sum to {total}, not 1", span)
    exact = [Fraction(share) * count for _, share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: count - sum(sizes)]:
        sizes[i] += 1
    return {name: size for (name, _), size in zip(shares, sizes, strict=True)}


def split_rows(count: int, shares: Sequence[tuple[str, Fraction]], span: Span | None = None) -> dict[str, np.ndarray]:
    """Part -> its row numbers in file order (int64); parts are disjoint and cover all rows."""
    order = permute(np.arange(count, dtype=np.int64), count, round_keys("split", count))
    rows, start = {}, 0
    for name, size in split_sizes(count, shares, span).items():
        rows[name] = np.sort(order[start : start + size])
        start += size
    return rows

"""Atomic structures in memory, their statistics, and batches of them packed into fixed numbers of atoms and edges.

A packed batch has room for one structure and one atom or more that are not real: a padding edge begins and ends at one of those atoms,
farther apart than the cutoff, so that it adds nothing to anything, and the masks leave out the rest. Padding edges are shared out among
those atoms, so that none of them has a list of neighbours that a device would wait for, and stand behind the real ones: those of real atoms end at the real count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any, ClassVar

import numpy as np

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import Batches, DataSource
from sexpgpu.run.data.split import split_rows
from sexpgpu.source import Span

Capacity = tuple[int, int, int]  # structures, atoms, edges


@dataclass(frozen=True, eq=False)
class Structures:
    """Arrays over all atoms and all edges; structure s has atoms `starts[s]` … `starts[s+1]`. Å and eV, float64."""

    ARRAYS: ClassVar = ("starts", "edge_starts", "species", "positions", "cells", "receivers", "senders", "offsets", "labels")

    source: DataSource
    starts: np.ndarray
    edge_starts: np.ndarray
    species: np.ndarray
    positions: np.ndarray
    cells: np.ndarray
    receivers: np.ndarray  # within the structure
    senders: np.ndarray
    offsets: np.ndarray
    labels: Mapping[str, np.ndarray]  # energy [structures], forces [atoms 3], stress [structures 6], those required
    digest: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def rows(self, part: str | None, span: Span | None = None) -> np.ndarray:
        """Structure numbers of a part of the split, in file order; all of them for None."""
        if part is None:
            return np.arange(self.count, dtype=np.int64)
        parts = split_rows(self.count, self.source.split, self.source.span)
        if part not in parts:
            fail("E-DATA-013", f"data `{self.source.name}` has no part `{part}`", span, help=suggestion(part, parts, "parts"))
        if not len(parts[part]):
            fail("E-DATA-013", f"part `{part}` of data `{self.source.name}` is empty: {self.count} frames are too few", span)
        return parts[part]

    def pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
        """Nothing to look at: indices are made here, and species were checked by name."""
        return iter(())

    def place(self, row: int) -> str:
        return f"frame {row + 1}"

    def atoms(self, rows: np.ndarray) -> np.ndarray:
        return self.starts[rows + 1] - self.starts[rows]

    def edges(self, rows: np.ndarray) -> np.ndarray:
        return self.edge_starts[rows + 1] - self.edge_starts[rows]


def joined(source: DataSource, frames: Sequence[Any], edges: Sequence[Any], digest: str) -> Structures:
    """Frames (`extxyz.Frame`) and their edges end to end."""
    ends = lambda counts: np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # noqa: E731
    required = source.options["required"]
    labels = {name: (np.concatenate if name == "forces" else np.array)([getattr(f, name) for f in frames]) for name in required}
    receivers, senders, offsets = (np.concatenate(parts) for parts in zip(*edges, strict=True))
    return Structures(
        source, ends([len(f.species) for f in frames]), ends([len(e[0]) for e in edges]),
        np.concatenate([f.species for f in frames]), np.concatenate([f.positions for f in frames]),
        np.array([f.cell for f in frames]), receivers, senders, offsets, labels, digest,
    )  # fmt: skip


def statistics(data: Structures, rows: np.ndarray) -> dict[str, Any]:
    """Over these structures: mean neighbours of an atom, root mean square of a force component (1 if 0), and for each element
    the energy that a ridge fit (strength 1) of compositions gives it beside the mean energy of an atom."""
    atoms = data.atoms(rows)
    found: dict[str, Any] = {"neighbours": float(data.edges(rows).sum() / atoms.sum()) or 1.0, "force-rms": 1.0,
                             "shifts": [0.0] * len(data.source.options["elements"])}
    if "forces" in data.labels:
        forces = np.concatenate([data.labels["forces"][data.starts[r] : data.starts[r + 1]] for r in rows])
        found["force-rms"] = float(sqrt((forces**2).mean())) or 1.0
    if "energy" in data.labels:
        energy, size = data.labels["energy"][rows], len(found["shifts"])
        counts = np.array([np.bincount(data.species[data.starts[r] : data.starts[r + 1]], minlength=size) for r in rows], float)
        mean = float(energy.sum() / atoms.sum())
        left = energy - mean * atoms
        found["shifts"] = (mean + np.linalg.solve(counts.T @ counts + np.eye(size), counts.T @ left)).tolist()
    return found


def capacities(data: Structures, rows: np.ndarray, batch: int, buckets: int) -> tuple[Capacity, ...]:
    """Sizes that packed batches come in, ascending; the last holds any batch of these structures.

    The others lie 1 to 3 deviations above the mean of a random batch. Atoms go up to a multiple of 8, edges to one of 64.
    """
    atoms, edges = data.atoms(rows), data.edges(rows)
    many = min(batch, len(rows)) if len(rows) < batch else batch
    worst = tuple(int(np.sort(sizes)[::-1][:many].sum()) + (batch - many) * int(sizes.max()) for sizes in (atoms, edges))
    found = []
    for i in range(buckets - 1):
        z = 1 + 2 * i / max(1, buckets - 2)
        found.append(tuple(ceil(batch * s.mean() + z * sqrt(batch) * s.std()) for s in (atoms, edges)))
    sizes = {_rounded(batch, min(a, worst[0]), min(e, worst[1])) for a, e in (*found, worst)}
    return tuple(sorted(sizes))


def _rounded(batch: int, atoms: int, edges: int) -> Capacity:
    return batch + 1, -(-(atoms + 1) // 8) * 8, -(-max(1, edges) // 64) * 64


@dataclass(frozen=True, eq=False)
class Packed:
    """The structures of a part, by their number; `take` packs them into the smallest capacity that holds them."""

    data: Structures
    rows: np.ndarray
    capacities: tuple[Capacity, ...]
    cutoff: float
    parts: int = 1  # micro-batches, each packed alone, all into one capacity

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(self.rows[index], self.parts)
        atoms, edges = (max(int(sizes(rows).sum()) for rows in parts) for sizes in (self.data.atoms, self.data.edges))
        fits = [c for c in self.capacities if atoms < c[1] and edges <= c[2]]
        capacity = fits[0] if fits else _rounded(self.capacities[-1][0] - 1, atoms, edges)
        packs = [pack(self.data, rows, capacity, self.cutoff) for rows in parts]
        return packs[0] if len(packs) == 1 else {name: np.concatenate([p[name] for p in packs]) for name in packs[0]}


def pack(data: Structures, rows: np.ndarray, capacity: Capacity, cutoff: float) -> dict[str, np.ndarray]:
    """The fields of `experiment.model.GRAPH_FIELDS` for these structures."""
    structures, atoms, edges = capacity
    counts, edge_counts = data.atoms(rows), data.edges(rows)
    real, real_edges, given = int(counts.sum()), int(edge_counts.sum()), len(rows)
    places = _ranges(data.starts[rows], counts)
    edge_places = _ranges(data.edge_starts[rows], edge_counts)
    first = np.repeat(np.cumsum(counts) - counts, edge_counts)
    spare = real + np.arange(edges - real_edges) * (atoms - real) // max(1, edges - real_edges)  # the atom of each padding edge, ascending
    cells = _padded(data.cells[rows], structures, 0.0)
    volume = np.abs(np.linalg.det(cells[:given]))
    offsets = _padded(data.offsets[edge_places], edges, 0.0)
    offsets[real_edges:, 0] = 2 * cutoff
    fields = {
        "positions": _padded(data.positions[places], atoms, 0.0),
        "species": _padded(data.species[places], atoms, 0),
        "graph": _padded(np.repeat(np.arange(given), counts), atoms, structures - 1),
        "atom-mask": (np.arange(atoms) < real),
        "senders": np.concatenate([data.senders[edge_places] + first, spare]),
        "receivers": np.concatenate([data.receivers[edge_places] + first, spare]),
        "offsets": offsets,
        "edge-mask": (np.arange(edges) < real_edges),
        "cell": cells,
        "volume": _padded(np.where(volume > 0, volume, 1.0), structures, 1.0),
        "atoms": _padded(counts, structures, 1),
        "graph-mask": (np.arange(structures) < given),
    }
    for name, values in data.labels.items():
        by_atom = name == "forces"
        fields[name] = _padded(values[places if by_atom else rows], atoms if by_atom else structures, 0.0)
    whole = ("species", "graph", "senders", "receivers")
    return {name: np.ascontiguousarray(a, np.int32 if name in whole else np.float32) for name, a in fields.items()}


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start … start + count of each, one after another."""
    total = int(counts.sum())
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(total)


def _padded(values: np.ndarray, size: int, value: Any) -> np.ndarray:
    out = np.full((size, *values.shape[1:]), value, values.dtype)
    out[: len(values)] = values
    return out


def packed(data: Structures, batches: Batches) -> Packed:
    """What `(graphs …)` asks for; capacities are those of its scan."""
    rows = data.rows(batches.split, batches.span)
    sizes = batches.capacities or capacities(data, rows, batches.batch // batches.parts, batches.buckets)
    return Packed(data, rows, sizes, data.source.options["cutoff"], batches.parts)

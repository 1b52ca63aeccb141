"""`(extxyz location :elements … :cutoff …)`: frames of atoms with energies, forces and stress, plain or gzipped.

A frame is the number of atoms, a line of key=value pairs (Properties, Lattice, pbc, energy …), and a line an atom. Numbers are
converted to Å and eV; neighbour lists are made once, on threads, and kept in the data cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import vesin

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import DataSource
from sexpgpu.experiment.structures import ELEMENTS, ENERGIES, LENGTHS
from sexpgpu.run.data.cache import Say, key_of, open_cache, silent
from sexpgpu.run.data.files import no_rows, read_bytes, unpacked
from sexpgpu.run.data.structures import Structures, joined

_PAIR = re.compile(r"""([^\s="']+)=("(?:[^"\\]|\\.)*"|'[^']*'|\{[^}]*\}|\[[^\]]*\]|[^\s]+)""")
CELLS = 1e5  # of vesin
NEAREST = 1e-6  # Å between two atoms, at least
_VOIGT = (0, 4, 8, 5, 2, 1)  # xx yy zz yz xz xy of nine numbers
_TRUE, _FALSE = ("T", "TRUE", "1"), ("F", "FALSE", "0")


@dataclass(frozen=True)
class Frame:
    """One structure in Å and eV. `forces` [atoms 3], `stress` [6], or None where the file has none."""

    species: np.ndarray
    positions: np.ndarray
    cell: np.ndarray  # rows are lattice vectors; zeros without one
    periodic: tuple[bool, bool, bool]
    energy: float | None
    forces: np.ndarray | None
    stress: np.ndarray | None


def read(source: DataSource, path: Path, say: Say = silent) -> Structures:
    """The whole file. Errors: E-DATA-001, 005, 006, 060 (a frame), 061 (a label), 062 (an element)."""
    raw = read_bytes(source, path)
    digest = hashlib.sha256(raw).hexdigest()
    options = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in source.options.items()))
    return _opened(source, path, digest, options, say)


@lru_cache(maxsize=4)
def _kept(digest: str, options: Any) -> dict[str, Structures]:
    """What was read of this content in this process: a run looks at its data before it compiles, and again when it binds."""
    return {}


def _opened(source: DataSource, path: Path, digest: str, options: Any, say: Say) -> Structures:
    kept = _kept(digest, options)
    if "data" not in kept:
        frames = list(parse(source, unpacked(source, path).decode("utf-8", "replace")))
        if not frames:
            no_rows(source, "no frames")
        edges = neighbours(frames, source.options["cutoff"], key_of("neighbours", digest, options), say, partial(_bad, source))
        kept["data"] = joined(source, frames, edges, digest)
        _report_zeros(source, frames, say)
    return Structures(source, **{k: getattr(kept["data"], k) for k in Structures.ARRAYS}, digest=digest)


def _report_zeros(source: DataSource, frames: list[Frame], say: Say) -> None:
    """Forces of exactly 0 are often labels that nobody computed."""
    parts = [f.forces for f in frames if f.forces is not None]
    zero, total = sum(int((f == 0).sum()) for f in parts), sum(f.size for f in parts)
    if zero:
        say(f"data {source.name}: {zero:,} of {total:,} force components are exactly 0 ({100 * zero / total:.2g} %)")


def parse(source: DataSource, text: str) -> Iterator[Frame]:
    """The frames, in file order."""
    lines = text.splitlines()
    at, number = 0, 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        number += 1
        try:
            count = int(lines[at])
            if count < 1 or at + 2 + count > len(lines):
                raise ValueError
        except ValueError:
            words = "a number of atoms that the rest of the file has lines for"
            _bad(source, number, f"expected {words}, and found `{lines[at][:40]}`", at + 1)
        yield _Reader(source, number, at, lines[at + 1], lines[at + 2 : at + 2 + count]).frame()
        at += 2 + count


def _bad(source: DataSource, frame: int, what: str, line: int = 0) -> NoReturn:
    """line: of the file, where one is to blame."""
    at = f", line {line}" if line else ""
    fail("E-DATA-060", f"{source.location}, frame {frame}{at}: {what}", source.location_span or source.span)


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


class _Reader:
    """One frame: its pairs and its table."""

    def __init__(self, source: DataSource, number: int, at: int, comment: str, rows: list[str]):
        self.source, self.number, self.line, self.rows = source, number, at + 2, rows
        found = _PAIR.findall(comment)
        self.pairs = {name: value.strip("\"'{}[]") for name, value in found}
        self.options = source.options
        for name in {"Properties", "Lattice", "pbc", self.options["energy-key"], self.options["stress-key"]} & self.pairs.keys():
            if len({value for other, value in found if other == name}) > 1:
                self.bad(f"`{name}` stands there twice, with different values")
        self.length, self.energy = LENGTHS[self.options["length-unit"]], ENERGIES[self.options["energy-unit"]]

    def bad(self, what: str) -> NoReturn:
        _bad(self.source, self.number, what, self.line)

    def frame(self) -> Frame:
        columns, places = self._table()
        if "species" not in places or "pos" not in places:
            self.bad("Properties name no species:S:1 and pos:R:3")
        cell, periodic = self._cell()
        forces = self._columns(columns, places, self.options["forces-key"])
        energy, stress = self._numbers(self.options["energy-key"], (1,)), self._numbers(self.options["stress-key"], (6, 9))
        found = {"energy": energy, "forces": forces, "stress": stress}
        keys = {name: self.options[f"{name}-key"] for name in found}
        for name in self.options["required"]:
            if found[name] is None:
                have = sorted({*self.pairs, *places} - {"Properties"})
                meant = [key for key in have if name.rstrip("s") in key.lower() and (key in places) == (name == "forces")]
                fail("E-DATA-061", f"{self.source.location}, frame {self.number} has no {name} (`{keys[name]}`)",
                     self.source.location_span or self.source.span, notes=(f"the frame has: {', '.join(have)}",),
                     help=tuple(f':{name}-key "{key}"' for key in meant[:2]))
        if stress is not None and len(stress) == 9:
            stress = stress[list(_VOIGT)]
        return Frame(
            self._species([row[places["species"][0]] for row in columns]),
            self._vectors(columns, places["pos"], "pos") * self.length,
            cell * self.length,
            periodic,
            None if energy is None else float(energy[0]) * self.energy,
            None if forces is None else forces * (self.energy / self.length),
            None if stress is None else stress * (self.energy / self.length**3),
        )

    def _table(self) -> tuple[list[list[str]], dict[str, tuple[int, int]]]:
        words = self.pairs.get("Properties", "species:S:1:pos:R:3").split(":")
        places, start = {}, 0
        if len(words) % 3 or not all(w.isdigit() for w in words[2::3]):
            self.bad("Properties is no list of name:type:columns")
        for name, _, count in zip(words[::3], words[1::3], words[2::3], strict=True):
            places[name] = (start, start + int(count))
            start += int(count)
        columns = [row.split() for row in self.rows]
        for i, row in enumerate(columns):
            if len(row) < start:
                _bad(self.source, self.number, f"{len(row)} columns, and Properties need {start}", self.line + 1 + i)
        return columns, places

    def _floats(self, words: list[str], what: str) -> np.ndarray:
        try:
            values = np.array([float(w) for w in words])
        except ValueError:
            self.bad(f"{what} has `{next(w for w in words if not _number(w))[:40]}`, which is no number")
        if not np.isfinite(values).all():
            self.bad(f"{what} is not finite")
        return values

    def _columns(self, columns: list[list[str]], places: dict[str, tuple[int, int]], name: str) -> np.ndarray | None:
        return self._vectors(columns, places[name], name) if name in places else None

    def _vectors(self, columns: list[list[str]], place: tuple[int, int], name: str) -> np.ndarray:
        start, stop = place
        if stop - start != 3:
            self.bad(f"`{name}` has {stop - start} columns, not 3")
        return self._floats([w for row in columns for w in row[start:stop]], f"`{name}`").reshape(-1, 3)

    def _numbers(self, key: str, sizes: tuple[int, ...]) -> np.ndarray | None:
        if key not in self.pairs:
            return None
        values = self._floats(self.pairs[key].replace(",", " ").split(), f"`{key}`")
        if len(values) not in sizes:
            self.bad(f"`{key}` has {len(values)} numbers, not {' or '.join(map(str, sizes))}")
        return values

    def _cell(self) -> tuple[np.ndarray, tuple[bool, bool, bool]]:
        lattice = self._numbers("Lattice", (9,))
        cell = np.zeros((3, 3)) if lattice is None else lattice.reshape(3, 3)
        words = self.pairs.get("pbc", " ".join("TTT" if lattice is not None else "FFF")).upper().split()
        if len(words) != 3 or not all(w in _TRUE + _FALSE for w in words):
            self.bad("pbc is three of T and F")
        periodic = tuple(w in _TRUE for w in words)
        if any(periodic) and abs(np.linalg.det(whole_cell(cell, periodic))) < 1e-12:
            self.bad("it is periodic, and its Lattice has no volume")
        return cell, periodic  # type: ignore[return-value]

    def _species(self, names: list[str]) -> np.ndarray:
        elements = self.options["elements"]
        for name in names:
            if name not in elements:
                written = name.capitalize()
                known = name in ELEMENTS
                helps = f":elements ({' '.join([*elements, name])})" if known else f"`{written}` is how it is written" if written in ELEMENTS else "species are the symbols of chemical elements"
                fail("E-DATA-062", f"{self.source.location}, frame {self.number}: " + (f"the element `{name}` is not in :elements" if known else f"`{name}` is no chemical element"),
                     self.source.span, help=(helps,))
        return np.array([elements.index(name) for name in names], np.int32)


Edges = tuple[np.ndarray, np.ndarray, np.ndarray]  # receivers, senders, offsets in Å; receivers ascending


def whole_cell(cell: np.ndarray, periodic: Any) -> np.ndarray:
    """Vectors of zero along directions that are not periodic, as ASE leaves them for slabs and wires, by unit vectors across the others."""
    made = np.array(cell, np.float64)
    missing = [axis for axis in range(3) if not periodic[axis] and not made[axis].any()]
    if missing and len(missing) < 3:
        across = np.linalg.svd(made)[2][3 - len(missing) :]
        for axis, vector in zip(missing, across, strict=True):
            made[axis] = vector
    return made


def scattered(positions: np.ndarray, cell: np.ndarray, periodic: Any, cutoff: float) -> bool:
    """Whether vesin would divide space into no cells along a thin direction, by which it then divides (SIGFPE in 0.6.2): beyond 100,000 cells it makes fewer
    along each direction, by one factor."""
    if not len(positions):
        return False
    inverse = np.linalg.inv(whole_cell(cell, periodic) if any(periodic) else np.eye(3))
    across = inverse / np.linalg.norm(inverse, axis=0)  # unit vectors, in columns
    spans = np.ptp(positions @ across, axis=0)
    lengths = np.where(periodic, 1 / np.linalg.norm(inverse, axis=0), spans)
    cells = np.maximum(1.0, np.floor(lengths / cutoff))
    total = cells.prod()
    return bool(total > CELLS and cells.min() * np.cbrt(CELLS / total) < 1)


def edges_of(positions: np.ndarray, cell: np.ndarray, periodic: Any, cutoff: float) -> Edges:
    """All pairs closer than the cutoff, both ways, with those of periodic images; no atom with itself in the home cell."""
    box = whole_cell(cell, periodic) if any(periodic) else np.zeros((3, 3))
    i, j, shift = vesin.NeighborList(cutoff=cutoff, full_list=True).compute(positions, box, list(periodic), "ijS")
    order = np.lexsort((shift[:, 2], shift[:, 1], shift[:, 0], j, i)) if len(i) else np.zeros(0, int)
    return i[order].astype(np.int32), j[order].astype(np.int32), (shift.reshape(-1, 3)[order] @ cell).astype(np.float64)


def at_one_place(positions: np.ndarray, edges: Edges) -> tuple[int, int] | None:
    """Two atoms, or one and its image, between which there is no direction."""
    receivers, senders, offsets = edges
    apart = np.linalg.norm(positions[senders] - positions[receivers] + offsets, axis=1)
    if not len(apart) or not apart.min() < NEAREST:
        return None
    first, last = sorted((int(receivers[apart.argmin()]), int(senders[apart.argmin()])))
    return first, last


def neighbours(frames: list[Frame], cutoff: float, key: str, say: Say = silent, bad: Callable[[int, str], None] = lambda number, what: None) -> list[Edges]:
    """The edges of every frame, from the cache or made on threads (vesin computes outside Python's lock). bad: is told of a frame, by number, that
    has none, or two of whose atoms have no direction between them."""
    path = _cache_path(key, say)
    found = _cached(path, frames)
    if found is not None:
        return found
    for number, frame in enumerate(frames, 1):
        if scattered(frame.positions, frame.cell, frame.periodic, cutoff):
            bad(number, "its atoms, or its Lattice, are spread over hundreds of cutoffs: is :length-unit right?")
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        made = list(pool.map(lambda f: edges_of(f.positions, f.cell, f.periodic, cutoff), frames))
    for number, (frame, edges) in enumerate(zip(frames, made, strict=True), 1):
        pair = at_one_place(frame.positions, edges)
        if pair is not None:
            bad(number, f"atoms {pair[0] + 1} and {pair[1] + 1} stand at one place")
    if path is not None:
        stage = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            with stage.open("wb") as file:
                np.savez(file, counts=np.array([len(e[0]) for e in made]),
                         receivers=np.concatenate([e[0] for e in made]), senders=np.concatenate([e[1] for e in made]),
                         offsets=np.concatenate([e[2] for e in made]))
            os.replace(stage, path)
    return made


def _cache_path(key: str, say: Say) -> Path | None:
    with contextlib.suppress(OSError):
        cache = open_cache(say)
        return cache.folder / f"{key}.npz" if cache.lasting else None
    return None


def _cached(path: Path | None, frames: list[Frame]) -> list[Edges] | None:
    """What is there, if it is whole and fits the frames."""
    try:
        if path is None or not path.exists():
            return None
        with np.load(path, allow_pickle=False) as file:
            counts, arrays = file["counts"], [file[k] for k in ("receivers", "senders", "offsets")]
        stops = np.cumsum(counts)
        if len(counts) != len(frames) or {len(a) for a in arrays} != {int(stops[-1])} or arrays[2].shape[1:] != (3,):
            return None
        pieces = [np.split(a, stops[:-1]) for a in arrays]
    except Exception:  # noqa: BLE001 - a torn file in the cache is as good as none
        return None
    edges = list(zip(*pieces, strict=True))
    inside = all(not len(r) or (0 <= min(r.min(), s.min()) and max(r.max(), s.max()) < len(f.species)) for (r, s, _), f in zip(edges, frames, strict=True))
    return edges if inside else None  # type: ignore[return-value]

"""The arithmetic of a product whose operands both have all channels, a block of paths at a time: those that join one rank of `a` with one of `b`.

Paths of a block differ in the rank of the result alone, and so share what stands at a cell (i, j): the outer product a[i] b[j], and

    W[i, j] = Σ_p Σ_k K_p[i, j, k] w_p c_p[k],   from which   ∂a[i] = Σ_j W[i, j] b[j]   and   ∂b[j] = Σ_i W[i, j] a[i].

Cells are worked on one after another: what lives through a block is its results and its weighted cotangents, and nothing of a cell outlives it.
Where the gradients are of first order it takes fewer instructions to draw the cotangents of a path through its coefficients first,
N[i, j] = Σ_k K[i, j, k] c[k], and to weigh the sums over j and i: gradients by `a`, `b` and the weights share those. `Block` takes the way that has fewer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Protocol

from sexpgpu.backends.cuda.cartesian.product import Output, Product
from sexpgpu.ops.cartesian.algebra import Path, terms

Numbered = tuple[int, Path]
Pairs = tuple[tuple[int, int], ...]  # operands that stand at two slots, added


def coefficient(value: Fraction, name: str) -> str:
    """A term of a sum."""
    if value == 1:
        return name
    return f"-{name}" if value == -1 else f"{float(value)!r} * {name}"


def total(parts: Iterable[str]) -> str:
    """The text of a sum."""
    return " + ".join(parts).replace("+ -", "- ")


def blocks(paths: Iterable[Numbered]) -> list[list[Numbered]]:
    """Paths by the ranks that they join, the first rank slowest: its components and their gradients live no longer than its blocks."""
    found: dict[tuple[int, int], list[Numbered]] = defaultdict(list)
    for n, path in paths:
        found[path.first, path.second].append((n, path))
    return [found[key] for key in sorted(found)]


class Writer(Protocol):
    """What writes a kernel."""

    p: Product

    def name(self, expression: str) -> str:
        """A new variable."""

    def value(self, number: int, component: int) -> str:
        """A component of an operand."""

    def add(self, number: int, component: int, value: str) -> None:
        """Adds to a component of an output."""

    def weights(self, number: int, path: int, value: str) -> None:
        """A path's gradient by its weight."""


class Block:
    """The paths of one block, as text for a writer."""

    def __init__(self, writer: Writer, paths: Sequence[Numbered]):
        self.w, self.paths = writer, paths
        outputs = list(enumerate(writer.p.outputs))
        self.results = [(n, o) for n, o in outputs if o.target == "result"]
        self.operands = [(n, o) for n, o in outputs if o.target in ("a", "b")]
        self.by_weights = [(n, o) for n, o in outputs if o.target == "weights"]
        self.cells: dict[tuple[int, int], list[tuple[int, int, Fraction]]] = defaultdict(list)  # (i, j) -> (path, k, K)
        for n, path in paths:
            for t in terms(path):
                self.cells[path.first**2 + t.i, path.second**2 + t.j].append((n, t.k, t.coefficient))
        self.rows = [(n, k) for n, path in paths for k in range(2 * path.result + 1)]

    def write(self) -> None:
        outer = self._outer_pairs(self.results)
        dots = self._outer_pairs(self.by_weights)
        weighted = self._weighted()
        if self._by_path(outer, dots, weighted):
            self._cells(outer, {})
            self._gradients_by_path()
            self._results()
            return
        self._cells({**outer, **dots}, weighted)
        self._results()
        for number, o in self.by_weights:
            for n, path in self.paths:
                parts = [f"{self._cotangent(c, n, k)} * {self.sums[pairs, n, k]}" for c, pairs in self._apart(o, "result") for k in range(2 * path.result + 1)]
                self.w.weights(number, n, total(parts))

    def _by_path(self, outer: dict[Pairs, None], dots: dict[Pairs, None], weighted: dict[Pairs, None]) -> bool:
        """Whether gradients take fewer instructions path by path."""
        count, wide = sum(map(len, self.cells.values())), len(self.cells)
        fresh = [pairs for pairs in dots if pairs not in outer]
        uses = sum(len(o.uses) for _, o in self.operands)
        shared = sum(len(pairs) for pairs in fresh) * wide + len(fresh) * count + sum(len(o.uses) for _, o in self.by_weights) * len(self.rows)
        shared += sum(len(pairs) * len(self.rows) for pairs in weighted) + len(weighted) * count + uses * wide
        cotangents = {f["result"] for _, o in self.operands + self.by_weights for f in map(o.filled, o.uses)}
        alone, sums = len(cotangents) * count, 0
        for path in (p for _, p in self.paths):
            cells = len({(t.i, t.j) for t in terms(path)})
            alone += cells * len(self._sides())
            sums += (2 * path.first + 1) + (2 * path.second + 1)
        return alone + (uses * sums) // 2 + sum(len(o.uses) for _, o in self.by_weights) * sums // 2 < shared

    def _sides(self) -> set[tuple[str, int, int]]:
        """(slot, operand, cotangent) that N is joined with; gradients by weights take those over b."""
        found = set()
        for _, o in self.operands + self.by_weights:
            slot = {"a": "b", "b": "a", "weights": "b"}[o.target]
            found |= {(slot, f[slot], f["result"]) for f in map(o.filled, o.uses)}
        return found

    @staticmethod
    def _apart(o: Output, slot: str) -> list[tuple[int, Pairs]]:
        """The operands at a slot, and those at the other two that are added before they meet it."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for f in map(o.filled, o.uses):
            first, second = (x for s, x in f.items() if s != slot)
            found[f[slot]].append((first, second))
        return [(x, tuple(pairs)) for x, pairs in found.items()]

    def _outer_pairs(self, outputs: Sequence[tuple[int, Output]]) -> dict[Pairs, None]:
        """Sums of outer products of operands a and b that outputs are made of."""
        return dict.fromkeys(pairs for _, o in outputs for _, pairs in self._apart(o, "weights" if o.target == "result" else "result"))

    def _weighted(self) -> dict[Pairs, None]:
        """(weights, cotangent) of each W that gradients by a or b are made of."""
        return dict.fromkeys(pairs for _, o in self.operands for _, pairs in self._apart(o, "b" if o.target == "a" else "a"))

    def _cotangent(self, c: int, n: int, k: int) -> str:
        return self.w.value(c, self.w.p.place(n, k))

    def _cells(self, outer: dict[Pairs, None], weighted: dict[Pairs, None]) -> None:
        """Through the cells: sums of outer products into `sums`, and gradients by a and b."""
        w = self.w
        self.sums: dict[tuple[Pairs, int, int], str] = {}
        drawn = {
            (pairs, n, k): w.name(total(f"{w.value(x, n)} * {self._cotangent(c, n, k)}" for x, c in pairs))
            for pairs in weighted for n, k in self.rows
        }
        for (i, j), found in sorted(self.cells.items()):
            for pairs in outer:
                product = w.name(total(f"{w.value(a, i)} * {w.value(b, j)}" for a, b in pairs))
                for n, k, value in found:
                    key = pairs, n, k
                    term = coefficient(value, product)
                    self.sums[key] = w.name(f"{self.sums[key]} + {term}".replace("+ -", "- ")) if key in self.sums else term if value == 1 else w.name(term)
            met: dict[Pairs, str] = {}
            for number, o in self.operands if weighted else ():
                slot, at, there = ("b", i, j) if o.target == "a" else ("a", j, i)
                for x, pairs in self._apart(o, slot):
                    if pairs not in met:
                        met[pairs] = w.name(total(coefficient(value, drawn[pairs, n, k]) for n, k, value in found))
                    w.add(number, at, f"{met[pairs]} * {w.value(x, there)}")

    def _results(self) -> None:
        for number, o in self.results:
            for n, k in self.rows:
                parts = [f"{self.w.value(x, n)} * {self.sums[pairs, n, k]}" for x, pairs in self._apart(o, "weights")]
                self.w.add(number, self.w.p.place(n, k), total(parts))

    def _gradients_by_path(self) -> None:
        for n, path in self.paths:
            self._path(n, path)

    def _path(self, n: int, path: Path) -> None:
        w = self.w
        by_cell: dict[tuple[int, int], list[tuple[int, Fraction]]] = defaultdict(list)
        for t in terms(path):
            by_cell[path.first**2 + t.i, path.second**2 + t.j].append((t.k, t.coefficient))
        sides: dict[tuple[str, int, int], dict[int, str]] = {key: {} for key in sorted(self._sides())}
        for (i, j), found in sorted(by_cell.items()):
            drawn: dict[int, str] = {}
            for (slot, x, c), sums in sides.items():
                if c not in drawn:
                    drawn[c] = w.name(total(coefficient(value, self._cotangent(c, n, k)) for k, value in found))
                at, there = (i, j) if slot == "b" else (j, i)
                term = f"{drawn[c]} * {w.value(x, there)}"
                sums[at] = w.name(f"{sums[at]} + {term}" if at in sums else term)
        for number, o in self.operands:
            slot = "b" if o.target == "a" else "a"
            parts: dict[int, list[str]] = defaultdict(list)
            for f in map(o.filled, o.uses):
                for at, value in sides[slot, f[slot], f["result"]].items():
                    parts[at].append(f"{w.value(f['weights'], n)} * {value}")
            for at, terms_of in parts.items():
                w.add(number, at, total(terms_of))
        for number, o in self.by_weights:
            w.weights(number, n, total(f"{w.value(f['a'], i)} * {value}" for f in map(o.filled, o.uses) for i, value in sides["b", f["b"], f["result"]].items()))

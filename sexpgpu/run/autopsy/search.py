"""The first op of a replayed step that made a number which is not finite, and that reached the loss or the gradient norm.

Not every infinity is a fault: a mask of -inf is meant, and an overflow in the branch that `where` leaves out hurts
nobody. So a value is *meant* when it holds no NaN and all its infinities come from constants, and *bad* when it is
otherwise not finite. From the result that fell, bad operands are followed upwards, in a pointwise op only where operand
and result are not finite at the same places. What is bad without such an operand began it; the first in the order of
execution is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sexpgpu.backends.interpreter.replay import Part, StepGraphs, parts
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND

SHOWN = 8  # samples named
TEXT = 60  # characters of a form shown


@dataclass(frozen=True)
class Range:
    """A tensor in numbers; least, greatest and mean are of its finite values, NaN where there are none."""

    what: str  # the op or leaf that made it, with type and place
    least: float
    greatest: float
    mean: float
    nans: int
    infinities: int

    def line(self) -> str:
        numbers = f"min {self.least:.4g}, max {self.greatest:.4g}, mean {self.mean:.4g}"
        return f"{self.what}: {numbers}, {self.nans} nan, {self.infinities} inf"


@dataclass(frozen=True)
class Finding:
    """`op`: the IR's name of the op (or leaf) to blame. `samples`: numbers in the batch, of rows that are not finite."""

    fell: str  # loss or gradient norm
    part: str
    op: str
    phase: str
    title: str
    paths: tuple[str, ...]
    places: tuple[str, ...]
    operands: tuple[Range, ...]
    result: Range
    samples: tuple[int, ...]

    def lines(self) -> list[str]:
        """For a person: the op and where it stands, its operands, its result, the samples."""
        part = "" if self.part == "step" else f" ({self.part})"
        lines = [f"first offending op{part}: {self.title}"]
        lines += [f"  operand {i}, {r.line()}" for i, r in enumerate(self.operands, 1)]
        lines.append(f"  {self.result.line()}")
        return lines


def search(graphs: StepGraphs, state: Mapping[str, torch.Tensor], updates: int, batch: Mapping[str, object]) -> Finding | None:
    """The first offending op of update `updates + 1`; None where the replay is finite."""
    origins = graphs.traced.origins
    empty: list[Finding | None] = []
    for number, part in enumerate(parts(graphs, state, updates, batch)):
        record = _walk(part, origins, _owners(batch, number, graphs.traced.run.accumulate))
        for name in ("loss", "count"):
            if name in part.results and part.results[name] in record.bad:
                return record.blame(name)
        if "count" in part.results:
            empty.append(record.nothing(part.results["count"]) if record.empty else None)
        if empty and all(empty) and len(empty) == graphs.traced.run.accumulate:
            return empty[0]
        for name in part.results:
            if (name == "gradient-norm" or name.startswith("gradient/")) and part.results[name] in record.bad:
                return record.blame(name)
    return None


class _Record:
    """What one walk saw. `bad`: node -> (mask of values that are not finite, its bad operands that explain it)."""

    def __init__(self, part: Part, origins: Origins, owners: Mapping[int, np.ndarray]):
        self.part, self.origins, self.owners = part, origins, owners
        self.bad: dict[Node, torch.Tensor] = {}
        self.causes: dict[Node, tuple[Node, ...]] = {}
        self.meant: set[Node] = set()
        self.order: dict[Node, int] = {}
        self.first: dict[Node, tuple[tuple[Range, ...], Range]] = {}  # of nodes without a cause
        self.empty = False

    def see(self, node: Node, operands: Sequence[torch.Tensor], value: torch.Tensor) -> None:
        self.order[node] = len(self.order)
        if node is self.part.results.get("count") and float(value) == 0.0:
            self.empty = True
            self.first[node] = (self.ranges(node, operands), _range(_what(node, self.origins), value))
        if not value.is_floating_point():
            return
        wrong = ~torch.isfinite(value)
        if not bool(wrong.any()):
            return
        if self._meant(node, value):
            self.meant.add(node)
            return
        self.bad[node] = wrong
        self.causes[node] = tuple(i for i in dict.fromkeys(node.inputs) if i in self.bad and self._explains(node, i, wrong))
        if not self.causes[node]:
            self.first[node] = (self.ranges(node, operands), _range("result", value))

    def ranges(self, node: Node, operands: Sequence[torch.Tensor]) -> tuple[Range, ...]:
        return tuple(_range(_what(i, self.origins), v) for i, v in zip(node.inputs, operands, strict=True))

    def _meant(self, node: Node, value: torch.Tensor) -> bool:
        if bool(torch.isnan(value).any()):
            return False
        return node.op == "constant" or (any(i in self.meant for i in node.inputs) and not any(i in self.bad for i in node.inputs))

    def _explains(self, node: Node, operand: Node, wrong: torch.Tensor) -> bool:
        if table()[node.op].lowering.kind != "pointwise":
            return True
        return bool((self.bad[operand] & wrong).any())

    def blame(self, name: str) -> Finding:
        root = self.part.results[name]
        seen, todo = {root}, [root]
        while todo:
            for cause in self.causes[todo.pop()]:
                if cause not in seen:
                    seen.add(cause)
                    todo.append(cause)
        first = min((n for n in seen if n in self.first), key=self.order.__getitem__)
        fell = "loss" if name in ("loss", "count") else "gradient norm"
        return self._finding(first, fell, self._samples(first))

    def nothing(self, count: Node) -> Finding:
        return self._finding(count, "loss", (), "the loss's count is 0, so that its mean is 0/0: ")

    def _samples(self, node: Node) -> tuple[int, ...]:
        if not node.type.shape or not (node.type.batch or self.owners):
            return ()
        rows = self.bad[node].reshape(node.type.shape[0], -1).any(dim=1)
        found = torch.nonzero(rows).reshape(-1).tolist()
        if self.owners:
            if node.type.shape[0] not in self.owners:
                return ()
            own = self.owners[node.type.shape[0]]
            found = sorted({int(own[i]) for i in found if own[i] >= 0})
        return tuple(int(i) + self.part.offset for i in found)

    def _finding(self, node: Node, fell: str, samples: tuple[int, ...], why: str = "") -> Finding:
        origin = self.origins.of(node)
        operands, result = self.first[node]
        return Finding(fell, self.part.name, node.op, origin.phase, why + title(node, self.origins),
                       origin.paths, tuple(s.place for s in origin.spans), operands, result, samples)


def _owners(batch: Mapping[str, object], number: int, parts: int) -> dict[int, np.ndarray]:
    """Of a micro-batch of packed structures: rows of a tensor -> the structure of each, -1 for padding. Empty for other batches."""
    if "graph-mask" not in batch:
        return {}
    real, graph, receivers = (np.split(np.asarray(batch[name]), parts)[number] for name in ("graph-mask", "graph", "receivers"))
    own = np.where(real > 0, np.arange(len(real)), -1)
    found: dict[int, np.ndarray] = {}
    for rows in (own, own[graph], own[graph[receivers]]):
        found[len(rows)] = found.get(len(rows), rows)
    return found if len(found) == 3 else {}  # as many atoms as edges: a row does not say which it is


def _walk(part: Part, origins: Origins, owners: Mapping[int, np.ndarray]) -> _Record:
    record = _Record(part, origins, owners)
    for node, operands, value in part.walk():
        record.see(node, operands, value)
    return record


def title(node: Node, origins: Origins) -> str:
    """One line: the op, its layer, file and line, and the form it comes from."""
    origin = origins.of(node)
    where = f" in {', '.join(origin.paths[:2])}" if origin.paths else ""
    places = f" at {', '.join(s.place for s in origin.spans[:2])}" if origin.spans else ""
    form = f"`{_short(origin.spans[0].text)}`" if origin.spans and origin.spans[0].text else ""
    if node.op in BOUND:
        return f"{_leaf(node)}, which was not finite before the step" if node.op != "input" else f"{_leaf(node)} of the batch"
    said = f"{node.op} {node.type}{where}{places}"
    if origin.phase == "gradient norm":
        return f"{said}, squaring and summing its gradient for the gradient norm"
    if origin.phase == "forward":
        return said + (f": {form}" if form else "")
    return f"{said}, in the {'gradient' if origin.phase == 'backward' else origin.phase}{f' of {form}' if form else ''}"


def _what(node: Node, origins: Origins) -> str:
    if node.op in BOUND:
        return f"{_leaf(node)} {node.type}"
    if node.op == "constant":
        return f"constant {node.attrs['value']:g} {node.type}"
    origin = origins.of(node)
    place = f" at {origin.spans[0].place}" if origin.spans else ""
    return f"{node.op} {node.type}{place}"


def _leaf(node: Node) -> str:
    name = node.attrs.get("path", node.attrs.get("name", ""))
    word = {"param": "parameter", "input": "field"}.get(node.op, node.op)
    return f"{word} {name}" if name else word


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= TEXT else text[: TEXT - 1] + "…"


def _range(what: str, value: torch.Tensor) -> Range:
    nans = int(torch.isnan(value).sum()) if value.is_floating_point() else 0
    numbers = value.double().reshape(-1)
    finite = numbers[torch.isfinite(numbers)]
    if not len(finite):
        return Range(what, math.nan, math.nan, math.nan, nans, value.numel() - nans)
    return Range(what, float(finite.min()), float(finite.max()), float(finite.mean()), nans, value.numel() - len(finite) - nans)


def samples_line(samples: Sequence[int], rows: Sequence[int] | None, source: str, packed: bool = False) -> str:
    """`samples of the batch: 0, 3 (rows 17, 4 of data digits)`; `rows`: their numbers in the source, from 0. packed: they are structures,
    whose frames are counted from 1, as everywhere."""
    def short(numbers: Iterable[int]) -> str:
        shown = [str(n) for n in list(numbers)[:SHOWN]]
        return ", ".join(shown) + (f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else "")

    text = f"{'structures' if packed else 'samples'} of the batch: {short(samples)}"
    if rows is None:
        return text
    if packed:
        return f"{text} (frame{'s' if len(samples) > 1 else ''} {short(rows[s] + 1 for s in samples)} of data {source})"
    return f"{text} (samples {short(rows[s] for s in samples)} of data {source}, from 0)"

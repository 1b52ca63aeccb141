"""What the ranks of a step exchange, put among its launches: sums of gradients while the backward pass still runs, then those of
scalars and states, and after an update of shares the parameters.

Gradients lie in their vectors in the order in which the launches make them final, and are cut there into buckets. Each is summed on
a stream of its own, which parts from that of the launches once the bucket's last one is made and joins it before the update, so that
a program captures both. The order of the sums is that of the first graph, for every graph of the run: ranks whose packed
batches have other capacities replay other graphs, and still meet in the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from sexpgpu.backends.arena import Arena, Line
from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.ranks import BUCKET, Team
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build

GRADIENT = "gradient/"
WAITED = "waited"  # seconds of a step in which the device's launches waited for sums
SQUARES = ("own squares", "whole squares")


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the `line`-th vector of gradients: those of `names`, or one rank's part of them. owner: the rank that
    needs the sum, None for all; ready: the launch of the first graph after which they are final."""

    line: int
    start: int
    stop: int
    names: tuple[str, ...]
    ready: int
    owner: int | None = None


def buckets(lines: list[Line], final: Callable[[str], int], limit: int) -> list[Bucket]:
    """Every vector cut, in the order in which the parts become final. A bucket has at least `limit` bytes, but for a vector's last."""
    found: list[Bucket] = []
    for number, line in enumerate(lines):
        names, start = list(line.starts), 0
        ends = [*list(line.starts.values())[1:], line.vector.numel()]
        held: list[str] = []
        for name, stop in zip(names, ends, strict=True):
            held.append(name)
            if name != names[-1] and (stop - start) * line.vector.element_size() < limit:
                continue
            ready = max(final(n) for n in held)
            found += [Bucket(number, low, high, tuple(held), ready, owner) for low, high, owner in _owned(line, start, stop)]
            start, held = stop, []
    return sorted(found, key=lambda bucket: bucket.ready)


def _owned(line: Line, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
    """The range, cut where the shares of two ranks meet."""
    while line.share and start < stop:
        owner = start // line.share
        end = min(stop, (owner + 1) * line.share)
        yield start, end, owner
        start = end
    if not line.share:
        yield start, stop, None


class Exchange:
    """`first`: the graph whose launches decide the order of sums. `parts`: micro-batches of a rank."""

    def __init__(self, team: Team, arena: Arena, first: Compiled, origins: Origins, deterministic: bool):
        self.team, self.arena, self.device = team, arena, torch.device(first.device)
        self.buckets = buckets(arena.lines, lambda name: first.final(GRADIENT + name), BUCKET)
        self.silent = False  # sums are left out
        self._met = False  # the ranks have rehearsed together
        #: before the launches' where both could go on: what the other ranks wait for is the shorter work
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._kept: list[torch.Tensor] = []
        self._began = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._origins, self._deterministic = origins, deterministic
        self._squares = self._compiled_squares(first.device) if any(line.share for line in arena.lines) else None

    @property
    def bytes(self) -> int:
        """Of memory while gradients are summed, rounded between nodes: a bucket twice."""
        widest = max(((b.stop - b.start) * self.arena.lines[b.line].vector.element_size() for b in self.buckets), default=0)
        return 2 * widest if self.team.wire == "bf16" else 0

    def follow(self) -> None:
        """Before the first launches are made: all take the choices that rank 0 knows, and the others wait until it has compiled and
        rehearsed, and take those that it made there."""
        if self._stream is None or self._met:
            return
        choice.agree(self.team.tell, self.team.rank == 0)
        if self.team.rank:
            choice.settle(self.team.tell)

    def rehearsal(self, work: Callable[[], None]) -> Callable[[], None]:
        """What is done before `work` is captured. The first time all ranks do it, so that they are connected: rank 0 alone first, which
        compiles what is not in the caches yet and chooses kernels, and then all with its choices. Later the others may have no
        new graph, so nothing is exchanged."""

        def quietly() -> None:
            self.silent = True
            try:
                work()
            finally:
                self.silent = False

        def rehearse() -> None:
            if self._met:
                quietly()
                return
            self._met = True
            if self.team.rank == 0:
                quietly()
                choice.settle(self.team.tell)
            work()
            if isinstance(self._stream, torch.cuda.Stream):  # where a rank does not come, this one waits for it, and is not slow itself
                with self.team.waiting("the first sums"):
                    torch.cuda.current_stream().synchronize()

        return rehearse

    # -- gradients

    def keep(self, first: bool) -> Callable[[], None]:
        """After a micro-batch that is not the last: its gradients join those before it."""
        if not self._kept:
            self._kept = [torch.empty_like(line.vector) for line in self.arena.lines]

        def work() -> None:
            for kept, line in zip(self._kept, self.arena.lines, strict=True):
                if first:
                    kept.copy_(line.vector)
                else:
                    kept.add_(line.vector)

        return work

    def after(self, compiled: Compiled, kept: bool) -> dict[int, list[Callable[[], None]]]:
        """Launch -> the sums that begin after it, in the order of all ranks. kept: micro-batches before this one are added."""
        found: dict[int, list[Callable[[], None]]] = {}
        last = 0
        for bucket in self.buckets:
            last = max(last, *(compiled.final(GRADIENT + name) for name in bucket.names))
            found.setdefault(last, []).append(partial(self._begin, bucket, kept))
        return found

    def _begin(self, bucket: Bucket, kept: bool) -> None:
        part = self.arena.lines[bucket.line].vector[bucket.start : bucket.stop]
        with self._beside():
            if kept:
                part.add_(self._kept[bucket.line][bucket.start : bucket.stop])
            if not self.silent:
                self.team.part_(part, bucket.owner)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the other stream, after what the current one was given until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    # -- what else a step sums

    def states(self, values: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
        """Memory for new states of these types, and what makes them those of all ranks: the mean; integers are the last rank's."""
        floats = {n: t for n, t in values.items() if t.dtype.is_floating_point}
        found = {n: torch.empty_like(t) for n, t in values.items() if n not in floats}
        whole = list(found.values())
        vectors = []
        for dtype in dict.fromkeys(t.dtype for t in floats.values()):
            own = {n: t for n, t in floats.items() if t.dtype == dtype}
            vectors.append(torch.empty(sum(t.numel() for t in own.values()), dtype=dtype, device=self.device))
            found |= {n: piece.view(own[n].shape) for n, piece in zip(own, vectors[-1].split([t.numel() for t in own.values()]), strict=True)}

        def work() -> None:
            for vector in vectors:
                self.team.sum_(vector)
                vector.div_(self.team.ranks)
            self.team.copy_(whole, self.team.ranks - 1)

        return found, work

    def finish(self, scalars: Sequence[torch.Tensor], states: Callable[[], None], squares: Mapping[str, torch.Tensor], waited: torch.Tensor) -> Callable[[], None]:
        """After the last micro-batch: the sums of `scalars`, which lie side by side, and of states, and every sum that was begun is there.
        `waited`: home for the seconds that this takes the device; the CPU's ranks wait where the host sees it.

        squares: where vectors are divided, `SQUARES` -> homes for the sums of squares of gradients, of shares and of what every
        rank has; the first is one of `scalars`.
        """
        own = self._bound_squares(squares) if self._squares is not None else None
        first, count = scalars[0], len(scalars)
        assert [t.storage_offset() - first.storage_offset() for t in scalars] == list(range(count))
        vector = torch.as_strided(first, (count,), (1,), first.storage_offset())

        def work() -> None:
            with self._beside():
                if own is not None:
                    own.launch()
                if not self.silent:
                    self.team.sum_(vector)
                    states()
            if self._stream is not None:
                clock = import_module("sexpgpu.backends.cuda.clock")  # brings Triton
                clock.start[(1,)](self._began)
                torch.cuda.current_stream().wait_stream(self._stream)
                clock.stop[(1,)](self._began, waited)

        return work

    def _leaves(self) -> dict[str, list[tuple[Node, torch.Tensor]]]:
        """The gradients whose squares each of SQUARES sums, as vectors, and the leaves that stand for them."""
        found: dict[str, list[tuple[Node, torch.Tensor]]] = {name: [] for name in SQUARES}
        for name, gradient in self.arena.gradients.items():
            part, leaf = self.arena.own(name, gradient), self.arena.flat.gradients[name]
            node = build("input", name=f"gradient {name}", dtype=leaf.type.dtype, shape=(part.numel(),), batch=False)
            found[SQUARES[part.numel() == gradient.numel()]].append((node, part.view(-1)))
        return found

    def _compiled_squares(self, target: str) -> Compiled:
        results: dict[str, Node] = {}
        for name, pairs in self._leaves().items():
            terms = [build("sum", build("square", leaf)) for leaf, _ in pairs]
            for term in terms:
                results[name] = term if name not in results else build("+", results[name], term)
        return Compiled(results, dict.fromkeys(results), target, self._origins)

    def _bound_squares(self, homes: Mapping[str, torch.Tensor]) -> Bound:
        assert self._squares is not None
        leaves = {leaf: part for pairs in self._leaves().values() for leaf, part in pairs}
        into = {name: homes[name] for name in self._squares.results}
        return Bound(self._squares, leaves, into, None, _no_draws, self._deterministic)

    # -- after the update

    def parameters(self) -> list[torch.Tensor]:
        """The vectors that an update of shares leaves to be put together."""
        return [vector for name, vector in self.arena.vectors.items() if self.arena.of_vector[name].shares > 1 and name not in self.arena.divided]

    def gather(self, copies: Sequence[torch.Tensor] = ()) -> None:
        """Those vectors, and the copies of others, from the ranks' shares."""
        if not self.silent:
            for vector in [*self.parameters(), *copies]:
                self.team.join_(vector)


def _no_draws(what: str, parts: tuple) -> torch.Tensor:
    raise LookupError("a sum of squares draws nothing")

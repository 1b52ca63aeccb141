"""What a program asks of the other ranks. `run.ranks.collectives.Collectives` answers; backends do not import run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

BUCKET = 25 << 20  # bytes of gradients that travel together


class Team(Protocol):
    """Every rank calls the same methods in the same order, with tensors of the same sizes."""

    rank: int
    ranks: int
    wire: str  # of gradients between nodes: f32, or bf16

    def sum_(self, tensor: Any) -> None:
        """In place: the sum over ranks."""

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks of numbers on the host, in float64."""

    def gradients_(self, vectors: Sequence[Any]) -> None:
        """In place: sums over ranks, rounded between nodes where the user chose so."""

    def own_sum(self, vector: Any) -> Any:
        """This rank's share of the sum over ranks."""

    def gather(self, share: Any) -> Any:
        """The shares of all ranks, one after another."""

    def copy_(self, tensors: Sequence[Any], root: int = 0) -> None:
        """In place: rank `root`'s values."""

    def part_(self, part: Any, owner: int | None = None) -> None:
        """In place: the sum over ranks of a part of a vector of gradients, as `gradients_` makes it. With `owner` on that rank
        alone; elsewhere it may change, but what every rank has as 0 stays so."""

    def join_(self, vector: Any) -> None:
        """In place: every rank's share of a vector of which each has its own."""

    def on_host(self, share: Any) -> Any:
        """The shares of all ranks, one after another, in rank 0's host memory; None on the others."""

    def tell(self, text: str) -> str:
        """Rank 0's text."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait of the host for the device, which does its own work and waits for the other ranks."""

    def making(self) -> AbstractContextManager[None]:
        """Around the making of a graph, where kernels may be compiled while the others go on to wait."""

    def waited(self, seconds: float) -> None:
        """So long the device waited for them."""


class Alone:
    """A run of one rank: nothing to do."""

    rank, ranks, wire = 0, 1, "f32"

    def sum_(self, tensor: Any) -> None: ...

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gradients_(self, vectors: Sequence[Any]) -> None: ...

    def own_sum(self, vector: Any) -> Any:
        return vector

    def gather(self, share: Any) -> Any:
        return share

    def copy_(self, tensors: Sequence[Any], root: int = 0) -> None: ...

    def part_(self, part: Any, owner: int | None = None) -> None: ...

    def join_(self, vector: Any) -> None: ...

    def on_host(self, share: Any) -> Any:
        return share

    def tell(self, text: str) -> str:
        return text

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def making(self) -> AbstractContextManager[None]:
        return nullcontext()

    def waited(self, seconds: float) -> None: ...


class Assumed(Alone):
    """The first of so many ranks that are not there: for a plan, which exchanges nothing."""

    def __init__(self, ranks: int):
        self.ranks = ranks

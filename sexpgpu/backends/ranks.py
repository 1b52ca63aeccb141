"""What a program asks of the other ranks. `run.ranks.collectives.Collectives` answers; backends do not import run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Team(Protocol):
    """Every rank calls the same methods in the same order, with tensors of the same sizes."""

    rank: int
    ranks: int

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


class Alone:
    """A run of one rank: nothing to do."""

    rank, ranks = 0, 1

    def sum_(self, tensor: Any) -> None: ...

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gradients_(self, vectors: Sequence[Any]) -> None: ...

    def own_sum(self, vector: Any) -> Any:
        return vector

    def gather(self, share: Any) -> Any:
        return share

    def copy_(self, tensors: Sequence[Any], root: int = 0) -> None: ...

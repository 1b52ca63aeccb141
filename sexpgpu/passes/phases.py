"""Which phase of a step each part of its graph belongs to, by what depends on what.

A loss may hold a gradient of its own, as forces are of an energy: then a step computes `forward` (the energy), `first backward` (the
forces), `loss`, and `double backward`, the gradient through both. Without one it is `forward` and `backward`. The update is a graph of
its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

PHASES = ("forward", "first backward", "loss", "backward", "double backward", "update")


class Item(NamedTuple):
    """A part of a graph, a node or a launch. derived: of a gradient's making (its origin's phase is `backward`)."""

    reads: Sequence[Any]
    stores: Sequence[Any]
    derived: bool


def phases(items: Sequence[Item], targets: Iterable[Hashable]) -> list[str]:
    """The phase of each item; items are in an order in which they may run, and `targets` are what the loss, or the results of an
    inference, are stored as."""
    home = {key: i for i, item in enumerate(items) for key in item.stores}
    before: set[int] = set()
    stack = [home[key] for key in targets if key in home]
    while stack:
        i = stack.pop()
        if i not in before:
            before.add(i)
            stack += [home[key] for key in items[i].reads if key in home]
    twice = any(items[i].derived for i in before)
    after: set[int] = set()  # what an inner gradient leads to
    found = []
    for i, item in enumerate(items):
        if item.derived or any(home.get(key) in after for key in item.reads):
            after.add(i)
        if i not in before:
            found.append("double backward" if twice else "backward")
        elif item.derived:
            found.append("first backward")
        else:
            found.append("loss" if i in after else "forward")
    return found


def inferred(found: Sequence[str]) -> list[str]:
    """The phases of a graph without a loss: what follows a gradient belongs to it."""
    return ["first backward" if name == "loss" else name for name in found]

"""`:remat`: the values inside a layer's call are let go after the forward pass, and the call's part of it runs again before the
backward pass needs them.

It works on the work of a graph in its final order (launches of a device, steps of the interpreter), after everything else is
decided: the same work runs twice, over the same operands, so no result depends on it, to the last bit. What one of
them gives to another is kept; so is what does not belong to one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sexpgpu.ir import Node, Origin, Origins
from sexpgpu.ops import build

Value = Hashable


@dataclass(frozen=True)
class Item:
    """A piece of work: what it reads and makes, the call whose layer it belongs to ("": none), and whether it is of a backward
    pass. `whole`: equal for pieces of which one alone cannot run again."""

    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    call: str = ""
    backward: bool = False
    whole: Hashable = None
    fixed: bool = False  # it may run once only


@dataclass(frozen=True)
class Turn:
    """Item `number` in the new order. again: value -> the one that stands for it here; `second`: it runs for the second time."""

    number: int
    again: Mapping[Value, Value] = field(default_factory=dict)
    second: bool = False


def turns(items: Sequence[Item], results: Iterable[Value], name: Callable[[Value], Value]) -> list[Turn]:
    """The order in which calls run again. `name`: value -> what its second making is called."""
    items = _settled(items)
    kept = set(results)
    maker = {v: i for i, item in enumerate(items) for v in item.makes}
    readers: dict[Value, list[int]] = {}
    for i, item in enumerate(items):
        for v in item.reads:
            readers.setdefault(v, []).append(i)
    inside: dict[Value, str] = {}  # value -> its call, where no other one that may run again reads it
    for v, i in maker.items():
        call = items[i].call
        if call and v not in kept and not items[i].fixed and all(items[j].backward or items[j].call in ("", call) for j in readers.get(v, ())):
            inside[v] = call
    wanted: dict[str, set[int]] = {}
    before: dict[int, list[str]] = {}  # item -> calls that run again before it
    for i, item in enumerate(items):
        for v in item.reads if item.backward else ():
            if v in inside:
                call = inside[v]
                if call not in wanted:
                    before.setdefault(i, []).append(call)
                _add(wanted.setdefault(call, set()), maker[v], items, maker, inside)
    out: list[Turn] = []
    renamed = {v: name(v) for call, numbers in wanted.items() for i in numbers for v in items[i].makes}
    lost = {v for v in renamed if v in inside}
    for i, item in enumerate(items):
        for call in before.get(i, ()):
            out += [Turn(j, {v: renamed[v] for v in (*items[j].reads, *items[j].makes) if v in lost or v in items[j].makes}, True) for j in sorted(wanted[call])]
        again = {v: renamed[v] for v in item.reads if v in lost} if item.backward else {}
        out.append(Turn(i, again))
    return out


def _add(found: set[int], start: int, items: Sequence[Item], maker: Mapping[Value, int], inside: Mapping[Value, str]) -> None:
    """`start`, and what makes the values inside its call that it needs, and the other pieces of these."""
    stack = [start]
    while stack:
        i = stack.pop()
        if i in found:
            continue
        found.add(i)
        stack += [maker[v] for v in items[i].reads if inside.get(v) == items[i].call]
        if items[i].whole is not None:
            stack += [j for j, other in enumerate(items) if other.whole == items[i].whole]


def _settled(items: Sequence[Item]) -> list[Item]:
    """With what follows from the others: work on values of a backward pass is of one, and pieces of one work share its call."""
    late: set[Value] = set()
    calls: dict[Hashable, set[str]] = {}
    for item in items:
        if item.whole is not None and item.call:
            calls.setdefault(item.whole, set()).add(item.call)
    out = []
    for item in items:
        backward = item.backward or any(v in late for v in item.reads)
        call = item.call
        if item.whole in calls:
            call = next(iter(calls[item.whole])) if len(calls[item.whole]) == 1 else ""
        if backward:
            late.update(item.makes)
        out.append(Item(item.reads, item.makes, "" if backward else call, backward, item.whole, item.fixed))
    return out


class Calls:
    """The calls of layers that run again, by path, and to which of them a value belongs."""

    def __init__(self, paths: Iterable[str], origins: Origins):
        self.paths, self.origins = tuple(dict.fromkeys(paths)), origins
        self._known: dict[str, str] = {}

    def of(self, nodes: Iterable[Node]) -> tuple[str, bool]:
        """The only call that all of these belong to that have a path at all ("": none), and whether one is of a backward pass."""
        found: set[str] = set()
        backward = False
        for node in nodes:
            origin: Origin = self.origins.of(node)
            backward = backward or origin.phase == "backward"
            found |= {self._call(path) for path in origin.paths}
        return (next(iter(found)) if len(found) == 1 else ""), backward

    def _call(self, path: str) -> str:
        if path not in self._known:
            self._known[path] = next((p for p in self.paths if path == p or path.startswith(p + "/")), "")
        return self._known[path]


def second(value: Value) -> Value:
    """What a value's second making is called; it stays a node where it is one, or a word beside one."""
    if isinstance(value, Node):
        return build("again", value, value)
    assert isinstance(value, tuple) and isinstance(value[1], Node), value
    return (value[0], build("again", value[1], value[1]))

"""Launches of layers that run again (`passes/remat.py`), over a schedule that is final: the same kernels and calls, on other memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sexpgpu.ir import Node, Origins
from sexpgpu.passes.remat import Calls, Item, second, turns
from sexpgpu.passes.schedule.fuse import Call, Launch, Schedule, parts_of


def repeat(schedule: Schedule, paths: Sequence[str], origins: Origins) -> tuple[Schedule, dict[Launch, Launch]]:
    """The schedule in which the layers called at `paths` run again; launch of it -> the one that it was, where it is another."""
    calls = Calls(paths, origins)
    items = [_item(launch, calls) for launch in schedule.launches]
    launches: list[Launch] = []
    was: dict[Launch, Launch] = {}
    for turn in turns(items, schedule.results.values(), second):
        old = schedule.launches[turn.number]
        again = {v: n for v, n in turn.again.items() if isinstance(v, Node) and isinstance(n, Node)}
        if not again:
            launches.append(old)
            continue
        if isinstance(old, Call):
            operands = tuple(replace(o, base=again.get(o.base, o.base)) for o in old.operands)
            new: Launch = replace(old, operands=operands, again=again)
        else:
            if turn.second:
                again |= {unit: again.get(unit) or _second(unit) for unit in old.units}
            new = replace(old, stores=tuple(again.get(n, n) for n in old.stores), reads=[again.get(n, n) for n in old.reads], again=again)
        was[new] = old
        launches.append(new)
    return Schedule(tuple(launches), schedule.results, schedule.kept), was


def _item(launch: Launch, calls: Calls) -> Item:
    nodes = launch.stores if isinstance(launch, Call) else launch.units
    call, backward = calls.of(nodes)
    return Item(tuple(launch.reads), launch.stores, call, backward, parts_of(launch.node) if isinstance(launch, Call) and "of" in launch.node.attrs else None)


def _second(node: Node) -> Node:
    made = second(node)
    assert isinstance(made, Node)
    return made

"""Launches that no other waits for: a weight's gradient, while the gradients go on through the layers below, the loss, a metric.

On a device they run on a stream of their own, beside the chain of launches that do wait for one another. That is worth something where
launches are too small to fill the device, and costs memory: what they read must stay until the streams meet, at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from sexpgpu.ir import Node
from sexpgpu.passes.schedule.fuse import Call, Kernel, Launch, Schedule

SMALL = 256 << 20  # bytes of an arena up to which launches go aside


def aside(schedule: Schedule, stays: Callable[[Node], bool], whole: Callable[[Kernel], bool]) -> tuple[Schedule, frozenset[Launch]]:
    """The schedule with such products and kernels right behind what they read, and which they are. `stays`: whether a value lies where
    nothing else may be put before the end; `whole`: whether a kernel leaves nothing for another launch to put together."""
    read = {base for launch in schedule.launches for base in launch.reads}
    home = {node: i for i, launch in enumerate(schedule.launches) for node in launch.stores}
    order: list[tuple[tuple[int, int, int], Launch]] = []
    found: list[Launch] = []
    for i, launch in enumerate(schedule.launches):
        place = (i, 0, 0)
        fits = launch.node.op.startswith("matmul") if isinstance(launch, Call) else bool(launch.stores) and whole(launch)
        if fits and not read & set(launch.stores) and all(map(stays, (*launch.reads, *launch.stores))):
            found.append(launch)
            place = (max((home[base] for base in launch.reads if base in home), default=-1), 1, i)
        order.append((place, launch))
    launches = tuple(launch for _, launch in sorted(order, key=lambda item: item[0]))
    return Schedule(launches, schedule.results, schedule.kept), frozenset(found)

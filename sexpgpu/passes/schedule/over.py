"""What a kernel may store in the place of a value that it reads for the last time.

Only over one that the stored element itself is computed of, and that is read nowhere but at this element: each is then loaded, once, before
what comes in its place is known, whichever thread loads and stores it, and no other program touches it. So GELU's operand becomes GELU and the
gradient behind it the gradient before it, in no memory but theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sexpgpu.ir import Node
from sexpgpu.passes.schedule.fuse import Kernel, Launch
from sexpgpu.passes.schedule.memory import Life

LEAST = 1 << 20  # bytes: below, a tile may have fewer elements than a program has threads, and several of these load one element


def stored_over(launches: Sequence[Launch], lives: Mapping[Any, Life], once: Callable[[Kernel], Collection[Node]] | None = None) -> dict[Node, Node]:
    """Stored value -> the one that was in its place, of values whose memory is planned (`lives`). once: what a kernel's source loads
    once, by the names of its text; None: all of it."""
    found: dict[Node, Node] = {}
    for i, launch in enumerate(launches):
        if not isinstance(launch, Kernel):
            continue
        loaded = None if once is None else once(launch)
        ends = {b for b in launch.reads if b in lives and lives[b].last == i and b.type.bytes >= LEAST}
        choices = {}
        for unit, bases in launch.own.items() if ends else ():
            node = launch.again.get(unit, unit)
            fits = [launch.again.get(b, b) for b in bases if loaded is None or b in loaded]
            choices[node] = [b for b in launch.reads if b in fits and b in ends and (b.type.bytes, b.type.size) == (node.type.bytes, node.type.size)]
        for node in sorted(choices, key=lambda node: len(choices[node])):  # those first that have the least to choose from
            base = next((b for b in choices[node] if b in ends), None)
            if node in lives and base is not None:
                ends.remove(base)
                found[node] = base
    return found

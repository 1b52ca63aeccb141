"""What a kernel may store in the place of a value that it reads for the last time, and at its own elements alone.

Each element is read and then written by one program, in this order; no other program touches it. So a kernel of several tensors needs no
memory beside theirs: GELU's operand becomes GELU, the gradient behind it the gradient before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sexpgpu.ir import Node
from sexpgpu.passes.schedule.fuse import Kernel, Launch
from sexpgpu.passes.schedule.memory import Life

LEAST = 1 << 20  # bytes: below, a tile may have fewer elements than a program has threads, and several of these read one element


def stored_over(launches: Sequence[Launch], lives: Mapping[Any, Life], aligned: Callable[[Kernel], Collection[Node]] = lambda kernel: kernel.aligned) -> dict[Node, Node]:
    """Stored value -> the one that was in its place, for values whose memory is planned (`lives`). aligned: what a kernel reads only at
    its own elements, by the names of its text."""
    found: dict[Node, Node] = {}
    for i, launch in enumerate(launches):
        if not isinstance(launch, Kernel) or not any(n.type.bytes >= LEAST for n in launch.stores):
            continue
        there = {launch.again.get(n, n) for n in aligned(launch)}
        free = [b for b in launch.reads if b in there and b in lives and lives[b].last == i and b.type.bytes >= LEAST]
        for node in launch.stores:
            base = next((b for b in free if (b.type.bytes, b.type.size) == (node.type.bytes, node.type.size)), None)
            if node in lives and base is not None:
                free.remove(base)
                found[node] = base
    return found

"""How many threads a step gets."""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.ir import Node, postorder
from sexpgpu.ops import table

#: below this many operations a step, handing work to threads costs more than it saves (about 5 ms of one core)
SMALL_STEP = 200_000_000
#: one more thread for each of these, so that a thread has work for a few milliseconds
PER_THREAD = 100_000_000
MOST = 32


def choose_threads(cores: int, flops_per_step: int) -> int:
    """One thread for a small step, then one for every 100 million operations, at most `cores` and 32.

    A pure function: the number is chosen once at a run's start and kept in its checkpoint, since it decides the
    order of sums.
    """
    if flops_per_step < SMALL_STEP:
        return 1
    return max(1, min(cores, MOST, flops_per_step // PER_THREAD))


def graph_flops(results: Mapping[str, Node]) -> int:
    """Operations of one evaluation of the graph, by the ops' own cost."""
    ops = table()
    return sum(ops[node.op].cost(node)[0] for node in postorder(results.values()))

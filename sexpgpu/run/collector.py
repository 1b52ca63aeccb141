"""Python's garbage collector over a run: seldom in a start, which makes objects that stay, and as a compiler needs it from the first step on."""

from __future__ import annotations

import gc

#: objects made since that let it look at the young ones, and how many times that lets it look at older ones. By Python's own 700 a start takes
#: a third longer; by 100,000 it still looks five times, for nothing.
START = (1_000_000, 20, 20)
STEADY = (100_000, 20, 20)


def begin() -> None:
    """The process's first line."""
    gc.set_threshold(*START)


def starting() -> bool:
    """Whether this is a process that began here, before its first step. Python 3.14 has no third threshold."""
    return gc.get_threshold()[:2] == START[:2]


def settle() -> None:
    """The start is over. What there is by then is the compiler's and the libraries', and stays: no later collection looks at it."""
    if starting():
        gc.freeze()
        gc.set_threshold(*STEADY)

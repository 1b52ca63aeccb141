"""Origins that remember every open call, so that a node in the library can be found from the line that asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sexpgpu.ir import Node, Origin, Origins
from sexpgpu.ir.node import recording
from sexpgpu.source import Span

MOST = 64  # places of one node


class CallOrigins(Origins):
    """`Origins` whose spans are the op's own place and then those of the calls that led to it, innermost first."""

    def __init__(self, ev: Any):
        super().__init__()
        self._ev = ev

    def add(self, node: Node, origin: Origin) -> None:
        known = self.table.get(node)
        self.table[node] = origin if known is None else _merged(known, origin)

    @contextmanager
    def at(self, origin: Origin) -> Iterator[None]:
        calls = tuple(reversed(self._ev.open_calls()))
        tracing = bool(calls)
        origin = replace(origin, spans=_joined(origin.spans, calls)) if tracing else origin

        def record(node: Node) -> None:
            known = self.table.get(node)
            if known is None:
                self.table[node] = origin
            elif tracing:  # an equal node of another line is the same node
                self.table[node] = _merged(known, origin)

        with recording(record):
            yield


def _joined(a: tuple[Span, ...], b: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(dict.fromkeys((*a, *b)))[:MOST]


def _merged(a: Origin, b: Origin) -> Origin:
    if a == b:
        return a
    names = lambda x, y: tuple(dict.fromkeys((*x, *y)))  # noqa: E731
    return Origin(_joined(a.spans, b.spans), names(a.paths, b.paths)[:MOST], names(a.knobs, b.knobs), a.phase)

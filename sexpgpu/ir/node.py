"""The one node of the middle: immutable and interned. Building the same node twice gives the same object.

Where a node came from lies *beside* it, in an `Origins` table (provenance inside the node silently
halved a gradient when it was tried; docs/decisions/0001). Paths are part of identity only for
`param`, `state`, `variable` and draws, as attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from sexpgpu.ir.types import TensorType
from sexpgpu.source import Span

_INTERNED: WeakValueDictionary[tuple, Node] = WeakValueDictionary()


class Node:
    """`op` applied to `inputs` with `attrs` (name -> number, string, bool or tuple of them). Equality is identity."""

    __slots__ = ("__weakref__", "attrs", "inputs", "op", "type")

    op: str
    inputs: tuple[Node, ...]
    attrs: dict[str, Any]
    type: TensorType

    def __repr__(self) -> str:
        return f"<{self.op} {self.type}>"


def _identity(value: Any) -> Any:
    """A key under which 1, 1.0 and True differ, and so do 0.0 and -0.0; NaN equals itself."""
    if isinstance(value, tuple):
        return tuple(_identity(v) for v in value)
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


def intern(op: str, inputs: Iterable[Node], attrs: dict[str, Any], type: TensorType) -> Node:  # noqa: A002
    """The node of these parts. Most callers want `sexpgpu.ops.build`, which infers the type."""
    inputs = tuple(inputs)
    key = (op, inputs, tuple([(k, _identity(attrs[k])) for k in sorted(attrs)]) if attrs else (), type)
    node = _INTERNED.get(key)
    if node is None:
        node = Node()
        node.op, node.inputs, node.attrs, node.type = op, inputs, dict(attrs), type
        _INTERNED[key] = node
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder(node)
    return node


_RECORDER: ContextVar[Callable[[Node], None] | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: Callable[[Node], None] | None) -> Iterator[None]:
    """Every node interned inside goes through `recorder` (origins, budget), nested ones replace outer ones."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@dataclass(frozen=True)
class Origin:
    """Where nodes came from: places in the text, model paths, knobs, phase (`forward backward update`)."""

    spans: tuple[Span, ...] = ()
    paths: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    phase: str = "forward"

    def merged(self, other: Origin) -> Origin:
        if other == self:
            return self
        join = lambda a, b: a + tuple(x for x in b if x not in a)  # noqa: E731
        return Origin(
            join(self.spans, other.spans)[:8], join(self.paths, other.paths)[:8], join(self.knobs, other.knobs), self.phase
        )


@dataclass
class Origins:
    """The table beside the nodes; the one place that merges provenance when nodes join."""

    table: dict[Node, Origin] = field(default_factory=dict)

    def add(self, node: Node, origin: Origin) -> None:
        known = self.table.get(node)
        self.table[node] = origin if known is None else known.merged(origin)

    def of(self, node: Node) -> Origin:
        return self.table.get(node, Origin())

    @contextmanager
    def at(self, origin: Origin) -> Iterator[None]:
        """Nodes first made inside come from `origin`."""

        def record(node: Node) -> None:
            if node not in self.table:
                self.table[node] = origin

        with recording(record):
            yield

    @contextmanager
    def following(self) -> Iterator[list[Origin]]:
        """As `at`, for many origins one after the other: that of the moment is the list's one element, which the caller sets."""
        now = [Origin()]

        def record(node: Node) -> None:
            if node not in self.table:
                self.table[node] = now[0]

        with recording(record):
            yield now


@dataclass(frozen=True)
class Graph:
    """Named results over interned nodes, and the origins beside them."""

    results: dict[str, Node]
    origins: Origins = field(default_factory=Origins)


def postorder(roots: Iterable[Node]) -> list[Node]:
    """Every node reachable from `roots`, operands before users, in a stable order. A loop: graphs are deep."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[Node | None] = []
    for root in roots:
        stack.append(root)
        while stack:
            node = stack.pop()
            if node is None:  # what is under it is done: a node whose operands are in the order
                order.append(stack.pop())  # type: ignore[arg-type]
            elif node not in seen:
                seen.add(node)
                if node.inputs:
                    stack += (node, None)
                    stack += [i for i in reversed(node.inputs) if i not in seen]
                else:
                    order.append(node)
    return order

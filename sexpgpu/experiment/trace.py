"""The model path while an entry is traced: scopes, call numbers, draws, parameters, taps, state updates.

An entry is a run's loss, one of its metrics, or a metric of an evaluation. Each starts from an empty path
with its counters at zero. The loss's entry alone decides which parameters and states exist and which calls
are lone (language.md, "Entries and sharing").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.diagnostics import Related, problem, suggestion
from sexpgpu.ir import Node
from sexpgpu.lisp.values import show
from sexpgpu.source import Span

# a component of a path is never `.` or `..`
NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._+-]+\Z")
TAP_NAME = re.compile(r"(?!\.\.?(/|\Z))[A-Za-z0-9._+-]+(/(?!\.\.?(/|\Z))[A-Za-z0-9._+-]+)*\Z")


@dataclass(frozen=True)
class Step:
    """One component of a path: a named call has no number."""

    name: str
    number: int | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}/{self.number}"


Path = tuple[Step, ...]


def text(path: Path) -> str:
    """The full path, with every call number."""
    return "/".join(map(str, path))


@dataclass(frozen=True)
class Spec:
    """A parameter or state: where it lies, what it starts as. `init` is an `Initial`."""

    kind: str  # param or state
    path: Path
    shape: tuple[int, ...]
    dtype: str
    init: Any
    node: Node
    span: Span | None
    call: Span | None = None  # the user's own text that led to it, where `span` lies in the library
    calls: tuple[Span, ...] = ()  # the calls that led to it, outermost first


@dataclass
class Scope:
    path: Path
    calls: Counter = field(default_factory=Counter)
    shared: bool = False


@dataclass
class Registry:
    """What the loss's entry made, by full path; the other entries look it up."""

    specs: dict[str, Spec] = field(default_factory=dict)
    lone: set[tuple[Path, str]] = field(default_factory=set)

    def outward(self, path: Path) -> str:
        """The path without the numbers of lone calls: the name in checkpoints, metrics and explain."""
        parts = []
        for i, step in enumerate(path):
            lone = step.number is not None and (path[:i], step.name) in self.lone
            parts.append(step.name if lone else str(step))
        return "/".join(parts)


class Trace:
    """The state of tracing one entry; `ev.trace` while it lasts."""

    def __init__(self, entry: str, registry: Registry, training: bool, decides: bool):
        self.entry, self.registry, self.training, self.decides = entry, registry, training, decides
        self.scopes = [Scope(())]
        self.seen: dict[str, Span | None] = {}
        self.calls: Counter = Counter()  # (scope path, layer) -> unnamed calls
        self.draws: Counter = Counter()  # path -> draws made there
        self.updates: dict[str, Node] = {}
        self.taps: list[tuple[Path, str, Node, Span | None]] = []
        self.layers: dict[Path, str] = {}  # every call of a layer, in order, and the layer

    @property
    def path(self) -> Path:
        return self.scopes[-1].path

    def path_text(self) -> str:
        return text(self.path)

    @contextmanager
    def layer(self, layer: str, name: str | None, share: bool, span: Span | None) -> Iterator[None]:
        """The scope of one call of a layer."""
        outer = self.scopes[-1]
        if name is not None:
            _check_name(name, "a layer's :name", span)
            step = Step(name)
        elif share and outer.calls[layer]:
            step = Step(layer, outer.calls[layer] - 1)
        else:
            step = Step(layer, outer.calls[layer])
            outer.calls[layer] += 1
            key = (outer.path, layer)  # a shared scope is entered again with its counters at zero: the most of one visit counts
            self.calls[key] = max(self.calls[key], outer.calls[layer])
        path = (*outer.path, step)
        if share and "call:" + text(path) not in self.seen:
            what = f"`{text(path)}`" if name is not None else f"`{layer}`"
            raise problem(
                "E-EVAL-130", f":share true, and there is no earlier call {'at' if name is not None else 'of'} {what} in this entry ({self.entry})",
                span, help="leave :share out of the first call; the later ones say it",
            )
        self._claim("call:" + text(path), text(path), share, span)
        self.layers.setdefault(path, layer)
        self.scopes.append(Scope(path, shared=outer.shared or share))
        try:
            yield
        finally:
            self.scopes.pop()

    def _claim(self, key: str, shown: str, share: bool, span: Span | None, help_: str = "") -> None:
        if key in self.seen and not share and not self.scopes[-1].shared:
            first = self.seen[key]
            raise problem(
                "E-EVAL-108", f"the path `{shown}` is made twice in one entry ({self.entry})", span,
                related=[Related(first, "first made here")] if first else [],
                help=help_ or "give the call another :name, or :share true to use the same parameters",
            )
        self.seen.setdefault(key, span)

    def declare(self, ev: Any, kind: str, name: str, shape: tuple[int, ...], dtype: str, init: Any, make: Any, span: Span | None) -> Spec:
        """The parameter or state `name` at the current path; made by the loss's entry, looked up by others."""
        _check_name(name, f"a {kind}'s name", span)
        path = (*self.path, Step(name))
        key = text(path)
        user = ev.users_place(span)
        self._claim("leaf:" + key, key, False, user)
        known = self.registry.specs.get(key)
        if known is None:
            if not self.decides:
                raise problem(
                    "E-EVAL-111", f"`{self.entry}` makes the {kind} `{key}`, and the run's loss does not", span,
                    help="a metric or an evaluation uses what the loss trains: call the same layers under the same names",
                    notes=suggestion(key, self.registry.specs, "paths of the loss"),
                )
            ev.spend(1000, "parameters")
            known = Spec(kind, path, shape, dtype, init, make(key), span, user, ev.open_calls())
            self.registry.specs[key] = known
        elif (known.kind, known.shape, known.dtype, known.init) != (kind, shape, dtype, init):
            raise problem(
                "E-EVAL-108", f"`{key}` is a {known.kind} {known.dtype}{list(known.shape)} started as {known.init}; here it is a "
                f"{kind} {dtype}{list(shape)} started as {init}", span,
                related=[Related(known.call, "first made here")] if known.call else [],
            )
        return known

    def tap(self, name: str, node: Node, span: Span | None) -> None:
        """A diagnostic; like every path, one an entry, except below a shared call."""
        full = "/".join(filter(None, [self.path_text(), name]))
        self._claim("tap:" + full, full, False, span, "give the tap another name, or make it in a layer: every call has a path of its own")
        self.taps.append((self.path, name, node, span))

    def close(self) -> None:
        """The loss's entry decides which calls are lone, and that no two paths share an outward name."""
        if not self.decides:
            return
        self.registry.lone = {key for key, count in self.calls.items() if count == 1}
        by_name: dict[str, Spec] = {}
        for spec in self.registry.specs.values():
            name = self.registry.outward(spec.path)
            other = by_name.setdefault(name, spec)
            if other is not spec:
                inside = [Related(spec.span, f"`{spec.path[-1]}` is made in the library here")] if spec.span != spec.call else []
                raise problem(
                    "E-EVAL-108", f"two {spec.kind}s have the outward name `{name}`: {text(other.path)} and {text(spec.path)}", spec.call,
                    label="one of them is made by this", help='give one of the calls another :name',
                    related=[*([Related(other.call, "the other one is made by this")] if other.call else []), *inside],
                )


def _check_name(name: Any, what: str, span: Span | None) -> None:
    if not isinstance(name, str) or not NAME.match(name):
        example = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip(".-")[:40] if isinstance(name, str) else ""
        raise problem("E-EVAL-103", f"{what} must be a string of letters, digits and . _ + -, and this is {show(name, 40)}", span,
                      help=f'for example "{example or "name"}"')

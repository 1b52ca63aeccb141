"""The data that the reader makes and macros transform: symbols, keywords, literals, lists.

A form is immutable and keeps its span and trail. The trail is the chain of macro calls a form came
through, innermost first, so that a message can say "expanded from macro `residual` here".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from sexpgpu.source import Span

Atom = int | float | Fraction | str | bool | None


@dataclass(frozen=True)
class Expansion:
    """One macro call: its name and the place of the call."""

    macro: str
    span: Span | None


@dataclass(frozen=True, eq=False)
class Form:
    span: Span | None = field(default=None, kw_only=True)
    trail: tuple[Expansion, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, eq=False, slots=True)
class Symbol(Form):
    name: str

    def __eq__(self, other):
        return isinstance(other, Symbol) and other.name == self.name

    def __hash__(self):
        return hash(("symbol", self.name))


@dataclass(frozen=True, eq=False, slots=True)
class Keyword(Form):
    """`:name`; `name` is without the colon."""

    name: str

    def __eq__(self, other):
        return isinstance(other, Keyword) and other.name == self.name

    def __hash__(self):
        return hash(("keyword", self.name))


@dataclass(frozen=True, eq=False, slots=True)
class Literal(Form):
    """A number, string, `true`, `false`; `nil` is the empty `ListForm`."""

    value: Atom


@dataclass(frozen=True, eq=False, slots=True)
class ListForm(Form):
    """`(a b)`, or with `bracket` `[a b]`, which evaluates as `(list a b)`."""

    items: tuple[Form, ...] = ()
    bracket: bool = False

    def head(self) -> str | None:
        """The name of the first symbol of a round list, else None."""
        if self.items and not self.bracket and isinstance(self.items[0], Symbol):
            return self.items[0].name
        return None

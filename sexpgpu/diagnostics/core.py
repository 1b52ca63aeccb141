"""The diagnostic as data, its catalogue entry, and the exceptions that carry it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NoReturn

from sexpgpu.source import Span

#: family of a code -> module of its entries (a literal table, so that `--help` loads none of them)
CATALOGUE = {
    family: f"sexpgpu.diagnostics.catalogue.{family.lower()}"
    for family in ("READ", "EVAL", "SHAPE", "KNOB", "ENV", "DATA", "MEM", "DEV", "CKPT", "NET", "RUN")
}


@dataclass(frozen=True)
class Entry:
    """What the catalogue knows of one code: a title of a few words and the page `explain` prints."""

    title: str
    page: str


@dataclass(frozen=True)
class Related:
    """A second place that helps to understand the first one: "defined here", "expanded from macro `m` here"."""

    span: Span | None
    label: str
    quoted: bool = True  # false: the place alone is shown, as for the calls that led to a mistake


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `message` uses the user's own names; `help` lines can be typed or done as they stand.

    `exit_code`: 2 before the first step, 3 after it (contracts.md, "A run"). `about`: the name that is unknown, so that
    a mistake which only follows from another one can be left out; it is not shown.
    """

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    related: tuple[Related, ...] = ()
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()
    severity: str = "error"
    exit_code: int = 2
    about: str = ""


class SexpError(Exception):
    """A mistake of the user's, or of their machine: carries a diagnostic, never shown as a traceback."""

    def __init__(self, diagnostic: Diagnostic):
        super().__init__(f"{diagnostic.code}: {diagnostic.message}")
        self.diagnostic = diagnostic

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes: by what it was made of, and not by its text."""
        return type(self), (self.diagnostics if isinstance(self, SexpErrors) else self.diagnostic,)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return (self.diagnostic,)

    def with_related(self, *related: Related) -> SexpError:
        d = self.diagnostic
        return SexpError(replace(d, related=d.related + related))


class SexpErrors(SexpError):
    """Several independent mistakes, found in one go."""

    def __init__(self, diagnostics: Iterable[Diagnostic]):
        self._all = tuple(diagnostics)
        super().__init__(self._all[0])

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return self._all


class InternalError(Exception):
    """A bug of ours (exit 70). Never raised for anything a user can write."""


def problem(
    code: str,
    message: str,
    span: Span | None = None,
    *,
    label: str = "",
    related: Iterable[Related] = (),
    notes: Iterable[str] = (),
    help: str | Iterable[str] = (),  # noqa: A002 - the field's word
    exit_code: int = 2,
    about: str = "",
) -> SexpError:
    """The exception for a coded mistake; `raise problem(…) from None`, or call `fail`."""
    helps = (help,) if isinstance(help, str) else tuple(help)
    facts = Diagnostic(code, message, span, label, tuple(related), tuple(notes), helps, "error", exit_code, about)
    return SexpError(facts)


def one_or_all(diagnostics: Iterable[Diagnostic]) -> SexpError:
    """The exception for some mistakes: each place and message once, in the order found."""
    unique: dict[tuple, Diagnostic] = {}
    for d in diagnostics:
        unique.setdefault((d.code, d.message, d.span), d)
    found = tuple(unique.values())
    return SexpError(found[0]) if len(found) == 1 else SexpErrors(found)


def fail(code: str, message: str, span: Span | None = None, **facts) -> NoReturn:
    """Raise a coded mistake; the keywords are those of `problem`."""
    raise problem(code, message, span, **facts)


def note_warning(code: str, message: str, span: Span | None = None, **facts) -> Diagnostic:
    """A coded warning as data; the caller hands it to whoever prints."""
    return replace(problem(code, message, span, **facts).diagnostic, severity="warning")


def entry(code: str) -> Entry | None:
    """The catalogue's entry of a code, or None if there is no such code."""
    parts = code.split("-")
    if len(parts) != 3 or parts[0] not in ("E", "W") or parts[1] not in CATALOGUE:
        return None
    return codes(parts[1]).get(code)


def codes(family: str) -> dict[str, Entry]:
    """The entries of one family."""
    return import_module(CATALOGUE[family]).CODES

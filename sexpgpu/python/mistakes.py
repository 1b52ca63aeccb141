"""A person's mistakes as Python exceptions whose text is what the command line would print."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, render


class Mistake(SexpErrors):
    """A `SexpError` that prints itself as the command line does: place, reason, mend."""

    def __str__(self) -> str:
        return "\n\n".join(render(d) for d in self.diagnostics)


class NoSuchName(Mistake, AttributeError):
    """There is no function of this name: also an AttributeError, so that `hasattr` answers."""


@contextmanager
def mistakes(kind: type[Mistake] = Mistake) -> Iterator[None]:
    """Coded errors leave as `kind`, without the frames of the compiler."""
    try:
        yield
    except Mistake:
        raise
    except SexpError as error:
        found = error.diagnostics
    else:
        return
    raise kind(found) from None


def warn(found: Iterable[Diagnostic | str]) -> None:
    """Warnings of the compiler as Python's."""
    for one in found:
        warnings.warn(render(one) if isinstance(one, Diagnostic) else one, UserWarning, stacklevel=4)

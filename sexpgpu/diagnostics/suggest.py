"""The nearest name, for every "unknown name" message."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Up to `count` known names close to `name`, closest first (case does not count)."""
    by_folded = {k.lower(): k for k in sorted(known)}
    return [by_folded[m] for m in get_close_matches(name.lower()[:200], list(by_folded), n=count, cutoff=0.6)]


def suggestion(name: str, known: Iterable[str], what: str = "") -> tuple[str, ...]:
    """Help lines for an unknown name: a guess as a question, else the list of what there is."""
    known = sorted(set(known))
    close = nearest(name, known)
    if close:
        return (f"did you mean `{close[0]}`?",)
    if not known:
        return (f"there are no {what}" if what else "there are none",)
    shown = ", ".join(known[:12]) + (f", … ({len(known)} in all)" if len(known) > 12 else "")
    return (f"known {what or 'names'}: {shown}",)

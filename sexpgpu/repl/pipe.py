"""The prompt without a terminal: inputs from a stream, plain output, no prompt, no history."""

from __future__ import annotations

from collections.abc import Iterable

from sexpgpu.repl.session import Session, unfinished


def inputs(lines: Iterable[str]) -> Iterable[str]:
    """Texts that are whole; what is left at the end is handed over as it is."""
    held: list[str] = []
    for line in lines:
        if not held and not line.strip():
            continue
        held.append(line)
        text = "".join(held)
        if not unfinished(text):
            yield text
            held = []
    if held:
        yield "".join(held)


def obey(session: Session, lines: Iterable[str]) -> int:
    """Every input in order; 1 if one of them failed, which does not end the session."""
    failed = False
    for text in inputs(lines):
        failed = not session.enter(text) or failed
        if session.done:
            break
    return 1 if failed else 0

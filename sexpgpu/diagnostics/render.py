"""Draws a diagnostic as text. All layout lives here; nothing else formats a message.

Control and bidirectional characters of the user's are shown escaped (contracts.md, Safety).
"""

from __future__ import annotations

import unicodedata

from sexpgpu.diagnostics.core import Diagnostic, entry
from sexpgpu.source import Span

MAX_LINE = 160  # columns of a quoted source line


def printable(text: str) -> str:
    """`text` with control, format (bidirectional) and surrogate characters and odd blanks as escapes; tabs become a blank."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_character(c) for c in text)


def _character(c: str) -> str:
    if c == "\t":
        return " "
    if c != " " and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"):
        return c.encode("unicode_escape").decode("ascii")
    return c


def _quote(span: Span, label: str, mark: str) -> list[str]:
    line, column = span.source.line_column(span.start)
    raw = span.source.line_text(line)
    start = column - 1
    end = min(start + max(1, span.end - span.start), len(raw)) if raw else start + 1
    cut = max(0, start - MAX_LINE // 2)
    head = ("…" if cut else "") + printable(raw[cut:start])
    body = printable(raw[start:end])[:MAX_LINE]
    tail = printable(raw[end : cut + MAX_LINE])
    number = str(line)
    pad = " " * len(number)
    label = f" {printable(label)}" if label else ""
    return [
        f"{pad} |",
        f"{number} | {head}{body}{tail}".rstrip(),
        f"{pad} | {' ' * _columns(head)}{mark * max(1, _columns(body))}{label}",
    ]


def _columns(text: str) -> int:
    """Columns of a terminal that printable text takes: East Asian wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def render(d: Diagnostic) -> str:
    """The message as several lines of plain text, with no newline at its end."""
    known = entry(d.code)
    title = f" {known.title}:" if known and known.title.lower() not in d.message.lower() else ""
    lines = [f"{d.severity}[{d.code}]{title} {_text(d.message)}"]
    if d.span is not None:
        lines.append(f"  --> {printable(d.span.place)}")
        lines += ["  " + part for part in _quote(d.span, d.label, "^")]
    lines += [f"  {_text(note)}" for note in d.notes]
    for related in d.related:
        if related.span is None:
            lines.append(f"  note: {_text(related.label)}")
            continue
        lines.append(f"  note: {_text(related.label)}: {printable(related.span.place)}")
        lines += ["  " + part for part in _quote(related.span, "", "-")] if related.quoted else []
    lines += [f"  help: {_text(text)}" for text in d.help]
    if known:
        lines.append(f"  more: sexpgpu explain {d.code}")
    return "\n".join(lines)


def _text(text: str) -> str:
    """One line, however long: a newline in a user's name must not look like a line of ours."""
    return printable(text)

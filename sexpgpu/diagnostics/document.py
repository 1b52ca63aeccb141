"""A diagnostic as a JSON document, for `--json` and editors: the facts of the text form, none of its layout."""

from __future__ import annotations

from typing import Any

from sexpgpu.diagnostics.core import Diagnostic, Related, entry
from sexpgpu.source import Span


def document(d: Diagnostic) -> dict[str, Any]:
    """`code severity title message label help notes related` and `place`; what is unknown is null or empty."""
    known = entry(d.code)
    return {
        "code": d.code,
        "severity": d.severity,
        "title": known.title if known else None,
        "message": d.message,
        "place": place(d.span),
        "label": d.label,
        "related": [_related(r) for r in d.related],
        "notes": list(d.notes),
        "help": list(d.help),
    }


def place(span: Span | None) -> dict[str, Any] | None:
    """File, lines and columns (from 1; the end is exclusive) and offsets in characters (from 0)."""
    if span is None:
        return None
    line, column = span.source.line_column(span.start)
    end_line, end_column = span.source.line_column(span.end)
    return {
        "file": span.source.name,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
        "start": span.start,
        "end": span.end,
    }


def _related(related: Related) -> dict[str, Any]:
    return {"label": related.label, "place": place(related.span)}

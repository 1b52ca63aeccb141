"""The only module of the command line that prints. stdout carries what was asked for, stderr everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from sexpgpu.diagnostics import Diagnostic, document, printable, render

#: whether diagnostics are printed as JSON; set once a command line
_JSON = [False]


def as_json(arguments: Sequence[str]) -> None:
    """`--json` anywhere before a `--` makes every error and warning one JSON object a line, on stderr."""
    words = list(arguments)
    _JSON[0] = "--json" in (words[: words.index("--")] if "--" in words else words)


#: for commands without a document of their own; `main` looks for the word itself, so no command sees it
json_messages = click.option("--json", is_flag=True, expose_value=False, help="Errors and warnings as JSON lines on stderr.")


def show(text: str) -> None:
    """What the user asked for, on stdout."""
    _write(sys.stdout, text)


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    show(json.dumps(value, indent=2, allow_nan=False))


def say(text: str) -> None:
    """A message beside it, on stderr."""
    sys.stdout.flush()
    _write(sys.stderr, text)


def report(diagnostics: Iterable[Diagnostic | str]) -> None:
    """Errors and warnings, on stderr; a plain text is a warning without a code."""
    for found in diagnostics:
        if _JSON[0]:
            facts = document(found) if isinstance(found, Diagnostic) else {"severity": "warning", "message": found}
            say(json.dumps(facts))
        else:
            say(render(found) if isinstance(found, Diagnostic) else f"warning: {printable(found)}")


def _write(stream: Any, text: str) -> None:
    """Whatever a caller forgot to escape is escaped here: a terminal sees no control or bidirectional character of a user's."""
    text = "\n".join(map(printable, text.split("\n")))
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def table(rows: Iterable[Iterable[str]], indent: str = "  ") -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    cells = [list(row) for row in rows]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]
    return [
        (indent + "  ".join(c if i == len(row) - 1 else c.ljust(widths[i]) for i, c in enumerate(row))).rstrip()
        for row in cells
    ]

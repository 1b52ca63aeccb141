"""Coded diagnostics: facts first (`Diagnostic`), text second (`render`).

Every code is one `Entry` in `catalogue/<family>.py`: title and page; `E-…` are mistakes, `W-…` warnings of `check`. A stage raises
`fail("E-KNOB-002", "…", span, help=…)`; the command line renders it and picks the exit code.
`InternalError` is for our own bugs only. A code is never reused.
"""

from sexpgpu.diagnostics.core import (
    Diagnostic,
    Entry,
    InternalError,
    Related,
    SexpError,
    SexpErrors,
    codes,
    entry,
    fail,
    note_warning,
    one_or_all,
    problem,
)
from sexpgpu.diagnostics.document import document
from sexpgpu.diagnostics.memory import out_of_memory
from sexpgpu.diagnostics.render import printable, render
from sexpgpu.diagnostics.suggest import nearest, suggestion

__all__ = [
    "Diagnostic",
    "Entry",
    "InternalError",
    "Related",
    "SexpError",
    "SexpErrors",
    "codes",
    "document",
    "entry",
    "fail",
    "nearest",
    "note_warning",
    "one_or_all",
    "out_of_memory",
    "printable",
    "problem",
    "render",
    "suggestion",
]

"""Texts and places in them. Imports nothing of ours; every other module may import it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Source:
    """One text with the name that messages print (a path relative to the main file's folder, with `/`)."""

    name: str
    text: str

    @cached_property
    def line_starts(self) -> list[int]:
        return [0, *(i + 1 for i, c in enumerate(self.text) if c == "\n")]

    def line_column(self, offset: int) -> tuple[int, int]:
        """1-based line and column of a character offset."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line_text(self, line: int) -> str:
        """The text of a 1-based line, without its newline."""
        start = self.line_starts[line - 1]
        end = self.line_starts[line] - 1 if line < len(self.line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


@dataclass(frozen=True)
class Span:
    """Characters `start` (inclusive) to `end` (exclusive) of one source."""

    source: Source
    start: int
    end: int

    @property
    def place(self) -> str:
        """`file:line:column`, as messages, manifests and provenance print it."""
        line, column = self.source.line_column(self.start)
        return f"{self.source.name}:{line}:{column}"

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`, in the same source."""
        return Span(self.source, self.start, max(self.end, other.end))

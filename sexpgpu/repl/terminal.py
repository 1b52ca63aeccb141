"""The prompt on a terminal: colours, completion, editing over several lines, a history on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.lexers import PygmentsLexer

from sexpgpu.diagnostics import printable
from sexpgpu.repl.complete import candidates
from sexpgpu.repl.lexer import SexpLexer
from sexpgpu.repl.session import Session, unfinished

PROMPT, MORE = "> ", ". "


class _Names(Completer):
    def __init__(self, session: Session):
        self._session = session

    def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
        for text, replaced, what in candidates(self._session, document.text_before_cursor):
            yield Completion(text, -replaced, display_meta=printable(what))


def history_file(environ: Any = os.environ) -> Path:
    """Where the inputs of all sessions are kept."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "sexpgpu" / "repl-history"


def history() -> History:
    """The history on disk, which its owner alone can read; in memory where it cannot be written."""
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    """Enter ends an input whose brackets pair, and else begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    @keys.add("c-j")  # Enter as it comes from a terminal that was not in raw mode yet
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif buffer.text.strip() and unfinished(buffer.text):
            buffer.insert_text("\n" + " " * _indent(buffer.document.text_before_cursor))
        else:
            buffer.validate_and_handle()

    return keys


def _indent(before: str) -> int:
    """Two columns more than the innermost open bracket."""
    columns: list[int] = []
    for line in before.split("\n"):
        for i, c in enumerate(line):
            if c in "([":
                columns.append(i)
            elif c in ")]" and columns:
                columns.pop()
    return columns[-1] + 2 if columns else 0


def converse(session: Session) -> int:
    """Read and evaluate until Ctrl-D or `,quit`. Ctrl-C at the prompt throws the input away."""
    prompts: PromptSession[str] = PromptSession(
        PROMPT, multiline=True, prompt_continuation=lambda width, number, wrapped: MORE, lexer=PygmentsLexer(SexpLexer),
        completer=_Names(session), complete_while_typing=False, history=history(), key_bindings=_keys(), enable_open_in_editor=False,
    )  # fmt: skip
    while not session.done:
        try:
            text = prompts.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            break
        session.enter(text)
    return 0

"""What may follow the word at the cursor: commands, names, keys of forms and ops, knobs, codes, paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from sexpgpu.diagnostics.core import CATALOGUE, codes
from sexpgpu.experiment import data, knobs, runs
from sexpgpu.ops import table
from sexpgpu.repl.commands import COMMANDS
from sexpgpu.repl.session import Session

MOST = 200
_WORD = re.compile(r"[^\s()\[\]\"'`,;]*\Z")
_HEAD = re.compile(r"\(\s*([^\s()\[\]\"'`,;]*)")


def candidates(session: Session, before: str) -> list[tuple[str, int, str]]:
    """(text, how many characters before the cursor it replaces, what it is) for the text before the cursor."""
    start = before.lstrip()
    if re.fullmatch(r",[a-z]*", start):
        return [(f",{name}", len(start), command.doc) for name, command in COMMANDS.items() if name.startswith(start[1:])]
    load = re.match(r",load\s+(\S*)\Z", start)
    if load is not None:
        return [(path, len(load[1]), "file") for path in _paths(load[1])]
    quoted = _open_string(before)
    if quoted is not None:
        return [(path, len(quoted), "file") for path in _paths(quoted)]
    match = _WORD.search(before)
    word = match[0] if match is not None else ""
    found = sorted(set(_words(session, start, before, word)))
    return [(text, len(word), what) for text, what in found if text.startswith(word)][:MOST]


def _words(session: Session, start: str, before: str, word: str) -> Iterator[tuple[str, str]]:
    if start.startswith(",knob ") or (start.startswith(",load ") and " " in start[6:].strip()):
        yield from ((name, "knob") for name in session.knobs)
        return
    if start.startswith(",explain ") and word[:2] in ("E-", "W-"):
        yield from ((code, "code") for family in CATALOGUE for code in codes(family))
        return
    if start.startswith(",run ") and not word.isdecimal():
        yield from ((name, "run") for name in session.loaded.experiment.runs)
        return
    if word.startswith(":"):
        yield from ((f":{key}", "key") for key in keys_of(session, head_of(before[: len(before) - len(word)])))
        return
    yield from ((name, "knob" if name in session.knobs else "name") for name in session.ev.main.names())


def head_of(before: str) -> str:
    """The head of the innermost list that is open at the end of a text."""
    open_lists: list[int] = []
    for i, c in enumerate(_without_strings(before)):
        if c in "([":
            open_lists.append(i)
        elif c in ")]" and open_lists:
            open_lists.pop()
    found = _HEAD.match(before, open_lists[-1]) if open_lists else None
    return found[1] if found is not None else ""


def keys_of(session: Session, head: str) -> list[str]:
    """The keys that a form, an op, a function or a layer takes."""
    forms = {"defrun": runs.RUN_KEYS, "defeval": runs.EVAL_KEYS, "defknob": knobs.KNOB_KEYS, "defdata": data.DATA_KEYS}
    if head in forms:
        return list(forms[head])
    op = table().get(head)
    if op is not None:
        return [p.name for p in op.attributes]
    value = session.ev.main.lookup(head) if head else None
    parameters = getattr(value, "parameters", None)
    own = [name for name, _ in parameters.keys] if parameters is not None else []
    return own + (["name", "share"] if hasattr(value, "closure") else [])


def _without_strings(text: str) -> str:
    """The text with strings and comments blanked, at its own offsets."""
    return re.sub(r'"(?:[^"\\]|\\.)*(?:"|\Z)|;[^\n]*', lambda m: " " * len(m[0]), text, flags=re.S)


def _open_string(before: str) -> str | None:
    """The text of a string that has not ended, else None."""
    rest = re.sub(r'"(?:[^"\\]|\\.)*"|;[^\n]*', "", before, flags=re.S)
    return rest.rpartition('"')[2] if '"' in rest else None


def _paths(begin: str) -> list[str]:
    """Files and folders that begin so; folders end in a slash, and hidden ones need their dot."""
    folder, _, name = begin.rpartition("/")
    place = Path(os.path.expanduser(folder) or ("/" if begin.startswith("/") else "."))
    try:
        found = sorted(place.iterdir())
    except OSError:
        return []
    head = f"{folder}/" if folder or begin.startswith("/") else ""
    shown = [p for p in found if p.name.startswith(name) and (name or not p.name.startswith("."))]
    return [f"{head}{p.name}{'/' if p.is_dir() else ''}" for p in shown][:MOST]

"""Runs a case and gives what it says; `python tests/messages/show.py [NAME…]` prints, `--update` writes the goldens."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from cases import CASES, CSV, Case

from sexpgpu.cli import main, output
from sexpgpu.diagnostics import Diagnostic, render

SLUG = re.compile(r"(?:/[^\s`']+/)?p-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
GOLDEN = Path(__file__).parent / "golden"


@contextlib.contextmanager
def _inside(folder: Path, environ: dict[str, str]) -> Iterator[None]:
    before, old = Path.cwd(), {name: os.environ.get(name) for name in environ}
    os.chdir(folder)
    os.environ.update(environ)
    try:
        yield
    finally:
        os.chdir(before)
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _patched(patches: dict[str, object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        yield


def prepare(case: Case, folder: Path) -> None:
    (folder / "p.lisp").write_text(case.program, "utf-8")
    for name, content in {"d.csv": CSV, **case.files}.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def said(case: Case) -> str:
    """The command line, the diagnostics it printed and its exit code; progress and reports are left out."""
    shown: list[str] = []

    def collect(found: object) -> None:
        for d in found:  # type: ignore[attr-defined]
            shown.append(render(d) if isinstance(d, Diagnostic) else f"warning: {d}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(case, folder)
        report, output.report = output.report, collect
        try:
            with _inside(folder, case.environ), open(os.devnull, "w", encoding="utf-8") as nowhere, \
                    contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                if case.first:
                    assert main.perform(list(case.first)) == 0, (case.first, shown)
                    shown.clear()
                if case.before is not None:
                    case.before(folder)
                with _patched(case.patches):
                    code = main.perform(list(case.words))
        finally:
            output.report = report
    text = "\n\n".join(shown).replace(str(folder.resolve()), "FOLDER").replace(name, "FOLDER")
    text = SLUG.sub("p-SLUG", text)
    return f"$ sexpgpu {' '.join(case.words)}\n\n{text}\n\nexit {code}\n"


def update(names: list[str]) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        if not names or any(n in case.name for n in names):
            text = said(case)
            assert not text.endswith("exit 70\n"), f"{case.name} is a bug, and no message"
            (GOLDEN / f"{case.name}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    words = sys.argv[1:]
    if "--update" in words:
        update([w for w in words if w != "--update"])
    else:
        for case in CASES:
            if not words or any(w in case.name for w in words):
                print(f"=== {case.name}\n{said(case)}")

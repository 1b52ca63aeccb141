"""A person at a terminal: a scripted session through every command, with completion, several lines, history, Ctrl-C."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from sexpgpu.repl.commands import COMMANDS
from sexpgpu.repl.complete import candidates, head_of
from sexpgpu.repl.lexer import SexpLexer
from sexpgpu.repl.session import Session

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from busy import until_busy  # noqa: E402

pexpect = pytest.importorskip("pexpect") if sys.platform != "win32" else pytest.skip("no terminals", allow_module_level=True)


class Person:
    """Types, and waits for what the terminal shows."""

    def __init__(self, home: Path) -> None:
        env = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "SEXPGPU_EVAL_LIMIT": str(10**12), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.child: Any = pexpect.spawn(sys.executable, ["-m", "sexpgpu", "repl"], env=env, cwd=str(ROOT), encoding="utf-8", timeout=100, dimensions=(50, 160))

    def type(self, text: str) -> None:
        self.child.send(text)

    def enter(self, text: str) -> None:
        self.child.send(text + "\r")

    def sees(self, pattern: str) -> str:
        """What came before the pattern, and the match, without colours."""
        self.child.expect(pattern)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.child.before + (self.child.after if isinstance(self.child.after, str) else ""))

    def asks(self, text: str, pattern: str) -> str:
        self.enter(text)
        return self.sees(pattern)


@pytest.fixture
def person(tmp_path: Path) -> Any:
    made = Person(tmp_path)
    made.sees("Ctrl-D ends")
    yield made
    made.child.close(force=True)


def test_every_command(person: Person, tmp_path: Path) -> None:
    asked: set[str] = set()

    def ask(text: str, pattern: str) -> str:
        if text.startswith(","):
            asked.add(text[1:].split()[0])
        return person.asks(text, pattern)

    ask("(+ [1 2] 0.5)", r"\[1\.5 2\.5\]  f32\[2\]")
    ask(",help", "as Ctrl-D does")
    ask("(defmacro twice (x) `(* 2 ,x))", r"twice\r")
    ask(",expand (twice 4)", r"\(\* 2 4\)")
    ask(",shape (exp [[1.0 2.0]])", r"f32\[1 2\]")
    ask(",ir (exp [1.0])", 'result "0" %1')
    ask(",grad (sum (square [1.0 2.0]))", r"\[2\.0 4\.0\]  f32\[2\]")
    ask(",time (exp [1.0])", "the median of")
    ask(",explain E-SHAPE-003", "See also")
    ask(",load examples/digits.lisp hidden=8", "runs train")
    ask(",knob hidden", r"hidden  8  \(set, --set hidden\)")
    ask(",run 2", "step 2  valid")
    ask("(no-such-name)", "E-EVAL-001")
    ask(",zork", "E-RUN-080")
    ask("(+ 40 2)", "42")
    ask(",quit", pexpect.EOF)
    assert asked - {"zork"} == set(COMMANDS)
    person.child.wait()
    assert person.child.exitstatus == 0
    kept = tmp_path / "sexpgpu" / "repl-history"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "+(+ 40 2)" in kept.read_text("utf-8").splitlines()


def test_lines_completion_history_and_interrupts(person: Person, tmp_path: Path) -> None:
    person.enter("(defun f (x)")
    person.enter("(* 2 x))")
    person.sees("<function f>")
    person.asks("(f 21)", "42")
    person.type("\x1b[A")  # the input before
    person.asks("", "42")
    person.type("(softma\t")
    person.sees("softmax")
    person.asks("[[1.0 1.0]])", r"\[\[0\.5 0\.5\]\]")
    person.type("(+ 1 1")
    person.type("\x03")  # at the prompt: the input is thrown away
    person.asks("(+ 2 3)", r"\b5\b")
    person.enter("(defun spin (n) (spin (+ n 1)))")
    person.sees("<function spin>")
    person.enter("(spin 0)")
    until_busy(person.child.pid)
    person.type("\x03")
    person.sees("stopped; the session goes on")
    person.asks("(+ 20 3)", "23")
    person.type("\x04")
    person.sees(pexpect.EOF)


def test_history_goes_on_in_the_next_session(tmp_path: Path) -> None:
    first = Person(tmp_path)
    first.sees("Ctrl-D ends")
    first.asks("(+ 100 11)", "111")
    first.asks(",quit", pexpect.EOF)
    second = Person(tmp_path)
    second.sees("Ctrl-D ends")
    second.type("\x1b[A\x1b[A")
    second.asks("", "111")
    second.asks(",quit", pexpect.EOF)


@pytest.fixture(scope="module")
def session() -> Session:
    made = Session(lambda text: None, lambda found: None)
    made.enter('(import "nn")')
    made.enter("(defknob width 3)")
    return made


@pytest.mark.parametrize(("before", "expected", "replaced"), [
    (",lo", ",load", 3),
    ("(softma", "softmax", 6),
    ("(linear x 4 :bi", ":bias", 3),
    ("(linear x 4 :na", ":name", 3),
    ("(mean (exp x) :ax", ":axis", 3),
    ("(defrun r :accu", ":accumulate", 5),
    ("(* 2 wid", "width", 3),
    (",knob wi", "width", 2),
    (",explain E-SHAPE-00", "E-SHAPE-003", 10),
    ('(defdata d (csv "exam', "examples/", 4),
    (",load examples/dig", "examples/digits.lisp", 12),
    ("(import \"nn\") (lin", "linear", 3),
])  # fmt: skip
def test_completion(session: Session, before: str, expected: str, replaced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (expected, replaced) in [(text, n) for text, n, _ in candidates(session, before)]


def test_completion_offers_nothing_wrong(session: Session) -> None:
    assert candidates(session, "(linear x 4 :zzz") == []
    assert all(text.startswith(":b") for text, _, _ in candidates(session, "(linear x 4 :b"))
    assert head_of('(f "(g" (h 1) [2 ') == "" and head_of('(f "(g" (h 1) ') == "f"


def test_lexer() -> None:
    text = '(defun f (x) "d" (* 2.5 x)) ; note\n#| a #| b |# c |# :key true \'q [1/2]\n'
    tokens = [(str(kind), value) for kind, value in SexpLexer().get_tokens(text)]
    assert "".join(value for _, value in tokens) == text
    found = dict((value, kind) for kind, value in tokens)
    assert found["defun"] == "Token.Keyword" and found["2.5"] == found["1/2"] == "Token.Literal.Number"
    assert found[":key"] == "Token.Name.Attribute" and found["true"] == "Token.Keyword.Constant" and found['"d"'] == "Token.Literal.String"
    assert found["; note"] == "Token.Comment.Single" and found["*"] == "Token.Name.Function"
    assert not [value for kind, value in tokens if "Error" in kind]
    for path in (*ROOT.glob("examples/*.lisp"), *ROOT.glob("lisp-stdlib/*.lisp")):
        whole = path.read_text("utf-8")
        assert not [v for kind, v in SexpLexer(stripnl=False, ensurenl=False).get_tokens(whole) if "Error" in str(kind)], path.name

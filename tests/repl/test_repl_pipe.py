"""The prompt without a terminal: what forms and commands print, mistakes with their places, budgets, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sexpgpu.repl.pipe import inputs
from sexpgpu.repl.session import Session, unfinished

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from busy import until_busy  # noqa: E402

DIGITS = ROOT / "examples/digits.lisp"


class Heard:
    """A session whose output is kept."""

    def __init__(self, limit: int = 10_000_000) -> None:
        self.shown: list[str] = []
        self.reported: list[str] = []
        self.session = Session(self.shown.append, lambda found: self.reported.extend(getattr(d, "code", d) for d in found), limit)

    def __call__(self, text: str) -> str:
        """What one input printed, mistakes as their codes."""
        self.shown.clear()
        self.reported.clear()
        self.session.enter(text)
        return "\n".join([*self.shown, *self.reported])


@pytest.fixture
def say() -> Heard:
    return Heard()


@pytest.mark.parametrize(("text", "printed"), [
    ("(+ 1 2)", "3"),
    ("(+ [1 2] 1)", "[2 3]  i32[2]"),
    ("(+ [1 2] 0.5)", "[1.5 2.5]  f32[2]"),
    ("(matmul [[1 2] [3 4]] [[1] [1]])", "[[3.0]\n [7.0]]\nf32[2 1]"),
    ("(exp [0 1])", "[1.0 2.71828]  f32[2]"),
    ("(> [1 5] [2 2])", "[false true]  bool[2]"),
    ("(array [1 2] :dtype f64)", "[1.0 2.0]  f64[2]"),
    ("(array 3)", "3  i32[]"),
    ("(/ [1.0] 0)", "[+inf]  f32[1]"),
    ("(concat [[1 2] [3 4]])", "[1 2 3 4]  i32[4]"),
    ("(shape [[1 2 3]])", "(1 3)"),
    ("(max 1 2)", "2"),
    ("(list (exp [0.0]) 2 \"a\")", "[1.0]  f32[1]\n2\n\"a\""),
    ("(grad (sum (square (array [1.0 2.0]))) (array [1.0 2.0]))", "[2.0 4.0]  f32[2]"),
    ("(array [1 2.5] :dtype i32)", "E-EVAL-103"),
    ("(array [300] :dtype u8)", "E-EVAL-103"),
    ("(array [[1 2] [3]])", "E-EVAL-103"),
    ("(array (list))", "E-EVAL-103"),
    ("(+ [[1 2] [3]] 1)", "E-EVAL-006"),
    ("(foo)", "E-EVAL-001"),
    ("(matmul [[1.0 2]] [[1.0]])", "E-SHAPE-003"),
    ("(matmul [[1 2]] [[1 2]])", "E-SHAPE-003"),
    ("(+ 1", "E-READ-001"),
    ("(defrun r :steps 3)", "E-EVAL-105"),
    ("(defvariant v :k 3)", "E-EVAL-105"),
    (",shape (broadcast (array 1.0) [100000 1000000])", "f32[100000 1000000]"),
    ("(+ 1 (broadcast (array 1.0) [1000000 10000000]))", "E-MEM-001"),
    (",shape (softmax [[1 2] [3 4]])", "f32[2 2]"),
    (",ir (exp [1.5])", 'sexpgpu-ir 1\n%0 f32[1] = input :batch false :dtype "f32" :name "array-0" :shape [1]\n%1 f32[1] = exp %0\nresult "0" %1'),
    (",grad (sum (square [1.0 2.0]))", "by literal (1.0 2.0)\n[2.0 4.0]  f32[2]"),
    (",grad (sum [1 2])", "E-RUN-080"),
    (",grad (square [1.0 2.0])", "E-SHAPE-016"),
    (",help array", "(array numbers &key dtype)\nA tensor of these numbers, at the prompt of `sexpgpu repl` only; whole numbers are i32 without a :dtype."),
    (",help zork", "E-EVAL-001"),
    (",zork", "E-RUN-080"),
    (",run 3", "E-RUN-080"),
    (",run ten", "E-RUN-080"),
    ("(step)", "0  i32[]"),
    (",load", "E-RUN-080"),
    (",load 'x", "E-RUN-080"),
    (",load no-such-file.lisp", "E-READ-014"),
    (",grad", "E-RUN-080"),
    (",knob zork", "E-KNOB-001"),
    (",explain E-XYZ-001", "E-ENV-007"),
])
def test_one_input(say: Heard, text: str, printed: str) -> None:
    assert say(text) == printed


def test_a_tensor_without_a_value(say: Heard) -> None:
    """A statistic has its value from a run's data."""
    from sexpgpu.lisp.values import Tensor
    from sexpgpu.ops import build

    say.session.ev.main.env.define("unknown", Tensor(build("statistic", name="scale", data="d", shape=(), dtype="f32")))
    assert say("(* 2 unknown)") == "E-RUN-081"
    assert say(",shape (* 2 unknown)") == "f32[]"


def test_definitions_macros_and_knobs(say: Heard) -> None:
    say('(defun f (x) "Doubles it." (* 2 x))')
    assert say("(f [1.5 2])") == "[3.0 4.0]  f32[2]"
    assert say(",help f") == "(f x)\nDoubles it.\ninput-1:1:1"
    say("(defun f (x) (* 3 x))")
    assert say("(f 2)") == "6", "a definition replaces the one before"
    say("(defmacro twice (x) `(f (f ,x)))")
    assert say(",expand (twice (+ 1 2))") == "(f (f (+ 1 2)))"
    assert say("(progn (defmacro one () 1) (one))") == "1"
    say('(defknob k 3 "a knob" :max 9)')
    assert say("(* 2 k)") == "6"
    assert say(",knob k 5").startswith("k  5  (set, --set k)")
    assert say("(* 2 k)") == "10"
    assert say(",knob k 50") == "E-KNOB-002"
    assert say("(+ _ 1)") == "11", "`_` is the last value"
    say("(defparameter x (array [1.0 2.0]))")
    assert say(",grad (sum (* x x)) x") == "by x\n[2.0 4.0]  f32[2]"
    assert say(",grad (sum (* x x))") == "by x\n[2.0 4.0]  f32[2]"


def test_layers_have_initial_values(say: Heard) -> None:
    say('(import "nn")')
    first = say("(linear [[1.0 2 3]] 4)")
    assert re.fullmatch(r"\[\[(-?[\d.]+ ?){4}\]\]  f32\[1 4\]", first)
    assert say("(linear [[1.0 2 3]] 4)") == first, "the same path: the same parameters"
    shown = say(",explain (linear [[1.0 2 3]] 4)")
    assert shown.startswith("f32[1 4]: ") and "param linear/0/weight  f32[3 4]" in shown
    assert say(",grad (sum (linear [[1.0 2 3]] 2))").endswith("by linear/0/bias\n[1.0 1.0]  f32[2]")
    assert "median of" in say(",time (linear [[1.0 2 3]] 2)")


def test_a_file_its_knobs_and_its_run(say: Heard) -> None:
    assert say(f",load {DIGITS} hidden=8 batch=16").endswith("runs train")
    assert "hidden  8  (set, --set hidden)" in say(",knob")
    assert say(",knob hidden") == "hidden  8  (set, --set hidden)"
    untrained = say(",grad (digit-loss (array (list (range 64)) :dtype f32) [3])")
    assert "by perceptron/0/in/weight" in untrained
    assert say("(digit-loss (array (list (range 64))) [3])") == "E-SHAPE-002"
    steps = say(",run 2")
    assert re.search(r"^step 2  loss [\d.]+  gradient norm", steps, re.M) and "step 2  valid" in steps
    assert re.search(r"^step 5  loss", say(",run 3"), re.M), "goes on where it stopped"
    zeros = "(array (mapcar (lambda (i) 0.5) (range 64)) :dtype f32)"
    shown = say(f"(perceptron (reshape {zeros} [1 64]))")
    assert shown.endswith("f32[1 10]"), shown
    say(",run 20")
    assert say(f"(perceptron (reshape {zeros} [1 64]))") != shown, "layers have the run's weights"
    assert "parameters of train" in say(",explain")
    assert say(",ir").startswith("sexpgpu-ir 1\n; knob hidden 8")
    assert say(",run 1 nobody") == "E-RUN-102"
    assert say(",knob hidden 12").startswith("hidden  12"), "reads the file again"
    assert say(",knob batch").startswith("batch  16"), "other knobs keep what was chosen"


def test_budget_of_an_input() -> None:
    say = Heard(limit=100_000)
    assert say("(length (range 1000000))") == "E-EVAL-041"
    for _ in range(5):
        assert say("(length (range 10000))") == "10000", "each input has the whole budget"
    assert say("(defun loop (n) (loop (+ n 1)))") and say("(loop 0)") == "E-EVAL-041"
    assert say("(defun deep (n) (+ 1 (deep n)))") and say("(deep 0)") in ("E-EVAL-041", "E-EVAL-042")
    assert say("(+ 1 1)") == "2"


def test_a_bug_of_ours_does_not_end_it(say: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(say.session, "evaluate", lambda form: 1 // 0)
    assert "this is a bug in SexpGPU" in say("(+ 1 1)")
    monkeypatch.undo()
    assert say("(+ 1 1)") == "2"


@pytest.mark.parametrize(("text", "more"), [
    ("(+ 1", True), ("(+ 1)", False), ('"a', True), ("'", True), ("#| a", True), ("#;", True), ("[1 2", True), (")", False), ("(]", False),
    (",grad (sum", True), (",load it's.lisp", False), (",knob x (", False), ("; only a comment", False), ('(f "(")', False),
])  # fmt: skip
def test_unfinished(text: str, more: bool) -> None:
    assert unfinished(text) is more


def test_inputs_of_a_stream() -> None:
    assert list(inputs(["(a\n", "\n", " b)\n", "\n", "c d\n", "(e"])) == ["(a\n\n b)\n", "c d\n", "(e"]


def run(text: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sexpgpu", "repl", *arguments], input=text, capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, **more}, timeout=120)  # fmt: skip


def test_a_pipe() -> None:
    done = run("(defun f (x)\n  (* 2 x))\n(f [1 2])\n(foo)\n(f 4)\n,quit\n(f 5)\n")
    assert done.stdout == "<function f>\n[2 4]  i32[2]\n8\n"
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.startswith("error[E-EVAL-001]") and "input-3:1:2" in done.stderr and "^^^" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert run("(+ 1 1)").returncode == 0
    json_lines = run("(foo)\n", "--json").stderr
    assert json_lines.startswith("{") and '"E-EVAL-001"' in json_lines


def test_a_file_on_the_command_line() -> None:
    done = run("hidden\n", "examples/digits.lisp", "--set", "hidden=7")
    assert done.stdout == "7\n", done.stderr
    assert run("1\n", "no-such.lisp").returncode == 2


def test_limit_from_the_environment() -> None:
    assert "E-EVAL-041" in run("(length (range 100000))\n", SEXPGPU_EVAL_LIMIT="1000").stderr


def test_interrupt_stops_an_evaluation_only() -> None:
    process = subprocess.Popen([sys.executable, "-m", "sexpgpu", "repl"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "SEXPGPU_EVAL_LIMIT": str(10**12)})  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write("(+ 40 2)\n(defun loop (n) (loop (+ n 1)))\n")
    process.stdin.flush()
    assert process.stdout.readline() == "42\n" and "loop" in process.stdout.readline()
    process.stdin.write("(loop 0)\n")
    process.stdin.flush()
    until_busy(process.pid)
    process.send_signal(signal.SIGINT)
    assert "stopped" in process.stderr.readline()
    out, _ = process.communicate("(+ 1 1)\n", timeout=60)
    assert out == "2\n" and process.returncode == 1

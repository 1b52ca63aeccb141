"""Evaluation is bounded: what costs what, and that every bomb ends soon, small and with a code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_lisp import evaluator, mistake


def kibibytes(what: str) -> int:
    """VmRSS, what this process holds now, or VmHWM, the most that it held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1])


@pytest.fixture(scope="module")
def held_before() -> int:
    """What the process holds before the first bomb; the peak is counted anew from here (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return kibibytes("VmRSS")


@pytest.fixture(autouse=True)
def _counted(held_before: int) -> Iterator[None]:
    yield


def spent(text: str) -> int:
    ev = evaluator(text)
    ev.load_main()
    return ev.budget.spent


def test_what_things_cost():
    assert spent("1") == 1 and spent("[1 2]") == 3 + 8
    assert spent("(list 1 2)") == 4 + 8
    assert spent("(+ 1 2)") == 4 + 1
    assert spent('(string-append "ab" "c")') == 4 + 3
    assert spent("(* 10000000000 10000000000)") == 4 + 11
    assert spent("(range 10)") == 3 + 40 + 2
    assert spent("(if true 1 (range 1000))") == 3


def test_over_it_names_form_calls_and_spenders():
    d = mistake("(defun grow (x) (grow (cons 1 x)))\n(defun start () (+ 0 (grow [])))\n(start)", "E-EVAL-041", limit=100_000)
    assert d.span.text == "(cons 1 x)"
    notes = "\n".join([*d.notes, *(r.label for r in d.related)])
    assert "in `grow`" in notes and "in `start`" in notes and "spent most: `cons`" in notes and "SEXPGPU_EVAL_LIMIT" in d.help[0]


BOMBS = {
    "range": "(range 1000000000000)",
    "range of ranges": "(mapcar range (range 100000))",
    "huge range bounds": "(range 0 (expt 10 100000) 1)",
    "string doubling": '(let ((s "ab")) (dotimes (i 100) (setq s (string-append s s))))',
    "list doubling": "(let ((s [1 2])) (dotimes (i 100) (setq s (append s s))))",
    "squaring": "(let ((x 3)) (dotimes (i 100) (setq x (* x x))))",
    "power": "(expt 10 1000000000000)",
    "power tower": "(let ((x 2)) (dotimes (i 10) (setq x (expt x x))))",
    "ratio power": "(expt 3/7 100000000)",
    "harmonic": "(let ((x 0)) (dotimes (i 100000) (setq x (+ x (/ 1 (+ i 1))))))",
    "endless loop": "(defun f () (f)) (f)",
    "dotimes": "(dotimes (i 1000000000000) i)",
    "dotimes of a huge count": "(dotimes (i (expt 10 1000)) i)",
    "apply": "(dotimes (i 1000000) (apply + (range 100000)))",
    "apply of a huge list": "(let ((xs (range 500000))) (dotimes (i 1000) (apply list xs)))",
    "macro": "(defmacro m (n) (if (= n 0) 1 `(list (m ,(- n 1)) (m ,(- n 1))))) (m 40)",
    "shared list compared": "(let ((a [1]) (b [1])) (dotimes (i 60) (setq a [a a]) (setq b [b b])) (equal a b))",
    "shared list as a form": "(defmacro m () (let ((a 1)) (dotimes (i 60) (setq a (list '+ a a))) a)) (m)",
    "cdr down a list": "(defun f (x) (if (null x) 0 (f (rest x)))) (f (range 100000))",
    "closures": "(defun f (acc) (f (cons (lambda () acc) acc))) (f [])",
    "pow": "(dotimes (i 10000000) (pow 1.000001 0.37))",
    "sin": "(dotimes (i 10000000) (sin 1e308))",
    "sort": "(let ((x (range 200000))) (dotimes (i 1000) (sort x <)))",
    "member": "(let ((x (range 100000))) (dotimes (i 10000) (member -1 x)))",
    "every": "(let ((x (range 100000))) (dotimes (i 10000) (every numberp x)))",
    "reduce": "(let ((x (range 100000))) (dotimes (i 10000) (reduce + x)))",
    "length of long calls": "(let ((x (range 100000))) (dotimes (i 10000) (apply max x)))",
    "gensym": "(dotimes (i 100000000) (gensym))",
    "symbols": '(let ((s "a")) (dotimes (i 10000000) (intern s)))',
    "destructuring": "(let ((x (range 100000))) (dotimes (i 1000) (destructuring-bind (a &rest r) x a)))",
    "splicing": "(let ((x (range 100000))) (dotimes (i 1000) `(,@x ,@x)))",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end(name):
    start = time.perf_counter()
    mistake(BOMBS[name], "E-EVAL-041", limit=1_000_000)  # benchmarks/evaluator_budget.py: the full one
    assert time.perf_counter() - start < 60  # seconds on an idle machine are 2; CI shares its cores


def test_deep_values_are_no_host_error():
    deep = "(let ((x [1]) (y [1])) (dotimes (i 100000) (setq x [x]) (setq y [y])) {})"
    evaluator(deep.format("(equal x y)")).load_main()
    mistake("(defmacro m () " + deep.format("x") + ") (m)", "E-EVAL-042")
    mistake(deep.format("(+ x 1)"), "E-EVAL-006")


def test_memory_stayed_small(held_before: int) -> None:
    """After all bombs of this file: how far the process's peak rose."""
    assert kibibytes("VmHWM") - held_before < 500_000

"""Imports: whose names are seen, what may be shadowed, what may be read."""

from __future__ import annotations

import pytest

from sexpgpu.diagnostics import SexpError, render
from sexpgpu.lisp.evaluator import Evaluator
from sexpgpu.lisp.modules import Loader


@pytest.fixture
def program(tmp_path):
    """`program({"main": text, …}, {"nn": text})` evaluates main.lisp with a library; returns the evaluator."""
    def make(files: dict[str, str], library: dict[str, str] | None = None, **more) -> Evaluator:
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "std").mkdir(exist_ok=True)
        for folder, texts in (("own", files), ("std", library or {})):
            for name, text in texts.items():
                path = tmp_path / folder / f"{name}.lisp"
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
        ev = Evaluator(Loader(tmp_path / "own" / "main.lisp", tmp_path / "std"), **more)
        ev.load_main()
        return ev
    return make


def failing(program, code, *args, **more):
    with pytest.raises(SexpError) as caught:
        program(*args, **more)
    assert caught.value.diagnostic.code == code, render(caught.value.diagnostic)
    return caught.value.diagnostic


def out(ev):
    return ev.main.env.lookup("out")


def test_library_and_own_files(program):
    ev = program({"main": '(import "nn" "parts/m") (defparameter out [(f 1) (g 2)])', "parts/m": "(defun g (x) (* x 2))"},
                 {"nn": "(defun f (x) (h x)) (defun h (x) (+ x 10))"})
    assert out(ev) == (11, 4)
    assert [name for name, _ in ev.loader.texts] == ["main.lisp", "lisp-stdlib/nn.lisp", "parts/m.lisp"]
    assert [f.name for f in ev.loader.all_files()] == ["main.lisp", "nn", "parts/m"]


def test_shadowing(program):
    library = {"a": "(defun f () 1) (defun use () (f))", "b": "(defun f () 2)"}
    assert out(program({"main": '(import "a") (defun f () 3) (defun abs (x) 9) (defparameter out [(f) (use) (abs -1)])'},
                       library)) == (3, 1, 9)
    assert out(program({"main": '(import "a" "b") (defparameter out (use))'}, library)) == 1
    d = failing(program, "E-EVAL-010", {"main": '(import "a" "b") (f)'}, library)
    assert len(d.related) == 2 and ":as" in d.help[0]
    assert out(program({"main": '(import "a") (import "b" :as b) (defparameter out [(f) (b/f)])'}, library)) == (1, 2)
    failing(program, "E-EVAL-014", {"main": '(import "c")'}, {"c": "(defun abs (x) x)"})
    failing(program, "E-EVAL-018", {"main": '(import "v") (setq x 2)'}, {"v": "(defparameter x 1)"})


def test_library_macros_find_their_own_names(program):
    library = {"m": "(defun helper (x) (* 3 x)) (defmacro triple (x) `(helper ,x))"}
    assert out(program({"main": '(import "m" :as m) (defparameter out (m/triple 2))'}, library)) == 6
    assert out(program({"main": '(import "m") (defun helper (x) 0) (defparameter out (triple 2))'}, library)) == 6


def test_paths_stay_inside(program, tmp_path):
    (tmp_path / "secret.lisp").write_text("(defun f () 1)")
    for name in ("../secret", "/etc/passwd", "a/../../secret", "", "c:\\x"):
        failing(program, "E-EVAL-013", {"main": f'(import "{name.replace(chr(92), chr(92) * 2)}")'})
    (tmp_path / "own" / "link.lisp").symlink_to(tmp_path / "secret.lisp")
    failing(program, "E-EVAL-013", {"main": '(import "link")'})
    d = failing(program, "E-EVAL-011", {"main": '(import "optin")'}, {"optim": ""})
    assert "did you mean `optim`?" in d.help[0]


def test_circles(program):
    d = failing(program, "E-EVAL-012", {"main": '(import "a")', "a": '(import "b")', "b": '(import "a")'})
    assert "a.lisp -> b.lisp -> a.lisp" in d.message
    failing(program, "E-EVAL-012", {"main": '(import "main")'})
    failing(program, "E-EVAL-012", {"main": '(import "x")', "x": '(import "main")'})


def test_a_mistake_inside_the_library_points_at_the_users_call(program):
    d = failing(program, "E-EVAL-007", {"main": '(import "nn")\n(defun mine (x)\n  (+ 1 (f x)))\n(mine 0)'},
                {"nn": "(defun f (x) (+ 1 (g x))) (defun g (x) (/ 1 x))"})
    assert d.span.text == "(f x)" and d.span.place == "main.lisp:3:8"
    assert d.related[0].span.place.startswith("lisp-stdlib/nn.lisp")
    d = failing(program, "E-EVAL-003", {"main": '(import "nn")\n(f)'}, {"nn": "(defun f (x) x)"})
    assert d.span.text == "(f)" and d.related[0].span.text == "(defun f (x) x)"


def test_not_text(program, tmp_path):
    (tmp_path / "own").mkdir(exist_ok=True)
    (tmp_path / "own" / "bin.lisp").write_bytes(b"\xff\xfe")
    failing(program, "E-READ-014", {"main": '(import "bin")'})

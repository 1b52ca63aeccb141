"""Macros: templates, fresh names, places and trails of what they make."""

from __future__ import annotations

from helpers_lisp import evaluator, mistake, value

from sexpgpu.diagnostics import render


def test_templates():
    assert value("(defmacro unless2 (c &rest body) `(if ,c nil (progn ,@body))) (unless2 false 1 2)") == 2
    assert value("(defmacro swap (a b) `(list ,b ,a)) (swap 1 (+ 1 1))") == (2, 1)
    assert value("(defmacro dims (&rest xs) `[,@xs 4]) (dims 2 3)") == (2, 3, 4)
    assert value("(defmacro k (x &key (by 2)) `(* ,x ,by)) [(k 3) (k 3 :by 5)]") == (6, 15)
    assert value("(defmacro m (x) (list '+ x x)) (m 4)") == 8
    assert value("(defmacro make (name v) `(defun ,name () ,v)) (make f 5) (f)") == 5
    assert value("`(1 `(2 ,(3 ,(+ 1 3))))")[1][1][1][1][1] == 4
    assert value("(defmacro five () 5) (+ (five) 1)") == 6


def test_residual_as_in_the_example():
    text = """(defmacro residual (x layer) `(let ((skip ,x)) (+ skip (,layer (* 2 skip)))))
    (defun double (x) (* 2 x)) (let ((x (residual 1 double))) (residual x double))"""
    assert value(text) == 25


def test_gensym_makes_names_nobody_can_write():
    text = "(defmacro sq (x) (let ((v (gensym))) `(let ((,v ,x)) (* ,v ,v)))) (let ((g1 3)) (sq (+ g1 1)))"
    assert value(text) == 16
    assert value("(eq (gensym) (gensym))") is False


def test_messages_name_the_call_and_the_macro():
    d = mistake("(defmacro bad (x)\n  `(nth ,x 5))\n(bad 1)", "E-EVAL-006")
    assert d.span.place == "main.lisp:3:1"
    assert any(r.label == "expanded from macro `bad` here" for r in d.related)
    d = mistake("(defmacro a (x) `(b ,x))\n(defmacro b (x) `(+ ,x oops))\n(a 1)", "E-EVAL-001")
    assert [r.label for r in d.related] == ["expanded from macro `b` here", "expanded from macro `a` here"]


def test_arguments_keep_their_own_place():
    d = mistake("(defmacro twice (x) `(list ,x ,x))\n(twice\n  (foo 1))", "E-EVAL-001")
    assert d.span.place == "main.lisp:3:4"


def test_a_macro_defined_too_late_says_so():
    assert "top level" in render(mistake("(let () (defmacro m (x) x) (m 1))", "E-EVAL-019"))
    evaluator("(progn (defmacro m (x) x) (m 1))").load_main()
    evaluator("(defun f () (m 1)) (defmacro m (x) x) (f)").load_main()


def test_endless_expansion_ends():
    mistake("(defmacro m (x) `(m ,x)) (m 1)", "E-EVAL-041")
    mistake("(defmacro m (x) `(list (m ,x))) (m 1)", "E-EVAL-042")
    mistake("(defmacro m (x) `(progn (m (+ ,x ,x)) (m ,x))) (m 1)", "E-EVAL-042")

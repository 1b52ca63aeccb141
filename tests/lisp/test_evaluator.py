"""What forms mean: bindings, functions, loops, macros, data, and what a mistake says."""

from __future__ import annotations

from fractions import Fraction

import pytest
from helpers_lisp import evaluator, mistake, value

from sexpgpu.diagnostics import SexpError, entry, problem, render
from sexpgpu.diagnostics.catalogue.eval import CODES
from sexpgpu.forms import Keyword, Symbol
from sexpgpu.lisp.values import Native, Tensor, knobs_of, plain, with_knobs


@pytest.mark.parametrize(("text", "wanted"), [
    ("(let ((x 1) (y 2)) (let ((x y) (y x)) [x y]))", (2, 1)),
    ("(let* ((x 1) (y (+ x 1)) (x (+ y 1))) [x y])", (3, 2)),
    ("(let* ((x 1) (f (lambda () x)) (x 2)) [(f) x])", (1, 2)),
    ("(defparameter g 7) (let* ((f (lambda () g)) (g 2)) [(f) g])", (7, 2)),
    ("(let ((n 0)) (dotimes (i 5) (setq n (+ n i))) n)", 10),
    ("(let ((n 0)) (dolist (x [1 2 3] n) (setq n (+ n x))))", 6),
    ("(mapcar (lambda (f) (f)) (mapcar (lambda (i) (lambda () i)) (range 3)))", (0, 1, 2)),
    ("(destructuring-bind (a (b &optional c) &rest d) '(1 (2) 3 4) [a b c d])", (1, 2, (), (3, 4))),
    ("[(if nil 1 2) (if [] 1 2) (if 0 1 2) (if \"\" 1 2) (if false 1)]", (2, 2, 1, 1, ())),
    ("(cond (false 1) ((+ 1 1)) (else 3))", 2),
    ("(cond (false 1) (else 2 3))", 3),
    ("[(and) (or) (and 1 2) (or nil 3) (and nil (error \"no\")) (when true 1 2) (unless true 1)]",
     (True, False, 2, 3, (), 2, ())),
    ("(case 3 (1 'a) ((2 3) 'b) (else 'c))", Symbol("b")),
    ("(case 'x (y 1) (else 2))", 2),
    ("(defun f (a &optional (b 2) &key (c (+ a b)) &rest r) [a b c]) [(f 1) (f 1 5) (f 1 :c 0)]",
     ((1, 2, 3), (1, 5, 6), (1, 2, 0))),
    ("(defun f (&rest xs) xs) (f 1 2)", (1, 2)),
    ("(apply + 1 [2 3])", 6),
    ("(defun f (a &key k) [a k]) (apply f '(1 :k 2))", (1, 2)),
    ("(funcall (lambda (x &key y) [x y]) 1 :y 2)", (1, 2)),
    ("(reduce + [1 2 3] :initial-value 10)", 16),
    ("(reduce list [1 2 3] :from-end true)", (1, (2, 3))),
    ("(mapcar + [1 2 3] [10 20])", (11, 22)),
    ("[(range 3) (range 1 4) (range 5 0 -2)]", ((0, 1, 2), (1, 2, 3), (5, 3, 1))),
    ("[(nth 1 [5 6]) (first []) (rest [1 2]) (cons 1 [2]) (append [1] [2 3]) (list* 1 2 [3]) (last [1 2]) (elt [7] 0)]",
     (6, (), (2,), (1, 2), (1, 2, 3), (1, 2, 3), 2, 7)),
    ("(sort [3 1 2] <)", (1, 2, 3)),
    ("(sort '((b 1) (a 0)) (lambda (x y) (< (second x) (second y))))", ((Symbol("a"), 0), (Symbol("b"), 1))),
    ("(string-append \"a\" 1 'b ':k 1/2 0.5 true)", "a1b:k1/20.5true"),
    ("(format-number 1/3 :digits 3)", "0.333"),
    ("[(eq 'a 'a) (eq 1 1.0) (equal [1 [2]] [1 [2]]) (not nil) (null []) (symbolp f32) (evenp 4)]",
     (True, False, True, True, True, True, True)),
    ("f32", Symbol("f32")),
    (":k", Keyword("k")),
    ("`(1 ,(+ 1 1) ,@(list 3 4))", (1, 2, 3, 4)),
    ("(let ((t 3)) t)", 3),
    ("(let ((param 1)) (+ param 1))", 2),
    ("(defun list2 (list) (list 1 2)) (list2 +)", 3),
    ("(defvar v 1) (defvar v 2) v", 1),
    ("(setq + -)", None),
])
def test_values(text, wanted):
    if wanted is None:
        mistake(text, "E-EVAL-018")
    else:
        assert value(text) == wanted


@pytest.mark.parametrize(("text", "wanted"), [
    ("(/ 128 4)", 32), ("(/ 130 4)", Fraction(65, 2)), ("(/ 2)", Fraction(1, 2)), ("(- 3)", -3), ("(+)", 0), ("(*)", 1),
    ("(+ 1/2 1/2)", 1), ("(+ 1 0.5)", 1.5), ("(mod -7 3)", 2), ("(rem -7 3)", -1), ("(floor 7 2)", 3), ("(floor -0.5)", -1),
    ("(round 2.5)", 2), ("(round 7 2)", 4), ("(ceiling 1/3)", 1), ("(expt 2 10)", 1024), ("(expt 2 -1)", Fraction(1, 2)),
    ("(expt 0 0)", 1), ("(expt -1 3)", -1), ("(expt -1 -2)", 1), ("(pow 2.0 0.5)", 2**0.5), ("(gcd 12 18)", 6),
    ("(max 1 2.5)", 2.5), ("(abs -3)", 3), ("(sum [1 2 3])", 6), ("(< 1 2 3)", True), ("(< 1 3 2)", False), ("(/= 1 2 1)", False),
    ("(sqrt 9)", 3.0), ("(1+ 2)", 3),
])
def test_numbers(text, wanted):
    got = value(text)
    assert got == wanted and type(got) is type(wanted)


def test_float_functions_are_correctly_rounded():
    # from tables of the hard cases of double precision (Lefèvre and Muller) and exact arithmetic
    assert value("(sin 1e22)") == -0.8522008497671888
    assert value("(cos 1e22)") == float("0.52321478539513894549759442588437")
    assert value("(exp 1)") == 2.718281828459045 and value("(log 10)") == 2.302585092994046
    assert value("(tanh 1e-300)") == 1e-300 and value("(exp -1000)") == 0.0 and value("(exp 1000)") == float("inf")
    assert value("(pow 0.9 100)") == 2.6561398887587544e-05 and value("(pow 4.0 0.5)") == 2.0
    assert value("(pow 1.0000001 10000000)") == 2.7182816941320818


@pytest.mark.parametrize(("text", "code", "words"), [
    ("(lenght [1])", "E-EVAL-001", "did you mean `length`"),
    ("(let ((hidden 1)) hiden)", "E-EVAL-001", "did you mean `hidden`"),
    ("(1 2)", "E-EVAL-002", "[a b c]"),
    ("(let ((x 3)) (x 1))", "E-EVAL-002", "`x` is an integer"),
    ("(defun f (a b) a) (f 1)", "E-EVAL-003", "(a b)"),
    ("(nth 1)", "E-EVAL-003", "(index list)"),
    ("(defun f (a &key rate) a) (f 1 :rat 2)", "E-EVAL-004", "did you mean `:rate`"),
    ("(defun f (a) a) (f 1 :rate)", "E-EVAL-004", "has no value"),
    ("(let (x 1) x)", "E-EVAL-005", "(let ((name value) …) body …)"),
    ("(if)", "E-EVAL-005", "(if test then else)"),
    ('(+ 1 "2")', "E-EVAL-006", "a string"),
    ("(/ 1 0)", "E-EVAL-007", "zero"),
    ("(/ 1.0 0)", "E-EVAL-007", "zero"),
    ("(log 0)", "E-EVAL-007", "positive"),
    ("(nth 3 [1 2])", "E-EVAL-008", "count from 0"),
    ("(defun if (a) a)", "E-EVAL-014", "`if`"),
    ("(defun f (a a) a)", "E-EVAL-015", "two parameters"),
    ("(destructuring-bind (a b) [1] a)", "E-EVAL-016", "the list has 1"),
    ("(list ,x)", "E-EVAL-017", "`"),
    ("(setq nope 1)", "E-EVAL-018", "nope"),
    ("(mapcar when [1])", "E-EVAL-019", "form of the language"),
    ("(defmacro m () (lambda () 1)) (m)", "E-EVAL-020", "a function"),
    ("(float (expt 10 400))", "E-EVAL-022", "too large"),
    ('(assert (= 1 2) "heads must divide d")', "E-EVAL-023", "heads must divide"),
    ("(defun f (n) (+ 1 (f n))) (f 1)", "E-EVAL-042", "nest deeper"),
    ("(defun f (x) (mapcar f [1])) (f 1)", "E-EVAL-042", "nest deeper"),
])
def test_mistakes(text, code, words):
    assert words in render(mistake(text, code))


def test_deep_recursion_in_a_deep_expression_is_no_host_error():
    deep = "(f n)"
    for _ in range(400):
        deep = f"(+ 1 {deep})"
    assert "E-EVAL-042" == mistake(f"(defun f (n) {deep}) (f 1)", "E-EVAL-042").code


def test_tail_calls_do_not_nest():
    assert value("(defun g (n) (if (= n 0) 'done (g (- n 1)))) (g 200000)") == Symbol("done")
    assert value("(defun a (n) (cond ((= n 0) 1) (else (b (- n 1))))) (defun b (n) (when true (let ((m n)) (a m)))) (a 50000)") == 1
    assert value("(defun g (n) (if (= n 0) 0 (+ 1 (g (- n 1))))) (g 900)") == 900


def test_a_million_tail_calls():
    assert value("(defun g (n) (if (= n 0) 0 (g (- n 1)))) (g 1000000)", limit=100_000_000) == 0


def test_doc_strings_and_parameters():
    ev = evaluator('(defun f (a &optional b &key (c 1)) "Adds." (+ a c))')
    f = ev.load_main().lookup("f")
    assert f.doc == "Adds." and f.parameters.required == ("a",) and f.signature == "(a &optional b &key (c 1))"
    assert f.span.place == "main.lisp:1:1" and ev.call(f, [1], {"c": 5}) == 6
    assert value('(defun f () "only") (f)') == "only"


def test_knobs_follow_values():
    seen = []

    def knob(ev, form, env):
        env.define(form.items[1].name, with_knobs(ev.eval(form.items[2], env), frozenset([form.items[1].name])), form.span)

    text = "(knob a 4) (knob b 2.5) (knob p 'f32) (knob flag true)" \
        "(defparameter out [(+ a 1) (* a b) (/ a 3) [a 1] p (string-append \"x\" a) 7 (< a 3) flag])" \
        "(if (= a 3) 1 2) (dotimes (i a) i) (range a) (when flag 1) (case p (f32 1)) (if (not flag) 1)"
    ev = evaluator(text, specials={"knob": knob})
    ev.on_decide = lambda v, form: seen.append((sorted(knobs_of(v)), form.span.text if hasattr(form, "span") else form.text))
    out = ev.load_main().lookup("out")
    assert [sorted(knobs_of(v)) for v in out] == [["a"], ["a", "b"], ["a"], ["a"], ["p"], ["a"], [], ["a"], ["flag"]]
    assert out[0] == 5 and plain(out[7]) is False and plain(out[8]) is True
    assert [k for k, _ in seen] == [["a"], ["a"], ["a"], ["flag"], ["p"], ["flag"]]
    assert seen[2][1] == "(range a)"


def test_tensors_go_to_the_hook_and_cannot_decide():
    calls = []

    def tensor_op(name, args, kwargs, span):
        calls.append((name, span.text))
        return Tensor(name)

    ev = evaluator("(defparameter y (+ (* x 2) (exp x) (max x 0) (= x 1)))", natives={"x": Tensor("x")})
    ev.tensor_op = tensor_op
    ev.load_main()
    assert [c[0] for c in calls] == ["*", "exp", "max", "=", "+"] and calls[0][1] == "(* x 2)"
    for text in ("(if x 1 2)", "(cond (x 1))", "(and x 1)", "(when x 1)"):
        d = mistake(text, "E-EVAL-009", natives={"x": Tensor("x")})
        assert "where" in d.help[0]


def test_natives_and_specials_from_outside():
    def bad(ev, args, kwargs, span):
        raise problem("E-EVAL-006", "no place given")

    d = mistake("(+ 1 (bad 2))", "E-EVAL-006", natives={"bad": Native("bad", bad)})
    assert d.span.text == "(bad 2)"
    twice = {"twice": lambda ev, form, env: ev.eval(form.items[1], env) * 2}
    assert value("(let ((x 4)) (twice (+ x 1)))", specials=twice) == 10
    assert value("(defun f (twice) (twice 3)) (f (lambda (x) x))", specials=twice) == 3
    assert value("(defun g (n) (mapcar (lambda (i) (twice (+ i n))) (range 3))) (g 1)", specials=twice) == (2, 4, 6)
    named = {"name-it": lambda ev, form, env: ev.eval(form.items[2], env.child({form.items[1].name: 5}))}
    assert value("(let ((a 1)) (name-it b (+ a b)))", specials=named) == 6
    made = {"fn": lambda ev, form, env: ev.make_closure("fn", form.items[1], form.items[2:], env, form.span)}
    assert value("(let ((a 1)) ((fn (b) (+ a b)) 2))", specials=made) == 3


def test_evaluation_goes_on_after_a_mistake():
    ev = evaluator("(defun f (n) (g n)) (defun g (n) (/ 1 n))")
    f = ev.load_main().lookup("f")
    with pytest.raises(SexpError, match="E-EVAL-007"):
        ev.call(f, [0])
    assert ev.stack == [] and ev.call(f, [1]) == 1


def test_every_code_has_a_page():
    for code, known in CODES.items():
        if code < "E-EVAL-100":  # those of the def-forms have tests of their own
            assert entry(code) is known and "Wrong:" in known.page and "Right:" in known.page

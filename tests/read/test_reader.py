"""The reader: what each notation gives, exact spans, one coded error a mistake, linear time."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from sexpgpu.diagnostics import SexpError, entry
from sexpgpu.diagnostics.catalogue.read import CODES
from sexpgpu.forms import Keyword, ListForm, Literal, Symbol
from sexpgpu.read.printer import print_form
from sexpgpu.read.reader import read, read_datum
from sexpgpu.source import Source


def forms(text: str) -> list:
    return read(Source("t.lisp", text))


def values(text: str) -> list:
    return [f.value for f in forms(text)]


def test_atoms():
    assert values("1 -2 +3 1.5 -.5 2. 1e-3 1/16 4/2 true false") == [1, -2, 3, 1.5, -0.5, 2.0, 1e-3, Fraction(1, 16), 2, True, False]
    assert values(r'"a\nb\"\\" "\x41\u0042\u{1F600}"') == ['a\nb"\\', "AB\U0001f600"]
    assert values('"two\nlines"') == ["two\nlines"]
    a, b, c, d = forms("x :key nil 1+")
    assert a == Symbol("x") and b == Keyword("key") and isinstance(c, ListForm) and not c.items and d == Symbol("1+")
    assert forms("- + ... a.b <= λ")[0] == Symbol("-")


def test_lists_and_quotes():
    (f,) = forms("(a [b 2] 'c `(d ,e ,@f))")
    assert f.items[1].bracket and not f.bracket
    assert f.items[2].items == (Symbol("quote"), Symbol("c"))
    assert print_form(f) == "(a [b 2] 'c `(d ,e ,@f))"


def test_comments():
    assert [print_form(f) for f in forms('a ; x (\n#| ( "#| " |# |# b #;(c d) e #; #; 1 2 3 "#| no |#" "; no"')] == [
        "a", "b", "e", "3", '"#| no |#"', '"; no"']
    assert forms("") == [] and forms("  ; only\n") == [] and forms("#| a |#") == []


def test_spans_are_exact():
    text = '\ufeff#| x |# (foo "é" [1 2]\n  \'bar)'
    (f,) = forms(text)
    assert f.span.text == '(foo "é" [1 2]\n  \'bar)'
    assert [i.span.text for i in f.items] == ["foo", '"é"', "[1 2]", "'bar"]
    assert f.items[3].span.place == "t.lisp:2:3"
    assert f.items[3].items[1].span.text == "bar"


@pytest.mark.parametrize(("text", "code", "place"), [
    ("(a (b)", "E-READ-001", "1:1"),
    ("(a\n  [b c", "E-READ-001", "2:3"),
    ("a)", "E-READ-002", "1:2"),
    ("(a]", "E-READ-003", "1:3"),
    ('(a "b', "E-READ-004", "1:4"),
    ("(a ')", "E-READ-005", "1:4"),
    ("a ,@", "E-READ-005", "1:3"),
    ("`", "E-READ-005", "1:1"),
    ("1.2.3", "E-READ-006", "1:1"),
    ("(x 3d)", "E-READ-006", "1:4"),
    ("1/0", "E-READ-006", "1:1"),
    ("1e999", "E-READ-006", "1:1"),
    ("(" * 1001 + ")" * 1001, "E-READ-007", "1:1001"),
    ('"a\\qb"', "E-READ-008", "1:3"),
    ('"\\u{110000}"', "E-READ-008", "1:2"),
    ("a #| b", "E-READ-009", "1:3"),
    ("a |#", "E-READ-009", "1:3"),
    ("#foo", "E-READ-010", "1:1"),
    ("(a :)", "E-READ-010", "1:4"),
    ("a\x00b", "E-READ-010", "1:1"),
    ("(1 #;)", "E-READ-011", "1:4"),
    ("#;", "E-READ-011", "1:1"),
    ("9" * 4001, "E-READ-013", "1:1"),
])
def test_mistakes_have_codes_and_places(text: str, code: str, place: str):
    with pytest.raises(SexpError) as caught:
        forms(text)
    d = caught.value.diagnostic
    assert (d.code, d.span.place) == (code, f"t.lisp:{place}")
    assert d.help or d.code in ("E-READ-006", "E-READ-007", "E-READ-010")


def test_one_datum():
    assert read_datum("[1 2]", "x").bracket
    assert isinstance(read_datum("1/2", "x"), Literal)
    for text in ("", "1 2"):
        with pytest.raises(SexpError, match="E-READ-012"):
            read_datum(text, "x")


def test_deep_and_long_texts_are_linear():
    start = time.perf_counter()
    with pytest.raises(SexpError, match="E-READ-007"):
        forms("(" * 100_000 + ")" * 100_000)
    assert print_form(forms("'" * 20_000 + "a")[0]) == "'" * 20_000 + "a"
    assert len(forms("(" + "a " * 30_000 + ")")[0].items) == 30_000
    assert len(forms("#|" * 50_000 + "|#" * 50_000 + " a")) == 1
    assert time.perf_counter() - start < 5


def test_every_code_has_a_page():
    for code, known in CODES.items():
        assert entry(code) is known and "Wrong:" in known.page and "Right:" in known.page


def test_a_comment_mark_inside_a_name_begins_a_line_comment():
    """`c#;x)` is the name `c#` and a comment, for the scan of brackets as for the parser."""
    with pytest.raises(SexpError) as caught:
        read(Source("t", "`(a ,b)\n(mean (c#;ast x))\n(f)"))
    assert caught.value.diagnostic.code == "E-READ-001" and caught.value.diagnostic.span.start > 8


def test_mistakes_of_several_forms_are_found_together():
    text = '(defun f (x)\n  (let ((a (+ x 1))\n    a))\n\n(list "abc)\n\n(g 1))\n(h [1 2))\n'
    with pytest.raises(SexpError) as caught:
        read(Source("t", text))
    found = caught.value.diagnostics
    assert [d.code for d in found] == ["E-READ-001", "E-READ-004", "E-READ-002", "E-READ-003"]
    assert found[0].span.place == "t:2:8"  # the bindings, which the next line begins left of
    assert [d.span.source.line_column(d.span.start)[0] for d in found] == [2, 5, 7, 8]

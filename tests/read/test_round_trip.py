"""What prints reads back as the same form, for any form."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from sexpgpu.forms import Keyword, ListForm, Literal, Symbol
from sexpgpu.read.printer import print_form, same
from sexpgpu.read.reader import read_datum

names = st.from_regex(r"[a-z*+<>=/!?-][a-z0-9*/<>=-]{0,8}", fullmatch=True).filter(
    lambda n: n not in ("true", "false", "nil") and not (n[0] in "+-" and (n[1:2].isdigit() or n[1:] in ("inf", "nan"))))
ratios = st.fractions().filter(lambda f: f.denominator != 1)
literals = st.one_of(st.integers(), st.floats(), ratios, st.booleans(), st.text(st.characters(exclude_categories=["Cs"])))
atoms = st.one_of(names.map(Symbol), names.map(Keyword), literals.map(Literal))
forms = st.recursive(atoms, lambda inner: st.builds(
    lambda items, bracket: ListForm(tuple(items), bracket), st.lists(inner, max_size=5), st.booleans()), max_leaves=25)
heads = st.sampled_from(["quote", "quasiquote", "unquote", "unquote-splicing"])


@settings(max_examples=150, deadline=None)
@given(forms)
def test_print_then_read(form):
    assert same(read_datum(print_form(form), "t"), form)


@settings(max_examples=50, deadline=None)
@given(heads, heads, forms)
def test_quotes_too(outer, inner, form):
    nested = ListForm((Symbol(outer), ListForm((Symbol(inner), form))))
    assert same(read_datum(print_form(nested), "t"), nested)


def test_unquote_before_an_at_sign():
    form = ListForm((Symbol("unquote"), Symbol("@x")))
    assert same(read_datum(print_form(form), "t"), form)


def test_equality_is_by_kind():
    assert not same(Literal(1), Literal(1.0)) and not same(Literal(1), Literal(True))
    assert same(Literal(Fraction(1, 2)), Literal(Fraction(1, 2))) and same(Literal(float("nan")), Literal(float("nan")))

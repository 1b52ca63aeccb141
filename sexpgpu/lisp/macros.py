"""Macros: quasiquotation builds values, and a macro's result becomes forms again with place and trail."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import SexpError
from sexpgpu.forms import Expansion, Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.lisp.budget import FORM
from sexpgpu.lisp.values import FormList, Macro, form_value, kind_of
from sexpgpu.read.reader import MAX_NESTING

#: stands first in the value of a bracketed template, so that it becomes a bracketed list again
BRACKET = Symbol("list")


MAX_TRAIL = 20  # macro calls that a form remembers: an endless expansion must not grow its forms


class HomeSymbol(Symbol):
    """A name from a macro's template: looked up in the scope of the call, then in the macro's own file."""

    __slots__ = ("home",)


def expand(ev: Any, macro: Macro, form: ListForm) -> Form:
    """The form that one call of a macro stands for."""
    args = [argument(item) for item in form.items[1:]]
    if macro.closure.parameters.keys:
        args, kwargs = split_keywords(args)
    else:
        kwargs = {}
    try:
        value = ev.call_closure(macro.closure, args, kwargs, form)
    except SexpError as mistake:
        raise ev.in_macro(mistake, macro, form) from None
    made = to_form(ev, value, macro, form)
    if ev.expansions is not None:
        ev.expansions[form] = made
    return made


def split_keywords(args: list) -> tuple[list, dict[str, Any]]:
    positional, named, index = [], {}, 0
    while index < len(args):
        if isinstance(args[index], Keyword) and index + 1 < len(args):
            named[args[index].name] = args[index + 1]
            index += 2
        else:
            positional.append(args[index])
            index += 1
    return positional, named


def argument(form: Form) -> Any:
    """A macro's argument as a value that remembers its form."""
    return form_value(form)


def to_form(ev: Any, value: Any, macro: Macro, call: ListForm) -> Form:
    """Value to form. What came from the call keeps its own place; what the template made takes the call's place."""
    trail = (Expansion(macro.name, call.span), *call.trail[: MAX_TRAIL - 1])
    own = macro.span
    done: list[list[Form]] = [[]]
    stack: list[tuple[bool, Any]] = []
    pending: Any = iter((value,))
    while True:
        for item in pending:
            if isinstance(item, tuple) and getattr(item, "form", None) is None:
                if len(stack) >= MAX_NESTING:
                    raise ev.error("E-EVAL-042", f"what the macro `{macro.name}` makes nests deeper than "
                                   f"{MAX_NESTING:,}", call)
                ev.spend(FORM * (len(item) + 1), call)
                bracket = bool(item) and item[0] is BRACKET
                stack.append((bracket, pending))
                pending = iter(item[1:] if bracket else item)
                done.append([])
                break
            done[-1].append(_atom_form(ev, item, macro, own, call, trail))
        else:
            if not stack:
                return done[0][0]
            bracket, pending = stack.pop()
            made = ListForm(tuple(done.pop()), bracket, span=call.span, trail=trail)
            done[-1].append(made)


def _atom_form(ev: Any, item: Any, macro: Macro, own: Any, call: ListForm, trail: tuple[Expansion, ...]) -> Form:
    if isinstance(item, FormList):
        return item.form
    if isinstance(item, Symbol):
        inside = own is not None and item.span is not None and item.span.source is own.source and (
            own.start <= item.span.start < own.end)
        if not inside and item.span is not None:
            return item
        made = HomeSymbol(item.name, span=call.span, trail=trail)
        object.__setattr__(made, "home", macro.module)
        return made
    if isinstance(item, Keyword):
        return Keyword(item.name, span=call.span, trail=trail)
    if item is None or isinstance(item, bool | int | float | Fraction | str):
        return Literal(item, span=call.span, trail=trail)
    raise ev.error("E-EVAL-020", f"the macro `{macro.name}` made {kind_of(item)}, which is no form", call,
                   help="a macro returns symbols, numbers, strings and lists; quote with ` and insert with ,")

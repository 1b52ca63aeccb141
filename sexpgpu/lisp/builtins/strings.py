"""Strings and symbols as data: joining, printing numbers, names."""

from __future__ import annotations

from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.forms import Keyword, Symbol
from sexpgpu.lisp.budget import size
from sexpgpu.lisp.builtins.arithmetic import number
from sexpgpu.lisp.builtins.define import joined, listed, native, text, whole, wrong_type
from sexpgpu.lisp.values import KnobBool, Native, plain
from sexpgpu.read.printer import print_value
from sexpgpu.read.reader import MAX_DIGITS

TABLE: dict[str, Native] = {}


def piece(ev: Any, name: str, value: Any) -> str:
    """The text of an atom: strings as they are, numbers as the reader takes them, symbols by name."""
    if isinstance(value, str):
        return value
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, Keyword):
        return f":{value.name}"
    if isinstance(value, KnobBool | bool):
        return "true" if value else "false"
    plain_value = number(name, value)
    if size(plain_value) > MAX_DIGITS:
        fail("E-EVAL-022", f"a number of more than {MAX_DIGITS:,} digits has no text")
    return print_value(plain_value)


def _join(ev: Any, name: str, args: list) -> Any:
    parts = [piece(ev, name, a) for a in args]
    ev.spend(sum(len(p) for p in parts), name)
    return joined("".join(parts), *args)


def _joining(name: str) -> None:
    def join(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        """The texts of strings, numbers and symbols in one string."""
        return _join(ev, name, args)

    native(TABLE, name, "(&rest parts)")(join)


_joining("string-append")
_joining("string")


@native(TABLE, "string-join", "(list &optional separator)")
def _string_join(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The texts of a list's elements with a separator between them."""
    separator = text("string-join", args[1]) if len(args) > 1 else ""
    parts = [piece(ev, "string-join", a) for a in listed("string-join", args[0])]
    ev.spend(sum(len(p) + len(separator) for p in parts), "string-join")
    return joined(separator.join(parts), *args[0])


@native(TABLE, "format-number", "(number &key digits)")
def _format_number(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The text of a number, with so many digits after the point if `:digits` says so."""
    if "digits" not in kwargs:
        return _join(ev, "format-number", args)
    places = whole("format-number", kwargs["digits"])
    value = number("format-number", args[0])
    if not 0 <= places <= 100 or size(value) > 300:
        fail("E-EVAL-006", "`format-number` takes 0 to 100 digits of a number below 1e300")
    made = f"{float(value):.{plain(places)}f}"
    ev.spend(len(made), "format-number")
    return joined(made, args[0])


@native(TABLE, "symbol-name", "(symbol)")
def _symbol_name(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The name of a symbol or keyword, a string."""
    if not isinstance(args[0], Symbol | Keyword):
        raise wrong_type("symbol-name", "a symbol", args[0])
    ev.spend(len(args[0].name), "symbol-name")
    return args[0].name


@native(TABLE, "intern", "(name)")
def _intern(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The symbol of a name, for macros."""
    name = text("intern", args[0])
    ev.spend(len(name) + 4, "intern")
    if not name or len(name) > 1000:
        fail("E-EVAL-006", "a symbol's name has 1 to 1,000 characters")
    return Symbol(str(name))

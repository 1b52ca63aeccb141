"""Equality, predicates and `not`, under their Common Lisp names."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.forms import Keyword, Symbol
from sexpgpu.lisp.builtins.define import joined, native, text
from sexpgpu.lisp.values import NIL, KnobBool, Native, Tensor, plain, show
from sexpgpu.lisp.values import Callable as Function

TABLE: dict[str, Native] = {}


def same_atom(a: Any, b: Any) -> bool:
    """Equal as atoms: numbers of one kind, strings, booleans, symbols; other things only if they are one."""
    a, b = plain(a), plain(b)
    if a is b:
        return True
    if isinstance(a, Symbol | Keyword):
        return a == b
    return type(a) is type(b) and isinstance(a, int | float | Fraction | str) and a == b


def equal(ev: Any, a: Any, b: Any) -> bool:
    """Equal in structure; pays for what it looks at and does not recurse."""
    todo = [(a, b)]
    while todo:
        x, y = todo.pop()
        if isinstance(x, tuple) and isinstance(y, tuple):
            if len(x) != len(y):
                return False
            ev.spend(4 + len(x), "equal")
            todo += zip(x, y, strict=True)
            continue
        if isinstance(x, str):
            ev.spend(len(x), "equal")
        ev.spend(4, "equal")
        if not same_atom(x, y):
            return False
    return True


@native(TABLE, "equal", "(a b)")
def _equal(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Whether two values are equal in structure; `1` and `1.0` are not."""
    return joined(equal(ev, args[0], args[1]), *args)


@native(TABLE, "eq", "(a b)")
def _eq(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Whether two atoms are equal; two lists only if they are the same list."""
    return joined(same_atom(*args) or args[0] == NIL == args[1], *args)


TABLE["eql"] = Native("eql", TABLE["eq"].fn, TABLE["eq"].doc, "(a b)")


@native(TABLE, "not", "(value)")
def _not(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Whether a value is false or nil."""
    value = args[0]
    if isinstance(value, Tensor):
        if ev.tensor_op is not None:
            return ev.tensor_op("not", args, kwargs, span)
        fail("E-EVAL-009", "`not` decides while the program is built, and a tensor has no value then")
    return joined(plain(value) is False or (isinstance(value, tuple) and not value), value)


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float | Fraction) and not _is_boolean(v)


def _is_boolean(v: Any) -> bool:
    return isinstance(v, bool | KnobBool)


_PREDICATES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "numberp": (_is_number, "a number"),
    "integerp": (lambda v: isinstance(v, int) and not _is_boolean(v), "an integer"),
    "rationalp": (lambda v: isinstance(v, int | Fraction) and not _is_boolean(v), "an integer or ratio"),
    "floatp": (lambda v: isinstance(v, float), "a float"),
    "stringp": (lambda v: isinstance(v, str), "a string"),
    "booleanp": (_is_boolean, "`true` or `false`"),
    "symbolp": (lambda v: isinstance(v, Symbol), "a symbol"),
    "keywordp": (lambda v: isinstance(v, Keyword), "a keyword"),
    "listp": (lambda v: isinstance(v, tuple), "a list"),
    "consp": (lambda v: isinstance(v, tuple) and bool(v), "a list with elements"),
    "atom": (lambda v: not (isinstance(v, tuple) and v), "no list with elements"),
    "null": (lambda v: isinstance(v, tuple) and not v, "nil"),
    "functionp": (lambda v: isinstance(v, Function), "a function"),
    "tensorp": (lambda v: isinstance(v, Tensor), "a tensor"),
}


def _predicate(name: str, test: Callable[[Any], bool], what: str) -> None:
    def check(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        return test(args[0])

    check.__doc__ = f"Whether a value is {what}."
    native(TABLE, name, "(value)")(check)


for _name, (_test, _what) in _PREDICATES.items():
    _predicate(_name, _test, _what)


def _number_predicate(name: str, test: Callable[[Any], bool], doc: str, whole: bool) -> None:
    def check(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        value = args[0]
        if not _is_number(value) or (whole and not isinstance(value, int)):
            fail("E-EVAL-006", f"`{name}` takes {'an integer' if whole else 'a number'}, not {show(value, 40)}")
        return joined(test(plain(value)), value)

    check.__doc__ = doc
    native(TABLE, name, "(number)")(check)


_number_predicate("evenp", lambda v: v % 2 == 0, "Whether an integer is even.", True)
_number_predicate("oddp", lambda v: v % 2 == 1, "Whether an integer is odd.", True)
_number_predicate("zerop", lambda v: v == 0, "Whether a number is zero.", False)
_number_predicate("plusp", lambda v: v > 0, "Whether a number is above zero.", False)
_number_predicate("minusp", lambda v: v < 0, "Whether a number is below zero.", False)


@native(TABLE, "error", "(message)")
def _error(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Stop with a message of the program's own."""
    fail("E-EVAL-023", str(text("error", args[0]))[:500])


@native(TABLE, "assert", "(value &optional message)")
def _assert(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Stop with the message unless the value is true."""
    if ev.test(args[0], span):
        return args[0]
    fail("E-EVAL-023", str(text("assert", args[1]))[:500] if len(args) > 1 else "an assertion does not hold")


@native(TABLE, "identity", "(value)")
def _identity(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The value itself."""
    return args[0]

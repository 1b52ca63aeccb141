"""Keys of the def-forms: one table a form, one parser, one message for each way to get a key wrong.

`docs/lisp.md` prints these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, nearest, one_or_all, suggestion
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.lisp.values import Callable, Tensor, kind_of, knobs_of, plain, show

LARGEST = 2**63  # of a number that a key takes: beyond it files and devices have no word for it


@dataclass(frozen=True)
class Key:
    """`kind`: integer, number, boolean, string, text (string or symbol), symbol, names, function, metrics, data, any, form."""

    kind: str
    doc: str
    default: Any = None
    evaluated: bool = True
    required: bool = False
    minimum: int | float | None = None


@dataclass(frozen=True)
class Given:
    """One key as given: its value (or its form, for kind `form`), and the form for places."""

    value: Any
    form: Form
    knobs: frozenset[str] = frozenset()  # that the value came from


def parse_keys(ev: Any, what: str, form: ListForm, items: tuple[Form, ...], keys: dict[str, Key], env: Any) -> dict[str, Given]:
    """`:key value …` of a def-form by its table; defaults are the caller's (`value_of`)."""
    given: dict[str, Given] = {}
    errors: list[Diagnostic] = []
    close: set[str] = set()  # keys that a misspelt one may stand for
    position = 0
    while position < len(items):
        try:
            name, found = _pair(ev, what, items, position, keys, given, env)
        except SexpError as mistake:
            head = items[position]
            if not isinstance(head, Keyword) or position + 1 == len(items):
                raise one_or_all([*errors, *mistake.diagnostics]) from None
            errors += mistake.diagnostics
            close |= {head.name, *nearest(head.name, keys)}
        else:
            given[name] = found
        position += 2
    for name, key in keys.items():
        if key.required and name not in given and name not in close:
            errors += ev.error("E-EVAL-102", f"{what} needs :{name}", form, help=f"add :{name}, {key.doc}").diagnostics
    if errors:
        raise one_or_all(errors)
    return given


def _pair(ev: Any, what: str, items: tuple[Form, ...], position: int, keys: dict[str, Key], given: dict[str, Given], env: Any) -> tuple[str, Given]:
    """The key at `position` and its value."""
    head = items[position]
    if not isinstance(head, Keyword):
        raise ev.error("E-EVAL-104", f"{what}: expected a :key here", head, help=f"keys of {what}: " + _list(keys))
    key = keys.get(head.name)
    if key is None:
        raise ev.error("E-EVAL-101", f"{what} has no key :{head.name}", head, help=suggestion(f":{head.name}", [f":{k}" for k in keys], f"keys of {what}"))
    if head.name in given:
        raise ev.error("E-EVAL-104", f"{what}: :{head.name} is given twice", head, help="remove one of them",
                       related=[Related(given[head.name].form.span, "the first value")])
    value_form = items[position + 1] if position + 1 < len(items) else None
    if value_form is None or (isinstance(value_form, Keyword) and value_form.name in keys):
        raise ev.error("E-EVAL-104", f"{what}: :{head.name} has no value", head, help=f"write a value after it: {key.doc}")
    value = value_form if key.kind == "form" else _value(ev, key, value_form, env)
    return head.name, Given(_checked(ev, what, head.name, key, value, value_form), value_form, knobs_of(value))


def value_of(given: dict[str, Given], keys: dict[str, Key], name: str) -> Any:
    return given[name].value if name in given else keys[name].default


def _list(keys: dict[str, Key]) -> str:
    return " ".join(f":{name}" for name in keys)


def _value(ev: Any, key: Key, form: Form, env: Any) -> Any:
    return ev.eval(form, env) if key.evaluated else datum(ev, form, env)


def datum(ev: Any, form: Form, env: Any) -> Any:
    """A form as data: lists become tuples, literals their values, `,x` the value of x."""
    if isinstance(form, Literal):
        return form.value
    if isinstance(form, ListForm):
        if form.head() == "unquote" and len(form.items) == 2:
            return ev.eval(form.items[1], env)
        return tuple(datum(ev, item, env) for item in form.items)
    return form


def _checked(ev: Any, what: str, name: str, key: Key, value: Any, form: Form) -> Any:
    value = plain(value) if key.kind == "boolean" else value
    number = isinstance(value, int | float | Fraction) and not isinstance(value, bool) and value - value == 0
    ok = {
        "integer": number and (isinstance(value, int) or value == int(value)),
        "number": number,
        "boolean": isinstance(value, bool) or value == (),
        "string": isinstance(value, str),
        "text": isinstance(value, str | Symbol),
        "symbol": isinstance(value, Symbol),
        "names": isinstance(value, tuple) and all(isinstance(v, str | Symbol) for v in value),
        "function": isinstance(value, Callable),
        "tensor": isinstance(value, Tensor) or number,
    }.get(key.kind, True)
    if not ok:
        article = "an" if key.kind[0] in "aeiou" else "a"
        wanted = {"names": "a list of names"}.get(key.kind, f"{article} {key.kind}")
        raise ev.error("E-EVAL-103", f"{what}: :{name} needs {wanted}, and this is {kind_of(value)}: {show(value, 40)}", form, help=f"what :{name} takes: {key.doc}")
    if key.minimum is not None and value < key.minimum:
        raise ev.error("E-EVAL-103", f"{what}: :{name} must be at least {key.minimum}, and is {show(value, 40)}", form, help=f"what :{name} takes: {key.doc}")
    if key.kind in ("integer", "number") and not abs(value) < LARGEST:
        raise ev.error("E-EVAL-103", f"{what}: :{name} is {show(value, 40)}, which is larger than any use of it", form, help=f"what :{name} takes: {key.doc}")
    if key.kind == "integer":
        return int(value)
    if key.kind == "boolean":
        return value is True
    if key.kind in ("text", "symbol"):
        return value.name if isinstance(value, Symbol) else str(value)
    if key.kind == "names":
        return tuple(v.name if isinstance(v, Symbol) else str(v) for v in value)
    return value

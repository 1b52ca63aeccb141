"""What a Lisp program computes with, besides Python's numbers, strings and tuples.

Lists are tuples, `nil` is `()`, only `false` and `nil` are false. Numbers and strings may carry the names of the knobs
they came from; such a value is a subclass of its plain type, so whoever does not care need not know.
"""

from __future__ import annotations

from collections.abc import Callable as PyCallable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.read.printer import print_value
from sexpgpu.source import Span

NONE: frozenset[str] = frozenset()
NIL: tuple = ()

#: names that evaluate to themselves
TYPE_NAMES = ("f32", "f64", "bf16", "f16", "tf32", "i32", "i64", "u8", "u16", "bool")


class KnobInt(int):
    knobs: frozenset[str]


class KnobBool(int):
    """A boolean from knobs. Python's bool cannot be subclassed: `plain` gives the real one back."""

    def __repr__(self) -> str:
        return "True" if self else "False"

    __str__ = __repr__


class KnobFloat(float):
    __slots__ = ("knobs",)


class KnobFraction(Fraction):
    __slots__ = ("knobs",)


class KnobStr(str):
    __slots__ = ("knobs",)


@dataclass(frozen=True, eq=False)
class KnobSymbol(Symbol):
    """A symbol (a precision, a choice of `:one-of`) that a knob holds."""

    knobs: frozenset[str] = NONE


_CARRIERS = {int: KnobInt, float: KnobFloat, str: KnobStr, bool: KnobBool, Fraction: KnobFraction}
_PLAIN = {KnobInt: int, KnobFloat: float, KnobStr: str, KnobBool: bool}
_KNOB_TYPES = (KnobInt, KnobFloat, KnobStr, KnobBool, KnobFraction, KnobSymbol)


def plain(value: Any) -> Any:
    """`value` without its knobs (a symbol stays as it is)."""
    kind = type(value)
    if kind is KnobFraction:
        return Fraction(value.numerator, value.denominator)
    return _PLAIN[kind](value) if kind in _PLAIN else value


def with_knobs(value: Any, knobs: frozenset[str]) -> Any:
    """`value` carrying `knobs` instead of what it carried; lists carry them in their elements."""
    value = plain(value)
    if not knobs:
        return value
    if isinstance(value, tuple):
        return _list_with_knobs(value, knobs, {})
    if isinstance(value, Symbol):
        return KnobSymbol(value.name, frozenset(knobs), span=value.span, trail=value.trail)
    carrier = _CARRIERS.get(type(value))
    if carrier is None:
        return value
    made = carrier(value)
    made.knobs = frozenset(knobs)
    return made


def _list_with_knobs(value: tuple, knobs: frozenset[str], done: dict[int, tuple]) -> tuple:
    """Each list once: `(list x x)` a hundred times over is a small value with 2^100 leaves."""
    made = done.get(id(value))
    if made is None:
        made = done[id(value)] = tuple([
            _list_with_knobs(v, knobs, done) if isinstance(v, tuple) else with_knobs(v, knobs | knobs_of(v)) for v in value])
    return made


def knobs_of(value: Any) -> frozenset[str]:
    """The names of the knobs a value came from; of a list, those of its elements."""
    if type(value) in _KNOB_TYPES:
        return value.knobs
    if not isinstance(value, tuple):
        return NONE
    found, todo, seen = NONE, [value], {id(value)}
    while todo:
        for v in todo.pop():
            if isinstance(v, tuple):
                if id(v) not in seen:
                    seen.add(id(v))
                    todo.append(v)
            elif type(v) in _KNOB_TYPES:
                found |= v.knobs
    return found


class Tensor:
    """A tensor of the program: a graph node by another name, so that one node may stand under several places."""

    __slots__ = ("node", "spans")

    def __init__(self, node: Any, spans: tuple[Span, ...] = ()):
        self.node = node
        self.spans = spans

    def __repr__(self) -> str:
        return f"Tensor({self.node!r})"


class FormList(tuple):
    """A quoted list that remembers the form it came from, so that spans survive a macro that passes it on."""

    form: ListForm


class Callable:
    """What stands first in a call. Subclasses answer `call` and say `name`, `doc`, `span`, `signature`."""

    name: str = "?"
    doc: str = ""
    span: Span | None = None
    signature: str = ""

    def call(self, ev: Any, args: list, kwargs: dict[str, Any], span: Span | None) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<function {self.name}>"


class Native(Callable):
    """A function written in Python: `fn(ev, args, kwargs, span)`."""

    __slots__ = ("name", "fn", "doc", "signature", "span")

    def __init__(self, name: str, fn: PyCallable[..., Any], doc: str = "", signature: str = ""):
        self.name, self.fn, self.doc, self.signature = name, fn, doc, signature
        self.span = None

    def call(self, ev: Any, args: list, kwargs: dict[str, Any], span: Span | None) -> Any:
        return self.fn(ev, args, kwargs, span)


class Closure(Callable):
    """A function of the program: a template (what is compiled once) and the scope it was made in."""

    __slots__ = ("template", "env")

    def __init__(self, template: Any, env: Any):
        self.template = template
        self.env = env

    @property
    def name(self) -> str:
        return self.template.name

    @property
    def doc(self) -> str:
        return self.template.doc

    @property
    def span(self) -> Span | None:
        return self.template.span

    @property
    def parameters(self) -> Any:
        return self.template.parameters

    @property
    def signature(self) -> str:
        return self.template.parameters.signature

    def call(self, ev: Any, args: list, kwargs: dict[str, Any], span: Span | None) -> Any:
        return ev.call_closure(self, args, kwargs, span)


class Macro:
    """A closure from forms to a form; `module` is where the free names of its template are looked up first."""

    __slots__ = ("closure", "module")

    def __init__(self, closure: Closure, module: Any):
        self.closure = closure
        self.module = module

    @property
    def name(self) -> str:
        return self.closure.name

    @property
    def span(self) -> Span | None:
        return self.closure.span

    def __repr__(self) -> str:
        return f"<macro {self.name}>"


def truthy(value: Any) -> bool:
    """Only `false` and `nil` are false."""
    if value is True:
        return True
    if value is False:
        return False
    if type(value) is KnobBool:
        return value != 0
    return not (isinstance(value, tuple) and not value)


def form_value(form: Form) -> Any:
    """The value of a quoted form: symbols and keywords stay, lists become tuples. Does not recurse."""
    if isinstance(form, ListForm):
        return _list_value(form)
    return form.value if isinstance(form, Literal) else form


def _list_value(top: ListForm) -> tuple:
    done: list[list] = [[]]
    stack = [(top, iter(top.items))]
    while stack:
        form, items = stack[-1]
        for item in items:
            if isinstance(item, ListForm):
                known = item.__dict__.get("_value")
                if known is not None:
                    done[-1].append(known)
                    continue
                stack.append((item, iter(item.items)))
                done.append([])
                break
            done[-1].append(item.value if isinstance(item, Literal) else item)
        else:
            first = (Symbol("list", span=form.span),) if form.bracket and done[-1] else ()
            made = FormList(first + tuple(done.pop()))
            made.form = form
            # kept with the form: macros share forms, and a shared one may stand in 2^n places
            object.__setattr__(form, "_value", made)
            stack.pop()
            if not stack:
                return made
            done[-1].append(made)
    raise AssertionError("unreachable")


def kind_of(value: Any) -> str:
    """A value's kind in the user's words, for messages."""
    if isinstance(value, bool | KnobBool):
        return "a boolean"
    for types, word in (
        (int, "an integer"), (float, "a float"), (Fraction, "a ratio"), (str, "a string"), (Tensor, "a tensor"),
        (Keyword, "a keyword"), (Symbol, "a symbol"), (Macro, "a macro"), (Callable, "a function"),
    ):
        if isinstance(value, types):
            return word
    if isinstance(value, tuple):
        return "a list" if value else "nil"
    return f"a {type(value).__name__}"


def show(value: Any, limit: int = 60) -> str:
    """A value on one line, cut to about `limit` characters, for messages and `string`."""
    out, size, todo = [], 0, [value]
    while todo and size <= limit:
        v = todo.pop()
        if isinstance(v, _Text):
            text = v
        elif isinstance(v, tuple):
            text = "(" if v else "nil"
            if v:
                todo.append(_Text(")"))
                for i in range(min(len(v), limit) - 1, -1, -1):
                    todo.append(v[i])
                    if i:
                        todo.append(_Text(" "))
        else:
            text = _show_atom(v, limit)
        out.append(text)
        size += len(text)
    text = "".join(out)
    return text if len(text) <= limit and not todo else text[:limit] + "…"


class _Text(str):
    pass


def _show_atom(v: Any, limit: int) -> str:
    v = plain(v)
    if isinstance(v, str):
        return print_value(v[: limit + 1])
    if isinstance(v, int) and not isinstance(v, bool) and v.bit_length() > 3000:
        return f"<integer of {v.bit_length()} bits>"
    if isinstance(v, Fraction) and (v.numerator.bit_length() > 3000 or v.denominator.bit_length() > 3000):
        return "<large ratio>"
    if isinstance(v, bool | int | float | Fraction):
        return print_value(v)
    if isinstance(v, Keyword):
        return f":{v.name}"
    if isinstance(v, Symbol):
        return v.name
    return repr(v)

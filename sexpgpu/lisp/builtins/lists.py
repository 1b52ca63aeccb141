"""Lists are immutable, so every new list is paid for by its elements, also where it shares them."""

from __future__ import annotations

from functools import cmp_to_key
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.forms import Symbol
from sexpgpu.lisp.budget import divide, size
from sexpgpu.lisp.builtins.arithmetic import TABLE as ARITHMETIC
from sexpgpu.lisp.builtins.arithmetic import compare_cost, number
from sexpgpu.lisp.builtins.define import index_of, joined, listed, native, text, whole
from sexpgpu.lisp.builtins.logic import equal
from sexpgpu.lisp.macros import split_keywords
from sexpgpu.lisp.parameters import check_count
from sexpgpu.lisp.values import NIL, Closure, KnobBool, Native, Tensor

TABLE: dict[str, Native] = {}


def _pay(ev: Any, count: int, name: str) -> None:
    ev.spend(4 * count, name)


@native(TABLE, "list", "(&rest values)")
def _list(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """A list of the values."""
    _pay(ev, len(args), "list")
    return tuple(args)


@native(TABLE, "list*", "(value &rest values)")
def _list_star(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The values before the last one, then the elements of the last, a list."""
    last = listed("list*", args[-1])
    _pay(ev, len(args) + len(last), "list*")
    return (*args[:-1], *last)


@native(TABLE, "cons", "(value list)")
def _cons(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The list with a value before it."""
    rest = listed("cons", args[1])
    _pay(ev, len(rest) + 1, "cons")
    return (args[0], *rest)


@native(TABLE, "append", "(&rest lists)")
def _append(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The elements of all lists in one."""
    _pay(ev, sum(len(listed("append", a)) for a in args), "append")
    out: list[Any] = []
    for a in args:
        out += a
    return tuple(out)


@native(TABLE, "reverse", "(list)")
def _reverse(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The list from its end."""
    _pay(ev, len(listed("reverse", args[0])), "reverse")
    return tuple(args[0])[::-1]


@native(TABLE, "length", "(list)")
def _length(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """How many elements a list has, or characters a string."""
    if isinstance(args[0], str):
        return joined(len(args[0]), args[0])
    return len(listed("length", args[0]))


def _first(name: str, at: int) -> None:
    def pick(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        items = listed(name, args[0])
        return items[at] if at < len(items) else NIL

    pick.__doc__ = f"Element {at} of a list, nil if there is none."
    native(TABLE, name, "(list)")(pick)


for _name, _at in (("first", 0), ("car", 0), ("second", 1), ("third", 2), ("fourth", 3), ("cadr", 1), ("caddr", 2)):
    _first(_name, _at)


def _rest(name: str) -> None:
    def rest(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        """The list without its first element."""
        items = listed(name, args[0])
        _pay(ev, max(0, len(items) - 1), name)
        return tuple(items[1:])

    native(TABLE, name, "(list)")(rest)


_rest("rest")
_rest("cdr")


@native(TABLE, "last", "(list)")
def _last(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The last element. (Common Lisp gives a list of it; a list here is no chain of pairs.)"""
    items = listed("last", args[0])
    return items[-1] if items else NIL


@native(TABLE, "nth", "(index list)")
def _nth(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The element at an index from 0."""
    items = listed("nth", args[1])
    value = items[index_of("nth", args[0], len(items))]
    return joined(value, value, args[0]) if not isinstance(value, tuple) else value


@native(TABLE, "elt", "(list index)")
def _elt(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The element of a list at an index from 0."""
    items = listed("elt", args[0])
    return items[index_of("elt", args[1], len(items))]


@native(TABLE, "subseq", "(list start &optional end)")
def _subseq(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The elements of a list (or characters of a string) from `start` to before `end`."""
    items = args[0] if isinstance(args[0], str) else listed("subseq", args[0])
    start = whole("subseq", args[1])
    end = whole("subseq", args[2]) if len(args) > 2 else len(items)
    if not 0 <= start <= end <= len(items):
        fail("E-EVAL-008", f"`subseq` from {start} to {end} is not inside 0 to {len(items)}")
    _pay(ev, end - start, "subseq")
    return items[start:end] if isinstance(items, str) else tuple(items[start:end])


@native(TABLE, "range", "(start-or-count &optional end step)")
def _range(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The integers from 0 (or `start`) to before `end`, by `step`."""
    for value in args:
        ev.decide(value, span)
    values = [int(whole("range", a)) for a in args]
    start, end = (0, values[0]) if len(values) == 1 else values[:2]
    step = values[2] if len(values) == 3 else 1
    if step == 0:
        fail("E-EVAL-006", "`range` cannot go by steps of 0")
    ev.spend(divide(size(max(abs(start), abs(end))), size(step)), "range")
    count = max(0, -((start - end) // step))
    ev.spend(count * (4 + size(max(abs(start), abs(end))) // 20), "range")
    return tuple(range(start, end, step))


@native(TABLE, "mapcar", "(function list &rest lists)")
def _mapcar(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The function's values for the elements of a list, or of several lists side by side (to the shortest)."""
    function, lists = args[0], [listed("mapcar", a) for a in args[1:]]
    _pay(ev, min(len(items) for items in lists), "mapcar")
    call = ev.call_closure if type(function) is Closure else ev.call
    return tuple([call(function, list(row), {}, span) for row in zip(*lists, strict=False)])


@native(TABLE, "reduce", "(function list &key initial-value from-end)")
def _reduce(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The elements joined by a function of two, from the left, beginning with `:initial-value` if there is one."""
    function, items = args[0], listed("reduce", args[1])
    backwards = kwargs.get("from-end", NIL) not in (False, NIL)
    if backwards:
        _pay(ev, len(items), "reduce")
        items = items[::-1]
    if "initial-value" in kwargs:
        value = kwargs["initial-value"]
    elif items:
        value, items = items[0], items[1:]
        _pay(ev, len(items), "reduce")
    else:
        return ev.call(function, [], {}, span)
    for item in items:
        ev.spend(4, "reduce")
        value = ev.call(function, [item, value] if backwards else [value, item], {}, span)
    return value


@native(TABLE, "apply", "(function &rest arguments)")
def _apply(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Call with the arguments, the last of which is a list of further ones; keywords in it name arguments."""
    if len(args) < 2:
        return ev.call(args[0], [], kwargs, span)
    last = listed("apply", args[-1])
    _pay(ev, len(args) + len(last), "apply")
    positional, named = split_keywords([*args[1:-1], *last])
    return ev.call(args[0], positional, {**named, **kwargs}, span)


@native(TABLE, "funcall", "(function &rest arguments)")
def _funcall(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Call the function. `(f x)` does the same."""
    return ev.call(args[0], args[1:], kwargs, span)


def _passing(name: str, fn: Any) -> None:
    """`apply` and `funcall` pass keywords on, so they check only their count."""

    def call(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        check_count(TABLE[name], len(args), 1, None)
        return fn(ev, args, kwargs, span)

    TABLE[name] = Native(name, call, TABLE[name].doc, TABLE[name].signature)


_passing("apply", _apply)
_passing("funcall", _funcall)


def _filter(name: str, keep: bool) -> None:
    def select(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        items = listed(name, args[1])
        _pay(ev, len(items), name)
        return tuple([x for x in items if _yes(ev, ev.call(args[0], [x], {}, span), name) is keep])

    select.__doc__ = f"The elements for which the function is {'true' if keep else 'false'}."
    native(TABLE, name, "(function list)")(select)


def _yes(ev: Any, value: Any, name: str) -> bool:
    if isinstance(value, Tensor):
        fail("E-EVAL-009", f"`{name}` decides while the program is built, and a tensor has no value then")
    return value is True or (value is not False and not (isinstance(value, KnobBool) and not value) and value != NIL)


_filter("remove-if-not", True)
_filter("remove-if", False)


def _quantifier(name: str, stop: bool) -> None:
    def check(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
        for item in listed(name, args[1]):
            ev.spend(4, name)
            if _yes(ev, ev.call(args[0], [item], {}, span), name) is stop:
                return stop
        return not stop

    check.__doc__ = f"Whether the function is true for {'some element' if stop else 'every element'}."
    native(TABLE, name, "(function list)")(check)


_quantifier("some", True)
_quantifier("every", False)


@native(TABLE, "member", "(value list)")
def _member(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """Whether an element equals the value."""
    return any(equal(ev, args[0], item) for item in listed("member", args[1]))


@native(TABLE, "position", "(value list)")
def _position(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The index of the first element that equals the value, or nil."""
    for index, item in enumerate(listed("position", args[1])):
        if equal(ev, args[0], item):
            return index
    return NIL


@native(TABLE, "assoc", "(key list)")
def _assoc(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The first element, a list, that begins with the key, or nil."""
    for item in listed("assoc", args[1]):
        if isinstance(item, tuple) and item and equal(ev, args[0], item[0]):
            return item
    return NIL


@native(TABLE, "getf", "(list key &optional default)")
def _getf(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The value after a key in a list of keys and values."""
    items = listed("getf", args[0])
    for index in range(0, len(items) - 1, 2):
        if equal(ev, items[index], args[1]):
            return items[index + 1]
    return args[2] if len(args) > 2 else NIL


@native(TABLE, "sort", "(list less)")
def _sort(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """The list in the order of a function of two, equal elements as they were."""
    items, less = listed("sort", args[0]), args[1]
    _pay(ev, len(items), "sort")
    if less in (ARITHMETIC["<"], ARITHMETIC[">"]):
        values = [number("sort", item) for item in items]
        ev.spend(compare_cost(values) * max(1, len(items).bit_length()) if values else 0, "sort")
        return tuple(sorted(items, reverse=less is ARITHMETIC[">"]))

    def compare(a: Any, b: Any) -> int:
        if _yes(ev, ev.call(less, [a, b], {}, span), "sort"):
            return -1
        return 1 if _yes(ev, ev.call(less, [b, a], {}, span), "sort") else 0

    return tuple(sorted(items, key=cmp_to_key(compare)))


@native(TABLE, "gensym", "(&optional prefix)")
def _gensym(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
    """A symbol that no text can contain, for names that a macro introduces."""
    from_text = text("gensym", args[0]) if args else "g"
    ev.gensyms += 1
    ev.spend(len(from_text) + 20, "gensym")
    return Symbol(f"#:{from_text}{ev.gensyms}")


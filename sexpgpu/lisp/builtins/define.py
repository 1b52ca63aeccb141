"""How a builtin is declared, and the checks that most of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sexpgpu.diagnostics import SexpError, fail, problem
from sexpgpu.lisp.parameters import check_count, check_keys, parse_parameters
from sexpgpu.lisp.values import NONE, KnobBool, Native, Tensor, kind_of, show, with_knobs
from sexpgpu.read.reader import read_datum

Function = Callable[..., Any]


def native(table: dict[str, Native], name: str, signature: str) -> Callable[[Function], Function]:
    """Declare `fn(ev, args, kwargs, span)` as the builtin `name`; the signature checks count and keywords."""
    p = parse_parameters(read_datum(signature, name))
    least, most = len(p.required), None if p.rest else len(p.required) + len(p.optional)
    keys = tuple(n for n, _ in p.keys)

    def declare(fn: Function) -> Function:
        def checked(ev: Any, args: list, kwargs: dict[str, Any], span: Any) -> Any:
            count = len(args)
            if count < least or (most is not None and count > most):
                check_count(made, count, least, most)
            if kwargs:
                check_keys(made, kwargs, keys)
            return fn(ev, args, kwargs, span)

        made = Native(name, checked, (fn.__doc__ or "").strip(), signature)
        table[name] = made
        return fn

    return declare


def raw(table: dict[str, Native], name: str, signature: str) -> Callable[[Function], Function]:
    """Declare a builtin that checks for itself, because tensors may come with keywords of their own or for speed."""

    def declare(fn: Function) -> Function:
        table[name] = Native(name, fn, (fn.__doc__ or "").strip(), signature)
        return fn

    return declare


def wrong_type(name: str, wanted: str, value: Any, help: str | tuple[str, ...] = ()) -> SexpError:  # noqa: A002
    """The mistake of giving a builtin a value of another kind."""
    return problem("E-EVAL-006", f"`{name}` takes {wanted}, not {kind_of(value)}: {show(value, 40)}", help=help)


def listed(name: str, value: Any) -> tuple:
    if not isinstance(value, tuple):
        helps = "for the sizes of a tensor write `(shape x)`" if isinstance(value, Tensor) else ()
        raise wrong_type(name, "a list", value, helps)
    return value


def whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool | KnobBool):
        raise wrong_type(name, "an integer", value)
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


def joined(value: Any, *sources: Any) -> Any:
    """`value` with the knobs of the atoms it was computed from."""
    knobs = NONE
    for source in sources:
        knobs |= getattr(source, "knobs", NONE)
    return with_knobs(value, knobs) if knobs else value


def index_of(name: str, value: Any, length: int) -> int:
    at = whole(name, value)
    if not 0 <= at < length:
        fail("E-EVAL-008", f"`{name}` asks for element {show(at)} of a list of {length}",
             help="elements count from 0" if length else "the list is empty")
    return at

"""Parameter lists: `(a b &optional (c 1) &key (d 2) &rest r)`, and how arguments meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sexpgpu.diagnostics import Related, SexpError, nearest, problem
from sexpgpu.forms import Form, Keyword, ListForm, Symbol
from sexpgpu.read.printer import print_form

MARKERS = ("&optional", "&rest", "&body", "&key")


@dataclass(frozen=True)
class Parameters:
    """Names by kind. Defaults are forms, evaluated in order in the function's own scope."""

    required: tuple[str, ...]
    optional: tuple[tuple[str, Form | None], ...]
    rest: str | None
    keys: tuple[tuple[str, Form | None], ...]
    signature: str

    @property
    def simple(self) -> bool:
        return not (self.optional or self.rest or self.keys)

    @property
    def names(self) -> tuple[str, ...]:
        rest = (self.rest,) if self.rest else ()
        return self.required + tuple(n for n, _ in self.optional) + rest + tuple(n for n, _ in self.keys)


def parse_parameters(form: Form, what: str = "a parameter list") -> Parameters:
    """Fails with a span but no trail; the evaluator adds it."""
    if not isinstance(form, ListForm):
        raise problem("E-EVAL-015", f"{what} is a list of names, not `{print_form(form)[:40]}`", form.span)
    required: list[str] = []
    optional: list[tuple[str, Form | None]] = []
    keys: list[tuple[str, Form | None]] = []
    rest: str | None = None
    mode, seen = "&required", set()
    for item in form.items:
        if isinstance(item, Symbol) and item.name.startswith("&"):
            if item.name not in MARKERS:
                close = nearest(item.name, MARKERS)
                raise problem("E-EVAL-015", f"`{item.name}` is no kind of parameter", item.span,
                              help=f"did you mean `{(close or ['&key'])[0]}`?")
            mode = "&rest" if item.name == "&body" else item.name
            continue
        name, default = _parameter(item, mode)
        if name in seen:
            raise problem("E-EVAL-015", f"two parameters are named `{name}`", item.span, help="rename one of them")
        seen.add(name)
        if mode == "&required":
            required.append(name)
        elif mode == "&optional":
            optional.append((name, default))
        elif mode == "&key":
            keys.append((name, default))
        elif rest is None:
            rest = name
        else:
            raise problem("E-EVAL-015", "one name follows `&rest`", item.span, help="put `&key` before further names")
    return Parameters(tuple(required), tuple(optional), rest, tuple(keys), print_form(form))


def _parameter(item: Form, mode: str) -> tuple[str, Form | None]:
    if isinstance(item, Symbol):
        return item.name, None
    pair = isinstance(item, ListForm) and 1 <= len(item.items) <= 2 and isinstance(item.items[0], Symbol)
    if pair and mode in ("&optional", "&key"):
        return item.items[0].name, item.items[1] if len(item.items) == 2 else None
    raise problem("E-EVAL-015", f"`{print_form(item)[:40]}` is no parameter", item.span,
                  help="a parameter is a name; after `&optional` or `&key` also `(name default)`")


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def mismatch(callee: Any, code: str, message: str, help: tuple[str, ...] = ()) -> SexpError:  # noqa: A002 - problem's word
    """A call that does not fit: shows the parameter list and where it stands."""
    notes = (f"parameters of `{callee.name}`: {callee.signature}",) if callee.signature else ()
    related = [Related(callee.span, "defined here")] if callee.span is not None else []
    return problem(code, message, notes=notes, related=related, help=help)


def check_count(callee: Any, count: int, least: int, most: int | None) -> None:
    """Fails if a call has a wrong number of positional arguments."""
    if count < least or (most is not None and count > most):
        wanted = f"{least}" if least == most else (f"at least {least}" if most is None else f"{least} to {most}")
        noun = "argument" if wanted == "1" else "arguments"
        macro = getattr(getattr(callee, "template", None), "macro", False)
        raise mismatch(callee, "E-EVAL-003", f"{'the macro ' if macro else ''}`{callee.name}` takes {wanted} {noun}, not {count}")


def check_keys(callee: Any, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Fails on a keyword that the function does not have, with the nearest one."""
    for key in given:
        if key not in known:
            if not known:
                raise mismatch(callee, "E-EVAL-004", f"`{callee.name}` takes no keyword, but was given `:{key}`")
            close = nearest(key, known)
            listing = "its keywords: " + " ".join(f":{k}" for k in known)
            helps = (f"did you mean `:{close[0]}`?" if close else listing,)
            raise mismatch(callee, "E-EVAL-004", f"`{callee.name}` has no keyword `:{key}`", helps)


def bind_arguments(callee: Any, p: Parameters, args: list, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Names to the given values; those left to their defaults are absent, a missing `&rest` is nil."""
    count = len(args)
    if p.simple and not kwargs:
        if count != len(p.required):
            check_count(callee, count, len(p.required), len(p.required))
        return dict(zip(p.required, args, strict=True))
    least, most = len(p.required), len(p.required) + len(p.optional)
    key_names = tuple(n for n, _ in p.keys)
    bound: dict[str, Any] = {}
    if kwargs:
        by_name = {k: v for k, v in kwargs.items() if k in key_names}
        if p.rest and not p.keys:
            for key, value in kwargs.items():
                args = [*args, Keyword(key), value]
            count = len(args)
        else:
            check_keys(callee, kwargs, key_names)
        bound.update(by_name)
    check_count(callee, count, least, None if p.rest else most)
    bound.update(zip(p.required, args, strict=False))
    for index, (name, _) in enumerate(p.optional):
        if least + index < count:
            bound[name] = args[least + index]
    if p.rest:
        bound[p.rest] = tuple(args[most:])
    return bound

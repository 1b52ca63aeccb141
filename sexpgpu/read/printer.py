"""Forms to text: `read(print_form(x))` is `x`. Does not recurse, so any nesting prints."""

from __future__ import annotations

from fractions import Fraction

from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol

_MARKS = {"quote": "'", "quasiquote": "`", "unquote": ",", "unquote-splicing": ",@"}
_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


def print_form(form: Form) -> str:
    """One line of text that reads back as the same form."""
    out: list[str] = []
    todo: list[Form | str] = [form]
    while todo:
        part = todo.pop()
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, ListForm):
            _list(part, out, todo)
        else:
            out.append(print_atom(part))
    return "".join(out)


def _list(form: ListForm, out: list[str], todo: list) -> None:
    if len(form.items) == 2 and form.head() in _MARKS:
        out.append(_MARKS[form.head()])
        # `,` before a name that begins with `@` would read as a splice
        out.append(" " if form.head() == "unquote" and getattr(form.items[1], "name", "")[:1] == "@" else "")
        todo.append(form.items[1])
        return
    out.append("[" if form.bracket else "(")
    todo.append("]" if form.bracket else ")")
    for index in range(len(form.items) - 1, -1, -1):
        todo.append(form.items[index])
        if index:
            todo.append(" ")


def print_atom(form: Form) -> str:
    """The text of a symbol, keyword or literal."""
    if isinstance(form, Symbol):
        return form.name
    if isinstance(form, Keyword):
        return f":{form.name}"
    assert isinstance(form, Literal)
    return print_value(form.value)


def print_value(value) -> str:
    """A literal's value as the reader takes it: shortest float that reads back, ratios as `a/b`."""
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_character(c) for c in value) + '"'
    if isinstance(value, float):
        if value != value:
            return "+nan"
        if value in (float("inf"), float("-inf")):
            return "+inf" if value > 0 else "-inf"
        return float.__repr__(value)
    if isinstance(value, Fraction):
        return f"{print_value(value.numerator)}/{print_value(value.denominator)}"
    if value.bit_length() > 14_000:  # past what the reader takes and Python prints (4,300 digits)
        return f"#<integer of {value.bit_length()} bits>"
    return int.__repr__(value)


def _character(c: str) -> str:
    if c in _ESCAPED:
        return _ESCAPED[c]
    return c if c.isprintable() else f"\\u{{{ord(c):x}}}"


def same(a: Form, b: Form) -> bool:
    """Whether two forms are equal as data, whatever their spans (NaN equals itself here)."""
    todo = [(a, b)]
    while todo:
        x, y = todo.pop()
        if isinstance(x, ListForm) and isinstance(y, ListForm):
            if len(x.items) != len(y.items) or x.bracket != y.bracket:
                return False
            todo += zip(x.items, y.items, strict=True)
        elif isinstance(x, Literal) and isinstance(y, Literal):
            if type(x.value) is not type(y.value) or print_value(x.value) != print_value(y.value):
                return False
        elif x != y:
            return False
    return True

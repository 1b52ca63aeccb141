"""The functions of plain data, by name. What builds graphs is registered from outside."""

from typing import Any

from sexpgpu.forms import Symbol
from sexpgpu.lisp.builtins import arithmetic, lists, logic, strings
from sexpgpu.lisp.values import TYPE_NAMES

BUILTINS: dict[str, Any] = {
    **{name: Symbol(name) for name in TYPE_NAMES},
    **arithmetic.TABLE,
    **lists.TABLE,
    **logic.TABLE,
    **strings.TABLE,
}

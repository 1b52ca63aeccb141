"""Lists of numbers as tensors: at the prompt `(matmul [[1 2] [3 4]] [[1] [1]])` needs no data source.

In: the evaluator's functions. Out: functions of the same names that take a rectangular list of numbers where an op has an
operand. Whole numbers are i32, and f32 where the op refuses integers; `(array [1 2] :dtype f32)` says it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import SexpError, problem, suggestion
from sexpgpu.forms import Symbol
from sexpgpu.ir import DTYPES
from sexpgpu.lisp.tensors import COUNTERPARTS
from sexpgpu.lisp.values import Callable, KnobBool, Tensor, plain, show
from sexpgpu.ops import build, table
from sexpgpu.source import Span

LARGEST = 1_000_000  # elements of a literal
_QUERIES = ("shape", "dim", "rank")


@dataclass
class Literals:
    """The arrays of a session: name of an `input` -> (dtype, shape, its numbers in row-major order)."""

    arrays: dict[str, tuple[str, tuple[int, ...], tuple[Any, ...]]] = field(default_factory=dict)
    names: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def tensor(self, value: Any, dtype: str | None, span: Span | None) -> Tensor:
        """The tensor of a number or a rectangular list of them; equal ones are one node."""
        found = _flat(value)
        if found is None:
            raise problem("E-EVAL-103", f"`array` needs a number or a rectangular list of numbers, and got {show(value, 40)}", span,
                          help="for example (array [[1 2] [3 4]])")
        shape, numbers = found
        dtype = dtype or _dtype(numbers)
        if dtype not in ("f32", "f64", "bf16", "f16", "bool") and any(n != n or n != int(n) for n in numbers if not _infinite(n)):
            raise problem("E-EVAL-103", f"`array`: {dtype} holds whole numbers only", span, help="leave :dtype out, or write f32")
        if any(_infinite(n) for n in numbers) and dtype not in ("f32", "f64", "bf16", "f16"):
            raise problem("E-EVAL-103", f"`array`: {dtype} has no infinity", span, help="leave :dtype out, or write f32")
        kind = bool if dtype == "bool" else int if dtype.startswith(("i", "u")) else float
        values = tuple(_as(kind, n, dtype, span) for n in numbers)
        key = (dtype, shape, tuple(map(repr, values)))
        if key not in self.names:
            name = self.names[key] = f"array-{len(self.names)}"
            self.arrays[name] = (dtype, shape, values)
        return Tensor(build("input", name=self.names[key], dtype=dtype, shape=shape, batch=False))


def _as(kind: type, number: Any, dtype: str, span: Span | None) -> Any:
    try:
        value = kind(number)
    except OverflowError:
        raise problem("E-EVAL-103", f"`array`: a number this large does not fit {dtype}", span) from None
    if kind is int:
        bits = DTYPES[dtype] * 8
        low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if not low <= value <= high:
            raise problem("E-EVAL-103", f"`array`: {show(value, 40)} does not fit {dtype} ({low} to {high})", span)
    return value


def _infinite(number: Any) -> bool:
    return isinstance(number, float) and not math.isfinite(number)


def _number(value: Any) -> bool:
    return isinstance(value, int | float | Fraction | KnobBool)


def _flat(value: Any) -> tuple[tuple[int, ...], list[Any]] | None:
    """Shape and numbers of a rectangular nest of lists, axis by axis; None for anything else."""
    shape: list[int] = []
    items = [plain(value)]
    while items and all(isinstance(item, tuple) for item in items):
        sizes = {len(item) for item in items}
        if len(sizes) != 1 or sizes == {0} or len(items) * min(sizes) > LARGEST or len(shape) > 16:
            return None
        shape.append(sizes.pop())
        items = [plain(v) for item in items for v in item]
    return (tuple(shape), items) if items and all(map(_number, items)) else None


def _dtype(numbers: list[Any]) -> str:
    if all(isinstance(n, bool) for n in numbers):
        return "bool"
    return "i32" if all(isinstance(n, int) and -(2**31) <= n < 2**31 for n in numbers) else "f32"


def is_array(value: Any) -> bool:
    """Whether a value is a list that could be a tensor."""
    return isinstance(value, tuple) and _flat(value) is not None


class Array(Callable):
    """`(array [[1 2] [3 4]] :dtype f32)`."""

    name, signature = "array", "numbers &key dtype"
    doc = "A tensor of these numbers, at the prompt of `sexpgpu repl` only; whole numbers are i32 without a :dtype."

    def __init__(self, literals: Literals):
        self.literals = literals

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        if len(args) != 1 or set(kwargs) - {"dtype"}:
            raise problem("E-EVAL-104", "an array is (array [[1 2] [3 4]] :dtype f32)", span)
        dtype = kwargs.get("dtype")
        text = dtype.name if isinstance(dtype, Symbol) else dtype
        if text is not None and text not in DTYPES:
            raise problem("E-EVAL-103", f"{show(dtype, 40)} is no dtype", span, help=suggestion(str(text), DTYPES, "dtypes"))
        return self.literals.tensor(args[0], text, span)


class WithLiterals(Callable):
    """A function that also takes lists of numbers where `op` has operands.

    What the function itself makes of a list, it still does: `(max 1 2)` and `(= [1] [1])` mean what they mean in a file.
    """

    def __init__(self, inner: Any, operands: tuple[str, ...], literals: Literals):
        self.inner, self.operands, self.literals = inner, operands, literals
        self.name, self.doc, self.signature, self.span = inner.name, inner.doc, inner.signature, inner.span

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        places = self._places(args)
        if not places:
            return self.inner.call(ev, args, kwargs, span)
        first: SexpError | None = None
        builtin = not hasattr(self.inner, "op") and self.name not in _QUERIES
        for dtype in ((None, "", "f32") if builtin else ("", "f32")):  # None: as it stands
            try:
                return self.inner.call(ev, args if dtype is None else self._taken(args, places, dtype, span), kwargs, span)
            except SexpError as mistake:
                if dtype == "" or (dtype == "f32" and first is not None and first.diagnostic.code == "E-SHAPE-006"):
                    first = mistake  # an op that refuses integers has more to say of floats
        assert first is not None
        raise first

    def _places(self, args: list[Any]) -> dict[int, bool]:
        """Place of an argument -> whether each of its elements is a tensor, as in `(concat [[1 2] [3 4]])`."""
        variadic = bool(self.operands) and self.operands[-1].endswith("*")
        count = len(args) if variadic else len(self.operands)
        if variadic and len(self.operands) == 1 and len(args) == 1 and isinstance(args[0], tuple):
            return {0: True} if args[0] and all(is_array(v) or isinstance(v, Tensor) for v in args[0]) else {}
        return {i: False for i, value in enumerate(args[:count]) if is_array(value)}

    def _taken(self, args: list[Any], places: Mapping[int, bool], dtype: str, span: Span | None) -> list[Any]:
        def take(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value
            found = _flat(value)
            chosen = dtype if dtype and found is not None and _dtype(found[1]) == "i32" else None
            return self.literals.tensor(value, chosen, span)

        return [
            value if i not in places else tuple(map(take, value)) if places[i] else take(value)
            for i, value in enumerate(args)
        ]  # fmt: skip


#: builtins that fold: every argument is an operand
_FOLD = ("xs*",)


def with_literals(functions: Mapping[str, Any], literals: Literals) -> dict[str, Any]:
    """The functions of the language whose tensors may be lists of numbers."""
    ops = table()
    made: dict[str, Any] = {}
    for name, function in functions.items():
        op = getattr(function, "op", None) or ops.get(COUNTERPARTS.get(name, name))
        if name in _QUERIES:
            made[name] = WithLiterals(function, ("x",), literals)
        elif op is not None and op.operands and op.lisp and hasattr(function, "call"):
            folds = not hasattr(function, "op") and len(op.operands) == 2
            made[name] = WithLiterals(function, (*op.operands[:1], "xs*") if folds else op.operands, literals)
    made["array"] = Array(literals)
    return made

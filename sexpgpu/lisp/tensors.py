"""Ops as functions of the language: numbers become constants, lists become attributes, problems get a place.

In: evaluated arguments. Out: `Tensor`s over nodes, with their origins recorded beside. The one place that
turns an `OpProblem` (which knows operands) into a diagnostic (which knows the text and the knobs).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import Related, SexpError, problem, suggestion
from sexpgpu.forms import ListForm, Literal, Symbol
from sexpgpu.ir import DTYPES, Node, Origin, Origins
from sexpgpu.lisp.values import Callable, Tensor, knobs_of, show, truthy, with_knobs
from sexpgpu.ops import Op, OpProblem, build, constant, table
from sexpgpu.read.printer import print_form
from sexpgpu.read.reader import read
from sexpgpu.source import Source, Span

#: function of compile time -> the op that does it to tensors
COUNTERPARTS = {"pow": "power", "expt": "power", "ceiling": "ceil", "rem": "mod", "truncate": "floor", "float": "cast", "not": "logical-not"}
NODE_UNITS = 100  # budget of one graph node (language.md, Evaluator)
FOLDED = frozenset({"+", "*", "max", "min", "and", "or"})  # (+ a b c) is ((a + b) + c)
#: a second name -> the op
ALIASES = {"cumulative-sum": "cumsum"}
Knobs = frozenset[str]


@dataclass
class Provenance:
    """What lies beside the nodes of one evaluation: origins, and per axis the knobs a size came from."""

    origins: Origins = field(default_factory=Origins)
    axes: dict[Node, tuple[Knobs, ...]] = field(default_factory=dict)
    knob_places: dict[str, str] = field(default_factory=dict)  # knob -> "default, model.lisp:4"

    def sizes(self, node: Node) -> tuple[Any, ...]:
        """The shape as numbers that carry the knobs they came from."""
        knobs = self.axes.get(node, ())
        return tuple(with_knobs(n, knobs[i]) if i < len(knobs) and knobs[i] else n for i, n in enumerate(node.type.shape))

    def infer_axes(self, node: Node, numbers: list[Any]) -> None:
        """The knobs of each axis of a result: of the operands' axes that it is, else of equal sizes among theirs and the numbers."""
        if node in self.axes:
            return
        by_size: dict[int, Knobs] = {}
        for operand in node.inputs:
            for size, knobs in zip(operand.type.shape, self.axes.get(operand, ()), strict=False):
                if knobs:
                    by_size[size] = by_size.get(size, frozenset()) | knobs
        for number in numbers:
            if knobs_of(number) and isinstance(number, int):
                by_size[int(number)] = by_size.get(int(number), frozenset()) | knobs_of(number)
        if by_size:
            exact = _SAME_AXES.get(node.op, _aligned)
            found = [exact(self, node, numbers, axis) for axis in range(node.type.rank)]
            self.axes[node] = tuple(by_size.get(n, frozenset()) if f is None else f for n, f in zip(node.type.shape, found, strict=True))

    def axis(self, node: Node, axis: int) -> Knobs:
        """The knobs of one axis."""
        known = self.axes.get(node, ())
        return known[axis] if -len(known) <= axis < len(known) else frozenset()


def _aligned(p: Provenance, node: Node, numbers: list[Any], axis: int) -> Knobs | None:
    """Operands of the result's rank that have the same size there; then those that broadcast to it. None: nobody can tell."""
    size, rank = node.type.shape[axis], node.type.rank
    for same_rank in (True, False):
        there = [(i, axis - rank) for i in node.inputs if i.type.rank + axis >= rank and i.type.shape[axis - rank] == size
                 and (i.type.rank == rank) == same_rank]
        if there:
            return frozenset().union(*(p.axis(i, at) for i, at in there))
    return None


def _matmul_axis(p: Provenance, node: Node, numbers: list[Any], axis: int) -> Knobs | None:
    a, b = node.inputs
    if min(a.type.rank, b.type.rank) < 2 or axis < node.type.rank - 2:
        return None if min(a.type.rank, b.type.rank) < 2 else _aligned(p, node, numbers, axis)
    return p.axis(b, -1) if axis == node.type.rank - 1 else p.axis(a, -2)


def _reshape_axis(p: Provenance, node: Node, numbers: list[Any], axis: int) -> Knobs | None:
    """A size that is given is its own; one that is computed (-1) comes from all of the operand's."""
    if len(numbers) != node.type.rank:
        return None
    everything: Knobs = frozenset().union(*p.axes.get(node.inputs[0], ()))
    return everything if numbers[axis] == -1 else knobs_of(numbers[axis])


def _embed_axis(p: Provenance, node: Node, numbers: list[Any], axis: int) -> Knobs | None:
    rows, indices = node.inputs
    return p.axis(rows, -1) if axis == node.type.rank - 1 else p.axis(indices, axis)


#: op -> (provenance, node, numbers, axis) -> the knobs of an axis that equal sizes might confuse
_SAME_AXES: dict[str, Any] = {
    "matmul": _matmul_axis,
    "reshape": _reshape_axis,
    "embed": _embed_axis,
    "transpose": lambda p, node, numbers, axis: p.axis(node.inputs[0], node.attrs["permutation"][axis]),
}


class OpFunction(Callable):
    """An op of the table, callable from Lisp."""

    def __init__(self, op: Op):
        self.op = op
        self.name = op.name
        self.doc = op.doc

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        return apply_op(ev, self.op.name, args, kwargs, span)


class Query(Callable):
    """`shape` and `dim`: compile-time facts of a tensor."""

    def __init__(self, name: str, doc: str, parameters: str):
        self.name, self.doc, self.parameter_text, self.signature = name, doc, parameters, parameters

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        wanted = 1 if self.name in ("shape", "rank") else 2
        if len(args) != wanted or kwargs:
            raise problem("E-EVAL-104", f"`{self.name}` is called as ({self.name} {self.parameter_text})", span)
        x = _tensor(self.name, args[0], span)
        sizes = ev.provenance.sizes(x)
        if self.name == "shape":
            return sizes
        if self.name == "rank":
            return len(sizes)
        axis = args[1]
        if not isinstance(axis, int) or isinstance(axis, bool) or not -len(sizes) <= axis < len(sizes):
            raise problem(
                "E-SHAPE-004", f"dim: axis {_show(axis)} of a tensor with {len(sizes)} axes: {x.type}", span,
                help=f"axes go from {-len(sizes)} to {len(sizes) - 1}" if sizes else "a scalar has no axes",
            )
        return sizes[axis]


def natives() -> dict[str, Callable]:
    """Every op that has a name in the language, and the queries."""
    functions: dict[str, Callable] = {name: OpFunction(op) for name, op in table().items() if op.lisp}
    functions |= {name: functions[op] for name, op in ALIASES.items()}
    functions["shape"] = Query("shape", "The sizes of a tensor's axes, as a list.", "x")
    functions["dim"] = Query("dim", "The size of one axis of a tensor; negative axes count from the end.", "x axis")
    functions["rank"] = Query("rank", "The number of axes of a tensor.", "x")
    return functions


def apply_op(ev: Any, name: str, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Tensor:
    """The result of op `name`; numbers among the operands take the tensors' dtype."""
    if name == "-" and len(args) == 1:
        name = "neg"
    if name == "/" and len(args) == 1:
        args = [1, *args]
    if name in FOLDED | {"-", "/"} and len(args) > 2 and not kwargs:
        result = args[0]
        for arg in args[1:]:
            result = ev.tensor_op(name, [result, arg], {}, span) if _any_tensor(result, arg) else _plain(ev, name, result, arg, span)
        return result
    op = table().get(name)
    if op is None or not op.lisp:
        instead = COUNTERPARTS.get(name, "")
        raise problem("E-EVAL-114", f"`{name}` works on compile-time values, not on tensors", span,
                      help=f"the op for tensors is `{instead}`" if instead else "for the sizes of a tensor write (shape x) or (dim x 0)")
    operands, attributes = _split(op, args, kwargs, span)
    nodes = _operands(op, operands, span)
    values, numbers = _attributes(op, attributes, span)
    ev.spend(NODE_UNITS, "graph nodes")
    knobs: Knobs = frozenset().union(*(knobs_of(n) for n in [*numbers, *operands] if not isinstance(n, Tensor)), frozenset())
    try:
        with ev.provenance.origins.at(origin(ev, span, knobs)):
            node = build(name, *nodes, **values)
    except OpProblem as p:
        raise _explain(ev, p, op, nodes, operands, span) from None
    ev.provenance.infer_axes(node, numbers)
    return Tensor(node)


def origin(ev: Any, span: Span | None, knobs: Knobs = frozenset()) -> Origin:
    """Where a node made now comes from."""
    path = ev.trace.path_text() if ev.trace is not None else ""
    return Origin((span,) if span else (), (path,) if path else (), tuple(sorted(knobs)))


def as_node(value: Any, like: str, what: str, span: Span | None) -> Node:
    """A tensor's node, or a number as a constant of dtype `like`."""
    if isinstance(value, Tensor):
        return value.node
    return _constant(value, like, what, span)


def real(value: Any, what: str, span: Span | None) -> float:
    """A number as a float; an integer or ratio may be too large for one."""
    try:
        return float(value)
    except OverflowError:
        raise problem("E-EVAL-022", f"{what} is a number too large for a float: {show(value, 40)}", span) from None


def _number(value: Any) -> bool:
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool)


def _any_tensor(*values: Any) -> bool:
    return any(isinstance(v, Tensor) for v in values)


def _plain(ev: Any, name: str, a: Any, b: Any, span: Span | None) -> Any:
    return ev.call(ev.builtins[name], [a, b], {}, span)


def _tensor(what: str, value: Any, span: Span | None) -> Node:
    if isinstance(value, Tensor):
        return value.node
    raise problem("E-EVAL-114", f"`{what}` needs a tensor, and got {_show(value)}", span)


def _show(value: Any) -> str:
    if isinstance(value, Callable):
        return f"the function `{getattr(value, 'name', '?')}`"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, Symbol | ListForm | Literal):
        return print_form(value)
    return repr(value) if isinstance(value, str) else str(value)


def _split(op: Op, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> tuple[list[Any], dict[str, Any]]:
    """Operands and attributes of a call; the op's positional attributes may follow the operands."""
    names = {p.name for p in op.attributes}
    for key in kwargs:
        if key not in names:
            raise problem("E-EVAL-101", f"`{op.name}` has no key :{key}", span, help=suggestion(key, names, "keys"))
    variadic = bool(op.operands) and op.operands[-1].endswith("*")
    if variadic and args and isinstance(args[0], str):  # (einsum "ij->i" x), as in torch
        first = next((p.name for p in op.attributes if p.kind == "string" and p.required), None)
        if first is not None and first in kwargs:
            raise problem("E-EVAL-104", f"`{op.name}`: :{first} is given twice", span)
        args, kwargs = (args[1:], {**kwargs, first: args[0]}) if first is not None else (args, kwargs)
    count = len(args) if variadic else len(op.operands)
    operands, rest = list(args[:count]), args[count:]
    if variadic and len(operands) == 1 and isinstance(operands[0], tuple):
        operands = list(operands[0])
    if len(operands) < len(op.operands) - variadic or len(rest) > len(op.positional):
        raise problem("E-EVAL-104", f"`{op.name}` is called as {signature(op)}, not with {len(args)} arguments", span)
    attributes = dict(kwargs)
    for name, value in zip(op.positional, rest, strict=False):
        if name in attributes:
            raise problem("E-EVAL-104", f"`{op.name}`: :{name} is given twice", span)
        attributes[name] = value
    return operands, attributes


def signature(op: Op) -> str:
    """How the op is called, for messages and the reference."""
    keys = [f"[{p.name}]" if p.name in op.positional else f":{p.name}" for p in op.attributes]
    return "(" + " ".join([op.name, *op.operands, *keys]) + ")"


def _operands(op: Op, values: list[Any], span: Span | None) -> list[Node]:
    dtypes = [v.node.type.dtype for v in values if isinstance(v, Tensor) and v.node.type.dtype != "bool"]
    if not _any_tensor(*values) and values:
        numeric = _number(values[0]) or isinstance(values[0], bool)
        raise problem("E-EVAL-114", f"`{op.name}` needs a tensor, and got {_show(values[0])}", span,
                      help="a number needs no cast: it takes the dtype of the tensor it meets" if op.name == "cast" and numeric else ())
    # (where mask 1.0 0): no tensor says what the numbers are
    alone = "f32" if op.name == "where" and any(_number(v) for v in values) else "bool"
    return [as_node(v, dtypes[0] if dtypes else alone, op.name, span) for v in values]


def _constant(value: Any, dtype: str, what: str, span: Span | None) -> Node:
    if isinstance(value, bool):
        if dtype != "bool":
            raise problem("E-EVAL-113", f"{what}: {str(value).lower()} cannot become {dtype}", span)
        return constant(value, "bool")
    if not isinstance(value, int | float | Fraction):
        raise problem("E-EVAL-114", f"`{what}` needs a tensor or a number, and got {_show(value)}", span)
    if dtype == "bool":
        raise problem("E-EVAL-113", f"{what}: the number {value} cannot become bool", span, help="use true or false, or a comparison")
    if dtype in ("f32", "f64", "bf16", "f16"):
        try:
            return constant(float(value), dtype)
        except (OverflowError, ValueError):
            raise problem("E-EVAL-113", f"{what}: a number this large does not fit {dtype}", span) from None
    if not isinstance(value, int):
        raise problem(
            "E-EVAL-113", f"{what}: the number {value} meets a tensor of {dtype}, which holds whole numbers only", span,
            help=f"cast the tensor: (cast x f32), or write the number as {dtype}",
        )
    bits = DTYPES[dtype] * 8
    low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if not low <= value <= high:
        raise problem("E-EVAL-113", f"{what}: {value} does not fit {dtype} ({low} to {high})", span)
    return constant(int(value), dtype)


def _attributes(op: Op, given: dict[str, Any], span: Span | None) -> tuple[dict[str, Any], list[Any]]:
    values: dict[str, Any] = {}
    numbers: list[Any] = []
    for parameter in op.attributes:
        if parameter.name not in given:
            if parameter.required:
                raise problem("E-EVAL-102", f"`{op.name}` needs :{parameter.name}: {signature(op)}", span)
            continue
        value = given[parameter.name]
        numbers += value if isinstance(value, tuple) else [value]
        values[parameter.name] = _attribute(op, parameter.name, parameter.kind, value, span)
    return values, numbers


def _attribute(op: Op, name: str, kind: str, value: Any, span: Span | None) -> Any:
    def integer(v: Any) -> int:
        if isinstance(v, int) and not isinstance(v, bool):
            return int(v)
        knobs = sorted(knobs_of(v))
        source = f" (from knob {', '.join(knobs)})" if knobs else ""
        raise problem("E-SHAPE-013", f"{op.name}: :{name} needs whole numbers, and got {_show(v)}{source}", span)

    if kind in ("shape", "axes") and isinstance(value, tuple):
        return tuple(integer(v) for v in value)
    if kind == "axes" and (value is None or value is False):  # 0 is an axis
        return None
    if kind in ("shape",):
        return (integer(value),)
    if kind == "triples":
        if not isinstance(value, tuple) or not all(isinstance(v, tuple) for v in value):
            raise problem("E-EVAL-103", f"{op.name}: :{name} is a list of lists such as [[1 1 0] [1 0 1]]", span)
        return tuple(tuple(integer(n) for n in v) for v in value) or None
    if kind in ("int", "axis", "axes"):
        return None if value == () else integer(value)
    if kind == "bool":
        return truthy(value)
    if kind == "dtype":
        text = value.name if isinstance(value, Symbol) else value
        if text in DTYPES:
            return str(text)
        raise problem("E-EVAL-103", f"{op.name}: {_show(value)} is no dtype", span, help=suggestion(str(text), DTYPES, "dtypes"))
    if kind in ("float", "number"):
        if _number(value):
            return real(value, f"{op.name}: :{name}", span)
        raise problem("E-EVAL-103", f"{op.name}: :{name} needs a number, and got {_show(value)}", span)
    if isinstance(value, str):
        return str(value)
    raise problem("E-EVAL-103", f"{op.name}: :{name} needs a {kind}, and got {_show(value)}", span)


def _explain(ev: Any, p: OpProblem, op: Op, nodes: list[Node], values: list[Any], span: Span | None) -> SexpError:
    """The diagnostic of a refused op: each operand with its type, and the clashing sizes with their knobs."""
    names = _operand_texts(span, len(nodes), op)
    width = max((len(n) for n in names), default=0)
    notes, related = [], []
    for i, node in enumerate(nodes):
        facts = []
        for operand, axis in p.axes:
            if operand == i and node.type.shape:
                knobs = ev.provenance.axes.get(node, ())
                for knob in sorted(knobs[axis]) if -len(knobs) <= axis < len(knobs) else ():
                    facts.append(f"{node.type.shape[axis]} from knob {knob} ({ev.provenance.knob_places.get(knob, '?')})")
        notes.append(f"{names[i]:<{width}} : {node.type}" + ("   " + ", ".join(facts) if facts else ""))
        spans = ev.provenance.origins.of(node).spans
        if spans and span is not None and spans[0] != span and facts and not ev.loader.is_library(spans[0].source):
            related.append(Related(spans[0], f"`{names[i]}` is made here"))
    helps = p.help or HELPS.get(p.code, "")
    if p.code == "E-SHAPE-003" and len(nodes) == 2 and _fits_turned(*nodes):
        helps += ", or write (transpose {1})"
    for i, name in enumerate(names):
        helps = helps.replace(f"{{{i}}}", name)
    return problem(p.code, p.message, span, notes=notes, related=related, help=helps or ())


#: what to try where the op says no better; `{0}` is the text of operand 0
HELPS = {
    "E-SHAPE-003": "the last axis of {0} must equal the last but one of {1}: change one of the two sizes",
    "E-SHAPE-005": "choose sizes with the same product, or write -1 for one of them and it is computed",
    "E-SHAPE-006": "(cast {0} f32)",
    "E-SHAPE-008": "all axes but the joined one must agree: join along another axis, or reshape one of them",
    "E-SHAPE-013": "a size is a whole number of 0 or more: choose numbers that divide, or (floor a b)",
}


def _fits_turned(a: Node, b: Node) -> bool:
    """Whether a matmul by the transposed second operand would fit."""
    return len(b.type.shape) == 2 and bool(a.type.shape) and a.type.shape[-1] == b.type.shape[1]


def _operand_texts(span: Span | None, count: int, op: Op) -> list[str]:
    """The operands as the person wrote them, where the call's text still shows them."""
    fallback = [f"operand {i + 1}" for i in range(count)]
    if span is None:
        return fallback
    try:
        forms = read(Source("call", span.text))
    except SexpError:
        return fallback
    if len(forms) != 1 or not isinstance(forms[0], ListForm) or forms[0].head() is None:
        return fallback
    written = [print_form(f) for f in forms[0].items[1 : 1 + count]]
    written = [w if len(w) <= 40 else w[:37] + "…" for w in written]
    return written + fallback[len(written) :]

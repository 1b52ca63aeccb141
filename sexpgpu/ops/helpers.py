"""What the op families share: shape rules, checks with their errors, costs, and short names to write gradients with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sexpgpu.ir import DTYPES, Node, TensorType
from sexpgpu.ops.definition import OpProblem, build, constant

Attrs = dict[str, Any]
Types = tuple[TensorType, ...]


def combine(name: str, /, *operands: Node | float, **attrs: Any) -> Node:
    """`build` in which a Python number stands for a constant of the first tensor's dtype (gradients are written so)."""
    dtype = next(o.type.dtype for o in operands if isinstance(o, Node))
    return build(name, *(o if isinstance(o, Node) else constant(o, dtype) for o in operands), **attrs)


def add(a: Node | float, b: Node | float) -> Node:
    return combine("+", a, b)


def sub(a: Node | float, b: Node | float) -> Node:
    return combine("-", a, b)


def mul(a: Node | float, b: Node | float) -> Node:
    return combine("*", a, b)


def div(a: Node | float, b: Node | float) -> Node:
    return combine("/", a, b)


def neg(a: Node) -> Node:
    return build("neg", a)


def where(mask: Node, a: Node | float, b: Node | float) -> Node:
    dtype = a.type.dtype if isinstance(a, Node) else b.type.dtype  # type: ignore[union-attr]
    a, b = (x if isinstance(x, Node) else constant(x, dtype) for x in (a, b))
    return build("where", mask, a, b)


def total(x: Node, axes: Sequence[int], keep: bool = False) -> Node:
    return build("sum", x, axis=tuple(axes), **{"keep-dims": keep})


def zeros(type: TensorType) -> Node:  # noqa: A002 - the word of the IR
    """A zero of this float type: a constant, broadcast."""
    zero = constant(0.0, type.dtype)
    return build("broadcast", zero, shape=type.shape, batch=type.batch) if type.shape else zero


def spread(x: Node, like: TensorType) -> Node:
    """`x` broadcast to the shape of `like`, with its batch mark; `x` itself if it has the shape."""
    return x if x.type.shape == like.shape else build("broadcast", x, shape=like.shape, batch=like.batch)


def unbroadcast(ct: Node, type: TensorType) -> Node:  # noqa: A002
    """The sum of `ct` over the axes along which an operand of `type` was broadcast: the transpose of broadcasting."""
    if ct.type.shape == type.shape:
        return ct
    extra = ct.type.rank - type.rank
    axes = tuple(a for a in range(ct.type.rank) if a < extra or type.shape[a - extra] != ct.type.shape[a])
    summed = total(ct, axes)
    return summed if summed.type.shape == type.shape else build("reshape", summed, shape=type.shape)


def broadcast_type(name: str, types: Types, dtype: str) -> TensorType:
    """NumPy's broadcasting. Axis 0 of the result is the batch's if an operand that supplies it is marked."""
    rank = max(t.rank for t in types)
    shape = []
    for axis in range(rank):
        size, owner = 1, None
        for number, t in enumerate(types):
            own = axis - (rank - t.rank)
            if own < 0 or t.shape[own] == 1:
                continue
            if owner is None:
                size, owner = t.shape[own], (number, own)
            elif t.shape[own] != size:
                raise OpProblem(
                    "E-SHAPE-001",
                    f"{name}: axes differ: {size} and {t.shape[own]}",
                    (owner, (number, own)),
                    "sizes must be equal, or one of them 1 (axes are matched from the last)",
                )
        shape.append(size)
    mark = rank > 0 and any(t.batch and t.rank == rank and t.shape[0] == shape[0] for t in types)
    return TensorType(dtype, tuple(shape), mark)


def same_dtype(name: str, types: Types) -> str:
    """The common dtype, or E-SHAPE-002."""
    first = types[0].dtype
    for number, t in enumerate(types[1:], 1):
        if t.dtype != first:
            wide = t.dtype if first in ("bool", "i32", "u8", "u16", "i64") else first
            other = 0 if wide == t.dtype else number
            raise OpProblem(
                "E-SHAPE-002",
                f"{name}: dtypes differ: {first} and {t.dtype}",
                help=f"(cast {{{other}}} {wide})",
            )
    return first


def require_float(name: str, *types: TensorType) -> None:
    for t in types:
        if not t.is_float:
            raise OpProblem("E-SHAPE-006", f"{name}: needs a float tensor, got {t.dtype}", help="cast it: (cast … f32)")


def require_number(name: str, *types: TensorType) -> None:
    for t in types:
        if t.dtype == "bool":
            raise OpProblem("E-SHAPE-006", f"{name}: needs numbers, got bool", help="cast it: (cast … f32)")


def require_bool(name: str, *types: TensorType) -> None:
    for t in types:
        if t.dtype != "bool":
            raise OpProblem("E-SHAPE-011", f"{name}: needs a bool tensor, got {t.dtype}", help="compare it: (> … 0)")


def require_indices(name: str, t: TensorType) -> None:
    if t.dtype not in ("i32", "i64"):
        raise OpProblem(
            "E-SHAPE-012", f"{name}: indices must be i32 or i64, got {t.dtype}", help="indices are whole numbers: declare the field as i32, leave out a cast to floats, or write (cast … i32)"
        )


def require_dtype(name: str, dtype: Any) -> str:
    if dtype not in DTYPES:
        raise OpProblem("E-SHAPE-015", f"{name}: {dtype} is no dtype", help="dtypes: " + " ".join(DTYPES))
    return dtype


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def axis_of(name: str, axis: Any, rank: int) -> int:
    """A Lisp axis, counted from the end if negative, as one in 0 … rank - 1."""
    if not is_int(axis) or not -rank <= axis < rank:
        hint = f"axes are {-rank} … {rank - 1}" if rank else "a scalar has no axes"
        raise OpProblem("E-SHAPE-004", f"{name}: no axis {axis} in a tensor of rank {rank}", help=hint)
    return axis % rank


def axes_of(name: str, axes: Any, rank: int) -> tuple[int, ...]:
    """One axis, several, or none (all of them), ascending."""
    if axes is None:
        return tuple(range(rank))
    listed = tuple(axes) if isinstance(axes, list | tuple) else (axes,)
    found = sorted(axis_of(name, a, rank) for a in listed)
    if len(set(found)) != len(found):
        raise OpProblem("E-SHAPE-004", f"{name}: an axis is given twice: {' '.join(map(str, listed))}")
    return tuple(found)


def shape_of(name: str, shape: Any) -> tuple[int, ...]:
    """A list of sizes as a tuple; a single integer is a shape of one axis."""
    sizes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    for size in sizes:
        if not is_int(size) or size < 0:
            raise OpProblem("E-SHAPE-013", f"{name}: a size must be an integer of 0 or more, got {size}")
    return sizes


def reduced(t: TensorType, axes: tuple[int, ...], keep: bool, dtype: str | None = None) -> TensorType:
    """The type left when `axes` are reduced."""
    shape = tuple(1 if a in axes else s for a, s in enumerate(t.shape) if keep or a not in axes)
    return TensorType(dtype or t.dtype, shape, t.batch and 0 not in axes)


def expand_reduced(y: Node, x: TensorType, axes: tuple[int, ...], keep: bool) -> Node:
    """A reduction's result (or cotangent) with its reduced axes back, of size 1, to broadcast against `x`."""
    if keep or not axes or not y.type.rank:
        return y
    shape = tuple(1 if a in axes else s for a, s in enumerate(x.shape))
    return build("reshape", y, shape=shape)


def traffic(node: Node) -> int:
    """Bytes read and written if nothing is cached."""
    return node.type.bytes + sum(i.type.bytes for i in node.inputs)


def per_element(flops: int) -> Callable[[Node], tuple[int, int]]:
    """A cost of so many operations for each element of the result."""
    return lambda node: (flops * node.type.size, traffic(node))


def per_input(flops: int) -> Callable[[Node], tuple[int, int]]:
    """A cost of so many operations for each element of the first operand."""
    return lambda node: (flops * node.inputs[0].type.size, traffic(node))


def view_cost(node: Node) -> tuple[int, int]:
    """A view moves nothing: it folds into its users' indices."""
    return (0, 0)


def positions(values: Iterable[int]) -> dict[int, int]:
    return {v: i for i, v in enumerate(values)}

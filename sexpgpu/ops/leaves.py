"""Leaves: what a graph starts from. Their values come from the caller's bindings, except constants and iota."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import FLOATS, Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, Parameter
from sexpgpu.ops.helpers import Attrs, Types, require_dtype, shape_of, view_cost

LEAF = Lowering("leaf")

#: ops whose value the caller binds
BOUND = ("input", "param", "state", "slot", "gradient", "statistic", "step")


def _canonical_constant(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[tuple[Node, ...], Attrs]:
    dtype = require_dtype("constant", attrs["dtype"])
    kind = float if dtype in FLOATS else bool if dtype == "bool" else int
    return inputs, {"value": kind(attrs["value"]), "dtype": dtype}


def _canonical_leaf(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[tuple[Node, ...], Attrs]:
    return inputs, {**attrs, "shape": shape_of("shape", attrs["shape"]), "dtype": require_dtype("leaf", attrs["dtype"])}


def _declared(types: Types, attrs: Attrs) -> TensorType:
    shape = attrs.get("shape", ())
    return TensorType(attrs["dtype"], shape, bool(attrs.get("batch")) and bool(shape))


def _bound(torch: Any, node: Node, args: list[Any]) -> Any:
    raise LookupError(f"{node.op} has no value of its own: its caller binds it")


def _constant(torch: Any, node: Node, args: list[Any]) -> Any:
    return torch.tensor(node.attrs["value"], dtype=getattr(torch, _TORCH[node.type.dtype]))


def _iota(torch: Any, node: Node, args: list[Any]) -> Any:
    return torch.arange(node.attrs["count"], dtype=getattr(torch, _TORCH[node.type.dtype]))


#: names of torch's dtypes, for references (backends/interpreter/dtypes.py has the objects)
_TORCH = {
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "f16": "float16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "bool": "bool",
}
TORCH_NAMES = _TORCH

_SHAPE = Parameter("shape", "shape", (), required=True)
_DTYPE = Parameter("dtype", "dtype", "f32")


def _leaf(name: str, doc: str, *attributes: Parameter) -> Op:
    shaped = any(a.name == "shape" for a in attributes)
    return Op(
        name,
        doc,
        (),
        _declared,
        _bound,
        view_cost,
        LEAF,
        attributes=attributes,
        lisp=False,
        differentiable=False,
        example=f"({name} …)",
        canonical=_canonical_leaf if shaped else None,
    )


def _identity(torch: Any, node: Node, args: list[Any]) -> Any:
    return args[0]


OPS = (
    Op(
        "constant",
        "A scalar known when the graph is made.",
        (),
        lambda types, attrs: TensorType(attrs["dtype"]),
        _constant,
        view_cost,
        LEAF,
        attributes=(Parameter("value", "float", 0.0, required=True), _DTYPE),
        lisp=False,
        differentiable=False,
        example="1.5",
        canonical=_canonical_constant,
    ),
    _leaf(
        "input",
        "A field of the batch, by name.",
        Parameter("name", "string", "", required=True),
        _DTYPE,
        _SHAPE,
        Parameter("batch", "bool", True),
    ),
    _leaf(
        "param",
        "A trained tensor, by its full model path.",
        Parameter("path", "string", "", required=True),
        _SHAPE,
        _DTYPE,
    ),
    _leaf(
        "state",
        "An untrained tensor that the step updates, by its full path.",
        Parameter("path", "string", "", required=True),
        _SHAPE,
        _DTYPE,
    ),
    _leaf(
        "statistic",
        "A number of the data, kept in the checkpoint.",
        Parameter("name", "string", "", required=True),
        Parameter("data", "string", ""),
        Parameter("shape", "shape", ()),
        _DTYPE,
    ),
    Op(
        "step",
        "The number of updates done so far, an i32 on the device: schedules of it never recompile.",
        (),
        lambda types, attrs: TensorType("i32"),
        _bound,
        view_cost,
        LEAF,
        differentiable=False,
        lisp=False,
        example="(step)",
    ),
    Op(
        "iota",
        "The integers 0 … count - 1 along one axis.",
        (),
        lambda types, attrs: TensorType(attrs["dtype"], shape_of("iota", attrs["count"])),
        _iota,
        view_cost,
        Lowering("pointwise", "index"),
        differentiable=False,
        positional=("count",),
        attributes=(Parameter("count", "int", None, required=True), Parameter("dtype", "dtype", "i32")),
        example="(iota 8)",
    ),
    Op(
        "variable",
        "A tensor to differentiate by: never joined with an equal one.",
        ("x",),
        lambda types, attrs: types[0],
        _identity,
        view_cost,
        Lowering("view"),
        vjp=lambda node, ct: (ct,),
        attributes=(Parameter("id", "int", 0, required=True), Parameter("path", "string", "")),
        lisp=False,
        example="(variable x)",
    ),
    Op(
        "again",
        "x, for a value that is computed a second time: never joined with x, and only once `gate` is there.",
        ("x", "gate"),
        lambda types, attrs: types[0],
        lambda torch, node, args: args[0],
        view_cost,
        Lowering("view"),
        vjp=lambda node, ct: (ct, None),
        lisp=False,
        example="(again x gate)",
    ),
    Op(
        "stop-gradient",
        "x, through which no gradient passes.",
        ("x",),
        lambda types, attrs: types[0],
        _identity,
        view_cost,
        Lowering("view"),
        vjp=lambda node, ct: (None,),
        example="(stop-gradient x)",
    ),
)

"""Draws inside a step: Philox 4x32-10, a pure function of (seed, path, draw number, kind, step, element).

The element index is the one in the whole batch where axis 0 comes from the batch, so neither rank layout nor
micro-batches change a draw (language.md, "Randomness"). A reference gets a `DrawContext` as its last argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build, constant
from sexpgpu.ops.helpers import Attrs, Types, per_element, require_dtype, require_float, shape_of
from sexpgpu.ops.leaves import TORCH_NAMES
from sexpgpu.ops.philox import draw_key, halves, words

Canonical = tuple[tuple[Node, ...], Attrs]


@dataclass(frozen=True)
class DrawContext:
    """What a draw depends on beside the node. `offset`: the place of this graph's first sample in the whole batch;
    `samples`: how many samples the graph holds (0: those of the drawn tensor's axis 0)."""

    seed: int = 0
    step: int = 0
    offset: int = 0
    samples: int = 0


def _first(type: TensorType, context: DrawContext) -> int:  # noqa: A002
    """The index in the whole batch of the tensor's first element."""
    if not type.batch or not context.offset:
        return 0
    return context.offset * (type.size // max(1, context.samples or type.shape[0]))


def _key(node: Node, context: DrawContext) -> int:
    return draw_key(context.seed, node.attrs["path"], node.attrs["number"], draw_kind(node.op))


def draw_kind(op: str) -> str:
    """The kind that is part of a draw's key; the uniforms of a categorical draw have that draw's."""
    return op.removeprefix("random-").removesuffix("-uniform")


def _words(node: Node, type: TensorType, context: DrawContext) -> np.ndarray:  # noqa: A002
    return words(_key(node, context), _first(type, context), type.size, context.step)


def _unit(w: np.ndarray) -> np.ndarray:
    """24-bit uniforms in [0, 1): exact in float32."""
    return (w >> np.uint32(8)).astype(np.float64) * 2.0**-24


def _give(torch: Any, node: Node, values: np.ndarray) -> Any:
    return torch.from_numpy(values.reshape(node.type.shape)).to(getattr(torch, TORCH_NAMES[node.type.dtype]))


def _uniform(torch: Any, node: Node, args: list[Any]) -> Any:
    return _give(torch, node, _unit(_words(node, node.type, args[-1])))


def _normal(torch: Any, node: Node, args: list[Any]) -> Any:
    """Box and Muller on the two words of a pair of elements: the even one takes the cosine, the odd one the sine."""
    context = args[-1]
    first, count = _first(node.type, context), node.type.size
    even = first - first % 2
    pairs = words(_key(node, context), even, first + count - even + (first + count) % 2, context.step).reshape(-1, 2)
    radius = np.sqrt(-2.0 * np.log(1.0 - _unit(pairs[:, 0])))
    angle = (2.0 * np.pi) * _unit(pairs[:, 1])
    values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
    return _give(torch, node, values[first - even :][:count])


def _bernoulli(torch: Any, node: Node, args: list[Any]) -> Any:
    context = args[-1]
    half = halves(_key(node, context), _first(node.type, context), node.type.size, context.step)
    return _give(torch, node, half < round(node.attrs["p"] * 65536))


def _categorical(torch: Any, node: Node, args: list[Any]) -> Any:
    """The argmax of logits + Gumbel noise."""
    logits, context = args
    u = torch.from_numpy(_unit(_words(node, node.inputs[0].type, context)) + 2.0**-25).reshape(logits.shape)
    return torch.argmax(logits.double() - torch.log(-torch.log(u)), -1).to(torch.int32)


def categorical_parts(node: Node) -> Node:
    """`random-categorical` as ops that a device has kernels of: the same words, the same argmax."""
    logits = node.inputs[0]
    place = {"path": node.attrs["path"], "number": node.attrs["number"], "shape": logits.type.shape, "batch": logits.type.batch}
    u = build("+", build("random-categorical-uniform", **place, dtype="f64"), constant(2.0**-25, "f64"))
    noise = build("log", build("neg", build("log", u)))
    wide = logits if logits.type.dtype == "f64" else build("cast", logits, dtype="f64")
    return build("argmax", build("-", wide, noise), axis=-1)


def _canonical(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    """`(random-normal :like x)` has the shape and mark of x, but not x itself as an operand."""
    attrs = {**attrs, "number": int(attrs["number"]), "batch": bool(attrs["batch"])}
    if inputs:
        like = inputs[0].type
        attrs |= {"shape": like.shape, "batch": like.batch}
    if "p" in attrs:
        attrs["p"] = float(attrs["p"])
        if not 0.0 <= attrs["p"] <= 1.0:
            raise OpProblem("E-SHAPE-015", f"random-bernoulli: a probability lies in 0 … 1, got {attrs['p']}")
    return (), {**attrs, "shape": shape_of("shape", attrs["shape"])}


def _infer(types: Types, attrs: Attrs) -> TensorType:
    dtype = require_dtype("random", attrs.get("dtype", "bool"))
    return TensorType(dtype, attrs["shape"], attrs["batch"] and bool(attrs["shape"]))


def _infer_categorical(types: Types, attrs: Attrs) -> TensorType:
    require_float("random-categorical", types[0])
    if not types[0].rank:
        raise OpProblem("E-SHAPE-007", "random-categorical: needs logits of 1 axis or more")
    return TensorType("i32", types[0].shape[:-1], types[0].batch and types[0].rank > 1)


_PLACE = (Parameter("path", "string", ""), Parameter("number", "int", 0))
_SHAPE = (Parameter("shape", "shape", ()), Parameter("batch", "bool", False))
_FLOAT = Parameter("dtype", "dtype", "f32")


def _draw(name: str, doc: str, reference: Callable[[Any, Node, list[Any]], Any], *more: Parameter, lisp: bool = True) -> Op:
    return Op(
        name,
        doc,
        ("like*",),
        _infer,
        reference,
        per_element(30),
        Lowering("pointwise", f"{name.replace('-', '_')}(key, element)"),
        attributes=(*_SHAPE, *_PLACE, *more),
        positional=("shape",),
        differentiable=False,
        example=f"({name} [2 3])",
        canonical=_canonical,
        lisp=lisp,
    )


OPS = (
    _draw("random-uniform", "Uniform in [0, 1), in steps of 2^-24, of :shape or like an operand.", _uniform, _FLOAT),
    _draw("random-normal", "Standard normal, of :shape or like an operand.", _normal, _FLOAT),
    _draw(
        "random-bernoulli",
        "A bool mask that holds with probability :p, in steps of 1/65536.",
        _bernoulli,
        Parameter("p", "float", 0.5),
    ),
    _draw("random-categorical-uniform", "The uniforms of random-categorical.", _uniform, _FLOAT, lisp=False),
    Op(
        "random-categorical",
        "An index along the last axis, i32, with probability softmax(logits).",
        ("logits",),
        _infer_categorical,
        _categorical,
        lambda node: (40 * node.inputs[0].type.size, node.inputs[0].type.bytes),
        Lowering("template", "random-categorical"),
        attributes=_PLACE,
        differentiable=False,
        example="(random-categorical logits)",
    ),
)

#: draws: their references take a DrawContext last, and their attributes `path` and `number` make their key
DRAWS = frozenset(op.name for op in OPS)

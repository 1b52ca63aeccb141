"""Several derivatives of one product in one launch, each a sum over fillings of its other slots: what the CUDA backend makes of
`tensor-product` and `tensor-product-grad` nodes that read the same tensors (`backends/cuda/cartesian/join.py`), and the same with the
matrix products before and behind it, over parts of the edges (`parts.py` there)."""

from __future__ import annotations

from typing import Any, NamedTuple

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, Parameter, build, evaluated, table
from sexpgpu.ops.helpers import Attrs, Types, traffic

#: an output: (target, shape, batch, uses); a use: numbers of the operands in the order of SLOTS, without the target
Out = tuple[str, tuple[int, ...], bool, tuple[tuple[int, int, int], ...]]


def _infer(types: Types, attrs: Attrs) -> TensorType:
    _, shape, batch, _ = attrs["outputs"][attrs["of"]]
    return TensorType(types[0].dtype, shape, batch)


def spread(node: Node) -> tuple[list[Node], tuple[Node, ...]]:
    """The operands, those given as two factors multiplied, and the indices."""
    count = len(node.attrs["slots"])
    operands, rest = list(node.inputs[:count]), list(node.inputs[count:])
    for n, inner in enumerate(node.attrs["inner"]):
        if inner:
            operands[n] = build("matmul", operands[n], rest.pop(0))
    return operands, tuple(rest)


def parts(node: Node) -> list[Node]:
    """The single products whose sum an output is."""
    target, shape, batch, uses = node.attrs["outputs"][node.attrs["of"]]
    operands, edges = spread(node)
    keep = {k: node.attrs[k] for k in ("l-max", "paths", "reduce-paths")}
    found = []
    for use in uses:
        filled = [operands[n] for n in use]
        if target == "result":
            found.append(build("tensor-product", *filled, *edges, symmetric=False, **keep))
        else:
            found.append(build("tensor-product-grad", *filled, *edges, target=target, shape=shape, batch=batch, **keep))
    return found


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    """The sum of the single products."""
    known = dict(zip(node.inputs, args, strict=True))
    for x in spread(node)[0]:
        if x not in known:
            known[x] = table()[x.op].reference(torch, x, [known[i] for i in x.inputs])
    total: Any = None
    for part in parts(node):
        value = table()[part.op].reference(torch, part, [known[x] for x in part.inputs])
        total = value if total is None else total + value
    return total


class Swept(NamedTuple):
    """What a `tensor-product-parts` node is made of. joint: the joint product by number of its output, over weights that are nodes; after: for
    each product behind it the output that it reads, and the node."""

    joint: tuple[Node, ...]
    after: tuple[tuple[int, Node], ...]

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes by number."""
        return (*self.joint, *(node for _, node in self.after))


def swept(node: Node) -> Swept:
    """The nodes that stand for a `tensor-product-parts` node without parts."""
    a = node.attrs
    count = len(a["slots"])
    operands, rest, ends = list(node.inputs[:count]), list(node.inputs[count:-2]), node.inputs[-2:]
    for n, scale in enumerate(a["scales"]):
        if scale:
            operands[n] = build("matmul-sum", operands[n], rest.pop(0), scale=scale)
    keep = {k: a[k] for k in ("slots", "outputs", "l-max", "paths", "reduce-paths")}
    joint = tuple(build("tensor-product-joint", *operands, *ends, of=n, inner=(), **keep) for n in range(len(a["outputs"])))
    after = []
    for (number, kind, scale), other in zip(a["after"], rest, strict=True):
        pair = (joint[number], other) if kind == "rows" else (build("transpose", other, permutation=(1, 0)), joint[number])
        after.append((number, build("matmul-sum", *pair, scale=scale)))
    return Swept(joint, tuple(after))


def _infer_swept(types: Types, attrs: Attrs) -> TensorType:
    count, of = len(attrs["outputs"]), attrs["of"]
    if of < count:
        return _infer(types, attrs)
    number, kind, _ = attrs["after"][of - count]
    _, shape, batch, _ = attrs["outputs"][number]
    other = types[len(types) - 2 - len(attrs["after"]) + of - count]
    return TensorType(types[0].dtype, (shape[0], other.shape[1]), batch) if kind == "rows" else TensorType(types[0].dtype, (other.shape[1], shape[1]), False)


def _reference_swept(torch: Any, node: Node, args: list[Any]) -> Any:
    """The value without parts."""
    return evaluated(torch, swept(node).results[node.attrs["of"]], dict(zip(node.inputs, args, strict=True)))


def _cost_swept(node: Node) -> tuple[int, int]:
    """The first of the results pays for what is made on the way; what a part makes for itself is written and read."""
    made = swept(node)
    own = made.results[node.attrs["of"]]
    inside = set(node.inputs)
    first = node.attrs["of"] == min((n for n, _ in enumerate(made.joint) if n not in {number for number, _ in made.after}), default=len(made.joint))
    extra = [x for x in made.joint[0].inputs if x.op == "matmul-sum" and x not in inside] if first else []
    flops = table()[own.op].cost(own)[0] + sum(table()[x.op].cost(x)[0] for x in extra)
    moved = traffic(node) + 2 * sum(x.type.bytes for x in extra)
    for number, behind in made.after:
        if behind is own:
            moved += made.joint[number].type.bytes
    return flops, moved


def _cost(node: Node) -> tuple[int, int]:
    return sum(table()[p.op].cost(p)[0] for p in parts(node)), traffic(node)


OPS = (
    Op(
        "tensor-product-joint",
        "Output `of` of several derivatives of one product that a kernel makes together. `inner` of each operand: 0, or the size over which "
        "it is the product of two factors, the second of which comes after the operands; () if none is.",
        ("operands*",),
        _infer,
        _reference,
        _cost,
        Lowering("template", "tensor-product"),
        attributes=(Parameter("slots", "parts", ()), Parameter("inner", "parts", ()), Parameter("outputs", "parts", ()), Parameter("of", "int", 0), Parameter("l-max", "int", None),
                    Parameter("paths", "triples", None), Parameter("reduce-paths", "bool", False)),
        lisp=False,
        differentiable=False,
    ),
    Op(
        "tensor-product-parts",
        "As tensor-product-joint, its weights `scales` times the product of two factors each (0: whole), the second of which come after the operands; then the other "
        "factor of each product in `after`, (output, rows or sums, scale): rows of that output times it, or its transpose times that output. All of it is done for "
        "`size` edges after another, so that neither weights nor their gradients exist whole.",
        ("operands*",),
        _infer_swept,
        _reference_swept,
        _cost_swept,
        Lowering("template", "tensor-product"),
        attributes=(Parameter("slots", "parts", ()), Parameter("scales", "parts", ()), Parameter("outputs", "parts", ()), Parameter("after", "parts", ()), Parameter("size", "int", 0),
                    Parameter("of", "int", 0), Parameter("l-max", "int", None), Parameter("paths", "triples", None), Parameter("reduce-paths", "bool", False)),
        lisp=False,
        differentiable=False,
    ),
)

"""The steps of a graph in the order in which the interpreter takes them: an op each, or several by one call (`fuse`).

The one walk that orders them: the program that runs (`emit`), the plan of its memory (`memory`) and what `explain` shows are made
from the same steps. Nothing here imports torch; what a step calls by a numbered name, `needs` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sexpgpu.backends.interpreter.fuse import FUSABLE, Step, Value, fusions, matrix_product, scaled_draw
from sexpgpu.ir import Node, postorder
from sexpgpu.ops.leaves import BOUND
from sexpgpu.ops.random import DRAWS

#: op -> source over its operands' names
_DIRECT = {
    "=": "{0} == {1}",
    "/=": "{0} != {1}",
    "<": "{0} < {1}",
    "<=": "{0} <= {1}",
    ">": "{0} > {1}",
    ">=": "{0} >= {1}",
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "where": "where({0}, {1}, {2})",
}
#: op -> torch's function of the same operands, which also writes over the first one or elsewhere
_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div"}
_UNARY = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "square", "sin", "cos")
_WITH_OUT = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "square", "sin", "cos")
#: torch's functions that a step calls by their name
FUNCTIONS = (
    *_ARITHMETIC.values(),
    *_UNARY,
    *("maximum", "minimum", "where", "matmul", "mm", "addmm", "addcmul", "addcdiv", "dot", "softmax", "log_softmax"),
    "native_layer_norm",
)


def _axes(axes: Sequence[int]) -> str:
    return f"({', '.join(map(str, axes))},)" if axes else "()"


def _sum(node: Node) -> Step | None:
    axes = node.attrs["axis"]
    if not axes or not node.type.is_float:
        return None
    call = f"total({{0}}, {_axes(axes)}, {node.attrs['keep-dims']}"
    return Step((node,), node.inputs, call + ")", True, into=call + ", out={out})")


def _mean(node: Node) -> Step | None:
    if not node.attrs["axis"]:
        return None
    return Step((node,), node.inputs, f"{{0}}.mean({_axes(node.attrs['axis'])}, {node.attrs['keep-dims']})", True)


def _transpose(node: Node) -> Step:
    order = node.attrs["permutation"]
    return Step((node,), node.inputs, "{0}.t()" if order == (1, 0) else f"{{0}}.permute({_axes(order)})")


def _reshape(node: Node) -> Step:
    return Step((node,), node.inputs, f"{{0}}.reshape({_axes(node.type.shape)})")


def _matmul(node: Node) -> Step | None:
    if node.type.dtype not in ("f32", "f64"):
        return None
    return matrix_product(node) or Step((node,), node.inputs, "matmul({0}, {1})", True)


def _like(operand: Node, node: Node) -> bool:
    return operand.type.shape == node.type.shape and operand.type.dtype == node.type.dtype


def _arithmetic(node: Node) -> Step:
    name, (a, b) = _ARITHMETIC[node.op], node.inputs
    over = {0: f"{{0}}.{name}_({{1}})"} if _like(a, node) else {}
    if _like(b, node) and b is not a:
        over[1] = f"{{1}}.{name}_({{0}})" if node.op in "+*" else f"{name}({{0}}, {{1}}, out={{1}})"
    return Step((node,), node.inputs, f"{name}({{0}}, {{1}})", True, over, f"{name}({{0}}, {{1}}, out={{out}})")


def _unary(node: Node) -> Step:
    into = f"{node.op}({{0}}, out={{out}})" if node.op in _WITH_OUT else ""
    return Step((node,), node.inputs, f"{node.op}({{0}})", True, {0: f"{{0}}.{node.op}_()"}, into)


_STEPS: dict[str, Callable[[Node], Step | None]] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(("reshape", "squeeze", "expand-dims"), _reshape),
    **dict.fromkeys(("variable", "stop-gradient"), lambda node: Step((node,), node.inputs, "{0}")),
    "sum": _sum,
    "mean": _mean,
    "transpose": _transpose,
    "broadcast": lambda node: Step((node,), node.inputs, f"{{0}}.expand({_axes(node.type.shape)})"),
    "matmul": _matmul,
    "softmax": lambda node: Step((node,), node.inputs, f"softmax({{0}}, {node.attrs['axis']})", True),
    "log-softmax": lambda node: Step((node,), node.inputs, f"log_softmax({{0}}, {node.attrs['axis']})", True),
    "relu-grad": lambda node: (
        Step((node,), node.inputs, "threshold_backward({1}, {0}, 0)", True) if node.type.is_float else None
    ),
    "gelu-grad": lambda node: (  # it does not broadcast
        Step((node,), node.inputs, "gelu_backward({1}, {0})", True) if all(_like(x, node) for x in node.inputs) else None
    ),
    "cast": lambda node: Step((node,), node.inputs, f"{{0}}.to(dtype_{node.type.dtype})"),
}


def alone(node: Node, number: int) -> Step:
    """The step of one node, the `number`-th of its graph."""
    scaled = scaled_draw(node) if node.op == "*" and node.type.dtype in FUSABLE else None
    if node.op == "random-bernoulli" or scaled is not None:
        drawn, factor = scaled or (node, None)
        return Step((node,), (), f"draw(context, m{number})", True, needs=("mask", number, drawn, factor))
    if node.op in _DIRECT:
        return Step((node,), node.inputs, _DIRECT[node.op], True)
    step = _STEPS[node.op](node) if node.op in _STEPS else None
    if step is not None:
        return step
    operands = [f"{{{i}}}" for i in range(len(node.inputs))]
    if node.op in DRAWS:
        operands.append("context")
    return Step((node,), node.inputs, f"f{number}(torch, n{number}, [{', '.join(operands)}])", needs=("reference", number, node))


@dataclass(frozen=True)
class Ordered:
    """nodes: of the graph, operands first; steps: in order, without constants and leaves; early: how many of them give the
    results that come first."""

    nodes: Sequence[Node]
    steps: Sequence[Step]
    early: int


def ordered(results: Mapping[str, Node], first: Sequence[str] = (), fused: bool = True) -> Ordered:
    """The steps of a graph; those of the results named in `first` before all others."""
    roots = [results[name] for name in first] + list(results.values())
    order = postorder(roots)
    together = fusions(order, results.values()) if fused else {}
    number = {node: i for i, node in enumerate(order)}
    steps: list[Step] = []
    done: set[Value] = set()
    flat: dict[Node, Node] = {}  # operand -> its first reshape: others reshape that, which may have had to copy
    early = 0
    for count, root in enumerate(roots):
        early = len(steps) if count == len(first) else early
        stack: list[tuple[Value, Step | None]] = [(root, None)]
        while stack:
            value, step = stack.pop()
            if value in done:
                continue
            if step is not None:
                done.update(step.outputs)
                steps.append(step)
                continue
            if isinstance(value, Node) and (value.op in BOUND or value.op in ("constant", "iota")):
                done.add(value)
                continue
            step = together.get(value) or alone(value, number[value])  # type: ignore[arg-type,index]
            if isinstance(value, Node) and value.op == "reshape" and value.inputs[0].op == "transpose":
                base = flat.setdefault(value.inputs[0], value)
                step = step if base is value else Step((value,), (base,), step.source)
            stack.append((value, step))
            stack.extend((i, None) for i in reversed(step.inputs) if i not in done)
    return Ordered(order, steps, early)

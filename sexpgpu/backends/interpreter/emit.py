"""Straight-line Python for a graph: one assignment a node, a `del` where a value was used last.

No text of a user's enters the source: names are numbered, attributes are integers or lie in the namespace. Common ops
become direct calls of torch; the rest call their definition's reference. Both mean the same, which a test checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND
from sexpgpu.ops.random import DRAWS

#: op -> source over its operands' names
_DIRECT = {
    "+": "{0} + {1}",
    "-": "{0} - {1}",
    "*": "{0} * {1}",
    "/": "{0} / {1}",
    "neg": "neg({0})",
    "=": "{0} == {1}",
    "/=": "{0} != {1}",
    "<": "{0} < {1}",
    "<=": "{0} <= {1}",
    ">": "{0} > {1}",
    ">=": "{0} >= {1}",
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "where": "where({0}, {1}, {2})",
    "variable": "{0}",
    "stop-gradient": "{0}",
    **{
        name: f"{name}({{0}})"
        for name in ("abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "square", "sin", "cos")
    },
}
_FUNCTIONS = (
    "neg",
    "maximum",
    "minimum",
    "where",
    "abs",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "relu",
    "square",
    "sin",
    "cos",
    "matmul",
    "softmax",
    "log_softmax",
    "cat",
)


def _axes(axes: Sequence[int]) -> str:
    return f"({', '.join(map(str, axes))},)" if axes else "()"


def _sum(node: Node) -> str | None:
    axes = node.attrs["axis"]
    if not axes or not node.type.is_float:
        return None
    return f"{{0}}.sum({_axes(axes)}, {node.attrs['keep-dims']})"


def _mean(node: Node) -> str | None:
    return f"{{0}}.mean({_axes(node.attrs['axis'])}, {node.attrs['keep-dims']})" if node.attrs["axis"] else None


def _transpose(node: Node) -> str:
    return f"{{0}}.permute({_axes(node.attrs['permutation'])})"


def _reshape(node: Node) -> str:
    return f"{{0}}.reshape({_axes(node.type.shape)})"


_FORMATS: dict[str, Callable[[Node], str | None]] = {
    "sum": _sum,
    "mean": _mean,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand-dims": _reshape,
    "broadcast": lambda node: f"{{0}}.expand({_axes(node.type.shape)})",
    "matmul": lambda node: "matmul({0}, {1})" if node.type.dtype in ("f32", "f64") else None,
    "softmax": lambda node: f"softmax({{0}}, {node.attrs['axis']})",
    "log-softmax": lambda node: f"log_softmax({{0}}, {node.attrs['axis']})",
    "relu-grad": lambda node: "threshold_backward({1}, {0}, 0)" if node.type.is_float else None,
    "gelu-grad": lambda node: "gelu_backward({1}, {0})",
    "cast": lambda node: f"{{0}}.to(dtype_{node.type.dtype})",
}


def namespace() -> dict[str, Any]:
    """What the source calls by name."""
    names: dict[str, Any] = {name: getattr(torch, name) for name in _FUNCTIONS}
    names |= {f"dtype_{name}": dtype for name, dtype in TORCH.items()}
    names["threshold_backward"] = torch.ops.aten.threshold_backward.default
    names["gelu_backward"] = torch.ops.aten.gelu_backward.default
    names["torch"] = torch
    return names


def expression(node: Node, names: Sequence[str], number: int, space: dict[str, Any]) -> str:
    """The source of one node's value; what it needs beside its operands goes into `space`."""
    template = _DIRECT.get(node.op)
    if template is None and node.op in _FORMATS:
        template = _FORMATS[node.op](node)
    if template is not None:
        return template.format(*names)
    space[f"f{number}"], space[f"n{number}"] = table()[node.op].reference, node
    operands = [*names, "context"] if node.op in DRAWS else names
    return f"f{number}(torch, n{number}, [{', '.join(operands)}])"


def emit(results: Mapping[str, Node], leaves: Sequence[Node]) -> tuple[str, dict[str, Any]]:
    """The source of `program(leaves, context) -> tuple of results`, and the namespace it runs in."""
    space, order = namespace(), postorder(results.values())
    outputs = list(results.values())
    last: dict[Node, Node] = {}
    for node in order:
        for operand in node.inputs:
            last[operand] = node
    kept, names = set(outputs), {}
    lines = ["def program(leaves, context):"]
    place = {leaf: i for i, leaf in enumerate(leaves)}
    for number, node in enumerate(order):
        if node.op in ("constant", "iota"):  # computed once; names of the namespace are never freed
            names[node] = f"c{number}"
            space[names[node]] = table()[node.op].reference(torch, node, [])
            continue
        names[node] = f"v{number}"
        if node.op in BOUND:
            lines.append(f" v{number} = leaves[{place[node]}]")
        else:
            lines.append(f" v{number} = {expression(node, [names[i] for i in node.inputs], number, space)}")
        dead = [
            names[i] for i in dict.fromkeys(node.inputs) if last[i] is node and i not in kept and names[i][0] == "v"
        ]
        if dead:
            lines.append(f" del {', '.join(dead)}")
    lines.append(f" return ({''.join(names[o] + ', ' for o in outputs)})")
    return "\n".join(lines), space

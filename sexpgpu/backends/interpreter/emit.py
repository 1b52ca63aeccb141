"""Straight-line Python for a graph: one assignment a step, a `del` where a value was used last.

No text of a user's enters the source: names are numbered, attributes are numbers or lie in the namespace. Common ops
become direct calls of torch, some of them several ops at once (`fuse`); the rest call their definition's reference. All
mean the same, which a test checks. A step writes over an operand of its own shape that nothing reads any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from sexpgpu.backends.interpreter import kernels
from sexpgpu.backends.interpreter.draws import Mask, draw
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.fuse import FUSABLE, Step, Value, fusions, matrix_product, scaled_draw
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import table
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
_FUNCTIONS = (
    *_ARITHMETIC.values(),
    *_UNARY,
    *("maximum", "minimum", "where", "matmul", "mm", "addmm", "addcmul", "addcdiv", "dot", "softmax", "log_softmax"),
    "native_layer_norm",
)
_KERNELS = (
    *("attend", "attend_grad", "entropy", "entropy_grad", "minus_ones", "max_pool", "pool_backward"),
    *("layer_norm_backward", "convolution_backward", "threshold_backward", "gelu_backward"),
)
#: ops whose value may lie in their operand's memory, as it lies there: dense if the operand is
_DENSE_VIEWS = ("reshape", "squeeze", "expand-dims", "transpose", "variable", "stop-gradient")


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


def namespace() -> dict[str, Any]:
    """What the source calls by name."""
    names: dict[str, Any] = {name: getattr(torch, name) for name in _FUNCTIONS}
    names |= {name: getattr(kernels, name) for name in _KERNELS}
    names |= {f"dtype_{name}": dtype for name, dtype in TORCH.items()}
    return names | {"torch": torch, "total": torch.sum, "draw": draw}


def alone(node: Node, number: int, space: dict[str, Any]) -> Step:
    """The step of one node; what it needs beside its operands goes into `space`."""
    scaled = scaled_draw(node) if node.op == "*" and node.type.dtype in FUSABLE else None
    if node.op == "random-bernoulli" or scaled is not None:
        mask = Mask(node) if scaled is None else Mask(*scaled, node.type.dtype)
        space[f"m{number}"] = mask
        return Step((node,), (), f"draw(context, m{number})", True)
    if node.op in _DIRECT:
        return Step((node,), node.inputs, _DIRECT[node.op], True)
    step = _STEPS[node.op](node) if node.op in _STEPS else None
    if step is not None:
        return step
    space[f"f{number}"], space[f"n{number}"] = table()[node.op].reference, node
    operands = [f"{{{i}}}" for i in range(len(node.inputs))]
    if node.op in DRAWS:
        operands.append("context")
    return Step((node,), node.inputs, f"f{number}(torch, n{number}, [{', '.join(operands)}])")


@dataclass
class _Memory:
    """Which values share memory, and until which step each memory is read."""

    group: dict[Value, Value] = field(default_factory=dict)
    last: dict[Value, float] = field(default_factory=dict)
    dense: set[Value] = field(default_factory=set)  # values that fill their memory, so that it can be written over

    def root(self, value: Value) -> Value:
        while self.group.get(value, value) is not value:
            value = self.group[value]
        return value

    def join(self, value: Value, other: Value) -> None:
        a, b = self.root(value), self.root(other)
        if a is not b:
            self.group[a] = b
            self.last[b] = max(self.last.get(a, -1.0), self.last.get(b, -1.0))

    def read(self, value: Value, at: float) -> None:
        root = self.root(value)
        self.last[root] = max(self.last.get(root, -1.0), at)


def _schedule(
    results: Mapping[str, Node], space: dict[str, Any], first: Sequence[str], fused: bool
) -> tuple[list[Node], list[Step], int]:
    """Nodes; the steps in order, without constants and leaves; how many of them give the results in `first`."""
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
            step = together.get(value) or alone(value, number[value], space)  # type: ignore[arg-type,index]
            if isinstance(value, Node) and value.op == "reshape" and value.inputs[0].op == "transpose":
                base = flat.setdefault(value.inputs[0], value)
                step = step if base is value else Step((value,), (base,), step.source)
            stack.append((value, step))
            stack.extend((i, None) for i in reversed(step.inputs) if i not in done)
    return order, steps, early


class _Writer:
    """The lines of one program, step by step."""

    def __init__(
        self, results: Mapping[str, Node], leaves: Sequence[Node], into: Mapping[str, Node | None],
        scratch: set[Node], first: Sequence[str], fused: bool,
    ):
        self.results, self.into, self.space = results, into, namespace()
        order, self.steps, self.early = _schedule(results, self.space, first, fused)
        self.homes = {leaf for leaf in into.values() if leaf is not None}
        self.places = {name: place for place, name in enumerate(into)}
        self.targets: dict[Value, str] = {}
        for name in into:
            self.targets.setdefault(results[name], name)
        self.needed: set[Value] = {i for step in self.steps for i in step.inputs} | set(results.values())
        self.names: dict[Value, str] = {}
        self.memory, self.lines, self.done = _Memory(), ["def program(leaves, context, outs=()):"], set[str]()
        self.lies: dict[Value, Node] = {}  # value -> the leaf whose memory it has
        self._start(order, leaves, scratch)
        _lifetimes(self.steps, results, self.memory)
        self.last = {value: at for at, step in enumerate(self.steps) for value in step.inputs}
        self.kept: set[Value] = set(results.values())

    def _start(self, order: Sequence[Node], leaves: Sequence[Node], scratch: set[Node]) -> None:
        for node in order:
            if node in self.needed and node.op in ("constant", "iota"):  # computed once, never freed
                self.names[node] = f"c{len(self.names)}"
                self.space[self.names[node]] = table()[node.op].reference(torch, node, [])
                self.memory.read(node, inf)
        for place, leaf in enumerate(leaves):
            if leaf not in self.needed:
                continue
            self.names[leaf] = f"v{len(self.names)}"
            self.lines.append(f" {self.names[leaf]} = leaves[{place}]")
            self.lies[leaf] = leaf
            self.memory.read(leaf, -1.0 if leaf in scratch else inf)
            if leaf in scratch:
                self.memory.dense.add(leaf)

    def write(self, at: int) -> None:
        """One step, and the end of what it read last."""
        step = self.steps[at]
        for output in step.outputs:
            self.names[output] = f"v{len(self.names)}"
        operands = [self.names[i] for i in step.inputs]
        output, over = step.outputs[0], _over(step, at, self.memory)
        early = at < self.early  # nothing may be lost yet
        if early and over is not None and self.lies.get(step.inputs[over[0]]) in self.homes:
            over = None
        target = None if early else self.targets.get(output)
        if over is not None:
            number, source = over
            if step.inputs[number] in self.lies:
                self.lies[output] = self.lies[step.inputs[number]]
        elif target is not None and step.into and self._vacant(target, step, at):
            source = step.into.replace("{out}", f"outs[{self.places[target]}]")
            self.done.add(target)
        else:
            source = step.source
        if not step.fresh:
            for value in step.inputs:
                if value in self.lies:
                    self.lies[output] = self.lies[value]
        if target is not None and self.into[target] is not None and self.lies.get(output) is self.into[target]:
            self.done.add(target)
        named = ", ".join(self.names[o] if o in self.needed else "_" for o in step.outputs)
        self.lines.append(f" {named} = {source.format(*operands)}")
        dead = [self.names[i] for i in dict.fromkeys(step.inputs) if self.last[i] == at and i not in self.kept]
        dead = [name for name in dead if name[0] == "v"]
        if dead:
            self.lines.append(f" del {', '.join(dead)}")

    def _vacant(self, target: str, step: Step, at: int) -> bool:
        """Whether the memory that a result is to lie in holds nothing that is read from here on."""
        home = self.into[target]
        if home is None:  # memory of its own
            return True
        tenants = [value for value, leaf in self.lies.items() if leaf is home]
        return all(self.memory.last[self.memory.root(v)] < at for v in tenants)

    def finish(self) -> None:
        """Copies the results that do not lie where they belong."""
        left = [name for name in self.into if name not in self.done and self.results[name] is not self.into[name]]
        for name in left:
            value = self.results[name]
            if self.lies.get(value) is not None and len(left) > 1:  # its memory may be another's home
                self.lines.append(f" {self.names[value]} = {self.names[value]}.clone()")
                self.lies.pop(value)
        for name in left:
            self.lines.append(f" outs[{self.places[name]}].copy_({self.names[self.results[name]]})")

    def give(self, names: Iterable[str]) -> str:
        return f"return ({''.join(self.names[self.results[n]] + ', ' for n in names)})"


def emit(
    results: Mapping[str, Node],
    leaves: Sequence[Node],
    into: Mapping[str, Node | None] | None = None,
    scratch: Iterable[Node] = (),
    first: Sequence[str] = (),
    fused: bool = True,
) -> tuple[str, dict[str, Any]]:
    """The source of `program(leaves, context, outs) -> tuple of the results that are not in `into``, and its namespace.

    into: result -> the leaf whose memory takes it (None: memory of its own); `outs` are those tensors, in this order.
    scratch: leaves whose memory may be written over once they were read last. first: results to compute before all
    others; when there are any, nothing but scratch is written unless `context.passes` is true of them.
    fused: false has every op by itself, in the order of the graph's own rounding.
    """
    into = into or {}
    writer = _Writer(results, leaves, into, set(scratch), first, fused)
    for at in range(len(writer.steps) + 1):
        if first and at == writer.early:
            writer.lines.append(f" if not context.passes({', '.join(writer.names[results[n]] for n in first)}):")
            writer.lines.append(f"  {writer.give([name for name in results if name in set(first)])}")  # as `names` has them
        if at < len(writer.steps):
            writer.write(at)
    writer.finish()
    writer.lines.append(" " + writer.give(name for name in results if name not in into))
    return "\n".join(writer.lines), writer.space


def _lifetimes(steps: Sequence[Step], results: Mapping[str, Node], memory: _Memory) -> None:
    """Joins what shares memory and notes until when each is read; results are read for ever."""
    for step in steps:
        for output in step.outputs:
            memory.last.setdefault(output, -1.0)
        if step.fresh:
            memory.dense.add(step.outputs[0])
            continue
        view = isinstance(step.outputs[0], Node) and step.outputs[0].op in _DENSE_VIEWS
        if view and step.inputs[0] in memory.dense:
            memory.dense.add(step.outputs[0])
        for value in step.inputs:  # a value of unknown make may lie in any operand's memory
            memory.join(step.outputs[0], value)
    for at, step in enumerate(steps):
        for value in step.inputs:
            memory.read(value, at)
    for node in results.values():
        memory.read(node, inf)


def _over(step: Step, at: int, memory: _Memory) -> tuple[int, str] | None:
    """(operand, source that writes over it) of one which nothing else reads at this step or later."""
    for number, source in step.over.items():
        value = step.inputs[number]
        root = memory.root(value)
        others = [i for n, i in enumerate(step.inputs) if n != number and i is not value]
        if value in memory.dense and memory.last[root] == at and all(memory.root(i) is not root for i in others):
            return number, source
    return None

"""A compiled graph: called with values for its leaves, gives its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sexpgpu.backends.interpreter.draws import Mask
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.emit import emit
from sexpgpu.backends.interpreter.repeat import Repeat
from sexpgpu.ir import Graph, Node, postorder
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND
from sexpgpu.ops.random import DRAWS, DrawContext


class Executable:
    """The results of a graph as a function of its leaves, on the CPU, without autograd.

    leaves: the nodes to bind (inputs, params, states, statistics …), in postorder; not `(step)`, which `run` fills in.
    A result may be a view of a binding or of another result: copy what must outlive a change of it.
    """

    def __init__(
        self,
        results: Graph | Mapping[str, Node],
        into: Mapping[str, Node | None] | None = None,
        scratch: Iterable[Node] = (),
        first: Sequence[str] = (),
        fused: bool = True,
        again: Repeat | None = None,
    ):
        """into, scratch, first, fused, again: see `emit`; a program with `first` gives those alone if its context does not let it pass."""
        self.results: dict[str, Node] = dict(results.results if isinstance(results, Graph) else results)
        order = postorder(self.results.values())
        self.leaves: list[Node] = [n for n in order if n.op in BOUND and n.op != "step"]
        self.samples = next((n.type.shape[0] for n in self.leaves if n.op == "input" and n.type.batch), 0)
        self.names = [name for name in self.results if name not in (into or {})]
        steps = [n for n in order if n.op == "step"]
        self._has_step = bool(steps)
        self._draws = any(n.op in DRAWS for n in order)
        source, space = emit(self.results, self.leaves + steps, into, scratch, first, fused, again)
        self.masks = [value for value in space.values() if isinstance(value, Mask)]
        exec(compile(source, "<sexpgpu graph>", "exec"), space)  # noqa: S102 - our own numbered names, no user text
        self._program: Callable[[Sequence[Any], Any, Sequence[Any]], tuple[Any, ...]] = space["program"]

    def run(
        self, bindings: Mapping[Node, torch.Tensor], seed: int = 0, step: int = 0, sample_offset: int = 0
    ) -> dict[str, torch.Tensor]:
        """Result name -> tensor. `bindings`: a tensor of the leaf's dtype and shape for each of `leaves`."""
        values = self.run_list([bindings[leaf] for leaf in self.leaves], seed, step, sample_offset)
        return dict(zip(self.names, values, strict=True))

    def run_list(
        self, values: list[torch.Tensor], seed: int = 0, step: int = 0, sample_offset: int = 0
    ) -> tuple[Any, ...]:
        """`run` without names: values in the order of `leaves`, results in the order of `names`."""
        with torch.no_grad():
            return self.call(values, self.context(seed, step, sample_offset), step)

    def call(self, values: list[Any], context: Any, step: int, outs: Sequence[torch.Tensor] = ()) -> tuple[Any, ...]:
        """`run_list` under the caller's grad mode and context; outs: where the results of `into` go, in its order."""
        if self._has_step:
            values = [*values, torch.tensor(step, dtype=torch.int32)]
        return self._program(values, context, outs)

    def walk(
        self,
        bindings: Mapping[Node, torch.Tensor],
        seed: int = 0,
        step: int = 0,
        sample_offset: int = 0,
        look: Callable[[Node, list[torch.Tensor]], None] | None = None,
    ) -> Iterator[tuple[Node, list[torch.Tensor], torch.Tensor]]:
        """Op by op: (node, operand values, value), each through its op's reference; what an autopsy searches.

        A value is let go where it was used last, as in `run`: the caller keeps what it needs. `look`: sees each node
        with its operands before it is computed.
        """
        context, ops = self.context(seed, step, sample_offset), table()
        order = postorder(self.results.values())
        last = {operand: node for node in order for operand in node.inputs}
        values: dict[Node, torch.Tensor] = {}
        for node in order:
            operands = [values[i] for i in node.inputs]
            if look is not None:
                look(node, operands)
            with torch.no_grad():
                if node.op == "step":
                    value = torch.tensor(step, dtype=torch.int32)
                elif node.op in BOUND:
                    value = bindings[node]
                else:
                    extra = [context] if node.op in DRAWS else []
                    value = ops[node.op].reference(torch, node, [*operands, *extra])
            if node in last:
                values[node] = value
            yield node, operands, value
            for operand in dict.fromkeys(node.inputs):
                if last[operand] is node:
                    del values[operand]

    def check(self, bindings: Mapping[Node, torch.Tensor]) -> None:
        """Every leaf is bound to a tensor of its dtype and shape, or ValueError names it."""
        for leaf in self.leaves:
            value = bindings.get(leaf)
            if value is None or tuple(value.shape) != leaf.type.shape or value.dtype != TORCH[leaf.type.dtype]:
                got = "nothing" if value is None else f"{value.dtype}{list(value.shape)}"
                raise ValueError(f"{leaf.op} {leaf.attrs} is {leaf.type}, bound to {got}")

    def context(self, seed: int, step: int, offset: int = 0) -> DrawContext:
        """What the draws of a call depend on."""
        return DrawContext(seed, step, offset, self.samples) if self._draws else _NO_DRAWS


_NO_DRAWS = DrawContext()


def compile_graph(results: Graph | Mapping[str, Node]) -> Executable:
    """The interpreter's form of a graph."""
    return Executable(results)

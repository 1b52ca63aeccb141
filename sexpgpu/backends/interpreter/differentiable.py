"""A graph as a function of torch tensors that torch's autograd differentiates by the graph's own gradient, to any order.

The pullback of a graph is a graph: the gradients of Σ result · cotangent by the leaves, with the cotangents as further
leaves. So the backward pass of a call is such a call again. It computes anew what it needs of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sexpgpu.backends.interpreter.program import Compiled
from sexpgpu.backends.leaves import source_of
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.simplify import simplify


@dataclass(frozen=True)
class Context:
    """What a graph's numbers depend on beside its leaves; `threads` None: as many as torch has."""

    seed: int = 0
    updates: int = 0
    threads: int | None = None


class Differentiable:
    """`results` as a function of `leaves` (inputs, parameters, states), typed as traced, before `precision`."""

    def __init__(self, results: Sequence[Node], leaves: Sequence[Node], precision: str, origins: Origins, level: int = 0):
        named = expand_gradients({f"{i}": node for i, node in enumerate(results)}, origins)
        self.results, self.leaves = tuple(named.values()), tuple(leaves)
        self.precision, self.origins, self.level = precision, origins, level
        self._compiled: Compiled | None = None
        self._pullbacks: dict[tuple[tuple[int, ...], tuple[int, ...]], Differentiable] = {}

    def call(self, values: Sequence[torch.Tensor], context: Context) -> tuple[torch.Tensor, ...]:
        """The results; what requires a gradient among `values` (one a leaf, of its shape) gets one."""
        return _Call.apply(self, context, *values)

    def run(self, values: Sequence[torch.Tensor], context: Context) -> tuple[torch.Tensor, ...]:
        """The results without autograd, each in memory of its own."""
        if self._compiled is None:
            named = {f"{i}": node for i, node in enumerate(self.results)}
            self._compiled = Compiled(simplify(apply_precision(named, self.precision)))
        bound = {source_of(leaf): value for leaf, value in zip(self.leaves, values, strict=True)}
        with _threads(context.threads):
            out = self._compiled.run(bound, context.seed, context.updates)
        return tuple(_own(out[f"{i}"]) for i in range(len(self.results)))

    def pullback(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Differentiable:
        """The gradients by the leaves numbered `wanted`, from cotangents of the results numbered `given`."""
        if (wanted, given) not in self._pullbacks:
            cotangents = [self._cotangent(i) for i in given]
            total = None
            for number, ct in zip(given, cotangents, strict=True):
                part = build("sum", build("*", self.results[number], ct))
                total = part if total is None else build("+", total, part)
            assert total is not None, "a pullback is of one result or more"
            found = grad(total, [self.leaves[i] for i in wanted], self.origins)
            leaves = (*self.leaves, *cotangents)
            self._pullbacks[wanted, given] = Differentiable(found, leaves, self.precision, self.origins, self.level + 1)
        return self._pullbacks[wanted, given]

    def _cotangent(self, number: int) -> Node:
        """A leaf like the result; its name has a blank, so it is no name of a program's."""
        kind = self.results[number].type
        name = f"cotangent {self.level} {number}"
        return build("input", name=name, dtype=kind.dtype, shape=kind.shape, batch=kind.batch)


class _Call(torch.autograd.Function):
    """One call of a graph, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, graph: Differentiable, context: Context, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graph, ctx.context = graph, context
        ctx.save_for_backward(*values)
        ctx.set_materialize_grads(False)
        results = graph.run(values, context)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        graph, needs = ctx.graph, ctx.needs_input_grad[2:]
        wanted = tuple(i for i, leaf in enumerate(graph.leaves) if needs[i] and leaf.type.is_float)
        given = {i: ct.contiguous() for i, ct in enumerate(cotangents) if ct is not None and graph.results[i].type.is_float}
        gradients: list[torch.Tensor | None] = [None] * len(graph.leaves)
        if wanted and given:
            found = graph.pullback(wanted, tuple(given)).call((*ctx.saved_tensors, *given.values()), ctx.context)
            for i, value in zip(wanted, found, strict=True):
                gradients[i] = value
        return (None, None, *gradients)


def _own(value: torch.Tensor) -> torch.Tensor:
    """A copy: a result may be a leaf's own tensor, a view, or a constant of the graph."""
    return value.clone(memory_format=torch.contiguous_format)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """The number of threads decides the order of sums."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""A `tensor-product-parts` node run: for one part of the edges after another, the weights of its edges by a matrix product, the tensor product, and
the matrix products that its weights' gradients go to. Only what a part makes for itself is written to memory that the next part takes again.

Sums at a node are added to those of the parts before, in their order: a walk of a part stores where no earlier part has edges of the node, and adds
otherwise (`Walk.states`). Sums over all edges, gradients of matrices, are left in parts and added at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from sexpgpu.backends.cuda import choice, modules, tall
from sexpgpu.backends.cuda.cartesian.lanes import suits
from sexpgpu.backends.cuda.cartesian.launch import Edges, Outputs, Runner, together
from sexpgpu.backends.cuda.cartesian.plan import plan
from sexpgpu.backends.cuda.cartesian.product import Product, of_node, rows_of
from sexpgpu.ir import Node
from sexpgpu.ops import build


class Around(NamedTuple):
    """The matrix products of a part, as nodes of its `edges`, for what `tall` chooses by them. weights: number of an operand -> node; behind: of each product
    in `after`."""

    weights: Mapping[int, Node]
    behind: tuple[Node, ...]


def takes(node: Node) -> bool:
    """Whether there are kernels for it: of what the pass makes there are."""
    product = of_node(node)[0]
    return product.dtype == "f32" and suits(product)


@cache
def _products(node: Node, edges: int) -> Around:
    a, count = node.attrs, len(node.attrs["slots"])
    rest = list(node.inputs[count:-2])

    def leaf(name: str, *shape: int) -> Node:
        return build("input", name=name, shape=shape, dtype="f32", batch=False)

    def matrix(x: Node) -> Node:
        """Stands as it lies in memory: transposed or not."""
        return build("transpose", leaf("matrix", *x.type.shape[::-1]), permutation=(1, 0)) if x.op == "transpose" else leaf("matrix", *x.type.shape)

    weights = {}
    for n, scale in enumerate(a["scales"]):
        if scale:
            right = matrix(rest.pop(0))
            weights[n] = build("matmul-sum", leaf("rows", edges, right.type.shape[0]), right, scale=scale, again=1)
    behind = []
    for (number, kind, scale), other in zip(a["after"], rest, strict=True):
        gradient = leaf("gradient", edges, a["outputs"][number][1][1])
        if kind == "rows":
            behind.append(build("matmul-sum", gradient, matrix(other), scale=scale, again=1))
        else:
            rows = build("transpose", leaf("rows", edges, other.type.shape[1]), permutation=(1, 0))
            behind.append(build("matmul-sum", rows, gradient, scale=scale, again=1))
    return Around(weights, tuple(behind))


def _sizes(node: Node) -> list[int]:
    """Edges of each part."""
    size, edges = node.attrs["size"], node.inputs[-1].type.size
    return [min(size, edges - start) for start in range(0, edges, size)]


def _hidden(node: Node) -> dict[int, int]:
    """Outputs that stand for a part alone -> their columns."""
    return {number: node.attrs["outputs"][number][1][1] for number, _, _ in node.attrs["after"]}


def scratch(node: Node) -> int:
    """Bytes of what a part makes for itself, and of sums over all edges in their parts."""
    size, made = node.attrs["size"], _products(node, node.attrs["size"])
    columns = sum(w.type.shape[1] for w in made.weights.values()) + sum(_hidden(node).values())
    sums = sum(tall.sums_room(n, len(_sizes(node))) for n, (_, kind, _) in zip(made.behind, node.attrs["after"], strict=True) if kind == "sums")
    return 4 * size * columns + sums


def ahead(node: Node) -> list[modules.Wanted]:
    """The kernels of its matrix products, to be compiled with others."""
    made, count = _products(node, node.attrs["size"]), len(_sizes(node))
    found = [w for n in made.weights.values() for w in tall.tall_ahead(n)]
    for n, (_, kind, _) in zip(made.behind, node.attrs["after"], strict=True):
        found += tall.sums_ahead(n, count) if kind == "sums" else tall.tall_ahead(n)
    return found


class PartOutputs(Outputs):
    """The outputs of a part. `whole`: (output, its which tensor) -> sums at nodes, that all parts share; `given`: tensors for outputs whose sums are
    made at once."""

    onto = True

    def __init__(self, runner: Runner, product: Product, operands: Sequence[torch.Tensor], edges: Any, rows: int, whole: dict[tuple[int, int], torch.Tensor], given: Mapping[int, torch.Tensor]):
        super().__init__(runner, product, operands, edges, rows)
        self.whole, self.given, self.usual = whole, given, edges.edges

    def _new(self, number: int, parts: int, rows: int, zero: bool, low: bool) -> torch.Tensor:
        which = number, len(self.raw.get(number, ()))
        if number not in self.walked:
            own = self.given.get(number)
            return own.view(1, rows, -1) if own is not None and parts == 1 and not which[1] and not zero else super()._new(number, parts, rows, zero, low)
        if which not in self.whole:
            own = self.given.get(number)
            made = own.view(1, rows, -1) if own is not None and parts == 1 and not which[1] else super()._new(number, parts, rows, False, False)
            self.whole[which] = made.zero_() if zero else made
        return self.whole[which]


def run(runner: Runner, node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor], room: torch.Tensor, edges: Edges) -> None:
    """All results of the node over `operands` into `outs`, by number; room: bytes of `scratch`."""
    a, (product, _, _) = node.attrs, of_node(node)
    count, size, rows = len(a["slots"]), a["size"], rows_of(node)
    others = list(operands[count:-2])
    made = _products(node, size)
    matrices = {n: others.pop(0) for n in made.weights}
    sizes, hidden = _sizes(node), _hidden(node)
    views = _Room(room)
    weights = {n: views.take(size, w.type.shape[1]) for n, w in made.weights.items()}
    gradients = {n: views.take(size, columns) for n, columns in hidden.items()}
    sums = {n: views.take(tall.sums_room(w, len(sizes)) // 4) for n, (w, (_, kind, _)) in enumerate(zip(made.behind, a["after"], strict=True)) if kind == "sums"}
    whole: dict[tuple[int, int], torch.Tensor] = {}
    side = choice.side() if room.is_cuda else None
    launches = plan(product, runner.config)  # gradients by features always by senders, where their sums end
    for number, (part, (start, stop)) in enumerate(zip(edges.parts(size), _spans(sizes), strict=True)):
        length = stop - start
        now = made if length == size else _products(node, length)
        given: list[torch.Tensor] = []
        for n, slot in enumerate(product.slots):
            if n in weights:
                own = weights[n][:length]
                tall.matmul_sum(now.weights[n], [operands[n][start:stop], matrices[n]], {0: own}, room[:0])
                given.append(own)
            else:
                given.append(operands[n][start:stop] if slot in ("b", "weights") else operands[n])
        places: dict[int, torch.Tensor] = {}
        for n, output in enumerate(product.outputs):
            if n in gradients:
                places[n] = gradients[n][:length]
            elif n in outs:
                places[n] = outs[n].view(outs[n].shape[0], -1)[start:stop] if output.target in ("b", "weights") else outs[n].view(rows, -1)
        if side is not None and number:
            torch.cuda.current_stream().wait_stream(side)
        done = PartOutputs(runner, product, given, part, rows, whole, places)
        together([work for launch in launches if (work := done.prepared(launch))], done.device)
        last = number == len(sizes) - 1
        for n, output in enumerate(product.outputs):
            by_edge = output.target in ("b", "weights")
            if by_edge or last:
                value = done.finish(n)
                if n in places and value.data_ptr() != places[n].data_ptr():
                    places[n].copy_(value.view(places[n].shape))
        with choice.beside(side) if side is not None else nullcontext():  # beside what makes the next part's weights
            for n, ((of, kind, _), other) in enumerate(zip(a["after"], others, strict=True)):
                gradient, out = gradients[of][:length], outs.get(len(product.outputs) + n)
                if out is None:
                    continue
                if kind == "rows":
                    tall.matmul_sum(now.behind[n], [gradient, other], {0: out[start:stop]}, room[:0])
                else:
                    tall.sums_part(made.behind[n], [other[start:stop].t(), gradient], out, sums[n], number, len(sizes))
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


class _Room:
    """Tensors of f32 one after another in bytes."""

    def __init__(self, room: torch.Tensor):
        self.left = room.view(torch.float32)

    def take(self, *shape: int) -> torch.Tensor:
        size = 1
        for n in shape:
            size *= n
        found, self.left = self.left[:size].view(shape), self.left[size:]
        return found

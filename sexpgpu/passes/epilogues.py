"""What a library's matrix product can do on its way out: GELU, its gradient, sums of a gradient's rows, a residual.

Runs on a decomposed graph (`schedule/decompose.py`) in which a product of bf16 operands is `matmul`, and what follows it is in f32. Nodes
are interned, so a gradient of GELU is found as exactly the node that the rule makes. relu is not among them: the vendor's turns NaN
into 0, and ours keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, table
from sexpgpu.passes.join import replaced

KINDS = ("gelu", "gelu-grad", "sum", "residual")


@dataclass(frozen=True)
class Decision:
    """A product that has an epilogue, or why it has none. `node`: what the epilogue computes."""

    kind: str
    node: Node
    taken: bool
    why: str


class _Graph:
    """A graph with who reads each node."""

    def __init__(self, results: Mapping[str, Node]):
        self.order = postorder(results.values())
        self.kept = set(results.values())
        self.readers: dict[Node, list[Node]] = {n: [] for n in self.order}
        for node in self.order:
            for operand in dict.fromkeys(node.inputs):
                self.readers[operand].append(node)

    def alone(self, node: Node) -> Node | None:
        """The only reader of a node that is no result."""
        found = self.readers[node]
        return found[0] if len(found) == 1 and node not in self.kept else None

    def product(self, wide: Node) -> Node | None:
        """The bf16 or f16 product that `wide` is in f32, where nothing else reads it."""
        if wide.op != "cast" or wide.type.dtype != "f32":
            return None
        x = wide.inputs[0]
        fits = x.op == "matmul" and x.type.dtype in ("bf16", "f16") and x.inputs[1].type.rank == 2 and x.inputs[0].type.rank >= 2
        return x if fits and self.alone(x) is wide else None

    def biased(self, node: Node) -> tuple[Node, Node] | None:
        """(product, row) of product + row in f32, where nothing else reads the product."""
        if node.op != "+":
            return None
        for wide, row in (node.inputs, node.inputs[::-1]):
            product = self.product(wide)
            if product is not None and self.alone(wide) is node and row.type.shape == product.type.shape[-1:]:
                return product, row
        return None


def epilogues(results: Mapping[str, Node], kinds: frozenset[str], origins: Origins | None = None) -> tuple[dict[str, Node], list[Decision]]:
    """The graph with the epilogues of these `KINDS`, and what was decided of each product that one might follow."""
    told: list[Decision] = []
    found = dict(results)
    if "gelu" in kinds:
        found = _gelus(found, "gelu-grad" in kinds, told, origins)
    if "residual" in kinds:
        found = _residuals(found, told, origins)
    if "sum" in kinds:
        found = _bias_gradients(found, told, origins)
    return found, told


def _gelus(results: Mapping[str, Node], gradients: bool, told: list[Decision], origins: Origins | None) -> dict[str, Node]:
    graph = _Graph(results)
    found: dict[Node, Node] = {}
    before: dict[Node, Node] = {}  # gelu -> what it is applied to, rounded
    for node in graph.order:
        if node.op != "gelu-tanh" or node.type.dtype != "f32":
            continue
        parts, cast = graph.biased(node.inputs[0]), graph.alone(node)
        if parts is None:
            told.append(Decision("gelu", node, False, "it is applied to no product with a bias that it alone reads"))
            continue
        product, row = parts
        if cast is None or cast.op != "cast" or cast.type.dtype != product.type.dtype:
            told.append(Decision("gelu", node, False, f"its value is read in f32, and the product would round it to {product.type.dtype}"))
            continue
        operands = (*product.inputs, build("cast", row, dtype=product.type.dtype))
        found[cast] = build("matmul-gelu", *operands, of=0)
        before[node] = build("matmul-gelu", *operands, of=1)
        found[node.inputs[0]] = build("cast", before[node], dtype="f32")
        told.append(Decision("gelu", node, True, "gelu and bias in the product; what gelu is applied to is kept for the gradient" if _again(node.inputs[0], graph) else "gelu and bias in the product"))
    if gradients:
        found |= _gelu_gradients(graph, before, told)
    return replaced(results, found, origins)


def _again(x: Node, graph: _Graph) -> bool:
    return len(graph.readers[x]) > 1


def _gelu_gradients(graph: _Graph, before: Mapping[Node, Node], told: list[Decision]) -> dict[Node, Node]:
    found: dict[Node, Node] = {}
    for gelu, x in before.items():
        slope = _derivative(gelu, gelu).inputs[1]
        taken = False
        for node in graph.readers.get(slope, ()):
            for ct, product in _cotangents(node, slope, graph):
                reads = graph.readers[node]
                if node in graph.kept or _derivative(gelu, ct) is not node or any(r.op != "sum" and not _narrow(r, product) for r in reads):
                    continue
                new = build("matmul-gelu-grad", *product.inputs, x)
                found |= {r: new for r in reads if _narrow(r, product)}
                found[node] = build("cast", new, dtype="f32")
                taken = True
        if taken or slope in graph.readers:
            told.append(Decision("gelu-grad", gelu, taken, "its gradient in the product that it multiplies" if taken else "its gradient multiplies no product alone"))
    return found


def _derivative(gelu: Node, ct: Node) -> Node:
    found = table()["gelu-tanh"].vjp(gelu, ct)  # type: ignore[misc]
    assert found[0] is not None
    return found[0]


def _cotangents(node: Node, slope: Node, graph: _Graph) -> Iterator[tuple[Node, Node]]:
    """(ct, product) of a node ct · ½ · slope whose ct is a product that nothing else reads."""
    if node.op != "*" or slope not in node.inputs:
        return
    half = node.inputs[0] if node.inputs[1] is slope else node.inputs[1]
    if half.op != "*" or graph.alone(half) is not node:
        return
    for ct in half.inputs:
        product = graph.product(ct) if ct in graph.readers else None
        if product is not None and graph.alone(ct) is half:
            yield ct, product


def _narrow(node: Node, product: Node) -> bool:
    return node.op == "cast" and node.type.dtype == product.type.dtype


def _residuals(results: Mapping[str, Node], told: list[Decision], origins: Origins | None) -> dict[str, Node]:
    """x + (product + row) in f32: added to the sums before anything is rounded."""
    graph = _Graph(results)
    found: dict[Node, Node] = {}
    for node in graph.order:
        if node.op != "+" or node.type.dtype != "f32":
            continue
        for part, x in (node.inputs, node.inputs[::-1]):
            parts = graph.biased(part)
            if parts is None or graph.alone(part) is not node or x.type.shape != node.type.shape or part.type.shape != node.type.shape:
                continue
            found[node] = build("matmul-add", *parts[0].inputs, parts[1], x)
            told.append(Decision("residual", node, True, "bias and residual in the product, in f32"))
            break
    return replaced(results, found, origins)


def _bias_gradients(results: Mapping[str, Node], told: list[Decision], origins: Origins | None) -> dict[str, Node]:
    """The sums over the rows of a product's right operand, where that is in memory as a call gave it: with the product by it."""
    graph = _Graph(results)
    sums: dict[Node, Node] = {}
    for node in graph.order:
        if node.op == "sum" and node.type.dtype == "f32" and node.type.rank == 1 and node.inputs[0].op == "cast":
            x = node.inputs[0].inputs[0]
            if x.type.dtype in ("bf16", "f16") and node.attrs["axis"] == tuple(range(x.type.rank - 1)):
                sums.setdefault(_same_rows(x), node)
    found: dict[Node, Node] = {}
    for node in graph.order:
        if node.op != "matmul-f32" or node.type.rank != 2 or node.inputs[0].type.rank != 2:
            continue
        total = sums.pop(_same_rows(node.inputs[1]), None)
        if total is None or total.type.shape != node.type.shape[1:]:
            continue
        found[node] = build("matmul-rows", *node.inputs, of=0)
        found[total] = build("matmul-rows", *node.inputs, of=1)
        told.append(Decision("sum", total, True, "the bias's gradient with the weight's, in one product"))
    told += [Decision("sum", total, False, "no product has these rows as its right operand; a kernel that reads them adds them up") for total in sums.values()]
    return replaced(results, found, origins)


def _same_rows(x: Node) -> Node:
    """The tensor under reshapes that keep the last axis."""
    while x.op == "reshape" and x.inputs[0].type.rank and x.inputs[0].type.shape[-1] == x.type.shape[-1]:
        x = x.inputs[0]
    return x

"""What a library's matrix product can do on its way out: GELU, its gradient, sums of a gradient's rows, a residual; and attention's
gradient: its own sums.

Runs on a decomposed graph (`schedule/decompose.py`) in which a product of bf16 operands is `matmul`, and what follows it is in f32. Nodes
are interned, so a gradient of GELU is found as exactly the node that the rule makes. relu is not among them: the vendor's turns NaN
into 0, and ours keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.passes.join import replaced
from sexpgpu.passes.schedule.recompute import BANDWIDTH, LAUNCH
from sexpgpu.passes.slopes import cotangents, derivative, slope

KINDS = ("gelu", "gelu-grad", "sum", "residual", "attend-sum")
EPILOGUE = 2.4e12  # bytes/s at which a product's epilogue reads what it needs besides: an H200 under its power cap (decision 0056)
HEADS = (16, 32, 64, 128)  # widths of heads that the device's kernels of attention's gradient take


@dataclass(frozen=True)
class Decision:
    """A product, or a gradient of attention, that has an epilogue, or why it has none. `node`: what the epilogue computes."""

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


def epilogues(results: Mapping[str, Node], kinds: frozenset[str], origins: Origins | None = None, passes: bool = True) -> tuple[dict[str, Node], list[Decision]]:
    """The graph with the epilogues of these `KINDS`, and what was decided of each product that one might follow. passes: whether what a
    kernel behind the product does in less time is left to it."""
    told: list[Decision] = []
    found = dict(results)
    if "gelu" in kinds:
        found = _gelus(found, kinds, passes, told, origins)
    if "residual" in kinds:
        found = _residuals(found, told, origins)
    if "attend-sum" in kinds:
        found = _attention_sums(found, told, origins)
    if "sum" in kinds:
        found = _bias_gradients(found, told, origins)
    return found, told


def _gelus(results: Mapping[str, Node], kinds: frozenset[str], passes: bool, told: list[Decision], origins: Origins | None) -> dict[str, Node]:
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
    if "gelu-grad" in kinds:
        found |= _gelu_gradients(graph, before, "sum" in kinds, passes, told)
    return replaced(results, found, origins)


def _again(x: Node, graph: _Graph) -> bool:
    return len(graph.readers[x]) > 1


def _gelu_gradients(graph: _Graph, before: Mapping[Node, Node], sums: bool, passes: bool, told: list[Decision]) -> dict[Node, Node]:
    found: dict[Node, Node] = {}
    for gelu, x in before.items():
        factor = slope(gelu)
        taken, why = False, "its gradient multiplies no product alone"
        for node in graph.readers.get(factor, ()):
            for ct in cotangents(node):
                product = graph.product(ct) if ct in graph.readers and graph.alone(ct) is not None else None
                if product is None or node in graph.kept or derivative(gelu, ct) is not node:
                    continue
                reads = graph.readers[node]
                summed = any(r.op == "sum" for r in reads)
                if graph.alone(_half(node, factor)) is not node or any(r.op != "sum" and not _narrow(r, product) for r in reads):
                    continue
                own, there = _gradient_seconds(product, x, sums)
                if passes and summed and own < there:
                    why = (f"a kernel behind the product makes it with the bias's gradient in {own * 1e6:.0f} µs, and gelu where that is needed once more; "
                           f"in two products' epilogues it would add {there * 1e6:.0f}")
                    continue
                new = build("matmul-gelu-grad", *product.inputs, x)
                found |= {r: new for r in reads if _narrow(r, product)}
                found[node] = build("cast", new, dtype="f32")
                taken, why = True, "its gradient in the product that it multiplies"
        if taken or factor in graph.readers:
            told.append(Decision("gelu-grad", gelu, taken, why))
    return found


def _half(node: Node, factor: Node) -> Node:
    return node.inputs[0] if node.inputs[1] is factor else node.inputs[1]


def _gradient_seconds(product: Node, x: Node, sums: bool) -> tuple[float, float]:
    """What GELU's gradient with its sum over rows takes beside plain products: in a kernel of its own, which reads the product and `x` and
    writes one tensor; and as epilogues, which read `x`, and for the sum the gradient, while their products wait."""
    own = LAUNCH + (2 * product.type.bytes + x.type.bytes) / BANDWIDTH
    rows = product.type.bytes
    return own, x.type.bytes / EPILOGUE + (rows / EPILOGUE if sums else LAUNCH + rows / BANDWIDTH)


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


def sums_itself(node: Node) -> bool:
    """Whether the kernels that make an `attend-grad-packed` can leave its sums: those of their own, which are for heads of few widths."""
    q = node.inputs[1].type
    return q.dtype in ("bf16", "f16") and q.shape[-1] in HEADS and node.attrs["window"] is None


def _attention_sums(results: Mapping[str, Node], told: list[Decision], origins: Origins | None) -> dict[str, Node]:
    """The sums over the rows of attention's packed gradient, where the kernels that write it for others have it in registers."""
    graph = _Graph(results)
    found: dict[Node, Node] = {}
    for total in graph.order:
        packed = _summed(total)
        if packed is None or packed.op != "attend-grad-packed" or packed.attrs["of"]:
            continue
        if not sums_itself(packed):
            window, width = packed.attrs["window"] is not None, packed.inputs[1].type.shape[-1]
            told.append(Decision("attend-sum", total, False, "torch makes the gradient of a window" if window else f"torch makes the gradient of heads {width} wide"))
            continue
        wide = total.inputs[0]
        others = [r for x in (packed, wide) for r in graph.readers[x] if r not in (wide, total)]
        if others or {packed, wide} & graph.kept:
            found[total] = build(packed.op, *packed.inputs, **{**packed.attrs, "of": 1})
            told.append(Decision("attend-sum", total, True, "the bias's gradient by the kernels that write the gradient of the projection"))
    return replaced(results, found, origins)


def _summed(node: Node) -> Node | None:
    """Whose rows a node adds up in f32: a narrow tensor under reshapes that keep the last axis; None: it does something else."""
    if node.op != "sum" or node.type.dtype != "f32" or node.type.rank != 1 or node.inputs[0].op != "cast":
        return None
    x = node.inputs[0].inputs[0]
    return _same_rows(x) if x.type.dtype in ("bf16", "f16") and node.attrs["axis"] == tuple(range(x.type.rank - 1)) else None


def _bias_gradients(results: Mapping[str, Node], told: list[Decision], origins: Origins | None) -> dict[str, Node]:
    """The sums over the rows of a product's right operand, where that is in memory as a call gave it: with the product by it."""
    graph = _Graph(results)
    sums: dict[Node, Node] = {}
    for node in graph.order:
        rows = _summed(node)
        if rows is not None:
            sums.setdefault(rows, node)
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

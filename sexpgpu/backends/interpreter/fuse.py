"""Which nodes of a graph one call of torch computes together, and the call. No text of a user's enters a call.

`fusions` looks for shapes of expressions that torch has one kernel for, gradients beside their forward pass included;
every node it does not name is emitted alone. A fused call gives the same values up to the rounding of float sums.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from sexpgpu.ir import Node
from sexpgpu.ops import build, table
from sexpgpu.ops.definition import OpProblem
from sexpgpu.passes.simplify import simplify

#: a node, or (word, node): something a call gives beside nodes, for its gradient
Value = Hashable
FUSABLE = ("f32", "f64")


@dataclass(frozen=True)
class Step:
    """One assignment. The templates are over {0} {1} …, the names of `inputs`, and {out}.

    fresh: the outputs lie in memory of their own. over: input number -> source that writes the output over that input,
    of equal shape and dtype. into: source that writes the only output to {out}. needs: what the source calls by a number:
    ("reference", number, node), or ("mask", number, draw, factor or None).
    """

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    source: str
    fresh: bool = False
    over: Mapping[int, str] = field(default_factory=dict)
    into: str = ""
    needs: tuple[Any, ...] = ()


class Graph:
    """A graph's nodes in order, their users, and what looks into it needs."""

    def __init__(self, order: Sequence[Node], results: Iterable[Node]):
        self.order, self.nodes = order, set(order)
        self.results = set(results)
        self.users: dict[Node, list[Node]] = {node: [] for node in order}
        for node in order:
            for operand in dict.fromkeys(node.inputs):
                self.users[operand].append(node)

    def once(self, node: Node) -> bool:
        """Whether it has one user, which may then compute it inside itself."""
        return len(self.users[node]) == 1 and node not in self.results

    def of(self, node: Node, op: str) -> list[Node]:
        """The users of a node that are of this op."""
        return [user for user in self.users[node] if user.op == op]

    def find(self, name: str, *inputs: Node, **attrs: Any) -> Node | None:
        """The node of these parts, in its simplest form, if the graph has it."""
        try:
            node = build(name, *inputs, **attrs)
        except OpProblem:
            return None
        if node not in self.nodes:
            node = simplify({"x": node})["x"]
        return node if node in self.nodes else None


def fusions(order: Sequence[Node], results: Iterable[Node]) -> dict[Value, Step]:
    """Value -> the step that gives it, for every value of a fused call; the first rule that fits a node takes it."""
    graph = Graph(order, results)
    found: dict[Value, Step] = {}
    for rules in (_WHOLE, _PARTS):
        for node in order:
            if node.op in rules and node.type.dtype in FUSABLE:
                for step in rules[node.op](graph, node):
                    if any(output in found for output in step.outputs) or (rules is _WHOLE and _circular(step, found)):
                        break  # what follows may need what this step would have saved
                    found.update(dict.fromkeys(step.outputs, step))
    return found


def _circular(step: Step, found: Mapping[Value, Step]) -> bool:
    """Whether an input needs an output: what a call computes together may lie on both sides of something else."""
    stack, seen = list(step.inputs), set(step.inputs)
    while stack:
        value = stack.pop()
        if value in step.outputs:
            return True
        fused = found.get(value)
        more = fused.inputs if fused is not None else value.inputs if isinstance(value, Node) else ()
        stack += (new for new in more if new not in seen)
        seen.update(more)
    return False


def _scalar(node: Node) -> bool:
    return not node.type.shape


def _value(node: Node) -> float | None:
    """The number of a constant, also a broadcast one."""
    while node.op == "broadcast":
        node = node.inputs[0]
    value = node.attrs["value"] if node.op == "constant" else None
    return value if isinstance(value, float) and isfinite(value) else None


# --- products


def _rows(node: Node) -> str:
    """The source that flattens an operand to a matrix."""
    return "{%d}" if node.type.rank == 2 else "{%d}.reshape(-1, " + str(node.type.shape[-1]) + ")"


def matrix_product(node: Node) -> Step | None:
    """A product by one matrix, over all rows at once."""
    a, b = node.inputs
    if a.type.rank < 2 or b.type.rank != 2 or node.type.dtype not in FUSABLE or 0 in a.type.shape:
        return None
    call = f"mm({_rows(a) % 0}, {{1}}"
    if a.type.rank == 2:
        return Step((node,), node.inputs, call + ")", True, into=call + ", out={out})")
    return Step((node,), node.inputs, f"{call}).view({node.type.shape})", True)


def _is_product(graph: Graph, node: Node) -> bool:
    """Whether a matrix product, with or without a sum, gives the node: then its rows lie one after another."""
    products = (node,) if node.op == "matmul" else node.inputs if node.op == "+" else ()
    return any(p.op == "matmul" and (p is node or graph.once(p)) and matrix_product(p) is not None for p in products)


def _add_product(graph: Graph, node: Node) -> Iterator[Step]:
    """product + bias, or product + something of its shape."""
    for product, other in (node.inputs, node.inputs[::-1]):
        if product.op != "matmul" or not graph.once(product) or matrix_product(product) is None:
            continue
        a, b = product.inputs
        bias = other.type.shape == b.type.shape[1:]
        if product.type.shape != node.type.shape or not (bias or other.type.shape == node.type.shape):
            continue
        base = "{0}" if bias else _rows(other) % 0
        tail = "" if node.type.rank == 2 else f".view({node.type.shape})"
        over = {}
        if not bias and (not tail or _is_product(graph, other)):
            over = {0: f"{base.replace('reshape', 'view')}.addmm_({_rows(a) % 1}, {{2}}){tail}"}
        call = f"addmm({base}, {_rows(a) % 1}, {{2}}"
        into = "" if tail else call + ", out={out})"
        yield Step((node,), (other, a, b), f"{call}){tail}", True, over, into)
        return


# --- layer-norm


def _norm_shape(node: Node) -> tuple[int, ...] | None:
    """The axes that a normalization is over, if torch's kernel has them: centred, the last ones."""
    axes, t = node.attrs["axis"], node.inputs[0].type
    last = node.attrs["center"] and axes and axes == tuple(range(t.rank - len(axes), t.rank))
    return t.shape[axes[0] :] if last and t.size else None


def _normalize(graph: Graph, node: Node) -> Iterator[Step]:
    """normalize with its scale and shift where they follow, and its gradients."""
    shape = _norm_shape(node)
    if shape is None:
        return
    x, eps = node.inputs[0], node.attrs["eps"]
    scale, shifted = _affine(graph, node, shape)
    inputs: tuple[Node, ...]
    if shifted is not None and scale is not None:
        outputs, inputs, more = (shifted,), (x, scale, _other(shifted, _product(graph, node, scale))), "{1}, {2}"
    else:
        outputs, inputs, more, scale = (node,), (x,), "None, None", None
    key = outputs[0]
    saved = (("mean", key), ("rsqrt", key))
    yield Step((*outputs, *saved), inputs, f"native_layer_norm({{0}}, {shape}, {more}, {eps!r})", True)
    lead = tuple(range(x.type.rank - len(shape)))
    for gradient in graph.of(x, "normalize-grad"):
        if gradient.inputs[0] is not x or gradient.attrs != node.attrs:
            continue
        ct = gradient.inputs[1]
        if scale is not None and ct.op == "*" and scale in ct.inputs and lead:
            inner = _other(ct, scale)
            product = graph.find("*", inner, node)
            by_scale = product and graph.find("sum", product, axis=lead)
            by_shift = graph.find("sum", inner, axis=lead)
            given = [(by_scale, ("by-scale", gradient)), (by_shift, ("by-shift", gradient))]
            call = f"layer_norm_backward({{0}}, {{1}}, {shape}, {{2}}, {{3}}, {{4}}, {{5}}, [True, True, True])"
            names = tuple(known or other for known, other in given)
            yield Step((gradient, *names), (inner, x, *saved, *inputs[1:]), call, True)
        else:
            call = f"layer_norm_backward({{0}}, {{1}}, {shape}, {{2}}, {{3}}, None, None, [True, False, False])[0]"
            yield Step((gradient,), (ct, x, *saved), call, True)


def _affine(graph: Graph, node: Node, shape: tuple[int, ...]) -> tuple[Node | None, Node | None]:
    """(scale, node · scale + shift) if both follow in the graph, else (None, None)."""
    for product in graph.of(node, "*"):
        scale = _other(product, node)
        if scale.type.shape != shape or scale.op != "param":
            continue
        for total in graph.of(product, "+"):
            if _other(total, product).type.shape == shape:
                return scale, total
    return None, None


def _product(graph: Graph, node: Node, scale: Node | None) -> Node:
    return next(n for n in graph.of(node, "*") if set(n.inputs) == {node, scale})


def _other(node: Node, one: Node) -> Node:
    """The other operand of a node of two."""
    return node.inputs[1] if node.inputs[0] is one else node.inputs[0]


# --- attention


def _attend(graph: Graph, node: Node) -> Iterator[Step]:
    """attend of whole heads without masks, and its three gradients from the saved sums."""
    q, k, v = node.inputs[:3]
    a = node.attrs
    whole = q.type.rank == 4 and q.type.shape[:2] == k.type.shape[:2] and q.type.shape[-1] == v.type.shape[-1]
    if len(node.inputs) > 3 or a["window"] is not None or not whole or 0 in q.type.shape + k.type.shape:
        return
    settings, sums = f"{a['causal']}, {a['scale']!r})", ("sums", node)
    yield Step((node, sums), (q, k, v), "attend({0}, {1}, {2}, " + settings, True)
    for product in graph.of(node, "*"):
        ct = _other(product, node)
        if not _alike(node, ct):
            continue
        vjp = table()["attend"].vjp
        assert vjp is not None
        parts = [simplify({"x": part})["x"] for part in vjp(node, ct) if part is not None]
        if any(part in graph.nodes for part in parts):
            names = tuple(part if part in graph.nodes else (number, product) for number, part in enumerate(parts))
            yield Step(names, (ct, q, k, v, node, sums), "attend_grad({0}, {1}, {2}, {3}, {4}, {5}, " + settings, True)


# --- cross-entropy


def _entropy(graph: Graph, node: Node) -> Iterator[Step]:
    logits, labels = node.inputs
    logs, index = ("logs", node), ("index", node)
    yield Step((node, logs, index), (logits, labels), "entropy({0}, {1})", True)
    gradients = [n for n in graph.of(logits, "softmax-cross-entropy-grad") if n.inputs[:2] == node.inputs]
    if len(gradients) != 1:  # the gradient takes the memory of the logarithms
        return
    gradient, ct = gradients[0], gradients[0].inputs[2]
    rows = labels.type.size
    minus = f"minus_ones({rows}, dtype_{logits.type.dtype})"
    factor = _value(ct)
    weight = "{2}.reshape(-1, 1)" if factor is None else repr(factor)
    call = f"entropy_grad({{0}}, {{1}}, {weight}, {minus})"
    shaped = call if logits.type.rank == 2 else f"{call}.view({logits.type.shape})"
    yield Step((gradient,), (logs, index, *((ct,) if factor is None else ())), shaped, True)


# --- convolution and pooling


def _weight_grad(graph: Graph, node: Node) -> Iterator[Step]:
    """Both gradients of a convolution by one call."""
    x, u = node.inputs
    settings = {key: node.attrs[key] for key in ("stride", "padding", "dilation", "groups")}
    for other in graph.of(u, "convolve-transpose"):
        if other.inputs[0] is not u or other.type.shape != x.type.shape:
            continue
        if any(other.attrs[k] != v for k, v in settings.items()) or other.inputs[1].type.shape != node.type.shape:
            continue
        numbers = ", ".join(str(settings[k]) for k in ("stride", "padding", "dilation"))
        none = (0,) * (x.type.rank - 2)
        call = f"convolution_backward({{0}}, {{1}}, {{2}}, None, {numbers}, False, {none}, {settings['groups']}, [True, True, False])[:2]"
        yield Step((other, node), (u, x, other.inputs[1]), call, True)
        return


def _max_pool(graph: Graph, node: Node) -> Iterator[Step]:
    """max-pool that keeps the places of its largest elements for the gradient."""
    (x,), keys = node.inputs, ("window", "stride", "padding")
    settings = ", ".join(str(node.attrs[key]) for key in keys)
    gradients = [n for n in graph.of(x, "max-pool-grad") if n.inputs[0] is x and all(n.attrs[k] == node.attrs[k] for k in keys)]
    if x.type.rank != 4 or not gradients:
        return
    places = ("places", node)
    yield Step((node, places), (x,), f"max_pool({{0}}, {settings})", True)
    for gradient in gradients:
        call = f"pool_backward({{0}}.contiguous(), {{1}}.contiguous(), {settings}, (1, 1), False, {{2}})"
        yield Step((gradient,), (gradient.inputs[1], x, places), call, True)


# --- sums of products


def _squares(graph: Graph, node: Node) -> Iterator[Step]:
    """The sum of the squares of a vector."""
    (product,) = node.inputs
    if _scalar(node) and product.op == "*" and product.inputs[0] is product.inputs[1] and product.type.rank == 1:
        x = product.inputs[0]
        yield Step((node,), (x, x), "dot({0}, {1})", True)


def _alike(node: Node, *others: Node) -> bool:
    return all(o.type.shape == node.type.shape for o in others)


def _sum_of_products(graph: Graph, node: Node) -> Iterator[Step]:
    """x + c y, x + c y z, x + y z, and the same with -, as one pass; c is a scalar."""
    minus = node.op == "-"
    pairs = [node.inputs] if minus else [node.inputs, node.inputs[::-1]]
    for x, product in pairs:
        if product.op != "*" or not graph.once(product) or _scalar(node) or not _alike(node, x, product):
            continue
        a, b = product.inputs
        if _scalar(b):
            a, b = b, a
        sign = "-" if minus else ""
        if not _scalar(a):
            if _alike(node, a, b):
                yield _call(node, "addcmul", (x, a, b), f", value={sign}1" if minus else "")
                return
            continue
        factor = _value(a)
        number = f"value={sign}{factor!r}" if factor is not None else f"value={sign}{{{{n}}}}.item()"
        inner: tuple[Node, ...] = (b,)
        function = "add"
        again = b.op == "*" and b.inputs[0] is b.inputs[1]  # a square costs nothing here, even if others need it too
        if b.op in ("*", "/") and (again or graph.once(b)) and _alike(node, *b.inputs):
            inner = b.inputs
            function = "addcmul" if b.op == "*" else "addcdiv"
        if function == "add":
            number = number.replace("value", "alpha")
        operands = (x, *inner)
        extra = () if factor is not None else (a,)
        yield _call(node, function, operands, ", " + number.replace("{{n}}", f"{{{len(operands)}}}"), extra)
        return


def _call(node: Node, function: str, operands: tuple[Node, ...], more: str, extra: tuple[Node, ...] = ()) -> Step:
    rest = ", ".join(f"{{{i}}}" for i in range(1, len(operands)))
    call = f"{function}({{0}}, {rest}{more}"
    return Step((node,), (*operands, *extra), call + ")", True, {0: f"{{0}}.{function}_({rest}{more})"}, call + ", out={out})")


def scaled_draw(node: Node) -> tuple[Node, float] | None:
    """(draw, c) of c · cast(draw): the mask of a dropout."""
    for a, b in (node.inputs, node.inputs[::-1]):
        factor = _value(a)
        if factor is not None and _scalar(a) and b.op == "cast" and b.inputs[0].op == "random-bernoulli":
            return b.inputs[0], factor
    return None


_WHOLE = {
    "normalize": _normalize,
    "attend": _attend,
    "softmax-cross-entropy": _entropy,
    "convolve-weight-grad": _weight_grad,
    "max-pool": _max_pool,
}
_PARTS = {
    "+": lambda g, n: (*_add_product(g, n), *_sum_of_products(g, n)),
    "-": _sum_of_products,
    "sum": _squares,
}
#: ops that a rule begins at
RULES = frozenset((*_WHOLE, *_PARTS))

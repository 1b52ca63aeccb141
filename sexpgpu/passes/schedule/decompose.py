"""Composites as the pointwise ops and reductions they consist of, so that fusion sees through them.

The results keep their meaning, not their last bit. What stays whole: contractions, attention, sorting, pooling and the
other ops that a library call or a kernel of its own computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from sexpgpu.ir import DTYPES, Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.ops.helpers import add, combine, div, mul, sub, total, where
from sexpgpu.ops.random import categorical_parts
from sexpgpu.passes.rewrite import rebuild, rewrite

#: views that move elements without computing; a cast commutes with them
MOVES = ("reshape", "transpose", "slice", "squeeze", "expand-dims", "flip")


def decompose(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """The graph without composites. Runs after gradients are expanded and precision is applied."""
    found = {name: _wide(node) for name, node in rewrite(results, _rule, origins).items()}
    return _biased(_transposed(_packed(found, origins), origins), origins)


def _packed(results: Mapping[str, Node], origins: Origins | None) -> dict[str, Node]:
    """The three gradients of an attention, padded and added into the gradient of the tensor that its operands were cut from, as one:
    a kernel writes them where they belong."""

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op != "+":
            return None
        parts = sorted(_addends(node), key=lambda n: n.attrs["before"][-1] if n.op == "pad" else -1)
        if len(parts) != 3 or any(n.op != "pad" or node.type.rank != 3 for n in parts):
            return None
        grads = [_gradient_of(n.inputs[0]) for n in parts]
        if any(g is None for g in grads):
            return None
        of = [g.attrs["of"] for g in grads if g is not None]
        first = grads[0]
        assert first is not None
        if of != [0, 1, 2] or any(g is None or g.inputs != first.inputs for g in grads) or len(first.inputs) != 5:
            return None
        b, h, t, d = first.type.shape
        if any(x.type.shape != first.type.shape for x in first.inputs[1:4]) or node.type.shape != (b, t, 3 * h * d):
            return None
        if [n.attrs["before"][-1] for n in parts] != [0, h * d, 2 * h * d] or any(n.attrs["value"] for n in parts):
            return None
        attrs = {k: v for k, v in first.attrs.items() if k != "of"}
        return build("cast", done(build("attend-grad-packed", *first.inputs, **attrs)), dtype=node.type.dtype)

    def done(node: Node) -> Node:
        """The new node over what its operands became."""
        return build(node.op, *(rewritten.get(i, i) for i in node.inputs), **node.attrs)

    rewritten: dict[Node, Node] = {}

    def outer(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        new = rule(node, inputs)
        if new is None and node.op == "cast":
            new = _cast(rebuild(node, inputs))
        rewritten[node] = new if new is not None else rebuild(node, inputs)
        return rewritten[node]

    return rewrite(results, outer, origins)


def _addends(node: Node) -> list[Node]:
    found, stack = [], [node]
    while stack:
        top = stack.pop()
        if top.op == "+":
            stack += top.inputs
        else:
            found.append(top)
    return found


def _gradient_of(node: Node) -> Node | None:
    """The attend-grad [b h t d] that a tensor [b t h·d] is, cast or not."""
    for op in ("reshape", "transpose"):
        if node.op == "cast":
            node = node.inputs[0]
        if node.op != op or (op == "transpose" and node.attrs["permutation"] != (0, 2, 1, 3)):
            return None
        node = node.inputs[0]
    if node.op == "cast":
        node = node.inputs[0]
    return node if node.op == "attend-grad" and node.type.rank == 4 else None


def _biased(results: Mapping[str, Node], origins: Origins | None) -> dict[str, Node]:
    """cast(cast(matmul) + row) of a product that nothing else reads, as one product with its row: the library adds it."""
    readers: dict[Node, int] = {}
    for node in postorder(results.values()):
        for operand in node.inputs:
            readers[operand] = readers.get(operand, 0) + 1
    kept = set(results.values())

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        added = node.inputs[0] if node.op == "cast" else node
        if node.op != "cast" or node.type.dtype not in ("bf16", "f16") or added.op != "+" or readers[added] > 1:
            return None
        for number in (0, 1):
            wide, row = added.inputs[number], added.inputs[1 - number]
            product = wide.inputs[0] if wide.op == "cast" else wide
            alone = product not in kept and readers.get(wide) == 1 and readers.get(product) == 1
            if product.op == "matmul" and product.type.dtype == node.type.dtype and alone and row.type.shape == product.type.shape[-1:] and product.inputs[1].type.rank == 2:
                a, b = inputs[0].inputs[number].inputs[0].inputs
                return build("matmul-bias", a, b, build("cast", inputs[0].inputs[1 - number], dtype=node.type.dtype))
        return None

    return rewrite(results, rule, origins)


def _transposed(results: Mapping[str, Node], origins: Origins | None) -> dict[str, Node]:
    """A product that is read transposed alone is computed so: a library takes its operands in any order."""
    order = postorder(results.values())
    readers: dict[Node, set[Node]] = {}
    for node in order:
        for operand in node.inputs:
            readers.setdefault(operand, set()).add(node)
    kept = set(results.values())

    def turned(node: Node) -> bool:
        return node.op == "transpose" and node.attrs["permutation"] == (1, 0)

    def product(node: Node) -> bool:
        """A product of two matrices, or casts of it, that transposes alone read."""
        users = readers.get(node, set())
        if node in kept or not users:
            return False
        if node.op == "cast" and len(users) == 1 and node.type.rank == 2:
            return all(turned(u) for u in users) and len(readers[node.inputs[0]]) == 1 and node.inputs[0].op == "matmul" and node.inputs[0] not in kept
        return node.op == "matmul" and node.type.rank == 2 and all(turned(u) for u in users)

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not turned(node) or not product(node.inputs[0]):
            return None
        x = inputs[0]
        if x.op == "cast":
            return build("cast", _turn(x.inputs[0]), dtype=x.type.dtype)
        return _turn(x) if x.op == "matmul" else None

    return rewrite(results, rule, origins)


def _turn(product: Node) -> Node:
    a, b = product.inputs
    if a.type.rank != 2 or b.type.rank != 2:
        return build("transpose", product, permutation=(1, 0))
    return build("matmul", _back(b), _back(a))


def _back(x: Node) -> Node:
    if x.op == "transpose" and x.attrs["permutation"] == (1, 0):
        return x.inputs[0]
    return build("transpose", x, permutation=(1, 0))


def _wide(node: Node) -> Node:
    """A result that is a product of bf16 operands cast to f32 keeps its sums: no pass over it, and no rounding."""
    if node.op == "cast" and node.type.dtype == "f32" and node.inputs[0].op == "matmul" and node.inputs[0].type.dtype in ("bf16", "f16"):
        return build("matmul-f32", *node.inputs[0].inputs)
    return node


def _rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    rule = _RULES.get(node.op)
    if rule is None:
        return None
    new = rebuild(node, inputs)
    return rule(new) if rule else new


def _axis(node: Node) -> tuple[int, ...]:
    return (node.attrs["axis"],)


def _extreme(x: Node, axes: tuple[int, ...]) -> Node:
    return build("reduce-max", x, axis=axes, **{"keep-dims": True})


def _softmax(node: Node) -> Node:
    x, axes = node.inputs[0], _axis(node)
    if not x.type.size:
        return x
    e = build("exp", sub(x, _extreme(x, axes)))
    return div(e, total(e, axes, keep=True))


def _softmax_grad(node: Node) -> Node:
    y, ct = node.inputs
    return mul(y, sub(ct, total(mul(ct, y), _axis(node), keep=True)))


def _logsumexp_of(x: Node, axes: tuple[int, ...], keep: bool) -> Node:
    """m + log Σ exp(x - m), m the maximum, or 0 where that is infinite."""
    top = _extreme(x, axes)
    shift = where(build("is-finite", top), top, 0.0)
    found = add(shift, build("log", total(build("exp", sub(x, shift)), axes, keep=True)))
    if keep:
        return found
    shape = tuple(s for a, s in enumerate(x.type.shape) if a not in axes)
    return build("reshape", found, shape=shape)


def _logsumexp(node: Node) -> Node:
    return _logsumexp_of(node.inputs[0], _axis(node), node.attrs["keep-dims"])


def _log_softmax(node: Node) -> Node:
    return sub(node.inputs[0], _logsumexp_of(node.inputs[0], _axis(node), True))


def _entropy(node: Node) -> Node:
    logits, labels = node.inputs
    last = logits.type.rank - 1
    place = build("reshape", labels, shape=(*labels.type.shape, 1))
    picked = build("reshape", build("take-along", logits, place, axis=last), shape=labels.type.shape)
    return sub(_logsumexp_of(logits, (last,), False), picked)


def _entropy_grad(node: Node) -> Node:
    logits, labels, ct = node.inputs
    last = logits.type.rank - 1
    p = build("exp", sub(logits, _logsumexp_of(logits, (last,), True)))
    hot = build("one-hot", labels, count=logits.type.shape[-1], dtype=logits.type.dtype)
    return mul(sub(p, hot), build("reshape", ct, shape=(*ct.type.shape, 1)))


def _mean_of(x: Node, axes: tuple[int, ...]) -> Node:
    count = prod(x.type.shape[a] for a in axes)
    return div(total(x, axes, keep=True), float(max(1, count)))


def _mean(node: Node) -> Node:
    x, axes = node.inputs[0], node.attrs["axis"]
    if not axes:
        return x
    count = prod(x.type.shape[a] for a in axes)
    return combine("/", total(x, axes, keep=node.attrs["keep-dims"]), float(count) if count else float("nan"))


def _variance(node: Node) -> Node:
    x, axes = node.inputs[0], node.attrs["axis"]
    if not axes:
        return sub(x, x)
    centred = sub(x, _mean_of(x, axes))
    count = prod(x.type.shape[a] for a in axes) - node.attrs["correction"]
    return div(total(mul(centred, centred), axes, keep=node.attrs["keep-dims"]), float(count))


def _normal_parts(x: Node, node: Node) -> tuple[Node, Node]:
    """The centred x and its scale r."""
    axes = node.attrs["axis"]
    centred = sub(x, _mean_of(x, axes)) if node.attrs["center"] else x
    return centred, build("rsqrt", add(_mean_of(mul(centred, centred), axes), node.attrs["eps"]))


def _normalize(node: Node) -> Node:
    if not node.attrs["axis"]:
        return rebuild(node, node.inputs)
    centred, scale = _normal_parts(node.inputs[0], node)
    return mul(centred, scale)


def _normalize_grad(node: Node) -> Node:
    x, ct = node.inputs
    axes = node.attrs["axis"]
    if not axes:
        return node
    centred, scale = _normal_parts(x, node)
    y = mul(centred, scale)
    out = sub(ct, mul(y, _mean_of(mul(ct, y), axes)))
    return mul(sub(out, _mean_of(ct, axes)) if node.attrs["center"] else out, scale)


def _reduction(node: Node) -> Node | None:
    """Axes neither all first nor all last: first the last run of them, then the others."""
    x, axes = node.inputs[0], node.attrs["axis"]
    real = [a for a in range(x.type.rank) if x.type.shape[a] != 1]
    inside = [a in axes for a in real]
    if not any(inside) or inside == sorted(inside) or inside == sorted(inside, reverse=True) or len(real) < 3:
        return node
    if not inside[-1]:
        return node
    first = len(inside) - 1
    while inside[first]:
        first -= 1
    tail = tuple(a for a in real[first + 1 :])
    partial = build(node.op, x, axis=tail, **{"keep-dims": True})
    rest = build(node.op, partial, axis=tuple(a for a in axes if a not in tail), **{"keep-dims": True})
    return rest if node.attrs["keep-dims"] else build("reshape", rest, shape=node.type.shape)


def _cast(node: Node) -> Node:
    """A cast to fewer bytes goes before the views of what it casts, so that the views share one narrow tensor."""
    x = node.inputs[0]
    if x.op == "cast" and x.inputs[0].type.dtype == node.type.dtype and x.type.dtype == "f32" and node.type.is_float:
        return x.inputs[0]
    if x.op not in MOVES or DTYPES[node.type.dtype] >= DTYPES[x.type.dtype]:
        return node
    return build(x.op, _cast(build("cast", x.inputs[0], dtype=node.type.dtype)), **x.attrs)




_RULES: dict[str, Callable[[Node], Node | None]] = {
    "softmax": _softmax,
    "softmax-grad": _softmax_grad,
    "log-softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "softmax-cross-entropy": _entropy,
    "softmax-cross-entropy-grad": _entropy_grad,
    "mean": _mean,
    "variance": _variance,
    "normalize": _normalize,
    "normalize-grad": _normalize_grad,
    "sum": _reduction,
    "reduce-max": _reduction,
    "reduce-min": _reduction,
    "reduce-all": _reduction,
    "reduce-any": _reduction,
    "prod": _reduction,
    "cast": _cast,
    "random-categorical": categorical_parts,
}

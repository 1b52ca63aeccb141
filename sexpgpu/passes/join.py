"""Gradients in which a large matrix would stand whole, by ops of their own, for backends that have kernels for them.

`attend` and the cross-entropy of a projection differentiate into ops that differentiate again. Nodes are interned, so where a graph
holds such a gradient it holds exactly the nodes that the rule makes.
"""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, table
from sexpgpu.ops.linear_entropy import LOSS
from sexpgpu.passes.rewrite import rebuild

LOGITS = 1 << 23  # elements of a projection from which it pays to make it in parts


def join_large(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """The graph with the gradients of attention, and the cross-entropy of large projections with its gradients, as single ops.
    Runs when every gradient is expanded, before precision."""
    return join_projection(join_attention(results, origins), origins)


def join_projection(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """softmax-cross-entropy of a matmul as linear-cross-entropy, which makes losses and gradients together where both are there."""
    order = postorder(results.values())
    present = set(order)
    found: dict[Node, Node] = {}
    for node in order:
        if node.op != "softmax-cross-entropy" or not _large(node.inputs[0]):
            continue
        logits, labels = node.inputs
        x, weight = logits.inputs
        found[node] = build("linear-cross-entropy", x, weight, labels)
        for grad in order:
            if grad.op != "softmax-cross-entropy-grad" or grad.inputs[:2] != node.inputs or {node, logits} & set(postorder([grad.inputs[2]])):
                continue
            parts = table()["matmul"].vjp(logits, grad)  # type: ignore[misc]
            if not all(p is None or p in present for p in parts):
                continue
            for number, part in enumerate(parts):
                if part is not None:
                    found[part] = build("linear-cross-entropy-grad", x, weight, labels, grad.inputs[2], of=number)
            found[node] = build("linear-cross-entropy-grad", x, weight, labels, grad.inputs[2], of=LOSS)
    return replaced(results, found, origins) if found else dict(results)


def _large(logits: Node) -> bool:
    if logits.op != "matmul" or logits.type.size < LOGITS:
        return False
    x, weight = logits.inputs
    return weight.type.rank == 2 and x.type.rank >= 2


def join_attention(results: Mapping[str, Node], origins: Origins | None = None) -> dict[str, Node]:
    """The graph with `attend-grad` for the gradients of `attend`. Runs when every gradient is expanded, before precision."""
    order = postorder(results.values())
    present = set(order)
    found: dict[Node, Node] = {}
    for node in order:
        if node.op != "*" or len(node.inputs) != 2:
            continue
        for ct, out in (node.inputs, node.inputs[::-1]):
            if out.op != "attend" or ct.type != out.type or len(out.inputs) > 3:
                continue
            parts = table()["attend"].vjp(out, ct)  # type: ignore[misc]
            if not any(part in present for part in parts if part is not None):
                continue
            for number, part in enumerate(parts[:3]):
                if part is not None and part in present:
                    found[part] = build("attend-grad", ct, *out.inputs[:3], out, of=number, **out.attrs)
    return replaced(results, found, origins) if found else dict(results)


def replaced(results: Mapping[str, Node], found: Mapping[Node, Node], origins: Origins | None) -> dict[str, Node]:
    """`results` with each node of `found` replaced, within the replacements too."""
    done: dict[Node, Node] = {}
    for root in results.values():
        stack = [root]
        while stack:
            node = stack[-1]
            needs = (found[node],) if node in found else node.inputs
            waiting = [i for i in needs if i not in done]
            if waiting:
                stack += reversed(waiting)
                continue
            stack.pop()
            if node in done:
                continue
            new = done[found[node]] if node in found else rebuild(node, tuple(done[i] for i in node.inputs))
            if origins is not None and new is not node and node in origins.table:
                origins.add(new, origins.of(node))
            done[node] = new
    return {name: done[node] for name, node in results.items()}

"""The gradients of attention by their own ops, for backends that have a kernel for them.

`attend` differentiates into ops that differentiate again, and in which the matrix of scores stands whole. Nodes are interned, so
where a graph holds such a gradient it holds exactly the nodes that the rule makes.
"""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, table
from sexpgpu.passes.rewrite import rebuild


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
    return _replaced(results, found, origins) if found else dict(results)


def _replaced(results: Mapping[str, Node], found: Mapping[Node, Node], origins: Origins | None) -> dict[str, Node]:
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

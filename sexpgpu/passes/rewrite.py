"""The one rewrite driver: operands before users, each node once, provenance merged beside the nodes. A loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sexpgpu.ir import Node, Origins, intern, postorder
from sexpgpu.ops import build, table

#: fn(node, operands) -> its replacement over the already rewritten operands, or None to keep the op
Rule = Callable[[Node, tuple[Node, ...]], Node | None]


def rebuild(node: Node, inputs: tuple[Node, ...]) -> Node:
    """The node's op over other operands, its type inferred anew; the node itself if they are its own."""
    if inputs == node.inputs:
        return node
    if table()[node.op].canonical is None and all(new.type == old.type for new, old in zip(inputs, node.inputs, strict=True)):
        return intern(node.op, inputs, node.attrs, node.type)  # what `build` would give, which infers a type from types and attributes
    return build(node.op, *inputs, **node.attrs)


def rewrite(results: Mapping[str, Node], fn: Rule, origins: Origins | None = None) -> dict[str, Node]:
    """`results` with `fn` applied bottom up. A replacement inherits the origins of what it replaces."""
    done: dict[Node, Node] = {}
    order = postorder(results.values())
    if origins is None:
        for node in order:
            inputs = tuple([done[i] for i in node.inputs])
            done[node] = fn(node, inputs) or rebuild(node, inputs)
        return {name: done[node] for name, node in results.items()}
    with origins.following() as now:
        for node in order:
            inputs = tuple([done[i] for i in node.inputs])
            now[0] = origin = origins.of(node)
            new = fn(node, inputs) or rebuild(node, inputs)
            if new is not node and node in origins.table:
                origins.add(new, origin)
            done[node] = new
    return {name: done[node] for name, node in results.items()}


def substitute(
    results: Mapping[str, Node], replacements: Mapping[Node, Node], origins: Origins | None = None
) -> dict[str, Node]:
    """`results` with some nodes replaced by others (of the same type), which are not themselves rewritten."""
    return rewrite(results, lambda node, inputs: replacements.get(node), origins)


def leaves(results: Mapping[str, Node]) -> list[Node]:
    """The nodes without operands that a caller binds, in postorder."""
    ops = table()
    return [n for n in postorder(results.values()) if ops[n.op].lowering.kind == "leaf" and n.op != "constant"]

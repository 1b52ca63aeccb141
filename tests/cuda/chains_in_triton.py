"""Chains of small layers and their gradients of two orders, under Triton's interpreter against the CPU interpreter."""

from __future__ import annotations

import torch
from harness import compare, tell

from sexpgpu.ir import Node, postorder
from sexpgpu.ops import build, constant
from sexpgpu.passes import chains as pass_
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.products import products
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.simplify import simplify

pass_.ROWS = 8  # so that a small one is a chain


def leaf(name: str, shape: tuple[int, ...], bindings: dict[Node, torch.Tensor], seed: int) -> Node:
    node = build("input", name=name, dtype="f32", shape=shape, batch=False)
    bindings[node] = 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return node


def network(rows: int, widths: tuple[int, ...], bindings: dict[Node, torch.Tensor]) -> tuple[Node, list[Node], Node]:
    """(inputs, weights, output) of layers with silu between them, as the radial functions of a potential have."""
    x = leaf("x", (rows, widths[0]), bindings, 1)
    weights = [leaf(f"w{i}", (a, b), bindings, 2 + i) for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False))]
    h = build("*", x, x)
    for i, w in enumerate(weights):
        h = build("matmul", h, build("*", constant(w.type.shape[0] ** -0.5, "f32"), w))
        if i < len(weights) - 1:
            h = build("*", constant(1.7, "f32"), build("silu", h))
    return x, weights, h


def main() -> None:
    failures: list[str] = []
    cases = {"as a potential's": (70, (8, 64, 64, 24)), "odd": (33, (3, 5, 17, 40)), "one tile": (32, (16, 16, 32, 16)), "wide": (40, (20, 100, 128, 130)),
             "three hidden layers": (33, (8, 64, 64, 64, 130))}
    for name, (rows, widths) in cases.items():
        bindings: dict[Node, torch.Tensor] = {}
        x, weights, y = network(rows, widths, bindings)
        energy = build("sum", build("*", y, y))
        force = grad(energy, [x])[0]
        loss = build("+", build("sum", build("*", force, force)), energy)
        results = simplify({"y": y, "force": force, "loss": loss} | {f"d{i}": g for i, g in enumerate(grad(loss, weights))})
        made = pass_.chains(products(decompose(results)))
        nodes = [n for n in postorder(made.values()) if n.op == "row-chain"]
        sums = [n for n in nodes if n.attrs["outputs"][n.attrs["of"]][0][0] == "sum"]
        if len(nodes) < 4 or not sums:
            failures.append(f"{name}: {len(nodes)} chain values, {len(sums)} sums")
        kept = [n for n in nodes if n not in sums and n.type.shape[1] == 64]
        if name == "as a potential's" and kept:  # they follow from 8 numbers a row
            failures.append(f"{name}: {len(kept)} hidden values are kept for a later chain")
        left = sum(n.op == "matmul-sum" for n in postorder(made.values()))
        if name == "three hidden layers" and left != 5:  # those of 130 columns: a chain that would be too long makes no products again, and stays one
            failures.append(f"{name}: {left} products are in no chain")
        for placed in (True, False):
            failures += [f"{name} placed={placed}: {what}" for what in compare(results, bindings, 5e-5, placed)]
    tell(failures, len(cases))


if __name__ == "__main__":
    main()

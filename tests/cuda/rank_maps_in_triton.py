"""Equivariant linear maps, their gradients and the gradients of those, under Triton's interpreter against the CPU interpreter."""

from __future__ import annotations

import torch
from harness import compare, tell

from sexpgpu.ir import Node, postorder
from sexpgpu.ops import build, constant
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.products import products
from sexpgpu.passes.rank_maps import rank_maps
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.simplify import simplify

#: rows, features (shape after rows; a row of paths is one number), inputs of each rank, outputs, :l-max
CASES = {
    "features": (5, (9, 3), (3, 3, 3), 4, 2),
    "fewer ranks": (3, (9, 2), (2, 2, 2), 5, 1),
    "more ranks": (4, (4, 2), (2, 2), 3, 2),
    "paths": (70, (1 * 4 + 3 * 2 + 5 * 6,), (4, 2, 6), 17, 2),
    "wide": (2, (4, 70), (70, 70), 33, 1),
    "one row": (1, (1, 1), (1,), 1, 0),
    "no rows": (0, (4, 2), (2, 2), 3, 1),
}

OVER = ("features", "paths")  #: cases whose features are over a number, as messages are over √neighbours


def leaf(name: str, shape: tuple[int, ...], bindings: dict[Node, torch.Tensor], seed: int) -> Node:
    node = build("input", name=name, dtype="f32", shape=shape, batch=False)
    bindings[node] = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return node


def main() -> None:
    failures: list[str] = []
    for name, (rows, features, inputs, outputs, top) in CASES.items():
        bindings: dict[Node, torch.Tensor] = {}
        x = leaf("x", (rows, *features), bindings, 1)
        raw = [leaf(f"w{i}", (k, outputs), bindings, 2 + i) for i, k in enumerate(inputs)]
        weights = [build("*", constant(k**-0.5, "f32"), w) for k, w in zip(inputs, raw, strict=True)]
        over = build("/", x, constant(3.0, "f32")) if name in OVER else x
        y = build("equivariant-linear", over, *weights, **{"l-max": top})
        energy = build("sum", build("*", y, build("*", y, y)))
        force = grad(energy, [x])[0]
        loss = build("+", build("sum", build("*", force, force)), energy)
        results = simplify({"y": y, "force": force} | {f"d{i}": g for i, g in enumerate(grad(loss, [x, *raw]))})
        made = rank_maps(decompose(results))
        ops = [n.op for n in postorder(made.values())]
        if name in OVER and any(n.op in ("/", "*") and n.type.shape == x.type.shape for n in postorder(made.values())):
            failures.append(f"{name}: features are divided by a launch of their own")
        if any(op.startswith("equivariant-linear") for op in ops) or rows and ops.count("rank-weights") != min(len(inputs), top + 1):
            failures.append(f"{name}: {sorted(op for op in ops if 'rank' in op or 'linear' in op)}")
        for placed in (True, False):
            failures += [f"{name} placed={placed}: {what}" for what in compare(results, bindings, 2e-5, placed)]
    failures += products_and_sums()
    tell(failures, len(CASES) + 1)


def products_and_sums() -> list[str]:
    """Numbers and sums that go into products, products that are read elsewhere too, and few places of a scatter-add."""
    bindings: dict[Node, torch.Tensor] = {}
    a, b, w = (leaf(n, shape, bindings, i) for i, (n, shape) in enumerate({"a": (5, 4), "b": (5, 4), "w": (4, 3)}.items()))
    half = build("*", constant(0.5, "f32"), w)
    left, right = build("matmul", a, half), build("matmul", b, half)
    index = build("input", name="index", dtype="i32", shape=(5,), batch=False)
    bindings[index] = torch.tensor([2, 0, 2, 2, 0], dtype=torch.int32)
    results = {
        "sum": build("+", left, right),
        "twice": build("*", constant(3.0, "f32"), build("+", build("matmul", b, w), build("matmul", a, w))),
        "turned": build("matmul", right, build("transpose", half, permutation=(1, 0))),
        "rows": build("scatter-add", a, index, axis=0, count=4),
        "columns": build("scatter-add", build("transpose", a, permutation=(1, 0)), index, axis=1, count=3),
        "scalars": build("scatter-add", build("sum", a, axis=(1,)), index, axis=0, count=3),
    }
    ops = [n.op for n in postorder(products(decompose(results)).values())]
    wrong = [] if ops.count("matmul-sum") == 4 and "scatter-add" not in ops and ops.count("matmul") == 0 else [f"products: {ops}"]
    return wrong + [f"products placed={placed}: {what}" for placed in (True, False) for what in compare(results, bindings, 1e-5, placed)]


if __name__ == "__main__":
    main()

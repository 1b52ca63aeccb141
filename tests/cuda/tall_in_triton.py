"""Products of tall f32 matrices, and the gradients of a loss over them, under Triton's interpreter against torch in f64."""

from __future__ import annotations

import torch
from harness import compare, run, tell

from sexpgpu.backends.cuda import library, tall
from sexpgpu.ir import Node
from sexpgpu.ops import build, constant
from sexpgpu.passes import products
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.simplify import simplify

tall.LEAST, tall.COLUMNS = products.TALL, products.NARROW = 32, 64  # so that small ones are tall
tall.PROGRAMS = 3

#: rows, inner numbers, columns; whether there is a second pair; the kinds of products that stand in the gradients
CASES = {
    "as a potential's": (200, 64, 150, True, {"rows", "sums"}),
    "ragged": (133, 20, 70, True, {"rows", "sums"}),
    "narrow": (129, 5, 3, False, {"rows", "sums"}),
    "short": (31, 16, 16, False, {"None"}),
}


def leaf(name: str, shape: tuple[int, ...], bindings: dict[Node, torch.Tensor], seed: int) -> Node:
    node = build("input", name=name, dtype="f32", shape=shape, batch=False)
    bindings[node] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return node


def from_halves() -> list[str]:
    """What stands around a tensor product: weights of edges, their cotangents by the matrix, and its gradient over two pairs."""
    failures, turn = [], {"permutation": (1, 0)}
    for rows, inner, columns in ((133, 20, 150), (200, 64, 128)):
        bindings: dict[Node, torch.Tensor] = {}
        shapes = {"h": (rows, inner), "v": (rows, inner), "w": (inner, columns), "g": (rows, columns), "d": (rows, columns)}
        h, v, w, g, d = (leaf(n, s, bindings, i) for i, (n, s) in enumerate(shapes.items()))
        pairs = {"weights": [(h, w)], "cotangents": [(g, build("transpose", w, **turn))],
                 "gradient": [(build("transpose", h, **turn), d), (build("transpose", v, **turn), g)]}  # fmt: skip
        for name, made in pairs.items():
            node = build("matmul-sum", *(x for pair in made for x in pair), scale=0.5, again=1)
            operands = [bindings[x] if x in bindings else bindings[x.inputs[0]].t() for x in node.inputs]
            exact = 0.5 * sum(a.double() @ b.double() for a, b in zip(operands[::2], operands[1::2], strict=True))
            out = torch.full(node.type.shape, float("nan"))
            mine = tall.tall(node, operands, out, torch.empty(tall.tall_scratch(node), dtype=torch.uint8))
            off = float((out.double() - exact).abs().max() / exact.abs().max())
            if not mine or not 1e-8 < off < 1.5e-5 :
                failures.append(f"{name} of {rows} {inner} {columns}: off by {off:.1e}, by these kernels: {mine}")
    return failures


def main() -> None:
    failures = from_halves()
    for name, (rows, inner, columns, two, kinds) in CASES.items():
        bindings: dict[Node, torch.Tensor] = {}
        h, g, w = (leaf(n, s, bindings, i) for i, (n, s) in enumerate({"h": (rows, inner), "g": (rows, inner), "w": (inner, columns)}.items()))
        scaled = build("*", constant(inner**-0.5, "f32"), w)
        loss = build("sum", build("square", build("matmul", h, scaled)))
        if two:
            loss = build("+", loss, build("sum", build("square", build("matmul", g, scaled))))
        results = simplify({"by h": grad(loss, [h])[0], "by w": grad(loss, [w])[0]} | ({"by g": grad(loss, [g])[0]} if two else {}))
        launched: list[str] = []
        made = library.JOINT["matmul-sum"]

        def counted(node: Node, operands: list[torch.Tensor], *rest: torch.Tensor, made: object = made, launched: list[str] = launched) -> None:
            launched.append(str(tall.kind(node)))
            made(node, operands, *rest)  # type: ignore[operator]

        library.JOINT["matmul-sum"] = counted
        try:
            failures += [f"{name} placed={placed}: {what}" for placed in (True, False) for what in compare(results, bindings, 2e-5, placed)]
            got, again = run(results, bindings), run(results, bindings)
        finally:
            library.JOINT["matmul-sum"] = made
        if set(launched) != kinds:
            failures.append(f"{name}: launched {launched}")
        x, y, m = (bindings[n].double() for n in (h, g, w))
        m /= inner**0.5
        exact = {"by h": 2 * x @ m @ m.t(), "by g": 2 * y @ m @ m.t(), "by w": 2 * (x.t() @ (x @ m) + (y.t() @ (y @ m) if two else 0)) / inner**0.5}
        for key, value in got.items():
            off = float((value.double() - exact[key]).abs().max() / exact[key].abs().max())
            if off > 2e-6 or not torch.equal(value, again[key]):
                failures.append(f"{name}: {key} is off by {off:.1e}, or differs between runs")
    tell(failures, len(CASES) + 2)


if __name__ == "__main__":
    main()

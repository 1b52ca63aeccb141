"""Values stored over ones that are read for the last time, under Triton's interpreter: `python over_in_triton.py CASE`.

Whole steps give the bits that they give without, in less memory; a feed-forward's gradient, in which GELU is made once more by the kernel
that makes its gradient and the bias's, gives the numbers of float64.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from harness import poison, tell  # first: it chooses the interpreter

# isort: split
import torch
from recompute_in_triton import CASES, eager, states
from steps_in_triton import Pair, equal

from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build
from sexpgpu.passes import epilogues
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.schedule import over, recompute
from sexpgpu.passes.schedule.fuse import Call, Kernel

BAND = 256
#: rows and widths, and whether gelu is made once more; "kept" is first, as what makes it so is not taken back
SIZES = {"kept": (61, 9, 35, False), "even": (64, 16, 48, True), "odd": (61, 9, 35, True), "one row": (1, 5, 7, True)}


def steps(case: str) -> tuple[list[str], int]:
    """Steps of a model with and without; with `:remat` where the case says so."""
    wrong: list[str] = []
    remat, name = case.endswith("-remat"), case.removesuffix("-remat")
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(dataclasses.replace(CASES[name], more=":remat true" if remat else ""), Path(folder))
        batches = [pair.batch() for _ in range(3)]
        eager(recipes=True)
        recompute.stored_over = lambda *_: {}  # type: ignore[assignment] # the same values are computed again either way
        plain, most, _ = states(pair, batches, wrong)
        over.LEAST = 0
        found, less, _ = states(pair, batches, wrong)
        count = len(pair.cuda()._graphs(False)[0].over)
    if not count or less > most:
        wrong.append(f"{count} values are stored over others, and the peak went from {most} to {less}")
    if not equal(plain, found):
        wrong.append("other bits: " + str(max((float((plain[n].double() - found[n].double()).abs().max()), n) for n in plain)))
    print(f"{case}: {count} values, peak {most} -> {less}", file=sys.stderr)
    return wrong, count


def leaf(name: str, *shape: int) -> Node:
    return build("input", name=name, shape=shape, dtype="f32", batch=False)


def network(rows: int, width: int, inner: int) -> tuple[dict[str, Node], list[Node]]:
    """Two blocks of x + W2 gelu(W1 x + b1) + b2 with gradients by everything."""
    x, ct = leaf("x", rows, width), leaf("ct", rows, width)
    leaves, y = [x, ct], x
    for i in range(2):
        up, b1, down, b2 = (leaf(f"{n}{i}", *shape) for n, shape in (("up", (width, inner)), ("b1", (inner,)), ("down", (inner, width)), ("b2", (width,))))
        leaves += [up, b1, down, b2]
        y = build("+", y, build("+", build("matmul", build("gelu-tanh", build("+", build("matmul", y, up), b1)), down), b2))
    loss = build("sum", build("*", y, ct))
    names = [n for n in leaves if n is not ct]
    return {"y": y} | {f"by {n.attrs['name']}": g for n, g in zip(names, grad(loss, names, Origins()), strict=True)}, leaves


def reference(results: dict[str, Node], bound: dict[Node, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in float64, by torch."""
    values = {n.attrs["name"]: t.double().requires_grad_() for n, t in bound.items()}
    y = values["x"]
    for i in range(2):
        inner = torch.nn.functional.gelu(y @ values[f"up{i}"] + values[f"b1{i}"], approximate="tanh")
        y = y + inner @ values[f"down{i}"] + values[f"b2{i}"]
    names = [name for name in results if name != "y"]
    found = torch.autograd.grad((y * values["ct"]).sum(), [values[name.removeprefix("by ")] for name in names])
    return {"y": y.detach()} | dict(zip(names, found, strict=True))


def feed_forward(precision: str, size: str) -> list[str]:
    """Values against float64; which kernel makes what, and where."""
    rows, width, inner, again = SIZES[size]
    results, leaves = network(rows, width, inner)
    random = torch.Generator().manual_seed(0)
    bound = {n: 0.7 * torch.randn(n.type.shape, generator=random) for n in leaves}
    expected = reference(results, bound)
    graph = apply_precision(expand_gradients(results, Origins()), precision)
    epilogues.EPILOGUE, over.LEAST = 1.0, 0  # whatever the size
    if again:
        eager(recipes=True)
    compiled = Compiled(graph, None, "cpu")
    wrong = [f"{op} is there" for op in ("matmul-gelu-grad", "matmul-rows", "tanh") if any(isinstance(l, Call) and l.node.op == op for l in compiled.schedule.launches)]
    kernels = [l for l in compiled.schedule.launches if isinstance(l, Kernel) and l.rows * l.columns == rows * inner and any(u.op == "sum" for u in l.units)]
    wide = 2 if again and rows > 1 else 1  # the gradient, and gelu
    own = [sum(n.type.size == rows * inner and n in compiled.over for n in l.stores) for l in kernels]
    if precision == "bf16" and rows > 1 and (len(own) != 2 or min(own) < 1 or max(own) != wide):
        wrong.append(f"of the blocks' kernels {own} tensors are stored over others, and in one of them {wide} are to be")
    arena = torch.full((compiled.plan.size + BAND,), 0xFF, dtype=torch.uint8)
    b = Bound(compiled, {n: t.to(TORCH[n.type.dtype]) for n, t in bound.items()}, {}, arena, lambda what, parts: poison(1, torch.int64))
    b.launch()
    first = {name: b.result(name).clone() for name in graph}
    b.launch()  # what was stored over is made anew
    tolerance = {"f32": 2e-6, "bf16": 3e-2}[precision]
    for name, value in expected.items():
        found = first[name].double()
        off = float((found - value).abs().max()) / (1e-9 + float(value.abs().max()))
        if not off <= tolerance:
            wrong.append(f"{name}: off by {off:.1e}")
        if not torch.equal(b.result(name), first[name]):
            wrong.append(f"{name}: a second run gives other bits")
    if bool((arena[compiled.plan.size :] != 0xFF).any()):
        wrong.append("a kernel wrote behind the arena")
    return [f"{precision}, {size}: {w}" for w in wrong]


def main(case: str) -> None:
    if case == "gradients":
        cases = [(precision, size) for size in SIZES for precision in ("bf16", "f32")]
        tell([w for precision, size in cases for w in feed_forward(precision, size)], len(cases))
    else:
        tell(*steps(case))


if __name__ == "__main__":
    main(sys.argv[1])

"""Bias gradients that attention's gradient leaves as partial sums, through the CUDA backend: `python attention_sums_in_triton.py CASE`.

Cases: `alone` (the last launch adds them up), `read` (another launch reads the bias's gradient), `watched` (a metric does), `wide` (heads
that no kernel of ours takes), `only` (of the projection's gradients, the bias's alone is wanted).
"""

from __future__ import annotations

import sys

from harness import BAND, DEVICE, draws, poison, same, tell  # first: it chooses the interpreter

# isort: split
import torch

from sexpgpu.backends.cuda import library
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.interpreter import compile_graph
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.join import join_attention
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.schedule.fuse import Call

BATCH, HEADS, PLACES = 2, 3, 70  # places: no multiple of a kernel's block
OPS = ("attend-grad-packed", "matmul-rows", "matmul-f32")


def graph(width: int, norm: bool, all_of_it: bool) -> tuple[dict[str, Node], dict[Node, torch.Tensor]]:
    """Gradients by a packed projection of heads of `width`, in the bf16 policy, and values of the leaves. norm: a sum over the bias's."""
    size = HEADS * width

    def leaf(name: str, *shape: int) -> Node:
        return build("input", name=name, shape=shape, dtype="f32", batch=False)

    x, ct, weight, bias = leaf("x", BATCH, PLACES, 8), leaf("ct", BATCH, PLACES, size), leaf("weight", 8, 3 * size), leaf("bias", 3 * size)
    joint = build("+", build("matmul", x, weight), bias)
    parts = []
    for i in range(3):
        part = build("slice", joint, axis=2, start=i * size, stop=(i + 1) * size)
        parts.append(build("transpose", build("reshape", part, shape=(BATCH, PLACES, HEADS, width)), permutation=(0, 2, 1, 3)))
    y = build("reshape", build("transpose", build("attend", *parts, causal=True), permutation=(0, 2, 1, 3)), shape=ct.type.shape)
    loss = build("sum", build("*", y, ct))
    wanted = {"weight": weight, "bias": bias, "x": x} if all_of_it else {"bias": bias}
    results = dict(zip(wanted, grad(loss, list(wanted.values())), strict=True))
    if norm:
        results["norm"] = build("sum", build("square", results["bias"]))
    origins = Origins()
    random = torch.Generator().manual_seed(0)
    values = {n: torch.randn(n.type.shape, generator=random) * (0.3 if n is weight else 1.0) for n in (x, ct, weight, bias)}
    return apply_precision(join_attention(expand_gradients(results, origins)), "bf16"), values


def made(compiled: Compiled, values: dict[Node, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its results in memory of NaN, over an arena of NaN, from its second run."""
    into = {name: poison(node.type.size, TORCH[node.type.dtype]).view(node.type.shape) for name, node in compiled.results.items()}
    arena = torch.full((compiled.plan.size + BAND,), 0xFF, dtype=torch.uint8, device=DEVICE)
    bound = Bound(compiled, {leaf: value.to(DEVICE) for leaf, value in values.items()}, into, arena, draws())
    bound.launch()
    first = {name: bound.result(name).to("cpu", copy=True) for name in compiled.results}
    for tensor in into.values():
        tensor.fill_(float("nan"))
    bound.launch()
    found = {name: bound.result(name).to("cpu", copy=True) for name in compiled.results}
    assert all(same(found[name], first[name]) for name in found), "the second run gives other bits"
    assert bool((arena[compiled.plan.size :] == 0xFF).all()), "something was written behind the arena"
    return found


def main(case: str) -> None:
    width = 24 if case == "wide" else 16
    results, values = graph(width, case in ("read", "watched"), case != "only")
    beside = ("norm",) if case == "watched" else ()
    compiled = Compiled(results, dict.fromkeys(results), DEVICE, None, None, beside)
    wrong: list[str] = []

    def claim(what: str, holds: bool) -> None:
        if not holds:
            wrong.append(what)

    calls = [tuple((n.op, n.attrs.get("of", 0)) for n in launch.stores) for launch in compiled.schedule.launches if isinstance(launch, Call)]
    present = [n for n in postorder(compiled.results.values()) if n.op == OPS[0] and n.attrs["of"]]
    if case in ("wide", "only"):
        claim(f"calls {calls}", ((OPS[0], 0),) in calls and not present)
        claim("a product adds up the rows", case == "only" or {(OPS[1], 0), (OPS[1], 1)} in map(set, calls))
    else:
        claim(f"calls {calls}", [set(c) for c in calls if c[0][0] == OPS[0]] == [{(OPS[0], 0), (OPS[0], 1)}] and not any(c[0][0] == OPS[1] for c in calls))
        claim("one sum is made of partial ones at the end", (present[0] in compiled.late) == (case != "read"))
        life = compiled._lives()["partial", present[0]]
        size = HEADS * width
        claim("the plan has room for the partial sums", life.size == 4 * 3 * size * BATCH * 2 == 4 * sum(rows * n for rows, n in library.partials(present[0])))
        claim("for so long", (life.last == len(compiled.schedule.launches)) == (case != "read"))
    found, expected = made(compiled, values), compile_graph(results).run(values)
    for name, value in expected.items():
        far = (found[name].double() - value.double()).abs().max() / value.double().abs().max()
        claim(f"{name} is off by {float(far):.2e}", bool(far < 2e-2) and found[name].dtype == value.dtype)
    if case in ("read", "watched"):
        plain, _ = graph(width, False, True)
        alone = made(Compiled(plain, dict.fromkeys(plain), DEVICE), values)
        for name, value in alone.items():
            claim(f"{name} has other bits beside a norm", same(found[name], value))
    tell(wrong, len(expected))


main(sys.argv[1])

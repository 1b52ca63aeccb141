"""Kernels whose programs take several tiles side by side, or walk over rows, against the interpreter: `python tiles_in_triton.py PART`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from harness import DEVICE, compare, tell  # first: it chooses the interpreter

# isort: split
import numpy as np
import torch

from sexpgpu.backends.cuda import emit, executable
from sexpgpu.backends.cuda.emit import Blocks, choose_blocks, next_power, shape_kind
from sexpgpu.ir import Node
from sexpgpu.ops import build, constant
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.schedule.fuse import Kernel

#: rows, columns: one row, odd ones, multiples of tiles and not, above and below what is cut apart by itself
SHAPES = [(1, 24), (3, 96), (5, 127), (4, 130)]
WIDE_SHAPES = [(3, 768), (2, 777), (1, 1000)]


def small_tiles(most: int, pieces: int, programs: int) -> Callable[[Kernel, str], Blocks]:
    """Tiles of up to `most` rows, some `pieces` side by side, `programs` programs that share the rows."""

    def choose(kernel: Kernel, device: str) -> Blocks:
        kind, columns = shape_kind(kernel), kernel.columns
        if kernel.rows * columns == 1 or kind == "long":
            return choose_blocks(kernel, device)
        wide, rows = max(1, next_power(columns) // 4), min(most, next_power(kernel.rows))
        if kind == "flat":
            return Blocks(1, 64, programs if choose_blocks(kernel, "cuda").splits > 1 else 1, 1, 1, pieces)
        if kind == "columns":
            return Blocks(rows, wide, programs, 1, 1, min(2, columns))
        return Blocks(rows, wide, programs, 1, 1, -(-columns // wide))

    return choose


CUTS = {
    "of the device": lambda kernel, device: choose_blocks(kernel, "cuda"),
    "one row": small_tiles(1, 3, 1),
    "walks": small_tiles(1, 2, 2),
    "several rows": small_tiles(2, 4, 2),
}


def graph(rows: int, columns: int, dtype: str) -> tuple[dict[str, Node], dict[Node, torch.Tensor]]:
    """Normalization with what stands around it in a block, its gradients with sums over rows, softmax, reductions of numbers and truth
    values, sums of everything, and a draw."""
    leaves = {n: build("input", name=n, shape=(rows, columns), dtype=dtype, batch=False) for n in ("x", "ct", "before")}
    vectors = {n: build("input", name=n, shape=(columns,), dtype=dtype, batch=False) for n in ("weight", "bias")}
    x, weight = leaves["x"], vectors["weight"]
    low = "f64" if dtype == "f64" else "bf16"
    joint = build("+", leaves["before"], build("+", x, vectors["bias"]))
    normal = build("+", build("*", build("normalize", joint, axis=1, eps=1e-5), weight), vectors["bias"])
    kept = build("cast", build("random-bernoulli", x, path="a", number=1, p=0.7), dtype=dtype)
    y = build("+", build("gelu-tanh", normal), build("*", kept, build("sigmoid", joint)))
    loss = build("mean", build("*", y, leaves["ct"]), axis=(0, 1))
    third = build("/", x, constant(3.0, dtype))
    large = build(">", x, constant(0.3, dtype))
    results = {
        "joint": joint, "low": build("cast", normal, dtype=low), "loss": loss, "soft": build("softmax", third, axis=1), "turned": build("/", constant(2.0, dtype), build("+", build("abs", x), constant(1.0, dtype))),
        "top": build("reduce-max", x, axis=1), "least": build("reduce-min", third, axis=1), "columns": build("sum", third, axis=0),
        "all": build("reduce-all", large, axis=1), "any": build("reduce-any", large, axis=1), "spread": build("rsqrt", build("+", build("mean", build("*", x, x), axis=1), constant(1e-3, dtype))),
        "highest": build("reduce-max", third, axis=0), "every": build("sum", build("*", x, third)),
    }  # fmt: skip
    results |= {f"g{i}": g for i, g in enumerate(grad(loss, [x, weight, vectors["bias"]]))}
    random = np.random.default_rng(rows * columns)
    wide = torch.float64 if dtype == "f64" else torch.float32
    return results, {n: torch.tensor(random.standard_normal(n.type.shape)).to(wide) for n in (*leaves.values(), *vectors.values())}


def cut(part: str) -> tuple[list[str], int]:
    failures, count = [], 0
    of_device = part == "of the device"
    for rows, columns in WIDE_SHAPES if of_device else SHAPES:
        for dtype, tolerance in (("f64", 1e-9), ("f32", 3e-5)):
            if dtype == "f32" and not of_device and columns != 96:
                continue
            results, bindings = graph(rows, columns, dtype)
            low = {"low": results.pop("low")}
            executable.choose_blocks = CUTS[part]  # type: ignore[assignment]
            failures += [f"{rows} {columns} {dtype}: {text}" for text in compare(results, bindings, tolerance)]
            failures += [f"{rows} {columns} {dtype}: {text}" for text in compare(low, bindings, tolerance if dtype == "f64" else 2**-7)]
            count += 2
    return failures, count


def not_numbers() -> tuple[list[str], int]:
    """A NaN in any tile reaches the maximum of its row."""
    failures, count = [], 0
    executable.choose_blocks = CUTS["one row"]  # type: ignore[assignment]
    for place in (0, 40, 95):
        x = build("input", name="x", shape=(3, 96), dtype="f32", batch=False)
        values = torch.randn(3, 96, generator=torch.Generator().manual_seed(place))
        values[1, place] = float("nan")
        values[2] = -float("inf")
        results = {op: build(op, x, axis=1) for op in ("reduce-max", "reduce-min", "sum", "logsumexp")}
        failures += [f"NaN at {place}: {text}" for text in compare(results, {x: values}, 1e-5)]
        count += 1
    return failures, count


def text() -> tuple[list[str], int]:
    """What a kernel of three tiles says: each line of columns three times, those of rows once, and no mask where tiles fit."""
    failures = []
    x = build("input", name="x", shape=(8, 96), dtype="f32", batch=False)
    launch = next(k for k in executable.Compiled({"y": build("softmax", x, axis=1)}, None, "cpu").emitted if isinstance(k, Kernel))
    for columns, masked in ((32, False), (64, True)):
        source = emit.Emitter(launch, Blocks(1, columns, 1, 1, 1, -(-96 // columns))).emit().source
        pieces = -(-96 // columns)
        if source.count("tl.load(") != pieces or source.count("tl.store(") != pieces or source.count("row_sum(") != 1 or ("mask=" in source) != masked:
            failures.append(source)
    return failures, 2


if __name__ == "__main__":
    assert DEVICE == "cpu" or sys.argv[1] == "of the device"
    tell(*{"not numbers": not_numbers, "text": text}.get(sys.argv[1], lambda: cut(sys.argv[1]))())

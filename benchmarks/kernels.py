"""Memory-bound kernels that the compiler makes, on tensors of 256 MB, against the device's copy speed. JSON lines. Needs a GPU.

A case is a graph; its floor is every operand read once and every result written once at the speed of a copy.

    python benchmarks/kernels.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from sides import say

from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import build, constant
from sexpgpu.ops.leaves import BOUND

ROWS, COLUMNS = 65536, 1024  # of f32: 256 MB


def leaf(name: str, *shape: int, dtype: str = "f32") -> Node:
    return build("input", name=name, shape=shape, dtype=dtype, batch=False)


def cases() -> dict[str, dict[str, Node]]:
    x, ct = leaf("x", ROWS, COLUMNS), leaf("ct", ROWS, COLUMNS)
    weight, bias = leaf("weight", COLUMNS), leaf("bias", COLUMNS)
    labels, row_ct = leaf("labels", ROWS, dtype="i32"), leaf("row-ct", ROWS)
    scaled = build("*", ct, weight)
    y = build("normalize", x, axis=(1,))
    m, v, g = leaf("m", ROWS * COLUMNS), leaf("v", ROWS * COLUMNS), leaf("g", ROWS * COLUMNS)
    p = leaf("p", ROWS * COLUMNS)

    def number(value: float) -> Node:
        return constant(value, "f32")

    new_m = build("+", build("*", number(0.9), m), build("*", number(0.1), g))
    new_v = build("+", build("*", number(0.95), v), build("*", number(0.05), build("*", g, g)))
    step = build("/", new_m, build("+", build("sqrt", new_v), number(1e-8)))
    low, low_bias = leaf("low", 2 * ROWS, COLUMNS, dtype="bf16"), leaf("bias", COLUMNS)
    wide = build("+", build("cast", low, dtype="f32"), low_bias)
    mask = build("random-bernoulli", shape=(ROWS, COLUMNS), p=0.9)
    dropped = build("*", build("*", x, number(1 / 0.9)), build("cast", mask, dtype="f32"))
    return {
        "layer norm forward": {"y": build("+", build("*", y, weight), bias)},
        "layer norm backward": {
            "x": build("normalize-grad", x, scaled, axis=(1,)),
            "weight": build("sum", build("*", ct, y), axis=(0,)),
            "bias": build("sum", ct, axis=(0,)),
        },
        "softmax": {"y": build("softmax", x)},
        "cross-entropy": {"y": build("softmax-cross-entropy", x, labels)},
        "cross-entropy gradient": {"y": build("softmax-cross-entropy-grad", x, labels, row_ct)},
        "gelu with bias, bf16": {"y": build("cast", build("gelu-tanh", wide), dtype="bf16")},
        "adamw": {"p": build("-", build("*", p, number(0.9999)), build("*", number(1e-3), step)), "m": new_m, "v": new_v},
        "dropout with residual": {"y": build("+", ct, dropped)},
    }


def milliseconds(work: Callable[[], None], repeats: int) -> float:
    """The median, each call with a cold cache."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    work()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    a, b = (torch.empty(ROWS * COLUMNS, device="cuda") for _ in range(2))
    copy = 2 * a.numel() * 4 / milliseconds(lambda: b.copy_(a), given.repeats) / 1e9
    say("copy of 256 MB", terabytes_per_second=copy)
    draws = {"key": torch.tensor([12345, 0], dtype=torch.int64, device="cuda"), "draw": torch.zeros((), dtype=torch.int64, device="cuda")}
    for name, results in cases().items():
        compiled = Compiled(results, device="cuda")
        leaves: dict[Node, torch.Tensor] = {}
        for node in postorder(results.values()):
            if node.op in BOUND:
                dtype = TORCH[node.type.dtype]
                leaves[node] = (
                    torch.randint(0, COLUMNS, node.type.shape, dtype=dtype, device="cuda")
                    if node.type.is_integer
                    else torch.rand(node.type.shape, device="cuda").to(dtype)
                )
        bound = Bound(compiled, leaves, {}, None, lambda what, parts: draws[what])
        bytes_ = sum(n.type.bytes for n in leaves) + sum(n.type.bytes for n in results.values())
        time = milliseconds(bound.launch, given.repeats)
        speed = bytes_ / time / 1e9
        say(name, ms=time, floor_ms=bytes_ / copy / 1e9, terabytes_per_second=speed, of_copy=speed / copy, launches=len(bound.work))
        del bound, leaves
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Compiles kernels by hand of a potential's step for sm_90, which needs no GPU, and prints a line of figures for each. Needs Triton's ptxas."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import triton
import triton.language as tl
from kernel_statistics import statistics
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sexpgpu.backends.cuda import rank_maps, tall
from sexpgpu.backends.cuda.cartesian.kernels import gathered

INTEGERS, NUMBERS, INDICES = ("rows", "columns"), ("scale", "one"), ("begins", "ends", "order")


def line(name: str, function: Any, warps: int, constants: dict[str, Any]) -> None:
    kinds = {n: "constexpr" if n in constants else "i32" if n in INTEGERS and not (n == "rows" and constants) else "fp32" if n in NUMBERS
             else "*i32" if n in INDICES else "*fp32" for n in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if kinds[n].startswith("*")}
    made = triton.compile(ASTSource(function, kinds, constants, aligned), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(json.dumps({"name": name, "matrix": made.asm["ptx"].count("wgmma.mma_async"), "apart": made.asm["ptx"].count("fma.rn.f32"), **
                      {k: v for k, v in statistics(made.asm["cubin"]).items() if k in ("registers", "spilled", "loop", "atomics")}}), flush=True)


def main() -> None:
    line("rows", tall._rows_kernel((1088,), 64, (True,), tall.ROWS, "tf32x3"), tall.ROWS[2], {})
    line("sums", tall._sums_kernels(64, 1088, 2, 16, 1.0, "tf32x3")[0], tall.SUMS[2], {})
    line("rows of halves", tall._rows_kernel((1088,), 64, (True,), tall.ROWS_HALVES, ""), tall.ROWS_HALVES[2], {})
    line("weights of halves", tall._rows_kernel((64,), 1088, (False,), tall.WIDE_HALVES, ""), tall.WIDE_HALVES[2], {})
    line("sums of halves", tall._sums_kernels(64, 1088, 2, 31, 1.0, "")[0], tall.SUMS[2], {})
    blocks = tuple((rank, 0, 64 * n, 0.1) for rank, n in enumerate((4, 6, 7, 6)))
    line("rank weights", rank_maps._weights_kernels(blocks, 64, 2, 6336, 1024, 12, "tf32x3")[0], 4, {})
    line("gathered", gathered, 4, {"STEP": 128, "WIDE": 4, "ACC": tl.float32, "LOW": False})


if __name__ == "__main__":
    main()

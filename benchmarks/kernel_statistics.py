"""Registers, spills and instructions of the tensor product's kernels, compiled for sm_90 without a GPU: one JSON line a kernel.

    python benchmarks/kernel_statistics.py --products "2,3,3;3,3,3" --channels 64

`loop`: instructions that a warp issues for one edge and its channels of a tile; the others as cuobjdump lists them in that loop.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.cartesian.config import Config
from sexpgpu.backends.cuda.cartesian.plan import Launch, plan
from sexpgpu.backends.cuda.cartesian.product import Product, passes
from sexpgpu.backends.cuda.cartesian.source import NAME, generate
from sexpgpu.backends.cuda.cartesian.tune import Tile, default
from sexpgpu.ops.cartesian.algebra import paths
from sexpgpu.ops.cartesian.product import Form

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
POINTER = {"f32": "*fp32", "f64": "*fp64", "bf16": "*bf16"}


def compiled(product: Product, launch: Launch, tile: Tile) -> bytes:
    """The cubin of a launch."""
    kernel = generate(product.only([product.outputs[n] for n in launch.outputs]), launch.mode, launch.ranks, product.form.channels % tile.channels == 0)
    function = modules.load(kernel.source, NAME)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {"ROWS": tile.rows, "CHANNELS": tile.channels, "ACC": tl.float64 if product.dtype == "f64" else tl.float32}
    for name in function.arg_names:
        if name.startswith("LOW"):
            constants[name] = product.dtype == "bf16"
        if name in constants:
            signature[name] = "constexpr"
        elif re.fullmatch(r"[xo]\d+", name):
            signature[name] = POINTER[product.dtype]
        else:
            signature[name] = "*i32" if name in ("starts", "order", "others", "senders", "receivers") else "i32"
    if launch.mode == "edge" or product.dtype == "bf16":  # sums that are not final are f32
        for i, n in enumerate(launch.outputs):
            low = product.dtype == "bf16" and launch.mode != "edge" and product.outputs[n].target != product.narrow
            constants[f"LOW{i}"] = low
            signature[f"o{i}"] = POINTER["bf16" if low else "f64" if product.dtype == "f64" else "f32"]
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if signature[n].startswith("*")}
    found = triton.compile(ASTSource(function, signature, constants, aligned), target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
    return found.asm["cubin"]


def statistics(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says of a cubin; the loop is its widest backward jump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, resources = (subprocess.run([TOOLS / "cuobjdump", what, file.name], capture_output=True, text=True, check=True).stdout
                           for what in ("--dump-sass", "--dump-resource-usage"))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", resources).groups())  # type: ignore[union-attr]
    lines = [(int(m[1], 16), m[2].strip()) for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    first = last = -1
    for at, text in lines:
        jump = re.search(r"\bBRA\S* (?:\S+, )?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at and at - int(jump[1], 16) > last - first:
            first, last = int(jump[1], 16), at
    loop = [text for at, text in lines if first <= at <= last] or [text for _, text in lines]

    def count(pattern: str, where: list[str] = loop) -> int:
        return sum(re.search(pattern, text) is not None for text in where)

    every = [text for _, text in lines]
    return {"registers": registers, "spilled": stack, "all": len(lines), "loop": len(loop), "arithmetic": count(r"\b[FD](FMA|MUL|ADD)"),
            "loads": count(r"\bLDG"), "stores": count(r"\bSTG"), "shuffles": count(r"\bSHFL"), "barriers": count(r"\bBAR"),
            "atomics": count(r"\b(RED|ATOM)G?\b", every)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", default="0,3,3;1,3,3;2,3,3;1,1,1;2,2,2;3,3,3")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--kinds", default="csr", help="of csr,edge,rows,f64,bf16")
    parser.add_argument("--tile", help="rows,channels,warps instead of the default")
    given = parser.parse_args()
    for kind in given.kinds.split(","):
        for ranks in given.products.split(";"):
            report(kind, ranks, given)


def report(kind: str, ranks: str, given: argparse.Namespace) -> None:
    """A line for each kernel of a product's three passes."""
    dtype = kind if kind in ("f64", "bf16") else "f32"
    edges = kind != "rows"
    l1, l2, top = map(int, ranks.split(","))
    form = Form(l1, l2, given.channels, 1 if edges else given.channels, paths(l1, l2, top), False)
    for what, product in passes(form, not edges, edges, dtype).items():
        for launch in plan(product, Config(scatter="edge" if kind == "edge" else "csr")):
            tile = Tile(*map(int, given.tile.split(","))) if given.tile else default(product, launch)
            row = statistics(compiled(product, launch, tile))
            print(json.dumps({"kind": kind, "ranks": ranks, "pass": what, "walk": launch.mode, "into": launch.ranks, "tile": tile,
                              "outputs": [product.outputs[n].target for n in launch.outputs], **row}), flush=True)


if __name__ == "__main__":
    main()

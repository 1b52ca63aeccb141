"""Registers, spills and instructions of kernels, compiled for sm_90 without a GPU: one JSON line a kernel. Of the tensor product's:

    python benchmarks/kernel_statistics.py --products "2,3,3;3,3,3" --channels 64

Of a step's of example programs, with the kernels written by hand (as they stand in `examples/`, or after `:` at these knobs):

    python benchmarks/kernel_statistics.py --examples "digits;char_lm;gpt2:layers=1;potential"

`loop`: instructions of the loop over edges, the others as cuobjdump lists them in that loop; `each`: instructions for an edge and 32
channels, also where a thread has several. `--inner 64`: the weights as a product of two factors, with its matrix instructions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sexpgpu.backends.cuda import choice, modules
from sexpgpu.backends.cuda.cartesian import lanes
from sexpgpu.backends.cuda.cartesian.config import Config
from sexpgpu.backends.cuda.cartesian.plan import Launch, plan
from sexpgpu.backends.cuda.cartesian.product import Product, passes
from sexpgpu.backends.cuda.cartesian.source import NAME, WALK, generate
from sexpgpu.backends.cuda.cartesian.tune import Tile, default
from sexpgpu.ops.cartesian.algebra import paths
from sexpgpu.ops.cartesian.product import Form

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
POINTER = {"f32": "*fp32", "f64": "*fp64", "bf16": "*bf16"}


def compiled(product: Product, launch: Launch, tile: Tile | lanes.Lanes) -> bytes:
    """The cubin of a launch."""
    part, numbers = product.only([product.outputs[n] for n in launch.outputs]), launch.paths(product.form)
    constants: dict[str, Any] = {}
    if isinstance(tile, lanes.Lanes):
        kernel = lanes.generate(part, launch.mode, numbers, tile)
    else:
        kernel = generate(part, launch.mode, numbers, product.form.channels % tile.channels == 0, tile.rows == 1)
        constants = {"ROWS": tile.rows, "CHANNELS": tile.channels, "ACC": tl.float64 if product.dtype == "f64" else tl.float32}
    function = modules.load(kernel.source, NAME)
    signature: dict[str, str] = {}
    for name in function.arg_names:
        if name.startswith("LOW"):
            constants[name] = product.dtype == "bf16"
        if name in constants:
            signature[name] = "constexpr"
        elif re.fullmatch(r"[hm]\d+", name):
            signature[name] = "*i32"
        elif re.fullmatch(r"[xo]\d+", name):
            signature[name] = POINTER[product.dtype]
        else:
            signature[name] = "*i32" if name in (*WALK, "senders", "receivers") else "i32"
    if launch.mode == "edge" or product.dtype == "bf16":  # sums that are not final are f32
        for i, n in enumerate(launch.outputs):
            whole = product.shared and product.outputs[n].target == "weights"  # a row of partial sums a program
            low = product.dtype == "bf16" and launch.mode != "edge" and product.outputs[n].target != product.narrow and not whole
            constants[f"LOW{i}"] = low
            signature[f"o{i}"] = POINTER["bf16" if low else "f64" if product.dtype == "f64" else "f32"]
    options = {"num_warps": tile.warps} | ({"maxnreg": tile.registers} if isinstance(tile, lanes.Lanes) and tile.registers else {})
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if signature[n].startswith("*")}
    found = triton.compile(ASTSource(function, signature, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options)
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
            "matrix": count(r"\bHMMA"), "loads": count(r"\bLDG"), "stores": count(r"\bSTG"), "shuffles": count(r"\bSHFL"), "barriers": count(r"\bBAR"),
            "atomics": count(r"\b(RED|ATOM)G?\b", every)}


TYPES = {"f32": "*fp32", "f64": "*fp64", "bf16": "*bf16", "f16": "*fp16", "i32": "*i32", "i64": "*i64", "u8": "*u8", "u16": "*u16", "bool": "*i8"}


def emitted(file: str, sets: tuple[str, ...]) -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """Kernels of the forward and backward pass and the update of a file's first run: name, source, options."""
    from sexpgpu import compiler
    from sexpgpu.backends.cuda.executable import Compiled
    from sexpgpu.compiler import Selection, load
    from sexpgpu.passes.bounds import bounded_fields, guard_indices

    loaded = load(str(Path(__file__).resolve().parents[1] / "examples" / f"{file}.lisp"), Selection(sets=sets))
    staged = compiler.stages(loaded, next(iter(loaded.experiment.runs.values())), "cuda")
    micro, seen = staged.micro(True), set()
    for results in (guard_indices(micro, bounded_fields(micro), staged.traced.origins), staged.update(True)):
        for made in Compiled(results, dict.fromkeys(results), "cuda", staged.traced.origins).emitted.values():
            if made.source in seen:
                continue
            seen.add(made.source)
            types = ["*i64" if what[0] in ("key", "draw") else "*fp32" if what[0] == "partial" and what[1].type.dtype in ("bf16", "f16") else
                     "*i32" if what[0] == "partial" and what[1].type.dtype == "bool" else TYPES[what[1].type.dtype] for what in made.arguments]
            signature = {f"p{i}": type_ for i, type_ in enumerate(types)}
            aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
            yield made.name, ASTSource(modules.load(made.source, made.name), signature, {}, aligned), {"num_warps": made.warps}


def by_hand() -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """The kernels of `kernels.py` and `attention.py` at GPT-2's sizes, in every type that reaches them, those that add rows of a graph, and the
    device's clock."""
    from sexpgpu.backends.cuda import attention, clock, library
    from sexpgpu.backends.cuda import kernels as hand
    from sexpgpu.backends.cuda.cartesian import kernels as graph

    def source(function: Any, pointers: dict[str, str], constants: dict[str, Any], even: Sequence[str] | None = None) -> ASTSource:
        names = function.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants and (even is None or n in even)}
        return ASTSource(function, signature, constants, aligned)

    yield "clock start", source(clock.start, {"at": "*i64"}, {}), {"num_warps": 4}
    yield "clock stop", source(clock.stop, {"at": "*i64", "out": "*fp32"}, {}), {"num_warps": 4}
    yield "finish", source(hand.finish, {"table": "*i64"}, {"PARTS": 128, "WIDE": 32}), {"num_warps": 4}
    low = {"logits": "*bf16", "labels": "*i32", "ct": "*fp32", "losses": "*fp32"}
    for wide, warps in ((8192, 16), (4096, 8)):
        constants = {"CLASSES": 50304, "WIDE": wide, "LOW": True, "GRAD": True, "STAGES": 3}
        yield f"entropy_rows {wide}", source(hand.entropy_rows, low, constants), {"num_warps": warps}
    for dtype, grad in itertools.product(("fp16", "fp32", "fp64"), (False, True)):
        pointers = {"logits": f"*{dtype}", "labels": "*i32"} | dict.fromkeys(("ct", "losses"), "*fp64" if dtype == "fp64" else "*fp32")
        constants = {"CLASSES": 50304, "WIDE": 4096, "LOW": False, "GRAD": grad, "STAGES": 3}
        yield f"entropy_rows of {dtype}{' with gradient' if grad else ''}", source(hand.entropy_rows, pointers, constants, ("logits",)), {"num_warps": 8}
    choice.SWITCH.once = True
    for classes in (16384, 32000, 50258, 50304, 65536):
        name, values, options = library._row_kernel(torch.bfloat16, classes, True)
        constants = dict(zip(("CLASSES", "WIDE"), values, strict=True))
        yield f"entropy_once {classes}", source(getattr(hand, name), low | {"logits": "*i32"}, constants, ("logits",)), options
    for dtype in ("fp32", "fp64"):
        rows = {n: f"*{dtype}" for n in ("rows", "out", "firsts", "lasts")} | {"keys": "*i32", "order": "*i64"}
        constants = {"COLUMNS": 768, "CHUNK": 32, "WIDE": 256}
        yield f"scattered {dtype}", source(hand.scattered, rows, constants), {"num_warps": 2}
        yield f"gathered_ends {dtype}", source(hand.gathered_ends, rows, constants | {"STEP": 8}), {"num_warps": 4}
    for dtype, narrow in (("fp32", False), ("fp64", False), ("bf16", True)):
        indices = dict.fromkeys(("starts", "begins", "ends", "order", "more"), "*i32")
        wide = "fp64" if dtype == "fp64" else "fp32"
        sums = {"WIDE": 128, "LOW": narrow, "ACC": tl.float64 if dtype == "fp64" else tl.float32}
        yield f"segment {dtype}", source(graph.segment, indices | {"rows": f"*{wide}", "out": f"*{dtype}"}, sums), {"num_warps": 4}
        yield f"gathered {dtype}", source(graph.gathered, indices | {"rows": f"*{dtype}", "out": f"*{wide}"}, sums | {"STEP": 128, "WIDE": 4}), {"num_warps": 4}
        yield f"fold {dtype}", source(graph.fold, indices | {"rows": f"*{dtype}", "nodes": "*i32"}, {"WIDE": 512, "LOW": narrow}), {"num_warps": 4}
    half = {n: "*bf16" for n in ("Q", "K", "V", "Ct", "Out", "DQ", "DK", "DV")} | {n: "*fp32" for n in ("Lse", "Delta", "Sums")}
    shared = {"D": 64, "LOW": True, "CPU": False}
    both = (("by_keys", attention.KEYS), ("by_queries", attention.QUERIES))
    for (name, (m, n, warps, stages)), sums in itertools.product(both, (False, True)):
        constants = shared | {"SCALE": 0.125, "CAUSAL": True, "M": m, "N": n, "EVEN": True, "END": 1024, "SUMS": sums}
        yield f"attention {name}{' with sums' if sums else ''}", source(getattr(attention, name), half, constants), {"num_warps": warps, "num_stages": stages}


def of_examples(words: str) -> None:
    """A line for each kernel, and one for each file."""
    todo = [(word, emitted(word.partition(":")[0], tuple(w for w in word.partition(":")[2].split(",") if w))) for word in words.split(";")]
    for file, kernels in [*todo, ("by hand", by_hand())]:
        rows = []
        for name, source, options in kernels:
            try:
                made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
                rows.append({"file": file, "kernel": name, "warps": options["num_warps"], "shared": made.metadata.shared, **statistics(made.asm["cubin"])})
            except Exception as error:
                rows.append({"file": file, "kernel": name, "error": f"{type(error).__name__}: {error}"[:400]})
            print(json.dumps(rows[-1]), flush=True)
        fine = [r for r in rows if "error" not in r]
        print(json.dumps({"file": file, "triton": triton.__version__, "kernels": len(rows), "failed": len(rows) - len(fine),
                          "most registers": max((r["registers"] for r in fine), default=0), "with a stack": [[r["kernel"], r["spilled"]] for r in fine if r["spilled"]]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", default="0,3,3;1,3,3;2,3,3;1,1,1;2,2,2;3,3,3")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--kinds", default="csr", help="of csr,edge,rows,f64,bf16")
    parser.add_argument("--passes", default="forward,backward,second")
    parser.add_argument("--inner", type=int, default=0, help="columns of the hidden rows whose product the weights are")
    parser.add_argument("--tile", help="rows,channels,warps, or lanes,wide,deep,warps,registers, instead of the default")
    parser.add_argument("--examples", help="example files, with ; between them, instead of products")
    given = parser.parse_args()
    if given.examples:
        of_examples(given.examples)
        return
    for kind in given.kinds.split(","):
        for ranks in given.products.split(";"):
            report(kind, ranks, given)


def chosen(text: str) -> Tile | lanes.Lanes:
    numbers = [int(n) for n in text.split(",")]
    return Tile(*numbers) if len(numbers) == 3 else lanes.Lanes(*numbers)


def report(kind: str, ranks: str, given: argparse.Namespace) -> None:
    """A line for each kernel of a product's three passes."""
    dtype = kind if kind in ("f64", "bf16") else "f32"
    edges = kind != "rows"
    l1, l2, top = map(int, ranks.split(","))
    form = Form(l1, l2, given.channels, 1 if edges else given.channels, paths(l1, l2, top), False)
    for what, product in passes(form, not edges, edges, dtype, given.inner).items():
        if what not in given.passes.split(","):
            continue
        for launch in plan(product, Config(scatter="edge" if kind == "edge" else "csr")):
            tile = chosen(given.tile) if given.tile else default(product, launch)
            row = statistics(compiled(product, launch, tile))
            row["each"] = round(row["loop"] / (tile.wide * tile.deep if isinstance(tile, lanes.Lanes) else tile.rows * tile.channels / (32 * tile.warps)), 1)
            print(json.dumps({"kind": kind, "ranks": ranks, "pass": what, "inner": given.inner, "walk": launch.mode, "into": launch.ranks, "of": launch.firsts, "tile": tile,
                              "outputs": [product.outputs[n].target for n in launch.outputs], **row}), flush=True)


if __name__ == "__main__":
    main()

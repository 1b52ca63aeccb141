"""Compiles the kernels of a program for sm_90, which needs no GPU: `python compile_for_gpu.py CASE`. `TRITON_OF_DEVICES`: a folder with
the Triton that devices have, as CI has it beside the newest."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sexpgpu import compiler
from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.compiler import Selection, load
from sexpgpu.passes.bounds import bounded_fields, guard_indices

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"f32": "fp32", "f64": "fp64", "bf16": "bf16", "f16": "fp16", "i32": "i32", "i64": "i64", "u8": "u8", "u16": "u16", "bool": "i8"}
CASES = {
    "digits": ("digits", ()),
    "conv_digits": ("conv_digits", ()),
    "vae": ("vae", ()),
    "own_optimizer": ("own_optimizer", ()),
    "pinn": ("pinn", ("hidden=16",)),
    "char_lm": ("char_lm", ("layers=1", "d-model=64", "heads=2", "context=64", "batch=4")),
    "gpt2": ("gpt2", ("layers=1",)),
}


def argument(what: tuple) -> str:
    """The type of a kernel's argument."""
    if what[0] in ("key", "draw"):  # the draw is the step
        return "*i64" if what[0] == "key" else "*i32"
    dtype = what[1].type.dtype
    if what[0] in ("partial", "parts"):
        return {"bool": "*i32", "bf16": "*fp32", "f16": "*fp32"}.get(dtype, "*" + TYPES[dtype])
    return "*" + TYPES[dtype]


def main(file: str, sets: tuple[str, ...]) -> None:
    loaded = load(str(ROOT / "examples" / f"{file}.lisp"), Selection(sets=sets))
    run = next(iter(loaded.experiment.runs.values()))
    staged = compiler.stages(loaded, run, "cuda")
    micro = staged.micro(True)
    graphs = [guard_indices(micro, bounded_fields(micro), staged.traced.origins), staged.update(True)]
    failures: list[str] = []
    done: set[str] = set()
    for results in graphs:
        compiled = Compiled(results, dict.fromkeys(results), "cuda", staged.traced.origins)
        for emitted in compiled.emitted.values():
            if emitted.source in done:
                continue
            done.add(emitted.source)
            signature = {f"p{i}": argument(what) for i, what in enumerate(emitted.arguments)}
            try:
                made = compile(
                    ASTSource(fn=modules.load(emitted.source, emitted.name), signature=signature),
                    target=GPUTarget("cuda", 90, 32), options={"num_warps": emitted.warps},
                )  # fmt: skip
                if "cubin" not in made.asm or ".target sm_90" not in made.asm["ptx"]:
                    failures.append(f"{emitted.name}: no code for sm_90")
            except Exception as error:  # noqa: BLE001 - reported as a failure of the kernel
                failures.append(f"{emitted.name}: {type(error).__name__}: {str(error)[:300]}\n{emitted.source}")
    tell(failures, len(done))


def by_hand() -> None:
    """The kernels that no fusion makes."""
    sys.path.append(str(ROOT / "benchmarks"))
    from kernel_statistics import by_hand as kernels

    failures, count = [], 0
    for name, source, options in kernels():
        try:
            made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            if "cubin" not in made.asm:
                failures.append(f"{name}: no code for sm_90")
        except Exception as error:  # noqa: BLE001 - reported as a failure of the kernel
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        count += 1
    tell(failures, count)


def prelude() -> None:
    """What kernels call for each element, in f32 and f64, which no example computes in."""
    from sexpgpu.backends.cuda import prelude as functions

    calls = {"x": "{}(v)", "x y": "{}(v, w)", "y x": "{}(v, w)", "x ct": "{}(v, w)", "x low high": "{}(v, 0.5 * w, w)"}
    low = {"from_bf16", "to_bf16", "round_bf16", "from_f16", "to_f16", "round_f16", "from_bool", "to_bool", "as_index", "not_", "mod_int", "maximum_int", "minimum_int"}
    failures, count = [], 0
    for dtype in ("fp32", "fp64"):
        for name, function in vars(functions).items():
            call = calls.get(" ".join(p.name for p in getattr(function, "params", ())))
            if call is None or name.startswith("_") or name in low or not isinstance(function, triton.runtime.JITFunction):
                continue
            lines = ["@triton.jit", "def one(p0, p1, p2):", "    c = tl.arange(0, 64)", "    v = tl.load(p0 + c)", "    w = tl.load(p1 + c)", f"    tl.store(p2 + c, {call.format(name)})", ""]
            count += 1
            try:
                source = ASTSource(fn=modules.load("\n".join(lines), "one"), signature={f"p{i}": f"*{dtype}" for i in range(3)})
                compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
            except Exception as error:  # noqa: BLE001 - reported as a failure of the function
                failures.append(f"{name} of {dtype}: {type(error).__name__}: {str(error)[-300:]}")
    tell(failures, count)


def tell(failures: list[str], count: int) -> None:
    folder = os.environ.get("TRITON_OF_DEVICES")
    if folder and not triton.__file__.startswith(folder):
        failures = [*failures, f"Triton {triton.__version__} is not that of {folder}"]
    print(json.dumps({"failures": failures, "count": count}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        if sys.argv[1] in ("by hand", "prelude"):
            {"by hand": by_hand, "prelude": prelude}[sys.argv[1]]()
        else:
            main(*CASES[sys.argv[1]])

"""Compiles the kernels of a small step for sm_90 on several threads, under a driver without a GPU: `python kernels_together.py CACHE
[NAME]`, the name of the layer. Says what they are called, and how many folders the cache had before and has after."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import torch
import triton
from triton.backends.compiler import GPUTarget

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Origin, Origins
from sexpgpu.ops import build

NAME = sys.argv[2] if len(sys.argv) > 2 else "layer"

triton.runtime.driver.set_active(
    SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0)
)

origins = Origins()
x, w = (build("input", name=n, dtype="f32", shape=(64, 96), batch=False) for n in "xw")
with origins.at(Origin(paths=(NAME,))):
    results = {"a": build("tanh", build("*", x, w)), "b": build("sum", build("*", x, x), axis=(1,)), "c": build("softmax", x), "d": build("exp", build("sum", w, axis=(0,)))}
    for node in results.values():
        origins.add(node, Origin(paths=(NAME,)))
compiled = Compiled(results, None, "cuda", origins)
wanted = []
for emitted in compiled.emitted.values():
    tensors = [torch.empty(4, dtype=torch.float32 if what[0] in ("partial", "parts") else TORCH[what[1].type.dtype]) for what in emitted.arguments]
    wanted.append((modules.load(emitted.source, emitted.name), tensors, {"num_warps": emitted.warps}))

before = len(os.listdir(sys.argv[1])) if os.path.isdir(sys.argv[1]) else 0
modules.compile_together(wanted)
kernels = [kernel for function, _, _ in wanted for kernel in function.device_caches[0][0].values()]
assert all(".target sm_90" in kernel.asm["ptx"] and kernel.asm["cubin"] for kernel in kernels)
print(json.dumps({"kernels": len(kernels), "names": sorted(kernel.name for kernel in kernels), "before": before, "after": len(os.listdir(sys.argv[1]))}))

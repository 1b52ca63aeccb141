"""Compiles the kernels of a head's rows for sm_90 ahead, then as they are launched on parts of the rows, under a driver without a GPU. Says of each
how many were compiled, and its registers, spilled bytes and shared memory. Needs Triton's ptxas."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
import triton
from kernel_statistics import statistics
from triton.backends.compiler import GPUTarget

from sexpgpu.backends.cuda import choice, library, modules
from sexpgpu.ops import build

ROWS = 16


def main() -> None:
    choice.SWITCH.once = True
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0))
    for classes, grad in ((16384, True), (32000, True), (50258, True), (50304, True), (65536, True), (50304, False)):
        leaves = [build("input", name=n, shape=shape, dtype=dtype, batch=False) for n, shape, dtype in (("x", (ROWS, 8), "bf16"), ("w", (8, classes), "bf16"), ("y", (ROWS,), "i32"), ("ct", (ROWS,), "f32"))]
        node = build("linear-cross-entropy-grad", *leaves, of=2) if grad else build("linear-cross-entropy", *leaves[:3])
        ((function, arguments, options),) = library.heads_ahead(node)
        function.device_caches.clear()
        modules.compile_together([(function, arguments, options)])
        logits, labels, ct, losses = torch.empty(4, classes, dtype=torch.bfloat16), torch.empty(ROWS, dtype=torch.int32), torch.empty(ROWS), torch.empty(ROWS)
        for start in (0, 5):  # a part that begins at no multiple of 16 bytes
            name, constants, more = library._row_kernel(logits.dtype, classes, grad)
            given = logits.view(torch.int32) if name == "entropy_once" else logits
            modules.by_hand(name).warmup(given, labels[start:], (ct if grad else losses)[start:], losses[start:], *constants, grid=(1,), **more)
        kernels = list(function.device_caches[0][0].values())
        found = statistics(kernels[0].asm["cubin"])
        print(json.dumps({"classes": classes, "kernel": name, "compiled": len(kernels), "shared": kernels[0].metadata.shared, "registers": found["registers"], "spilled": found["spilled"]}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main()

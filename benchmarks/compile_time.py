"""From a file to its first step: GPT-2 124M with empty caches and again with full ones, ours (the command `sexpgpu run`, its data a
synthetic token file) and torch.compile's, each start a process of its own, timed from its beginning. JSON lines, with where the time
goes. Needs a GPU.

    python benchmarks/compile_time.py

On a CPU, as a check of this script: TRITON_INTERPRET=1 python benchmarks/compile_time.py --device cpu --tiny --only ours
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BARS = {"first": 60.0, "second": 8.0}  # seconds
CASES = ("ours first", "ours second", "torch first", "torch second")


class Parts:
    """Seconds by part of a start; a part within another counts in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.first_step: float | None = None

    def add(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Counts every call of a function as this part."""
        plain = getattr(owner, attribute)
        setattr(owner, attribute, lambda *given, **named: self.add(name, lambda: plain(*given, **named)))


def ours(given: argparse.Namespace) -> Parts:
    """`sexpgpu run` for two steps, with the large parts of its start watched."""
    parts = Parts()
    sys.path[:0] = [str(ROOT)]
    parts.add("import torch", lambda: __import__("torch"))

    def modules() -> Any:
        from sexpgpu import compiler
        from sexpgpu.backends import state
        from sexpgpu.backends.cuda import device, executable, flight, modules, program
        from sexpgpu.cli import main
        from sexpgpu.run import bind

        return compiler, state, device, executable, flight, modules, program, main, bind

    compiler, state, device, executable, flight, modules_, program, main_, bind = parts.add("import the rest", modules)
    for name in ("load", "train_graph", "stages"):
        parts.watch(compiler, name, "trace")
    parts.watch(device, "open_device", "device opened")
    parts.watch(bind, "bind", "data bound")
    parts.watch(state, "initialise", "initial values")
    parts.watch(executable.Compiled, "__init__", "lowering")
    parts.watch(modules_, "compile_together", "kernels compiled or found")
    parts.watch(flight.Replay, "__init__", "warm-up and capture")
    parts.watch(program.CudaProgram, "__init__", "program, with lowering")
    parts.watch(program.CudaProgram, "launch", "launches, with capture")
    plain = program.CudaProgram.collect

    def collect(self: Any, flying: Any) -> Any:
        found = plain(self, flying)
        if parts.first_step is None:
            parts.first_step = time.time()
        return found

    program.CudaProgram.collect = collect
    sets = [word for one in (["layers=2", "heads=2", "d-model=32", "context=32", "vocabulary=512", "batch=4"] if given.tiny else [f"batch={given.batch}"]) for word in ("--set", one)]
    code = main_.perform(["run", given.folder + "/gpt2.lisp", "--device", "cuda", "--steps", "2", "--eval-every", "0", *sets])
    if code or parts.first_step is None:
        raise SystemExit(f"sexpgpu run ended with {code}")
    return parts


def theirs(given: argparse.Namespace) -> Parts:
    """A script as users of torch.compile write it; its initial values are made on the device."""
    parts = Parts()
    torch = parts.add("import torch", lambda: __import__("torch"))
    torch.set_float32_matmul_precision("high")

    def build() -> Any:
        from torch_models import Gpt2

        with torch.device("cuda"):
            model = Gpt2(12, 12, 768, 1024, 50304)
            for p in model.parameters():
                if p.dim() > 1:
                    torch.nn.init.normal_(p, std=0.02)
        return model

    model = parts.add("model", build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, 50304, (given.batch, 1025), device="cuda")

    def loss_of(tokens: Any, targets: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return model(tokens, targets)

    fast = torch.compile(loss_of)

    def step() -> float:
        loss = fast(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    parts.add("first step", step)
    parts.first_step = time.time()
    return parts


def start(case: str, given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One start, timed from the beginning of its process; `folder` holds its caches and data."""
    caches = {name: f"{folder}/{name.lower()}" for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_STATE_HOME")}
    environ = {**os.environ, **caches, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if case.startswith("ours") else ""}
    environ = {name: value for name, value in environ.items() if value and name != "TRITON_CACHE_DIR"}
    if case.startswith("torch"):
        environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    words = ["--start", case.split()[0], "--folder", folder, "--batch", str(given.batch), "--device", given.device, *(["--tiny"] if given.tiny else [])]
    begun = time.time()
    try:
        done = subprocess.run([sys.executable, __file__, *words], env=environ, capture_output=True, text=True, timeout=given.limit)
    except subprocess.TimeoutExpired as error:
        tail = error.stderr or b""
        return {"error": f"over {given.limit} s", "trace": (tail.decode(errors="replace") if isinstance(tail, bytes) else tail).splitlines()[-6:]}
    ended = time.time()
    if done.returncode:
        return {"error": f"ended with {done.returncode}", "trace": done.stderr.strip().splitlines()[-8:]}
    told = json.loads(done.stdout.strip().splitlines()[-1])
    found = {"first_step_seconds": round(told["at"] - begun, 2), "process_seconds": round(ended - begun, 2), "parts": {k: round(v, 2) for k, v in told["parts"].items()}}
    return found | ({"bar": BARS[case.split()[1]]} if case.startswith("ours") else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", default="", help="starts whose name holds this: " + ", ".join(CASES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: ours under Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 32, to try the script")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one start")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start is not None:
        parts = ours(given) if given.start == "ours" else theirs(given)
        print(json.dumps({"at": parts.first_step, "parts": parts.seconds}), flush=True)
        return
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").mkdir()
        shutil.copy(ROOT / "examples" / "gpt2.lisp", folder)
        np.random.default_rng(0).integers(0, 512, 1 << 21, dtype=np.uint16).tofile(f"{folder}/data/gpt2_tokens.bin")
        for case in CASES:
            if given.only in case:
                row = {"name": f"start {case}", **start(case, given, folder)}
                print(json.dumps(row), flush=True)
                if os.environ.get("OUT") and Path(os.environ["OUT"]).is_dir():
                    with open(Path(os.environ["OUT"]) / "rows.jsonl", "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""From a file to its first step: GPT-2 124M with empty caches and again with full ones, ours (the command `sexpgpu run`, its data a
synthetic token file) and torch.compile's, each start a process of its own, timed from its beginning. JSON lines, with where the time
goes. Needs a GPU.

    python benchmarks/compile_time.py

`parts`: seconds of each part without the parts within it, `elsewhere` what none of them names. `torch_import`: seconds that are torch's own. Each side
keeps its bytecode in a folder of this measurement, empty at the first start: ours by the command's own rule (`cli/bytecode.py`), torch.compile's by
PYTHONPYCACHEPREFIX, or `--as-given` as the machine has it. `--profile FILE`: of our starts, by cProfile, which makes them slower.

On a CPU, as a check of this script: TRITON_INTERPRET=1 python benchmarks/compile_time.py --device cpu --tiny --only ours
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from typing import Any

BEGAN = time.time()
ROOT = Path(__file__).resolve().parents[1]
BARS = {"first": 60.0, "second": 8.0}  # seconds
CASES = ("ours first", "ours second", "torch first", "torch second")


class Parts:
    """Seconds by part of a start, each without the parts within it; what is left of the process's time is in none."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.first_step: float | None = None
        self.until: dict[str, float] = {}  # the seconds as they were then
        self.cpu = 0.0  # of all threads, by then
        self._inner: list[float] = []

    def add(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            return work()
        finally:
            whole = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole

    def end(self) -> bool:
        """The first step is there; whether it was the first."""
        if self.first_step is not None:
            return False
        self.first_step, self.until, self.cpu = time.time(), dict(self.seconds), time.process_time()
        return True

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Counts every call of a function on this thread as this part."""
        plain, mine = getattr(owner, attribute), threading.get_ident()

        def counted(*given: Any, **named: Any) -> Any:
            return self.add(name, lambda: plain(*given, **named)) if threading.get_ident() == mine else plain(*given, **named)

        setattr(owner, attribute, counted)


class Imports:
    """Before Python's own finders: counts what a module takes to be imported, torch's apart from the rest, and watches functions of modules
    once these are there, so that nothing is imported earlier or in another order than by the command."""

    def __init__(self, parts: Parts, watched: dict[str, Sequence[tuple[str, str]]], then: dict[str, Callable[[Any], None]]):
        self.parts, self.watched, self.then = parts, watched, then
        self.torch, self.mine = False, threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = next((s for f in sys.meta_path if f is not self and (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader | ExtensionFileLoader) and threading.get_ident() == self.mine:
            plain = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._run(name, plain, module)  # type: ignore[method-assign]
        return spec

    def _run(self, name: str, plain: Callable[[Any], Any], module: Any) -> None:
        outer, self.torch = self.torch, self.torch or name == "torch"
        try:
            self.parts.add("import torch" if self.torch else "import the rest", lambda: plain(module))
        finally:
            self.torch = outer
        for attribute, part in self.watched.get(name, ()):
            owner, _, last = attribute.rpartition(".")
            self.parts.watch(getattr(module, owner) if owner else module, last, part)
        if name in self.then:
            self.then[name](module)


#: module -> its functions that are parts of a start
WATCHED: dict[str, Sequence[tuple[str, str]]] = {
    "sexpgpu.compiler": [("load", "trace"), ("train_graph", "trace"), ("check_evals", "trace"), ("stages", "trace"), ("whole_step", "count of operations"),
                         ("flops", "count of operations"), ("graph_hash", "hashes"), ("trajectory", "hashes"), ("label_bounds", "hashes")],
    "sexpgpu.cli.device": [("begin", "device opened"), ("wake", "device opened")],
    "sexpgpu.cli.run": [("stored", "settings and options"), ("options", "settings and options"), ("load", "settings and options")],
    "sexpgpu.run.session": [("bind", "data bound"), ("check_disk", "settings and options")],
    "sexpgpu.backends.state": [("initialise", "initial values")],
    "sexpgpu.backends.cuda.executable": [("Compiled.__init__", "lowering"), ("Bound.__init__", "launches put together")],
    "sexpgpu.backends.cuda.ahead": [("Ahead.join", "waited for what is made ahead")],
    "sexpgpu.backends.cuda.modules": [("compile_together", "kernels compiled or found")],
    "sexpgpu.backends.cuda.flight": [("Replay.__init__", "warm-up and capture")],
    "sexpgpu.backends.cuda.program": [("CudaProgram.__init__", "program"), ("CudaProgram.initialise", "initial values"), ("CudaProgram.launch", "first launch"),
                                      ("CudaProgram.collect", "first step")],
}


def ours(given: argparse.Namespace) -> Parts:
    """`sexpgpu run` for two steps, as the command does it, with the large parts of its start watched."""
    parts = Parts()
    profile = cProfile.Profile() if given.profile else None

    def end_at_first_step(module: Any) -> None:
        plain = module.CudaProgram.collect

        def collect(self: Any, flying: Any) -> Any:
            found = plain(self, flying)
            if parts.end() and profile is not None:
                profile.disable()
                profile.dump_stats(given.profile)
            return found

        module.CudaProgram.collect = collect

    sys.path[:0] = [str(ROOT)]
    from sexpgpu.cli import entry

    entry.prepare()
    sys.meta_path.insert(0, Imports(parts, WATCHED, {"sexpgpu.backends.cuda.program": end_at_first_step}))  # type: ignore[arg-type]
    if profile is not None:
        profile.enable()
    from sexpgpu.cli import main as command

    sets = [word for one in (["layers=2", "heads=2", "d-model=32", "context=32", "vocabulary=512", "batch=4"] if given.tiny else [f"batch={given.batch}"]) for word in ("--set", one)]
    code = command.perform(["run", given.folder + "/gpt2.lisp", "--device", "cuda", "--steps", "2", "--eval-every", "0", *sets])
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
    parts.end()
    return parts


def start(case: str, given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One start, timed from the beginning of its process; `folder` holds its caches and data."""
    caches = {name: f"{folder}/{name.lower()}" for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_STATE_HOME")}
    environ = {**os.environ, **caches, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if case.startswith("ours") else ""}
    environ = {name: value for name, value in environ.items() if value and name != "TRITON_CACHE_DIR"}
    if case.startswith("torch"):
        environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        if not given.as_given:
            environ.pop("PYTHONDONTWRITEBYTECODE", None)
            environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
    words = ["--start", case.split()[0], "--folder", folder, "--batch", str(given.batch), "--device", given.device, *(["--tiny"] if given.tiny else [])]
    words += ["--profile", f"{given.profile}.{case.split()[1]}"] if given.profile and case.startswith("ours") else []
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
    parts = {"Python's own start": told["began"] - begun, **told["parts"]}
    whole = told["at"] - begun
    found = {"first_step_seconds": round(whole, 2), "process_seconds": round(ended - begun, 2), "cpu_seconds": round(told["cpu"], 2),
             "torch_import": round(parts.get("import torch", 0.0), 2), "parts": {k: round(v, 2) for k, v in parts.items()},
             "elsewhere": round(whole - sum(parts.values()), 2), "bytecode": told["bytecode"]}
    return found | ({"bar": BARS[case.split()[1]]} if case.startswith("ours") else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", default="", help="starts whose name holds this: " + ", ".join(CASES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: ours under Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 32, to try the script")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one start")
    parser.add_argument("--profile", help="a file, in which cProfile's figures of our starts go, with .first and .second behind its name")
    parser.add_argument("--as-given", action="store_true", help="torch.compile's bytecode is where the environment has it")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start is not None:
        parts = ours(given) if given.start == "ours" else theirs(given)
        kept = "kept nowhere" if sys.dont_write_bytecode else "beside the sources" if sys.pycache_prefix is None else "in its folder"
        print(json.dumps({"began": BEGAN, "at": parts.first_step, "cpu": parts.cpu, "parts": parts.until, "bytecode": kept}), flush=True)
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

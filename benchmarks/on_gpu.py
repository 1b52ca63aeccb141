"""What only a GPU can show of the CUDA backend, part by part: each has its own time limit, and one that fails leaves the others.
JSON lines on the way, a table at the end.

    python benchmarks/on_gpu.py --part ops,follow,repeat      # parts in this order
    python benchmarks/on_gpu.py --list
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import ROOT, last_lines, python_path, say

OUT = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
STEPS = 50
FOLLOWED = ("digits", "char_lm")
CLOSE = 1e-5  # relative, of losses in f32 against the interpreter's


@dataclass
class Done:
    """A process that ended; `code` is None where it had to be stopped: then `err` ends with where it was, as Python's faulthandler says it."""

    code: int | None
    out: str
    err: str
    seconds: float

    def trouble(self) -> list[str]:
        if self.code is not None:
            return [f"exit {self.code}", *last_lines(self.err, 8)]
        before, _, dump = self.err.partition("Fatal Python error")
        stacks = dump.split("(most recent call first):")[1:]  # of its threads, and of what it started
        where = [line.strip() for stack in stacks[-3:] for line in [x for x in stack.splitlines() if x.strip().startswith("File ")][:4]]
        return [f"stopped after {self.seconds:.0f} s", *last_lines(before, 2), *last_lines(self.out, 1), *where]


def stop(process: subprocess.Popen[Any]) -> None:
    """Ends a process and all that it started, which would run on beside what comes next. Python's say on stderr where they are."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    every = [process.pid]
    for pid in every:
        every += [child for child, parent in parents.items() if parent == pid]
    for number in (signal.SIGABRT, signal.SIGKILL):
        for pid in every:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)


class Job:
    """A process beside others."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str] | None = None):
        self._start = time.monotonic()
        environ = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1", **(variables or {})}  # many beside each other: threads that spin would wait for them all
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environ, stdout=self._files[0], stderr=self._files[1])

    def wait(self, until: float) -> Done:
        """Stops it at `until` of the monotonic clock."""
        code: int | None = None
        try:
            code = self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(self.process)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Done(code, texts[0], texts[1], time.monotonic() - self._start)


def together(jobs: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], seconds: float, most: int = 8) -> dict[str, Done]:
    """So many processes at once."""
    until = time.monotonic() + seconds
    found: dict[str, Done] = {}
    running: dict[str, Job] = {}
    for name, (words, variables) in jobs.items():
        if len(running) >= most:
            first = next(iter(running))
            found[first] = running.pop(first).wait(until)
        running[name] = Job(words, variables)
    return found | {name: job.wait(until) for name, job in running.items()}


def command(*words: str) -> list[str]:
    return ["-m", "sexpgpu", *words]


def example(folder: Path, name: str, **more: str) -> str:
    """A copy of an example that logs every step, with its data."""
    (folder / "data").mkdir(exist_ok=True)
    for file in (ROOT / "examples" / "data").iterdir():
        if not (folder / "data" / file.name).exists():
            shutil.copy(file, folder / "data")
    if name == "gpt2" and not (folder / "data/gpt2_tokens.bin").exists():
        import numpy as np

        np.random.default_rng(0).integers(0, 500, 1 << 21, dtype=np.uint16).tofile(folder / "data/gpt2_tokens.bin")
    text = (ROOT / "examples" / f"{name}.lisp").read_text("utf-8")
    if ":log-every" not in text:
        text = text.replace("  :checkpoint-every", "  :log-every 1\n  :checkpoint-every", 1)
    target = folder / f"{name}.lisp"
    target.write_text(text, "utf-8")
    return str(target)


def losses(file: Path) -> list[float]:
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [float(r["value"]) for r in rows if r["type"] == "metric" and r["name"] == "loss" and "eval" not in r.get("metadata", {})]


# --- parts ------------


def ops(seconds: float, folder: Path) -> dict[str, Any]:
    """Every op, its gradient, odd sizes, bf16 in memory, NaN and draws beside the interpreter, in memory of NaN between guard bands."""
    script = str(ROOT / "tests/cuda/ops_in_triton.py")
    shares = {f"{part} {i}/4": ([script, part], {"TESTED_PART": f"{i}/4"}) for part in ("f64", "f32") for i in range(4)}
    jobs = shares | {part: ([script, part], {}) for part in ("sizes", "single", "low", "special", "draws", "second")}
    own = {"TESTED_DEVICE": "cuda", "XDG_CACHE_HOME": str(folder / "cache")}  # products that are timed beside other work are not kept
    found = together({n: (words, own | more) for n, (words, more) in jobs.items()}, seconds, 13)
    failures, count = [], 0
    for name, done in found.items():
        if done.code != 0 or not done.out.strip():
            failures.append(f"{name}: {done.trouble()}")
            continue
        told = json.loads(done.out.strip().splitlines()[-1])
        failures += [f"{name}: {text}" for text in told["failures"]]
        count += told["count"]
    return {"ok": not failures, "graphs": count, "failures": len(failures), "first": failures[:12]}


def oracle(seconds: float, folder: Path) -> dict[str, Any]:
    """Every entry of flashcart's oracle in f32 by compiled graphs: 2e-5 (tests/flashcart/oracle_in_triton.py)."""
    script = str(ROOT / "tests/flashcart/oracle_in_triton.py")
    own = {"TESTED_DEVICE": "cuda", "XDG_CACHE_HOME": str(folder / "cache"), "FLASHCART_CACHE_DIR": str(folder / "flashcart")}
    found = together({f"{i}/14": ([script], own | {"TESTED_PART": f"{i}/14"}) for i in range(14)}, seconds, 14)
    failures, small, worst, count = [], [], 0.0, 0
    for name, done in found.items():
        if done.code != 0 or not done.out.strip():
            failures.append(f"{name}: {done.trouble()}")
            continue
        said, told = (json.loads(line) for line in done.out.strip().splitlines()[-2:])
        worst, count = max(worst, said["worst"]), count + told["count"]
        failures, small = [*failures, *told["failures"]], [*small, *said["small"]]
    return {"ok": not failures, "values": count, "worst": worst, "cancel": small, "failures": len(failures), "first": failures[:12]}


def flights(seconds: float, folder: Path) -> dict[str, Any]:
    """Launches of several steps, two in the air: the bits of the state whatever goes together, is logged, is resumed; a NaN, an index."""
    script = str(ROOT / "tests/cuda/flights_in_triton.py")
    cases = ("digits", "digits-parts", "char-lm-bf16", "batch-norm", "tapped", "counted", "falls", "index", "loop", "plans")
    found = together({n: ([script, n], {"TESTED_DEVICE": "cuda"}) for n in cases}, seconds)
    failures = []
    for name, done in found.items():
        if done.code != 0 or not done.out.strip():
            failures.append(f"{name}: {done.trouble()}")
            continue
        failures += [f"{name}: {text}" for text in json.loads(done.out.strip().splitlines()[-1])["failures"]]
    return {"ok": not failures, "failures": len(failures), "first": failures[:12]}


def follow(seconds: float, folder: Path) -> dict[str, Any]:
    """digits and char_lm in f32 on the device, beside the interpreter on this machine's CPU: the largest relative difference of a loss."""
    jobs = {}
    for name in FOLLOWED:
        file = example(folder, name)
        for device in ("cpu", "cuda"):
            words = command("run", file, "--device", device, "--set", "precision=f32", "--steps", str(STEPS), "--eval-every", "0", "--metrics", f"jsonl:{folder}/{name}-{device}.jsonl")
            jobs[f"{name} {device}"] = (words, {"OMP_NUM_THREADS": "6"} if device == "cpu" else {"XDG_CACHE_HOME": str(folder / "cache")})
    found = together(jobs, seconds)
    told: dict[str, Any] = {"ok": True}
    for name in FOLLOWED:
        bad = [d.trouble() for n, d in found.items() if n.startswith(name) and d.code != 0]
        if bad:
            told |= {"ok": False, name: bad}
            continue
        cpu, cuda = (losses(folder / f"{name}-{device}.jsonl") for device in ("cpu", "cuda"))
        off = max(abs(a - b) / abs(a) for a, b in zip(cpu, cuda, strict=True))
        told |= {"ok": told["ok"] and off < CLOSE and len(cpu) == STEPS, name: f"{off:.2e} over {len(cpu)} steps, {cpu[0]:.4f} to {cpu[-1]:.4f}"}
    return told | {"bar": CLOSE}


def state(folder: Path) -> str:
    from safetensors.numpy import load_file

    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    digest = hashlib.sha256()
    for name, array in sorted((n, a) for part in parts for n, a in load_file(part).items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()[:16]


def repeat(seconds: float, folder: Path) -> dict[str, Any]:
    """Two runs, and one that is stopped in its middle and resumed: the same bits in the checkpoint, with the deterministic default."""
    cases = [(name, precision) for name in FOLLOWED for precision in ("f32", "bf16")]
    begun = time.monotonic()

    def words(name: str, precision: str, which: str, *more: str) -> tuple[list[str], dict[str, str]]:
        place = str(folder / f"{name}-{precision}-{which}")
        return command("run", example(folder, name), "--device", "cuda", "--set", f"precision={precision}", "--eval-every", "0", "--checkpoint-dir", place, *more), {"XDG_CACHE_HOME": str(folder / "cache")}

    steps = {"a": STEPS, "b": STEPS, "c": STEPS // 2}
    found: dict[str, Done] = {}
    for which in ("a", "bc", "c"):  # the first of each chooses the algorithms of its products, and keeps the choice
        more = ("--resume", "latest") if which == "c" else ()
        jobs = {f"{n} {p} {w}{' resumed' if more else ''}": words(n, p, w, "--steps", str(STEPS if more else steps[w]), *more) for n, p in cases for w in which}
        found |= together(jobs, (seconds - (time.monotonic() - begun)) * (1 if more else 0.5), 12)
    told: dict[str, Any] = {"ok": True}
    for name, precision in cases:
        bad = [d.trouble() for n, d in found.items() if n.startswith(f"{name} {precision} ") and d.code != 0]
        if bad:
            told |= {"ok": False, f"{name} {precision}": bad[0]}
            continue
        a, b, c = (state(folder / f"{name}-{precision}-{w}" / f"step-{STEPS}") for w in "abc")
        told |= {"ok": told["ok"] and a == b == c, f"{name} {precision}": "same bits" if a == b == c else f"runs {'equal' if a == b else 'DIFFER'}, resumed {'equal' if a == c else 'DIFFERS'}"}
    return told


#: example -> knobs; what takes longest first. GPT-2 of its width over 1 to 4 samples; narrower ones over 127 and 129 too, which is much work for a CPU
NUMERICS = {
    "potential": ("channels=8", "batch=4"), "gpt2": ("layers=1", "context=128", "vocabulary=5003", "batch=4"),
    "gpt2 odd": ("layers=1", "context=96", "vocabulary=5003", "d-model=384", "heads=6", "batch=4"),
    "gpt2 f32": ("layers=2", "context=129", "vocabulary=513", "d-model=254", "heads=2", "batch=3", "precision=f32"),
    "char_lm": ("layers=2",), "char_lm f32": ("layers=1", "precision=f32"), "pinn": (), "vae": (), "conv_digits": (), "own_optimizer": (), "digits": (),
}  # fmt: skip

#: the doctor's command, whose kernels have so many seconds: it then says what they had begun
DOCTOR = """
import sys
from sexpgpu.doctor import numerics
numerics.SECONDS = 10 + float(sys.argv.pop(1))
from sexpgpu.cli.main import main
main()
"""


def numerics(seconds: float, folder: Path) -> dict[str, Any]:
    """`sexpgpu doctor FILE --numerics --device cuda` of every example, all at once: most of it is done by the CPU, which compiles and computes what
    is compared with."""
    jobs: dict[str, tuple[list[str], dict[str, str]]] = {}
    for name, sets in NUMERICS.items():
        more = [word for text in sets for word in ("--set", text)]
        words = ["-c", DOCTOR, f"{max(10, seconds - 25):.0f}", "doctor", example(folder, name.split()[0]), "--numerics", "--device", "cuda", "--json", *more]
        jobs[name] = (words, {"OMP_NUM_THREADS": "3" if name.startswith("gpt2") else "1"})
    found = together(jobs, seconds, len(jobs))
    told: dict[str, Any] = {"ok": True}
    for name, done in found.items():
        try:
            document = json.loads(done.out)
        except ValueError:
            told |= {"ok": False, name: done.trouble()}
            continue
        wrong = [f"{f.get('code')} {f.get('message', '')}"[:300] for f in document["findings"] if f.get("code") != "E-ENV-011"]  # boto3 is not needed here
        said = json.dumps(document).split('"')
        kernels = [text for text in said if "kernels" in text and "agree with the interpreter" in text]
        sizes = [text.partition(": ")[2] for text in said if ": batches of " in text]
        told |= {"ok": told["ok"] and not wrong and bool(kernels), name: [*(wrong or kernels[:2] or ["nothing compared"]), *sizes[:1], f"{done.seconds:.0f} s"]}
    return told


def profile(seconds: float, folder: Path) -> dict[str, Any]:
    """`sexpgpu profile` of GPT-2 at batch 8 and of digits: the launches' sum beside a replayed step, the ceilings, the longest lines."""
    jobs: dict[str, tuple[list[str], dict[str, str]]] = {
        "gpt2": (command("profile", example(folder, "gpt2"), "--set", "batch=8", "--json"), {}),
        "digits": (command("profile", example(folder, "digits"), "--json"), {}),
    }
    told: dict[str, Any] = {"ok": True}
    for name, done in together(jobs, seconds, 1).items():
        if done.code != 0:
            told |= {"ok": False, name: done.trouble()}
            continue
        if OUT is not None:
            (OUT / f"profile-{name}.json").write_text(done.out)
        document = json.loads(done.out)
        peak = document["ceilings"]
        rows = [f"{100 * x['share']:.1f}% {x['name']} {x['path']} {x['phase']} {100 * x['of_ceiling']:.0f}% {x['bound']}" for x in document["lines"][:8]]
        told[name] = {
            "step_ms": round(1e3 * document["step_seconds"], 3), "launch_ms": round(1e3 * document["launch_seconds"], 3), "launches": document["launches"],
            "copy_tb_s": round(peak["bytes"] / 1e12, 2), "tflop_s": {k: round(v / 1e12) for k, v in peak["operations"].items()}, "lines": rows,
        }  # fmt: skip
        told["ok"] = told["ok"] and peak["bytes"] > 1e12 and abs(sum(x["share"] for x in document["lines"]) - 1) < 1e-3
    return told


def large(seconds: float, folder: Path) -> dict[str, Any]:
    """Tensors of 3.3e9 elements (logits of GPT-2 at batch 64), beside torch on some rows and columns."""
    import torch

    from sexpgpu.backends.cuda.executable import Bound, Compiled
    from sexpgpu.ops import build, constant

    rows, columns = 65536, 50304
    x = build("input", name="x", dtype="bf16", shape=(rows, columns), batch=False)
    labels = build("input", name="labels", dtype="i32", shape=(rows,), batch=False)
    wide = build("cast", x, dtype="f32")
    results = {
        "loss": build("softmax-cross-entropy", wide, labels), "twice": build("cast", build("*", wide, constant(2.0, "f32")), dtype="bf16"),
        "columns": build("sum", wide, axis=(0,)), "top": build("reduce-max", wide, axis=(1,)),
    }  # fmt: skip
    values = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    chosen = torch.randint(0, columns, (rows,), dtype=torch.int32, device="cuda")
    into = {n: torch.full(tuple(r.type.shape), float("nan"), dtype=torch.bfloat16 if r.type.dtype == "bf16" else torch.float32, device="cuda") for n, r in results.items()}
    compiled = Compiled(results, dict.fromkeys(results), "cuda")
    bound = Bound(compiled, {x: values, labels: chosen}, into, None, lambda what, parts: None)  # type: ignore[arg-type, return-value]
    bound.launch()
    torch.cuda.synchronize()
    some = torch.tensor([0, 1, 42_690, 42_691, 50_000, rows - 1], device="cuda")
    part = values[some].float()
    off = {
        "loss": float((into["loss"].flatten()[some] - torch.nn.functional.cross_entropy(part, chosen[some].long(), reduction="none")).abs().max()),
        "twice": float((into["twice"][some].float() - 2 * part).abs().max()), "top": float((into["top"].flatten()[some] - part.amax(1)).abs().max()),
        "columns": max(float((into["columns"].flatten()[c] - values[:, c].double().sum()).abs()) for c in (0, 777, columns - 1)),
    }  # fmt: skip
    whole = all(bool(torch.isfinite(t).all()) for n, t in into.items() if n != "twice") and all(bool(torch.isfinite(part).all()) for part in into["twice"].split(8192))
    fine = whole and off["loss"] < 1e-4 and off["twice"] == 0 and off["top"] == 0 and off["columns"] < 0.05
    return {"ok": fine, "elements": rows * columns, "every_element_written": whole, "off": off}


def initial(seconds: float, folder: Path) -> dict[str, Any]:
    """Initial values made on the device have the bits of the host's; the seconds of GPT-2's largest tensor."""
    import numpy as np
    import torch

    from sexpgpu.backends.initial import drawn
    from sexpgpu.ops.initial import initial_value

    told: dict[str, Any] = {"ok": True}
    for kind, settings, size in (("normal", {"std": 0.02}, 5_000_001), ("uniform", {"low": -1.5, "high": 0.25}, 3_000_003), ("normal", {}, 7)):
        out = torch.full((size,), float("nan"), device="cuda")
        drawn(kind, settings, 0x1234567890ABCDEF, out)
        same = np.array_equal(out.cpu().numpy(), initial_value(kind, settings, (size,), 0x1234567890ABCDEF).astype(np.float32))
        told |= {"ok": told["ok"] and same, f"{kind} {size}": "same bits" if same else "OTHER BITS"}
    out = torch.empty(50304 * 768, device="cuda")
    start = time.monotonic()
    drawn("normal", {"std": 0.02}, 1, out)
    torch.cuda.synchronize()
    return told | {"embedding_seconds": round(time.monotonic() - start, 3)}


HOG = """
import sys, time, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(600)
"""


def mistakes(seconds: float, folder: Path) -> dict[str, Any]:
    """What the device's own troubles look like: each ends with its code and no traceback."""
    digits, gpt2 = example(folder, "digits"), example(folder, "gpt2")
    short = ["--device", "cuda", "--steps", "2", "--eval-every", "0"]
    jobs: dict[str, tuple[list[str], dict[str, str]]] = {
        "ordinal": (command("run", digits, *short), {"SEXPGPU_DEVICES": "7"}),
        "hidden": (command("run", digits, *short), {"CUDA_VISIBLE_DEVICES": ""}),
        "cache": (command("run", digits, *short), {"XDG_CACHE_HOME": "/dev/null/cache", "TRITON_CACHE_DIR": ""}),
        "memory": (command("run", gpt2, *short), {"SEXPGPU_MEMORY": "4"}),
    }
    expected = {"ordinal": (2, "E-DEV-004"), "hidden": (2, "E-DEV-002"), "cache": (0, "E-DEV-007"), "memory": (2, "E-MEM-002")}
    found = together(jobs, seconds * 0.5)
    hog = subprocess.Popen([sys.executable, "-c", HOG, "5"], stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout is not None
        if hog.stdout.readline().strip() == "held":
            found |= together({
                "neighbour": (command("run", gpt2, *short), {}), "run time": (command("run", gpt2, *short), {"SEXPGPU_MEMORY": "130"}),
            }, seconds * 0.5, 1)  # fmt: skip
            expected |= {"neighbour": (2, "E-MEM"), "run time": (3, "E-MEM-003")}
    finally:
        hog.kill()
        hog.wait()
    told: dict[str, Any] = {"ok": "run time" in found}
    for name, done in found.items():
        code, text = expected[name]
        fine = done.code == code and text in done.err and "Traceback" not in done.err
        told |= {"ok": told["ok"] and fine, name: text if fine else done.trouble()}
        if name == "run time" and fine:
            told["who_else"] = [line.strip()[:120] for line in done.err.splitlines() if "process " in line][:2]
    return told


def script(*words: str) -> Callable[[float, Path], dict[str, Any]]:
    """Another script of this folder, whose lines pass through."""

    def work(seconds: float, folder: Path) -> dict[str, Any]:
        process = subprocess.Popen([sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]], env={**os.environ, "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1"})
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(process)  # it says above where it was
            return {"ok": False, "error": f"over {seconds:.0f} s"}
        return {"ok": code == 0, "lines": "above"}

    return work


#: name -> (what it does, seconds that it may take)
PARTS: dict[str, tuple[Callable[[float, Path], dict[str, Any]], float]] = {
    "ops": (ops, 150),
    "oracle": (oracle, 500),
    "flights": (flights, 90),
    "follow": (follow, 90),
    "repeat": (repeat, 150),
    "numerics": (numerics, 180),
    "profile": (profile, 90),
    "large": (large, 60),
    "initial": (initial, 60),
    "mistakes": (mistakes, 100),
    "kernels": (script("kernels.py"), 60),
    "products": (script("products.py"), 150),
    "switches": (script("switches.py"), 300),
    "small": (script("small.py"), 200),
    "gpt2-32": (script("gpt2.py", "--batch", "32", "--both-modes", "--loss"), 230),
    "gpt2-64": (script("gpt2.py", "--batch", "64", "--both-modes", "--profile"), 240),
    "starts": (script("compile_time.py"), 240),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help="names with commas, in the order in which they run; none is all")
    parser.add_argument("--list", action="store_true", help="the parts and their limits in seconds")
    parser.add_argument("--budget", type=float, default=570, help="seconds in all; a part that would begin after them is left out")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of what is stopped
    if given.list:
        for name, (_, seconds) in PARTS.items():
            print(f"{name:10} {seconds:4.0f} s")
        return
    end, table = time.monotonic() + given.budget, []
    for name in [n for n in given.part.split(",") if n] or list(PARTS):
        work, limit = PARTS[name]
        start = time.monotonic()
        left = min(limit, end - start)
        if left < 5:
            found: dict[str, Any] = {"ok": False, "error": "no time was left"}
        else:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = work(left, Path(folder))
                except Exception as error:
                    import traceback

                    found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:400], "trace": last_lines(traceback.format_exc(), 6)}
        row = {"seconds": round(time.monotonic() - start, 1), **found}
        say(f"part {name}", **row)
        table.append((name, row))
    for name, row in table:
        rest = "  ".join(f"{k}={v}" for k, v in row.items() if k not in ("ok", "seconds", "lines", "trace") and len(str(v)) < 90)
        print(f"{'ok    ' if row['ok'] else 'FAILED'} {name:10} {row['seconds']:6.1f} s  {rest}"[:240], flush=True)
    sys.exit(0 if all(row["ok"] for _, row in table) else 1)


if __name__ == "__main__":
    main()

"""How much faster N GPUs train GPT-2 124M than one, each with the same batch, beside torch DDP with torch.compile; then what else a
run on several GPUs promises.

JSON lines, one a part, the essential first, each as soon as it is known and tried by itself: `one`, `all`, `divided` (`sexpgpu run`: tokens a
second, the median over logged steps after the first third; each rank's own seconds; what torch's allocator held at most on each
rank, beside the plan), `numbers` (a small model: one rank, N, N again, divided, saved on N and resumed on N and on one), `torch one`,
`torch all`, `one last` (ours on the last GPU: GPUs differ), `failures` (how soon a run ends whose rank is killed or paused, and
what it says), `links` (`doctor --distributed`). After each timed part come the `ratios` so far; the last lines say what was met. Bars:
all / one >= 0.95 N, divided / all >= 0.95, all over torch's all at least one over torch's one less 0.02, losses within 1e-5.

torch's processes compile from the end of `one` on, on processors that ours do not need, and wait for their turn: one side at a time
computes, but for the few steps with which torch warms up. GPUs have a power limit each, so one of them is not slower for the other's work.

    python benchmarks/scaling.py --devices 2 --batch 32 --seconds 300     # all parts, between four and five minutes
    python benchmarks/scaling.py --device cpu --tiny --batch 2 --steps 30 --slow 3 --seconds 500     # the script itself, without a GPU
    TRITON_INTERPRET=1 python benchmarks/scaling.py --tiny --batch 1 --steps 6 --slow 5 --parts all,divided     # its kernels, too
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONTEXT, VOCABULARY = 1024, 50304
SMALL = {"layers": 2, "heads": 2, "d-model": 64, "context": 32, "vocabulary": 512, "warmup": 5}
#: part -> seconds that it may take, and is begun with at least
LIMITS = {"one": 90, "all": 75, "divided": 75, "numbers": 100, "torch one": 90, "torch all": 60, "one last": 40, "failures": 60, "links": 30}
STEPS = 40  # of the small model
#: a run that hangs says where before its part is over: `running` counts ten times where ranks wait for their GPUs
SOON = ("--deadline", "running=6s", "--deadline", "compiling=60s", "--deadline", "starting=60s")
#: variables with which `all` is tried where it fails without; the first that helps stay for the rest
TRIES: tuple[dict[str, str], ...] = ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, {"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_P2P_DISABLE": "1"})
NEAR, WORSE = 1e-5, 0.02
GIB = 2**30
#: runs first in every process of ours, and says at its end what torch's allocator held
PEAKS = """
import atexit, json, os, sys
def tell():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        row = {"rank": rank, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        with open(os.environ["SCALING_PEAKS"], "a") as file:
            file.write(json.dumps(row) + "\\n")
rank = json.loads(os.environ.get("_SEXPGPU_PLACE", "{}")).get("rank", 0)
if "SCALING_PEAKS" in os.environ:
    atexit.register(tell)
"""


def say(name: str, **fields: Any) -> dict[str, Any]:
    row = {"name": name, **fields}
    print(json.dumps(row), flush=True)
    if os.environ.get("OUT"):
        with open(Path(os.environ["OUT"]) / "scaling.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


def tokens(path: Path, vocabulary: int) -> None:
    """A stream in which each token mostly decides the next one: a model learns it."""
    import numpy as np

    rng = np.random.default_rng(0)
    follow = rng.permutation(vocabulary)
    lanes = np.empty((4096, 500), np.uint16)
    lanes[:, 0] = rng.integers(0, vocabulary, len(lanes))
    for t in range(1, lanes.shape[1]):
        lanes[:, t] = np.where(rng.random(len(lanes)) < 0.2, rng.integers(0, vocabulary, len(lanes)), follow[lanes[:, t - 1]])
    path.parent.mkdir(parents=True)
    lanes.tofile(path)


def last_words(text: str) -> str:
    return text.strip()[-1500:]


class Ours:
    """One `sexpgpu run`. `devices`: ordinals; `name`: of its files; `more`: flags."""

    environ: Mapping[str, str] = {}  # of all of them

    def __init__(self, folder: Path, file: str, devices: Sequence[int], name: str, device: str, sets: Mapping[str, Any], steps: int, *more: str):
        self.folder, self.name, self.steps = folder, name, steps
        self.peaks = folder / f"{name}.peaks"
        self.numbers, self.status, self.log = folder / f"{name}.jsonl", folder / f"{name}.json", folder / f"{name}.log"
        for path in (self.peaks, self.numbers, self.status):
            path.unlink(missing_ok=True)
        words = [sys.executable, "-m", "sexpgpu", "run", f"{file}.lisp", "--eval-every", "0", "--device", device, "--steps", str(steps),
                 "--metrics", f"jsonl:{self.numbers}", "--status", str(self.status), *more,
                 *(word for key, value in sets.items() for word in ("--set", f"{key}={value}"))]  # fmt: skip
        python = os.pathsep.join([str(folder.parent / "peaks"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": python, "SEXPGPU_DEVICES": ",".join(map(str, devices)), "SCALING_PEAKS": str(self.peaks)}
        if device == "cuda":
            environ |= {"SEXPGPU_EXPLAIN": "kernels", "NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": str(folder / f"{name}.nccl.%p"), **self.environ}
        self.begun = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def last(self) -> str:
        """The end of standard error, and what NCCL warns of."""
        return last_words(self.text()) + "".join(f"; NCCL: {path.read_text('utf-8', 'replace')[-300:]}" for path in self.folder.glob(f"{self.name}.nccl.*"))

    def step(self) -> int:
        try:
            return int(json.loads(self.status.read_text("utf-8")).get("step") or 0)
        except (OSError, ValueError):
            return 0

    def end(self) -> None:
        """Its ranks go with it."""
        self.process.kill()
        self.process.wait()

    def wait(self, limit: float) -> Ours:
        try:
            code = self.process.wait(max(1.0, limit))
        except subprocess.TimeoutExpired:
            state = self.status.read_text("utf-8")[-1200:] if self.status.exists() else "no status"
            self.end()
            raise RuntimeError(f"{self.name}: not done in {limit:.0f} s: {self.last()}; {state}") from None
        if code:
            raise RuntimeError(f"{self.name}: exit code {code}: {self.last()}")
        self.seconds = round(time.monotonic() - self.begun, 1)
        return self

    def metrics(self) -> dict[str, dict[int, float]]:
        """Metric -> step -> value."""
        found: dict[str, dict[int, float]] = {}
        for line in self.numbers.read_text("utf-8").splitlines():
            record = json.loads(line)
            if record["type"] == "metric":
                found.setdefault(record["name"], {})[record["step"]] = record["value"]
        return found

    def losses(self) -> dict[int, float]:
        return self.metrics()["loss"]

    def told(self) -> dict[str, Any]:
        """Tokens a second and what is known of memory and ranks."""
        rates = [v for step, v in self.metrics()["tokens-per-second"].items() if step > self.steps / 3]
        table = json.loads(self.status.read_text("utf-8")).get("ranks") or []
        plan = re.search(r"plan: ([0-9.,]+) ([GM])iB", self.text())
        promised = float(plan[1].replace(",", "")) / (1 if plan[2] == "G" else 1024) if plan else None
        peaks = sorted((json.loads(line) for line in self.peaks.read_text("utf-8").splitlines()), key=lambda row: row["rank"]) if self.peaks.exists() else []
        held = [round(row["allocated"] / GIB, 3) for row in peaks]
        return {"tokens_per_second": round(statistics.median(rates)), "spread": [round(min(rates)), round(max(rates))], "seconds": self.seconds, "promised_gib": promised,
                "allocated_gib": held, "reserved_gib": [round(row["reserved"] / GIB, 3) for row in peaks],
                "over_promise": round(max(held) / promised, 4) if held and promised else None,
                "ranks": [{"own_step_ms": round(1e3 * row["step_seconds"], 3), "straggler": row["straggler"]} for row in table if row["step_seconds"]]}  # fmt: skip


class Torch:
    """torch's processes, one a GPU: they build and compile at once, and are timed when they are told to."""

    def __init__(self, name: str, devices: int, given: argparse.Namespace, folder: Path):
        self.name, self.ready, self.go, self.log = name, folder / f"{name}.ready", folder / f"{name}.go", folder / f"{name}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = [sys.executable, str(HERE / "scaling.py"), "--ddp", "--device", given.device, "--batch", str(given.batch), "--steps", str(given.steps),
                 "--answers", str(self.ready), *(["--tiny"] if given.tiny else [])]  # fmt: skip
        environ = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                   "WORLD_SIZE": str(devices), "SCALING_TOKENS": str(folder / "large/data/gpt2_tokens.bin")}  # fmt: skip
        self.processes = []
        with open(self.log, "wb") as log:
            for rank in range(devices):
                more = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(subprocess.Popen(words, env=environ | more, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True))

    def measured(self, limit: float) -> dict[str, Any]:
        """Waits until it is compiled, lets it go, and gives what rank 0 says."""
        end = time.monotonic() + limit
        self._until(self.ready, end)
        self.go.touch()
        answer = self.ready.with_suffix(".answer")
        self._until(answer, end)
        return dict(json.loads(answer.read_text("utf-8")))

    def _until(self, path: Path, end: float) -> None:
        while not path.exists():
            if any(p.poll() not in (None, 0) for p in self.processes) or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"{self.name}: no {path.suffix[1:]}: {last_words(self.log.read_text('utf-8', 'replace'))}")
            time.sleep(0.05)

    def close(self) -> None:
        """With the processes that compile for it."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass
            process.wait()


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path):
        self.given, self.folder, self.begun = given, folder, time.monotonic()
        self.n = given.devices
        self.limit = 0.0  # when the part at hand is to be done
        self.found: dict[str, list[dict[str, Any]]] = {}
        self.met: dict[str, bool] = {}
        self.torch: dict[str, Torch] = {}
        text = (ROOT / "examples/gpt2.lisp").read_text("utf-8")
        for home, vocabulary, more in (("large", SMALL["vocabulary"] if given.tiny else VOCABULARY, ":checkpoint-every 1000000 :log-every 5"),
                                       ("small", SMALL["vocabulary"], ":checkpoint-every 1000000 :log-every 1")):  # fmt: skip
            tokens(folder / home / "data/gpt2_tokens.bin", int(vocabulary))
            plain = text.replace(":checkpoint-every 1000", more)
            (folder / home / "plain.lisp").write_text(plain, "utf-8")
            (folder / home / "divided.lisp").write_text(plain.replace(":clip-norm 1.0", ":clip-norm 1.0 :shard optimizer"), "utf-8")
        (folder / "peaks").mkdir()
        (folder / "peaks/sitecustomize.py").write_text(PEAKS, "utf-8")

    @property
    def left(self) -> float:
        return float(self.given.seconds - (time.monotonic() - self.begun))

    @property
    def rest(self) -> float:
        """Seconds of this part."""
        return self.limit - time.monotonic()

    def bar(self, name: str, met: bool) -> None:
        self.met[name] = met

    # -- tokens a second

    def large(self, name: str, file: str, devices: Sequence[int]) -> None:
        sets = {**(SMALL if self.given.tiny else {}), "batch": self.given.batch * len(devices)}
        run = Ours(self.folder / "large", file, devices, name.replace(" ", "-"), self.given.device, sets, self.given.steps, *(SOON if self.given.slow <= 1 else ()))
        self._timed(name, devices=list(devices), batch_each=self.given.batch, **run.wait(self.rest).told())

    def first_together(self, devices: Sequence[int]) -> None:
        """`all`, in other ways where the first fails."""
        for environ in ({}, *TRIES):
            Ours.environ = environ
            try:
                self.large("all", "plain", devices)
                return
            except RuntimeError as error:
                say("all", failed=str(error)[-1800:], environ=environ)
                if self.left < 100:
                    break
                self.limit = time.monotonic() + 45  # its kernels are compiled
        Ours.environ = {}

    def _timed(self, name: str, **found: Any) -> None:
        self.found.setdefault(name, []).append(say(name, **found))
        if found.get("over_promise"):
            self.bar(f"{name}: at most 3% over the promised memory", found["over_promise"] <= 1.03)
        self._ratios()

    def torchs(self, name: str) -> None:
        self._timed(name, **self.torch[name].measured(self.rest))
        self.torch[name].close()

    def _ratios(self) -> None:
        rate = {name: statistics.median(row["tokens_per_second"] for row in rows) for name, rows in self.found.items()}
        held = {name: max(rows[-1]["allocated_gib"]) for name, rows in self.found.items() if rows[-1].get("allocated_gib")}
        found: dict[str, float] = {}
        for name, above, below in (("all to one", "all", "one"), ("divided to all", "divided", "all"), ("torch all to one", "torch all", "torch one"),
                                   ("ours to torch, one", "one", "torch one"), ("ours to torch, all", "all", "torch all"), ("last GPU to first", "one last", "one")):
            if above in rate and below in rate:
                found[name] = round(rate[above] / rate[below], 4)
        if "divided" in held and "all" in held:
            found["memory of divided to all"] = round(held["divided"] / held["all"], 4)
        if found:
            say("ratios", devices=self.n, **found)
        if "all to one" in found:
            self.bar(f"{self.n} GPUs at least {0.95 * self.n:.2f} times one", found["all to one"] >= 0.95 * self.n)
        if "divided to all" in found:
            self.bar("divided within 5%", found["divided to all"] >= 0.95)
        if {"ours to torch, one", "ours to torch, all"} <= found.keys():
            self.bar("over DDP at least what one GPU has over torch, less 0.02", found["ours to torch, all"] >= found["ours to torch, one"] - WORSE)

    # -- numbers

    def numbers(self) -> None:
        """A small model in three rounds of runs at once, which share the GPUs: the first alone, so that the others have its kernels and
        its choices of products."""
        everywhere, first, home = list(range(self.n)), [0], self.folder / "small"
        runs: dict[str, Ours] = {}

        def begin(name: str, file: str, devices: Sequence[int], precision: str, steps: int = STEPS, *more: str) -> None:
            runs[name] = Ours(home, file, devices, name.replace(" ", "-"), self.given.device, {**SMALL, "batch": 4 * self.n, "precision": precision}, steps, *more)

        def losses(name: str) -> dict[int, float]:
            return runs[name].wait(self.rest).losses()

        try:
            begin("all", "plain", everywhere, "f32")
            every = losses("all")
            begin("one", "plain", first, "f32")
            begin("again", "plain", everywhere, "f32")
            begin("divided", "divided", everywhere, "f32")
            begin("half", "divided", everywhere, "f32", STEPS // 2, "--checkpoint-dir", "half")
            begin("bf16 all", "plain", everywhere, "bf16")
            one, again, divided, low = (losses(name) for name in ("one", "again", "divided", "bf16 all"))
            gradients = [runs[name].metrics()["gradient-norm"] for name in ("one", "all")]
            say("numbers", steps=len(one), one_to_all=far(one, every), norms_one_to_all=far(*gradients), all_twice_the_same=every == again, all_to_divided=far(every, divided))
            self.bar("losses of one rank within 1e-5", far(one, every) <= NEAR)
            self.bar("divided within 1e-5", far(every, divided) <= NEAR)
            self.bar("twice the same bits", every == again and len(every) == STEPS)
            losses("half")
            for name, where in (("resumed all", everywhere), ("resumed one", first)):
                shutil.copytree(home / "half", home / name)
                begin(name, "divided", where, "f32", STEPS, "--checkpoint-dir", name, "--resume", "latest")
            begin("bf16 divided", "divided", everywhere, "bf16")
            later = {step: value for step, value in divided.items() if step > STEPS // 2}
            same, other = losses("resumed all"), losses("resumed one")
            say("resume", on_all_same_bits=same == later, on_one=far(later, other), says=[line.strip() for line in runs["resumed one"].text().splitlines() if "bit-exact" in line or "tolerance" in line][:2])
            self.bar(f"a resume on {self.n} goes on bit for bit", same == later and bool(later))
            self.bar("a resume on 1 within 1e-5", far(later, other) <= NEAR)
            apart = losses("bf16 divided")
            say("bf16", all_to_divided=far(low, apart), same_bits=low == apart)
            self.bar("bf16 divided within 1e-3", far(low, apart) <= 1e-3)
        finally:
            for run in runs.values():
                run.end()

    # -- failures

    def failures(self) -> None:
        """Two runs at once: of one the last rank is killed, of the other it is paused."""
        ways = {"killed": (signal.SIGKILL, "E-RUN-060", "SIGKILL"), "paused": (signal.SIGSTOP, "E-RUN-061", "silent")}
        sets = {**SMALL, "batch": 4 * self.n}
        runs = {way: Ours(self.folder / "small", "plain", range(self.n), way, self.given.device, sets, 10**6) for way in ways}
        begun, ranks = {}, {}
        try:
            for way, run in runs.items():
                while run.step() <= 5 and run.process.poll() is None and self.rest > 35:
                    time.sleep(0.1)
                if run.step() <= 5:
                    raise RuntimeError(f"{way}: it did not step: {run.last()}")
                ranks[way] = [int(p) for p in Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()]
                os.kill(ranks[way][-1], ways[way][0])
                begun[way] = time.monotonic()
            for way, run in runs.items():
                code = run.process.wait(max(1.0, self.rest))
                seconds, text = time.monotonic() - begun[way], run.text()
                error = json.loads(run.status.read_text("utf-8")).get("error") or {}
                live = [p for p in ranks[way] if alive(p)]
                say(way, seconds=round(seconds, 2), exit_code=code, code=error.get("code"), rank=error.get("rank"), message=error.get("message"), left=live, says=last_words(text)[-600:])
                self.bar(f"a {way} rank ends the run in 30 s by its name", seconds < 30 and error.get("code") == ways[way][1] and error.get("rank") == self.n - 1
                         and ways[way][2] in str(error.get("message")) and not live and code == 3)  # fmt: skip
        finally:
            for run in runs.values():
                run.end()

    def links(self) -> None:
        words = [sys.executable, "-m", "sexpgpu", "doctor", "--distributed", "--json", "--device", self.given.device]
        python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": python, "SEXPGPU_DEVICES": ",".join(map(str, range(self.n)))}
        done = subprocess.run(words, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=max(1.0, self.rest), check=False)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {last_words(done.stderr)}")
        told = json.loads(done.stdout)
        say("links", latency_us=round(told["latency_seconds"] * 1e6, 1), gb_per_second={k: round(v / 1e9, 2) for k, v in told["bytes_per_second"].items()}, findings=told["findings"])
        self.bar("doctor --distributed finds nothing", told["findings"] == [])

    # -- all of it

    def machine(self) -> None:
        """What the GPUs are and how they are linked, as the driver says it; nothing where there is none."""
        try:
            asked = [["nvidia-smi", "--query-gpu=name,power.limit,memory.total", "--format=csv,noheader"], ["nvidia-smi", "topo", "-m"]]
            said = [subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout for words in asked]
        except (OSError, subprocess.SubprocessError):
            return
        say("machine", gpus=said[0].splitlines(), links=[" ".join(line.split())[:60] for line in said[1].splitlines() if line.startswith(("GPU", "\tGPU", " \tGPU"))], cpus=os.cpu_count())

    def all(self) -> None:
        everywhere = list(range(self.n))
        if self.given.device == "cuda":
            self.machine()
        makes: dict[str, Callable[[], None]] = {
            "one": lambda: self.large("one", "plain", [0]), "all": lambda: self.first_together(everywhere), "divided": lambda: self.large("divided", "divided", everywhere),
            "torch one": lambda: self.torchs("torch one"), "torch all": lambda: self.torchs("torch all"), "one last": lambda: self.large("one last", "plain", everywhere[-1:]),
            "numbers": self.numbers, "failures": self.failures, "links": self.links,
        }  # fmt: skip
        try:
            for name in self.given.parts:
                if name != "one" and not self.torch:
                    self.torch |= {side: Torch(side, count, self.given, self.folder) for side, count in (("torch one", 1), ("torch all", self.n)) if side in self.given.parts}
                limit = min(self.left, LIMITS[name] * self.given.slow)
                if limit < 0.4 * LIMITS[name]:
                    say(name, skipped=f"{self.left:.0f} s are left")
                    continue
                self.limit = time.monotonic() + limit
                begun = time.monotonic()
                try:
                    makes[name]()
                except Exception as error:  # noqa: BLE001 - a part that fails leaves the others
                    say(name, failed=f"{type(error).__name__}: {error}"[:2500])
                print(f"# {name}: {time.monotonic() - begun:.1f} s, {self.left:.0f} s left", flush=True)
        finally:
            for side in self.torch.values():
                side.close()
        for bar, met in self.met.items():
            print(f"{'met   ' if met else 'MISSED'} {bar}", flush=True)


def far(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """The largest relative difference; infinite where they are of other steps."""
    return max((abs(a[k] - b[k]) / max(abs(a[k]), 1e-9) for k in a), default=float("inf")) if a.keys() == b.keys() else float("inf")


def alive(pid: int) -> bool:
    """Whether it still runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ddp(given: argparse.Namespace) -> None:
    """One rank of `Torch`: GPT-2 124M, bf16 autocast, fused AdamW, clipped to 1; the whole step timed in blocks."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch_models import Gpt2

    local, ranks, cuda = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), given.device == "cuda"
    place = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=place if cuda else None)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    context, vocabulary = (int(SMALL["context"]), int(SMALL["vocabulary"])) if given.tiny else (CONTEXT, VOCABULARY)
    layers, heads, width = (int(SMALL[n]) for n in ("layers", "heads", "d-model")) if given.tiny else (12, 12, 768)
    model = Gpt2(layers, heads, width, context, vocabulary).to(place)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    net: Any = model
    if ranks > 1:
        net = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local] if cuda else None, gradient_as_bucket_view=True)
    net = torch.compile(net, backend="inductor" if cuda else "eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    stream = np.fromfile(os.environ["SCALING_TOKENS"], np.uint16).astype(np.int64)
    starts = np.random.default_rng(local).integers(0, len(stream) - context - 1, (8, given.batch))
    batches = torch.from_numpy(np.stack([[stream[s : s + context + 1] for s in row] for row in starts])).to(place)
    made = 0

    def step() -> None:
        nonlocal made
        batch = batches[made % len(batches)]
        made += 1
        with torch.autocast(place.type, torch.bfloat16):
            loss = net(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def settle() -> None:
        if cuda:
            torch.cuda.synchronize()
        if ranks > 1:
            dist.barrier()

    ready = Path(given.answers)
    begin = time.perf_counter()
    for _ in range(5):
        step()
    settle()
    first = time.perf_counter() - begin
    if local == 0:
        ready.touch()
    while not ready.with_suffix(".go").exists():  # without a call of the device, which others use
        time.sleep(0.02)
    settle()
    block, times = 5, []
    for _ in range(max(3, given.steps // block)):
        begin = time.perf_counter()
        for _ in range(block):
            step()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / block)
    times = times[len(times) // 3 :]
    if local == 0:
        seconds = statistics.median(times)
        answer = {"devices": list(range(ranks)), "batch_each": given.batch, "tokens_per_second": round(given.batch * ranks * context / seconds), "step_ms": round(seconds * 1e3, 3),
                  "spread_ms": [round(1e3 * min(times), 3), round(1e3 * max(times), 3)], "compiled_in_seconds": round(first, 1)}  # fmt: skip
        if cuda:
            answer |= {"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3)}
        part = ready.with_suffix(".part")
        part.write_text(json.dumps(answer), "utf-8")
        part.rename(ready.with_suffix(".answer"))
    settle()
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=32, help="samples of one device in a step")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seconds", type=float, default=300.0, help="in all")
    parser.add_argument("--slow", type=float, default=1.0, help="the parts' limits times this")
    parser.add_argument("--parts", default=",".join(LIMITS))
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answers", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ddp:
        ddp(given)
        return
    given.parts = [name.strip() for name in given.parts.split(",")]
    unknown = [name for name in given.parts if name not in LIMITS]
    if unknown:
        parser.error(f"unknown parts {unknown}; there are {', '.join(LIMITS)}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Bench(given, Path(folder)).all()


if __name__ == "__main__":
    main()

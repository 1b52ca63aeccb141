"""How much faster N GPUs train GPT-2 124M than one, each with the same batch, beside torch DDP with torch.compile.

JSON lines, one a part, each part tried by itself: `links` (what sums between the ranks reach), `numbers` (a small model: one rank
and several, twice, divided), `one`, `all`, `divided` (`sexpgpu run`: tokens a second, the median over logged steps after the first third;
each rank's own seconds; peak memory of a GPU by nvidia-smi, beside the plan's), `torch one`, `torch all`, `kill` (how soon a run
ends whose rank was killed), and at the end `ratios`. Targets: all / one >= 0.95 N, divided / all >= 0.95, and all over torch's all at
least one over torch's one, less 0.02.

    python benchmarks/scaling.py --devices 2 --batch 32 --seconds 540     # all parts, about eight minutes
    python benchmarks/scaling.py --devices 2 --parts one,all --rounds 3
    TRITON_INTERPRET=1 python benchmarks/scaling.py --tiny --batch 2 --steps 6 --parts numbers,one,all,divided   # the script itself, on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONTEXT, VOCABULARY = 1024, 50304
SMALL = {"layers": 2, "heads": 2, "d-model": 32, "context": 32, "vocabulary": 512, "warmup": 5}
PARTS = ("links", "numbers", "one", "all", "divided", "torch one", "torch all", "kill")
NEEDED = {"links": 40, "numbers": 110, "kill": 60}  # seconds that a part is begun with at least; others 60


def say(name: str, **fields: Any) -> dict[str, Any]:
    row = {"name": name, **fields}
    print(json.dumps(row), flush=True)
    if os.environ.get("OUT"):
        with open(Path(os.environ["OUT"]) / "scaling.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


class Memory:
    """The most MiB in use on each GPU while this stands, by nvidia-smi; empty where there is none."""

    def __enter__(self) -> Memory:
        self.most: dict[int, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _look(self) -> None:
        words = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.3):
            try:
                found = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
            except (OSError, subprocess.SubprocessError):
                return
            for line in found.splitlines():
                index, used = (int(part) for part in line.split(","))
                self.most[index] = max(used, self.most.get(index, 0))


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path):
        self.given, self.folder, self.begun = given, folder, time.monotonic()
        self.device = "cpu" if given.cpu else "cuda"
        self.found: dict[str, list[dict[str, Any]]] = {}
        self.small: dict[str, dict[int, float]] = {}
        (folder / "data").mkdir()
        self._tokens(folder / "data/gpt2_tokens.bin", SMALL["vocabulary"] if given.tiny else VOCABULARY)
        text = (ROOT / "examples/gpt2.lisp").read_text("utf-8")
        text = text.replace(":checkpoint-every 1000", ":checkpoint-every 1000000 :log-every 5")
        (folder / "plain.lisp").write_text(text, "utf-8")
        (folder / "divided.lisp").write_text(text.replace(":clip-norm 1.0", ":clip-norm 1.0 :shard optimizer"), "utf-8")

    @staticmethod
    def _tokens(path: Path, vocabulary: int) -> None:
        """A stream in which each token mostly decides the next one: a model learns it."""
        import numpy as np

        rng = np.random.default_rng(0)
        follow = rng.permutation(vocabulary)
        lanes = np.empty((4096, 500), np.uint16)
        lanes[:, 0] = rng.integers(0, vocabulary, len(lanes))
        for t in range(1, lanes.shape[1]):
            lanes[:, t] = np.where(rng.random(len(lanes)) < 0.2, rng.integers(0, vocabulary, len(lanes)), follow[lanes[:, t - 1]])
        lanes.tofile(path)

    @property
    def left(self) -> float:
        return float(self.given.seconds - (time.monotonic() - self.begun))

    # -- ours

    def words(self, file: str, batch: int, sets: Mapping[str, Any], *more: str) -> list[str]:
        chosen = {"batch": batch, **(SMALL if self.given.tiny else {}), **sets}
        return [sys.executable, "-m", "sexpgpu", "run", f"{file}.lisp", "--eval-every", "0", "--device", self.device, *more,
                *(word for name, value in chosen.items() for word in ("--set", f"{name}={value}"))]

    def environ(self, devices: int, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": python_path(), "SEXPGPU_DEVICES": ",".join(map(str, range(devices))), **more}

    def run(self, file: str, devices: int, each: int, steps: int, **sets: Any) -> dict[str, Any]:
        """One `sexpgpu run`: {metric name: {step: value}}, and what status, plan and driver say."""
        numbers, status = self.folder / "m.jsonl", self.folder / "s.json"
        for path in (numbers, status):
            path.unlink(missing_ok=True)
        words = self.words(file, each * devices, sets, "--steps", str(steps), "--metrics", f"jsonl:{numbers}", "--status", str(status))
        with Memory() as memory:
            start = time.monotonic()
            done = subprocess.run(words, cwd=self.folder, env=self.environ(devices, SEXPGPU_EXPLAIN="kernels" if self.device == "cuda" else ""),
                                  capture_output=True, text=True, timeout=max(30.0, self.left), check=False)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
        found: dict[str, dict[int, float]] = {}
        for line in numbers.read_text("utf-8").splitlines():
            record = json.loads(line)
            if record["type"] == "metric":
                found.setdefault(record["name"], {})[record["step"]] = record["value"]
        table = json.loads(status.read_text("utf-8")).get("ranks") or []
        plan = re.search(r"plan: ([0-9.,]+ .iB)", done.stderr)
        return {"metrics": found, "seconds": round(time.monotonic() - start, 1), "peak_mib": memory.most, "plan": plan[1] if plan else None,
                "ranks": [{"step_seconds": row["step_seconds"], "straggler": row["straggler"]} for row in table]}  # fmt: skip

    def speed(self, name: str, file: str, devices: int) -> None:
        found = self.run(file, devices, self.given.batch, self.given.steps)
        rates = [v for step, v in found.pop("metrics")["tokens-per-second"].items() if step > self.given.steps / 3]
        self.found.setdefault(name, []).append(say(name, devices=devices, batch_each=self.given.batch, tokens_per_second=statistics.median(rates), spread=[min(rates), max(rates)], **found))

    def links(self) -> None:
        words = [sys.executable, "-m", "sexpgpu", "doctor", "--distributed", "--json", "--device", self.device]
        done = subprocess.run(words, cwd=self.folder, env=self.environ(self.given.devices), capture_output=True, text=True, timeout=max(30.0, self.left), check=False)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
        told = json.loads(done.stdout)
        say("links", latency_us=told["latency_seconds"] * 1e6, gb_per_second={k: v / 1e9 for k, v in told["bytes_per_second"].items()})

    def numbers(self) -> None:
        """20 steps of a small model: in f32 one rank and N, in bf16 N, N again, and N divided."""
        n = self.given.devices

        def losses(file: str, devices: int, precision: str = "f32") -> dict[int, float]:
            metrics = self.run(file, devices, 4 * n // devices, 20, **SMALL, precision=precision)["metrics"]
            return metrics["loss"] | {-step: norm for step, norm in metrics["gradient-norm"].items()}

        def far(a: Mapping[int, float], b: Mapping[int, float]) -> float:
            return max(abs(a[k] - b[k]) / max(abs(a[k]), 1e-9) for k in a)

        low = losses("plain", n, "bf16")
        row = say("numbers", one_to_all=far(losses("plain", 1), losses("plain", n)), twice_the_same=low == losses("plain", n, "bf16"),
                  bf16_all_to_divided=far(low, losses("divided", n, "bf16")))
        right = row["one_to_all"] < 1e-4 and row["twice_the_same"] and row["bf16_all_to_divided"] < 1e-3
        say("numbers are right" if right else "NUMBERS ARE WRONG")

    def kill(self) -> None:
        """A rank is killed in the middle: seconds until the run has ended, what it said, and whether anything is left of it."""
        status = self.folder / "k.json"
        words = self.words("plain", self.given.devices * self.given.batch, {}, "--steps", "1000000", "--status", str(status))
        process = subprocess.Popen(words, cwd=self.folder, env=self.environ(self.given.devices), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            limit = time.monotonic() + max(40.0, self.left - 20)
            while time.monotonic() < limit and process.poll() is None and not _steps(status) > 5:
                time.sleep(0.2)
            ranks = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
            os.kill(ranks[-1], signal.SIGKILL)
            start = time.monotonic()
            _, said = process.communicate(timeout=60)
            say("kill", seconds=round(time.monotonic() - start, 2), exit_code=process.returncode, said=said[-600:], left=[p for p in ranks if Path(f"/proc/{p}").exists()])
        finally:
            process.kill()

    # -- torch

    def torchs(self, name: str, devices: int) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), str(HERE / "scaling.py"), "--ddp",
                 "--batch", str(self.given.batch), "--steps", str(self.given.steps)]  # fmt: skip
        environ = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "4"}
        with Memory() as memory:
            done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=max(30.0, self.left), check=False)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
        self.found.setdefault(name, []).append(say(name, **json.loads(done.stdout.splitlines()[-1]), peak_mib=memory.most))

    # -- all of it

    def all(self) -> None:
        n = self.given.devices
        makes: dict[str, Callable[[], None]] = {
            "links": self.links, "numbers": self.numbers, "kill": self.kill,
            "one": lambda: self.speed("one", "plain", 1), "all": lambda: self.speed("all", "plain", n),
            "divided": lambda: self.speed("divided", "divided", n),
            "torch one": lambda: self.torchs("torch one", 1), "torch all": lambda: self.torchs("torch all", n),
        }
        once = {"links", "numbers", "kill"}
        for number in range(self.given.rounds):
            for name in self.given.parts:
                if number and name in once:
                    continue
                if self.left < NEEDED.get(name, 60):
                    say(name, skipped=f"{self.left:.0f} s are left")
                    continue
                try:
                    makes[name]()
                except Exception as error:  # noqa: BLE001 - a part that fails leaves the others
                    say(name, failed=f"{type(error).__name__}: {error}"[:2000])
            self._ratios()

    def _ratios(self) -> None:
        rate = {name: statistics.median(row["tokens_per_second"] for row in rows) for name, rows in self.found.items()}
        found: dict[str, float] = {}
        for name, above, below in (("all to one", "all", "one"), ("divided to all", "divided", "all"), ("torch all to one", "torch all", "torch one"),
                                   ("ours to torch, one", "one", "torch one"), ("ours to torch, all", "all", "torch all")):
            if above in rate and below in rate:
                found[name] = round(rate[above] / rate[below], 4)
        if found:
            say("ratios", devices=self.given.devices, **found)


def _steps(status: Path) -> int:
    try:
        return int(json.loads(status.read_text("utf-8")).get("step") or 0)
    except (OSError, ValueError):
        return 0


def ddp(given: argparse.Namespace) -> None:
    """One rank of `torchs`: GPT-2 124M on random tokens, bf16 autocast, fused AdamW, clipped to 1; the whole step timed in blocks."""
    import torch
    import torch.distributed as dist
    from torch_models import Gpt2

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Gpt2(12, 12, 768, CONTEXT, VOCABULARY).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    net: Any = model
    if dist.get_world_size() > 1:
        net = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True)
    net = torch.compile(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, VOCABULARY, (given.batch, CONTEXT + 1), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    block, times = 5, []
    for _ in range(max(3, given.steps // block)):
        begin = time.perf_counter()
        for _ in range(block):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / block)
    times = times[len(times) // 3 :]
    if dist.get_rank() == 0:
        size, seconds = dist.get_world_size(), statistics.median(times)
        print(json.dumps({"devices": size, "batch_each": given.batch, "tokens_per_second": given.batch * size * CONTEXT / seconds, "step_ms": seconds * 1e3,
                          "first_steps_seconds": first, "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30}))  # fmt: skip
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples of one device in a step")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540.0, help="no part is begun that would go beyond")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cpu", action="store_true", help="ranks of the device cpu")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ddp:
        ddp(given)
        return
    given.parts = [name.strip() for name in given.parts.split(",")]
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        Bench(given, Path(folder)).all()


if __name__ == "__main__":
    main()

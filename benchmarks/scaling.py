"""How much faster N devices train than one, each with the same batch: `sexpgpu run` on 1 device and on N, in turns.

JSON lines: samples and tokens a second of each run (the median over logged steps after the first third), and at the end the
ratio to one device, plain and with `:shard optimizer` (--shard, for a file whose knob `shard` chooses it by a variant of that
name), with each rank's own step time. With --torch also torch DDP with torch.compile on GPT-2 at the same batch and the same
number of devices, and its ratio: ours is to reach that of one GPU less 0.02. Works on CPU ranks too (--device cpu).

    python benchmarks/scaling.py examples/gpt2.lisp --devices 2 --batch 64 --device cuda --torch
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def ours(arguments: argparse.Namespace, devices: int, variant: str | None = None) -> dict[str, Any]:
    """One run's rates."""
    with tempfile.TemporaryDirectory() as folder:
        numbers, status = Path(folder, "m.jsonl"), Path(folder, "s.json")
        words = [sys.executable, "-m", "sexpgpu", "run", arguments.file, "--steps", str(arguments.steps), "--eval-every", "0", "--device", arguments.device,
                 "--set", f"{arguments.knob}={arguments.batch * devices}", "--metrics", f"jsonl:{numbers}", "--status", str(status)]
        words += ["--variant", variant] if variant else []
        words += [word for text in arguments.set for word in ("--set", text)]
        environ = os.environ | {"SEXPGPU_DEVICES": ",".join(map(str, range(devices)))}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stderr}")
        rates: dict[str, list[float]] = {}
        for line in numbers.read_text().splitlines():
            record = json.loads(line)
            if record["type"] == "metric" and record["name"].endswith("per-second") and record["step"] > arguments.steps / 3:
                rates.setdefault(record["name"], []).append(record["value"])
        table = json.loads(status.read_text()).get("ranks") or []
    found = {name: statistics.median(values) for name, values in rates.items()}
    return {"side": "sexpgpu", "devices": devices, "variant": variant, **found, "own_step_seconds": [row["step_seconds"] for row in table]}


def torchs(arguments: argparse.Namespace, devices: int) -> dict[str, Any]:
    """The same of DDP with torch.compile, a process a GPU."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), str(HERE / "scaling.py"), "--ddp",
             "--batch", str(arguments.batch), "--steps", str(arguments.steps)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def ddp(arguments: argparse.Namespace) -> None:
    """One rank of `torchs`: GPT-2 124M of benchmarks/gpt2.py on random tokens, bf16 autocast, fused AdamW, clipped to 1."""
    import torch
    import torch.distributed as dist
    from gpt2 import CONTEXT, VOCABULARY, Gpt2

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Gpt2().cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    net = torch.compile(torch.nn.parallel.DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, VOCABULARY, (arguments.batch, CONTEXT + 1), device="cuda")
    times = []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step > arguments.steps / 3:
            times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        size, seconds = dist.get_world_size(), statistics.median(times)
        print(json.dumps({"side": "torch", "devices": size, "samples-per-second": arguments.batch * size / seconds,
                          "tokens-per-second": arguments.batch * size * CONTEXT / seconds}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="examples/gpt2.lisp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of one device in a step")
    parser.add_argument("--knob", default="batch", help="the file's knob for all samples of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--shard", metavar="VARIANT", help="a variant of the file with `:shard optimizer`")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ddp:
        ddp(arguments)
        return
    sides: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        tries = {"one": lambda: ours(arguments, 1), "all": lambda: ours(arguments, arguments.devices)}
        if arguments.shard:
            tries["divided"] = lambda: ours(arguments, arguments.devices, arguments.shard)
        if arguments.torch:
            tries |= {"torch one": lambda: torchs(arguments, 1), "torch all": lambda: torchs(arguments, arguments.devices)}
        for name, run in tries.items():
            sides.setdefault(name, []).append(run())
            print(json.dumps(sides[name][-1]), flush=True)
    rate = {name: statistics.median(f["samples-per-second"] for f in found) for name, found in sides.items()}
    print(json.dumps({"devices": arguments.devices, "times_one": {name: value / rate["one"] for name, value in rate.items()},
                      **({"ours_to_torch": {"one": rate["one"] / rate["torch one"], "all": rate["all"] / rate["torch all"]}} if arguments.torch else {})}))


if __name__ == "__main__":
    main()

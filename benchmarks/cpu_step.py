"""How long is a CPU step here, and in eager PyTorch? One JSON line a round and one with the medians and the paired ratio.

The digits perceptron (64-128-10, batch 64): forward, backward, gradient norm, AdamW. Eager runs its fused AdamW and reads
loss and norm every tenth step, as our log does. One process a side and round, alternating, one thread each.

    python benchmarks/cpu_step.py [--rounds 5] [--steps 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

FILE = Path(__file__).parent.parent / "examples" / "digits.lisp"
WARM = 200


def ours(steps: int) -> float:
    """Seconds a step of the compiled program, data fetching included."""
    import torch  # noqa: F401 - the thread count is set before

    from sexpgpu.compiler import Selection, choose_run, load, program, stages
    from sexpgpu.run.bind import bind

    loaded = load(str(FILE), Selection())
    run = choose_run(loaded.experiment, None)
    feed, made = bind(run).feeds.train, program(stages(loaded, run), "cpu", 1)
    made.initialise()
    for step in range(WARM):
        made.step(feed.batch(step), False)
    start = time.perf_counter()
    for step in range(WARM, WARM + steps):
        made.step(feed.batch(step), step % 10 == 9)
    return (time.perf_counter() - start) / steps


def eager(steps: int) -> float:
    """The same in eager PyTorch, data in memory as tensors."""
    import torch

    torch.set_num_threads(1)
    image, label = torch.rand(1438, 64), torch.randint(0, 10, (1438,))
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)
    start = 0.0
    order = torch.randperm(1438)
    for step in range(WARM + steps):
        if step == WARM:
            start = time.perf_counter()
        rows = order[(step * 64) % 1374 :][:64]
        x, y = image[rows], label[rows]
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                loss.item(), norm.item(), (model(x).argmax(-1) == y).float().mean().item()
    return (time.perf_counter() - start) / steps


def child(side: str, steps: int) -> float:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "--side", side, "--steps", str(steps)], env=environ, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--side", choices=("ours", "eager"))
    options = parser.parse_args()
    if options.side:
        print({"ours": ours, "eager": eager}[options.side](options.steps))
        return
    rows = []
    for _ in range(options.rounds):
        row = {side: child(side, options.steps) * 1e6 for side in ("ours", "eager")}
        rows.append(row)
        print(json.dumps({**{f"{k}_us": round(v, 1) for k, v in row.items()}, "ratio": round(row["ours"] / row["eager"], 3)}), flush=True)
    median = {side: round(statistics.median(r[side] for r in rows), 1) for side in ("ours", "eager")}
    ratio = statistics.median(r["ours"] / r["eager"] for r in rows)
    print(json.dumps({"median_us": median, "paired_ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()

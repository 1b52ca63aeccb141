"""Is the digits perceptron as good here as in eager PyTorch? Prints one JSON line a seed and one with the means.

Both sides: the same split, 64-128-10 perceptron, uniform ±1/√in initial values, AdamW (lr 1e-3, decay 1e-2), batch 64, 500 steps.
The draws differ (each side uses its own generator), so the accuracies are compared as means over seeds.

    python benchmarks/digits_parity.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402 - the thread count is set before

from sexpgpu.compiler import Selection, choose_run, load  # noqa: E402
from sexpgpu.run.bind import bind  # noqa: E402

FILE = Path(__file__).parent.parent / "examples" / "digits.lisp"


def ours(seed: int) -> tuple[float, float]:
    """Final validation accuracy and seconds of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "m.jsonl")
        start = time.perf_counter()
        command = [sys.executable, "-m", "sexpgpu", "run", str(FILE), "--set", f"seed={seed}", "--metrics", f"jsonl:{path}"]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        records = [json.loads(line) for line in open(path, encoding="utf-8")]
    found = [r for r in records if r["type"] == "metric" and r["name"] == "accuracy" and r["metadata"].get("eval") == "valid"]
    return found[-1]["value"], seconds


def rows() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train and validation rows exactly as the run splits them."""
    loaded = load(str(FILE), Selection())
    run = choose_run(loaded.experiment, None)
    bound = bind(run)
    feeds = (bound.feeds.train, bound.feeds.evals["valid"])
    train, valid = ({k: torch.from_numpy(v) for k, v in feed.samples.dataset.take(feed.samples.rows).items()} for feed in feeds)
    return train, valid


def eager(seed: int, train: dict[str, torch.Tensor], valid: dict[str, torch.Tensor]) -> float:
    """The same perceptron, written as a PyTorch user would."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    for layer in (model[0], model[2]):
        torch.nn.init.uniform_(layer.weight, -(layer.in_features**-0.5), layer.in_features**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    count = len(train["label"])
    order = torch.cat([torch.randperm(count) for _ in range(500 * 64 // count + 1)])
    for step in range(500):
        chosen = order[step * 64 : (step + 1) * 64]
        loss = torch.nn.functional.cross_entropy(model(train["image"][chosen]), train["label"][chosen].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (model(valid["image"]).argmax(-1) == valid["label"]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(1, parser.parse_args().seeds + 1)
    train, valid = rows()
    table = []
    for seed in seeds:
        accuracy, seconds = ours(seed)
        row = {"seed": seed, "sexpgpu": accuracy, "eager": eager(seed, train, valid), "process_seconds": round(seconds, 2)}
        table.append(row)
        print(json.dumps(row), flush=True)
    mean = {side: sum(r[side] for r in table) / len(table) for side in ("sexpgpu", "eager")}
    print(json.dumps({"mean": mean, "difference": mean["sexpgpu"] - mean["eager"], "rows": [len(train["label"]), len(valid["label"])]}))


if __name__ == "__main__":
    main()

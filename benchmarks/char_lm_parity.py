"""Is char_lm.lisp as good here as in eager PyTorch, and better than counting pairs of bytes? Prints one JSON object.

Its numbers are validation losses in nats a byte after --steps steps in f32: `sexpgpu`, `eager` and `bigram`; `ratio` is the
first over the second. The eager model starts from our initial weights and sees the same windows in an order of its own; dropout
is its own too. The bigram counts the pairs of the training part, a tenth added to each.

    python benchmarks/char_lm_parity.py [--steps 600] [--variant tiny] [--set batch=8] [--check]

With --check the exit code is 1 when our loss is above 1.02 of the eager one or, from 600 steps on, not under the bigram's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402 - the thread count is set before
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from sexpgpu.compiler import Selection, choose_run, load, program, stages  # noqa: E402
from sexpgpu.run.bind import bind  # noqa: E402

FILE = Path(__file__).parent.parent / "examples" / "char_lm.lisp"
PRECISION = "precision=f32"
WARMUP = 100
BIGRAM_FROM = 600  # steps after which the model must beat the counts
Windows = dict[str, Tensor]  # tokens and targets, each [windows context]


def ours(steps: int, variant: str | None, sets: list[str]) -> float:
    """The final validation loss of a run as a person starts it."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "m.jsonl")
        command = [sys.executable, "-m", "sexpgpu", "run", str(FILE), "--steps", str(steps)]
        command += [word for text in sets for word in ("--set", text)]
        command += ["--metrics", f"jsonl:{path}", *(["--variant", variant] if variant else [])]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        records = [json.loads(line) for line in open(path, encoding="utf-8")]
    found = [
        r for r in records if r["type"] == "metric" and r["name"] == "loss" and r["metadata"].get("eval") == "valid"
    ]
    assert found[-1]["step"] == steps
    return found[-1]["value"]


class Block(torch.nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, d: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norm0, self.norm1 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.query, self.key, self.value = (torch.nn.Linear(d, d, bias=False) for _ in range(3))
        self.out, self.up, self.down = torch.nn.Linear(d, d), torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        u = self.norm0(x)
        q, k, v = (f(u).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + functional.dropout(self.out(y), self.rate, self.training)
        y = self.down(functional.gelu(self.up(self.norm1(x))))
        return x + functional.dropout(y, self.rate, self.training)


class Transformer(torch.nn.Module):
    """The model of char_lm.lisp, written as a PyTorch user would."""

    def __init__(self, layers: int, heads: int, d: int, context: int, rate: float) -> None:
        super().__init__()
        self.token, self.position = torch.nn.Embedding(256, d), torch.nn.Embedding(context, d)
        self.blocks = torch.nn.ModuleList(Block(d, heads, rate) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(d)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.token.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def take(model: Transformer, state: dict[str, Tensor]) -> None:
    """Our initial parameters, every one of them, into the eager model; our matrices lie [in out]."""
    left = {name.removeprefix("param/gpt/"): value for name, value in state.items() if name.startswith("param/")}
    places: list[tuple[str, Tensor]] = [("token", model.token.weight), ("position", model.position.weight)]
    modules = [("layer-norm", model.norm)]
    for i, block in enumerate(model.blocks):
        modules += [(f"block/{i}/layer-norm/0", block.norm0), (f"block/{i}/layer-norm/1", block.norm1)]
        modules += [
            (f"block/{i}/self-attention/{name}", getattr(block, name)) for name in ("query", "key", "value", "out")
        ]
        modules += [(f"block/{i}/feed-forward/{name}", getattr(block, name)) for name in ("up", "down")]
    for path, module in modules:
        for name, parameter in module.named_parameters():
            places.append((f"{path}/{name}", parameter.T if parameter.dim() == 2 else parameter))
    with torch.no_grad():
        for path, place in places:
            place.copy_(left.pop(path))
    assert not left, f"the eager model lacks {sorted(left)}"


def rate_at(done: int, peak: float, steps: int) -> float:
    """`warmup-cosine` after `done` updates."""
    if done < WARMUP:
        return peak * (done + 1) / WARMUP
    if WARMUP >= steps:
        return peak
    return peak / 2 * (1 + math.cos(math.pi * min(1.0, (done - WARMUP) / (steps - WARMUP))))


def orders(count: int) -> Iterator[int]:
    """Windows without end, each epoch in an order of its own."""
    while True:
        yield from torch.randperm(count).tolist()


def eager(steps: int, model: Transformer, knobs: dict[str, float], train: Windows, valid: list[Windows]) -> float:
    """The validation loss after so many steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=knobs["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order, batch = orders(len(train["tokens"])), int(knobs["batch"])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate_at(step, knobs["lr"], int(knobs["steps"]))
        chosen = torch.tensor([next(order) for _ in range(batch)])
        loss = model(train["tokens"][chosen], train["targets"][chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [(model(**part).item(), part["tokens"].numel()) for part in valid]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def bigram(train: Windows, valid: list[Windows]) -> float:
    """The loss of p(next byte | byte) by counting."""
    pairs = (train["tokens"] * 256 + train["targets"]).flatten()
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + 0.1
    logs = (counts / counts.sum(1, keepdim=True)).log()
    return -torch.cat([logs[part["tokens"], part["targets"]].flatten() for part in valid]).mean().item()


def good(steps: int, mine: float, theirs: float, pairs: float) -> bool:
    """Within 2% of the eager model and, after enough steps, better than counting pairs; NaN is not good."""
    return mine <= 1.02 * theirs and (steps < BIGRAM_FROM or mine < pairs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--variant")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    sets = [PRECISION, *arguments.sets]

    loaded = load(str(FILE), Selection(variant=arguments.variant, sets=tuple(sets)))
    run = choose_run(loaded.experiment, None)
    knobs = {name: knob.value for name, knob in loaded.experiment.knobs.items()}
    feeds = bind(run).feeds
    windows = feeds.train.samples
    train = {k: torch.from_numpy(v).long() for k, v in windows.take(torch.arange(len(windows)).numpy()).items()}
    valid = [{k: torch.from_numpy(v).long() for k, v in part.items()} for part in feeds.evals["valid"]]

    compiled = program(stages(loaded, run), "cpu", 1)
    compiled.initialise()
    model = Transformer(knobs["layers"], knobs["heads"], knobs["d-model"], knobs["context"], float(knobs["drop-rate"]))
    take(model, compiled.state())
    compiled.close()

    start = time.perf_counter()
    mine = ours(arguments.steps, arguments.variant, sets)
    middle = time.perf_counter()
    theirs = eager(arguments.steps, model, knobs, train, valid)
    seconds = {"sexpgpu": round(middle - start, 1), "eager": round(time.perf_counter() - middle, 1)}
    pairs = bigram(train, valid)
    print(json.dumps({"sexpgpu": mine, "eager": theirs, "bigram": pairs, "ratio": mine / theirs,
                      "steps": arguments.steps, "variant": arguments.variant, "seconds": seconds}))  # fmt: skip
    return int(arguments.check and not good(arguments.steps, mine, theirs, pairs))


if __name__ == "__main__":
    sys.exit(main())

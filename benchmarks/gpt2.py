"""GPT-2 124M: a training step of examples/gpt2.lisp beside torch.compile, in one process, blocks of steps that take turns.

Both start from our initial weights and see the same batches. JSON lines: ms and tokens a second, the paired ratio, peak memory,
and with --loss the mean loss of steps 151-200 of both. Needs a GPU.

    python benchmarks/gpt2.py --batch 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from on_gpu import Block, alternate, ours, program_of, ratios, say, summary, tokens
from torch import nn

VOCABULARY, CONTEXT = 50304, 1024


class Gpt2(nn.Module):
    def __init__(self, layers: int = 12, heads: int = 12, d: int = 768) -> None:
        super().__init__()
        self.token, self.position = nn.Parameter(torch.empty(VOCABULARY, d)), nn.Parameter(torch.empty(CONTEXT, d))
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.token) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.token).flatten(0, 1), targets.flatten().long())

    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Our weights, by name; ours lie [in out]."""
        def get(name: str) -> torch.Tensor:
            return state[f"param/gpt2/{name}"]

        with torch.no_grad():
            self.token.copy_(get("token"))
            self.position.copy_(get("position"))
            self.norm.weight.copy_(get("layer-norm/weight"))
            self.norm.bias.copy_(get("layer-norm/bias"))
            for number, block in enumerate(self.blocks):
                home = "block" if len(self.blocks) == 1 else f"block/{number}"
                pairs = ((block.qkv, "self-attention/qkv"), (block.out, "self-attention/out"), (block.up, "feed-forward/up"), (block.down, "feed-forward/out"))
                for layer, path in pairs:
                    layer.weight.copy_(get(f"{home}/{path}/weight").T)
                    layer.bias.copy_(get(f"{home}/{path}/bias"))
                for layer, path in ((block.before, "layer-norm/0"), (block.between, "layer-norm/1")):
                    layer.weight.copy_(get(f"{home}/{path}/weight"))
                    layer.bias.copy_(get(f"{home}/{path}/bias"))


def compiled(model: nn.Module, batches: list[dict[str, np.ndarray]], mode: str, losses: list[float] | None = None) -> Callable[[int], float]:
    """PyTorch's side: bf16 autocast, fused AdamW as our file has it, clipping included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    fields = [{n: torch.from_numpy(a).cuda() for n, a in b.items()} for b in batches]

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(tokens, targets)

    fast = loss_of if mode == "eager" else torch.compile(loss_of, mode=None if mode == "default" else mode)
    made = 0

    def steps(count: int) -> float:
        nonlocal made
        loss = torch.zeros(())
        for _ in range(count):
            batch = fields[made % len(fields)]
            made += 1
            loss = fast(batch["tokens"], batch["targets"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if losses is not None:
                losses.append(float(loss))
        return float(loss.detach())

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", default="default", help="of torch.compile, or eager")
    parser.add_argument("--deterministic", action="store_true", help="ours, with the deterministic default beside the fast kernels")
    parser.add_argument("--loss", action="store_true", help="200 steps of each from the same weights on the same batches")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    batches = tokens(200 if given.loss else 4, given.batch, CONTEXT, VOCABULARY)
    sets = (f"batch={given.batch}", "warmup=0", "lr=1e-4", "steps=1000000000")
    sides: dict[str, Callable[[int], float]] = {}
    peaks: dict[str, float] = {}
    start = time.perf_counter()
    program = program_of("examples/gpt2.lisp", sets, deterministic=False)
    model = Gpt2().cuda()
    model.take(program.state())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first = ours(program, batches, 1)
    first(1)
    say("ours first step", seconds=time.perf_counter() - start, batch=given.batch)
    peaks["ours"] = torch.cuda.max_memory_allocated() - before + sum(t.numel() * t.element_size() for t in program.state().values())
    program.initialise()
    if given.loss:
        mine = [program.step(b, False).loss for b in batches]
        theirs: list[float] = []
        compiled(model, batches, given.mode, theirs)(len(batches))
        say("loss of steps 151-200", ours=float(np.mean(mine[150:])), torch=float(np.mean(theirs[150:])))
        return
    sides["ours"] = first
    if given.deterministic:
        sides["ours deterministic"] = ours(program_of("examples/gpt2.lisp", sets), batches, 1)
    before = torch.cuda.memory_allocated() - sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    sides["torch"] = compiled(model, batches, given.mode)
    sides["torch"](3)
    say("torch first steps", seconds=time.perf_counter() - start, mode=given.mode)
    peaks["torch"] = torch.cuda.max_memory_allocated() - before
    times = alternate(sides, given.steps, given.rounds)
    for side, found in times.items():
        step = summary(found)
        more = {} if side == "torch" else {"torch_over_ours": ratios(found, times["torch"])}
        peak = peaks.get(side)
        say(f"gpt2 {side}", batch=given.batch, step=step, tokens_per_second=given.batch * CONTEXT / step["median"] * 1e3,
            **({} if peak is None else {"peak_gib": peak / 2**30}), **more)


if __name__ == "__main__":
    main()

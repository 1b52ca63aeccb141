"""Models so small that launches are their time, beside PyTorch's best: the torch.compile'd step, captured whole by hand, ten
steps a replay. One process, blocks that take turns; JSON lines. Needs a GPU.

    python benchmarks/small.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from on_gpu import Block, alternate, ours, program_of, ratios, say, summary, tokens
from torch import nn

HERE = Path(__file__).parent / "programs"
TOGETHER = 10


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(F.relu(self.second(F.relu(self.first(x))))), label.long())


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 256, context: int = 128, d: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, d), nn.Parameter(torch.randn(context, d))
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten().long())


def captured(model: nn.Module, batches: list[dict[str, np.ndarray]], low: bool) -> Callable[[int], float]:
    """PyTorch's side: steps of the compiled model in one CUDA graph, its batches copied in before each replay."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=True)
    names = list(batches[0])
    source = {n: torch.from_numpy(np.stack([batches[i % len(batches)][n] for i in range(TOGETHER)])).cuda() for n in names}
    fields = {n: t.clone() for n, t in source.items()}

    @torch.compile
    def loss_of(*values: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
            return model(*values)

    def step(i: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*(fields[n][i] for n in names))
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            step(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, last = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        for i in range(TOGETHER):
            loss = step(i)
        last.copy_(loss)

    def steps(count: int) -> float:
        for _ in range(0, count, TOGETHER):
            for n in names:
                fields[n].copy_(source[n])
            graph.replay()
        return float(last)

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--deterministic", action="store_true", help="beside the fast kernels, those that repeat bit for bit")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    means = rng.standard_normal((10, 784)).astype(np.float32)
    labels = [rng.integers(0, 10, 128).astype(np.int32) for _ in range(16)]
    points = [{"x": means[y] + rng.standard_normal((128, 784)).astype(np.float32), "label": y} for y in labels]
    text = tokens(16, 16, 128, 256)
    cases = (
        ("perceptron f32", "perceptron.lisp", "f32", "highest", Perceptron, points),
        ("perceptron tf32", "perceptron.lisp", "tf32", "high", Perceptron, points),
        ("transformer bf16", "transformer.lisp", "bf16", "high", Transformer, text),
    )
    for name, file, precision, matmul, model, batches in cases:
        if given.only not in name:
            continue
        torch.manual_seed(0)
        torch.set_float32_matmul_precision(matmul)
        theirs = captured(model().cuda(), batches, precision == "bf16")
        sides = {"torch": theirs}
        for deterministic in (False, True) if given.deterministic else (False,):
            sides["ours" if not deterministic else "ours deterministic"] = ours(
                program_of(str(HERE / file), (f"precision={precision}",), deterministic), batches, TOGETHER
            )
        times = alternate(sides, given.steps, given.rounds)
        for side in (s for s in sides if s != "torch"):
            say(f"{name} {side}", step=summary(times[side]), torch=summary(times["torch"]), torch_over_ours=ratios(times[side], times["torch"]))


if __name__ == "__main__":
    main()

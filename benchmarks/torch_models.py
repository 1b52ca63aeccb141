"""The models of the benchmarks in PyTorch, as our files have them, and our weights into them. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A pre-norm transformer block in PyTorch, as examples/gpt2.lisp has it."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))

    def names(self, home: str, last: str) -> dict[str, nn.Module]:
        """Our path -> the layer; `last`: what the second product of the feed-forward part is called."""
        return {
            f"{home}/self-attention/qkv": self.qkv, f"{home}/self-attention/out": self.out, f"{home}/feed-forward/up": self.up,
            f"{home}/feed-forward/{last}": self.down, f"{home}/layer-norm/0": self.before, f"{home}/layer-norm/1": self.between,
        }


def take(layers: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor], root: str) -> None:
    """Our weights into PyTorch's layers; a matrix of ours lies [in out], a table as theirs."""
    with torch.no_grad():
        for path, layer in layers.items():
            weight = tensors[f"param/{root}/{path}/weight"]
            layer.weight.copy_(weight.T if isinstance(layer, nn.Linear) else weight)  # type: ignore[operator, union-attr]
            if getattr(layer, "bias", None) is not None:
                layer.bias.copy_(tensors[f"param/{root}/{path}/bias"])  # type: ignore[operator, union-attr]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(F.relu(self.second(F.relu(self.first(x))))), label)

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        take({"first": self.first, "second": self.second, "out": self.out}, tensors, "perceptron")


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 256, context: int = 128, d: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, d), nn.Parameter(torch.empty(context, d))
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        layers: dict[str, nn.Module] = {"token": self.token, "head": self.head, "layer-norm": self.norm}
        for number, block in enumerate(self.blocks):
            layers |= block.names(f"block/{number}", "down")  # type: ignore[operator]
        take(layers, tensors, "transformer")
        with torch.no_grad():
            self.position.copy_(tensors["param/transformer/position"])


class Gpt2(nn.Module):
    def __init__(self, layers: int, heads: int, d: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Parameter(torch.empty(vocabulary, d)), nn.Parameter(torch.empty(context, d))
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.token) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.token).flatten(0, 1), targets.flatten())

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        layers: dict[str, nn.Module] = {"layer-norm": self.norm}
        for number, block in enumerate(self.blocks):
            layers |= block.names("block" if len(self.blocks) == 1 else f"block/{number}", "out")  # type: ignore[operator]
        take(layers, tensors, "gpt2")
        with torch.no_grad():
            self.token.copy_(tensors["param/gpt2/token"])
            self.position.copy_(tensors["param/gpt2/position"])

"""The tensors of a run: vectors of the parameters whose updates are alike, and the rest each for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.passes.flatten import Flat


class Arena:
    """tensors: name -> view or tensor, for every name of `schema`. gradients: vector's or parameter's name -> tensor;
    views: parameter -> its gradient in there. All start as zeros and stay where they are."""

    def __init__(self, flat: Flat, schema: Mapping[str, tuple[str, tuple[int, ...]]]):
        self.flat = flat
        self.vectors: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self.views: dict[str, Any] = {}
        made: dict[str, Any] = {}
        for group in flat.groups:
            for role in (*group.roles, "gradient"):
                vector = torch.zeros(group.size, dtype=TORCH[group.dtype])
                (self.gradients if role == "gradient" else self.vectors)[group.vector(role)] = vector
                for name in group.names:
                    shape, start = group.shapes[name], group.offsets[name]
                    view = vector[start : start + shape_size(shape)].view(shape)
                    if role == "gradient":
                        self.views[name] = view
                    else:
                        made[f"{role}/{name}"] = view
        for name, leaf in flat.gradients.items():
            if name not in self.gradients:
                self.gradients[name] = self.views[name] = torch.zeros(leaf.type.shape, dtype=TORCH[leaf.type.dtype])
        self.tensors = {
            name: made[name] if name in made else torch.zeros(shape, dtype=TORCH[dtype])
            for name, (dtype, shape) in schema.items()
        }

    def place(self, name: str) -> Any:
        """Of a vector or a state's name."""
        return self.vectors[name] if name in self.vectors else self.tensors[name]


def shape_size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size

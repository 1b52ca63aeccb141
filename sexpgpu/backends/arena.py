"""The tensors of a run: vectors of the parameters whose updates are alike, and the rest each for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.passes.flatten import Flat


class Arena:
    """tensors: name -> view or tensor, for every name of `schema`. gradients: vector's or parameter's name -> tensor;
    views: parameter -> its gradient in there. All start as zeros and stay where they are.

    Where the update is of a share of each vector (`Group.shares`), optimizer state is there for that share alone, the
    `rank`-th: its names are not in `tensors`, and `put` and `whole` are the way to them.
    """

    def __init__(self, flat: Flat, schema: Mapping[str, tuple[str, tuple[int, ...]]], rank: int = 0):
        self.flat, self.rank = flat, rank
        self.of_vector = {group.vector(role): group for group in flat.groups for role in (*group.roles, "gradient")}
        self.divided = [name for name, group in self.of_vector.items() if group.shares > 1 and name.startswith("opt/")]
        self._homes = {f"{role}/{name}": group.vector(role) for group in flat.groups for role in group.roles for name in group.names}
        self.vectors: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self.views: dict[str, Any] = {}
        made: dict[str, Any] = {}
        for group in flat.groups:
            for role in (*group.roles, "gradient"):
                if group.vector(role) in self.divided:
                    self.vectors[group.vector(role)] = torch.zeros(group.share, dtype=TORCH[group.dtype])
                    continue
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
            if self._homes.get(name) not in self.divided
        }

    def place(self, name: str) -> Any:
        """Of a vector or a state's name: what the update reads and writes."""
        if name not in self.vectors:
            return self.tensors[name]
        return self.vectors[name] if name in self.divided else self.own(name, self.vectors[name])

    def own(self, name: str, vector: Any) -> Any:
        """This rank's share of a vector, a view of it; all of what is not divided."""
        group = self.of_vector.get(name)
        if group is None or group.shares == 1:
            return vector
        return vector[self.rank * group.share : (self.rank + 1) * group.share]

    def put(self, name: str, value: Any) -> None:
        """Takes the whole tensor of a state's name; of one that is divided, what lies in this rank's share."""
        home = self._homes.get(name, "")
        if home not in self.divided:
            self.tensors[name].copy_(value)
            return
        group, plain = self.of_vector[home], name.split("/", 2)[2]
        start = group.offsets[plain] - self.rank * group.share
        low, high = max(0, start), min(group.share, start + shape_size(group.shapes[plain]))
        if low < high:
            self.vectors[home][low:high] = value.reshape(-1)[low - start : high - start]

    def whole(self, gather: Callable[[Any], Any]) -> dict[str, Any]:
        """Every state's name -> its whole tensor; `gather` joins the shares of a divided vector."""
        tensors = dict(self.tensors)
        joined = {home: gather(self.vectors[home]) for home in self.divided}
        for name, home in self._homes.items():
            if home in joined:
                group, plain = self.of_vector[home], name.split("/", 2)[2]
                start, shape = group.offsets[plain], group.shapes[plain]
                tensors[name] = joined[home][start : start + shape_size(shape)].view(shape)
        return tensors


def shape_size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size

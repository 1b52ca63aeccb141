"""The tensors of a run: vectors of the parameters whose updates are alike, and the rest each for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.passes.flatten import ALIGN, Flat, Group

COPIED = "copied"  # of parameters: all but the update read a copy


@dataclass(frozen=True)
class Line:
    """A vector of gradients. starts: parameter -> its first element, in the vector's order; share: elements of one rank's share, 0
    where the vector is not divided."""

    vector: Any
    starts: Mapping[str, int]
    share: int = 0


class Arena:
    """tensors: name -> view or tensor, for every name of `schema`. gradients: vector's or parameter's name -> tensor;
    views: parameter -> its gradient in there; lines: the vectors that all of them lie in. All start as zeros and stay where they are.

    Where the update is of a share of each vector (`Group.shares`), optimizer state is there for that share alone, the
    `rank`-th; so are parameters of the kind COPIED, of which others read a copy. Their names are not in `tensors`, and `put` and
    `whole` are the way to them.
    """

    def __init__(self, flat: Flat, schema: Mapping[str, tuple[str, tuple[int, ...]]], rank: int = 0):
        self.flat, self.rank = flat, rank
        self.of_vector = {group.vector(role): group for group in flat.groups for role in (*group.roles, "gradient")}
        self.divided = [name for name, group in self.of_vector.items() if group.shares > 1 and divides(group, name)]
        self._homes = {f"{role}/{name}": (group.vector(role), name) for group in flat.groups for role in group.roles for name in group.names}
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
        self.lines = [Line(self.gradients[group.vector("gradient")], group.offsets, group.share if group.shares > 1 else 0) for group in flat.groups]
        self._lay_others()
        self.tensors = {
            name: made[name] if name in made else torch.zeros(shape, dtype=TORCH[dtype])
            for name, (dtype, shape) in schema.items()
            if self._home(name)[0] not in self.divided
        }

    def _lay_others(self) -> None:
        """Gradients that are in no group's vector, one after another too."""
        others: dict[Any, dict[str, int]] = {}
        sizes: dict[Any, int] = {}
        leaves = {name: leaf for name, leaf in self.flat.gradients.items() if name not in self.gradients}
        for name, leaf in leaves.items():
            dtype = TORCH[leaf.type.dtype]
            others.setdefault(dtype, {})[name] = sizes.get(dtype, 0)
            step = ALIGN // dtype.itemsize
            sizes[dtype] = sizes.get(dtype, 0) + -(-max(1, leaf.type.size) // step) * step
        for dtype, starts in others.items():
            vector = torch.zeros(sizes[dtype], dtype=dtype)
            self.lines.append(Line(vector, starts))
            for name, start in starts.items():
                shape = leaves[name].type.shape
                self.gradients[name] = self.views[name] = vector[start : start + shape_size(shape)].view(shape)

    def _home(self, name: str) -> tuple[str, str]:
        """The vector that a state lies in, if any, and its parameter."""
        return self._homes.get(name, ("", ""))

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
        home, plain = self._home(name)
        if home not in self.divided:
            self.tensors[name].copy_(value)
            return
        group = self.of_vector[home]
        start = group.offsets[plain] - self.rank * group.share
        low, high = max(0, start), min(group.share, start + shape_size(group.shapes[plain]))
        if low < high:
            self.vectors[home][low:high] = value.reshape(-1)[low - start : high - start]

    def whole(self, gather: Callable[[Any], Any]) -> dict[str, Any]:
        """Every state's name -> its whole tensor; `gather` joins the shares of a divided vector. Where it gives None, on a rank
        that need not know, the divided states are left out."""
        tensors = dict(self.tensors)
        joined = {home: gather(self.vectors[home]) for home in self.divided}
        for name, (home, plain) in self._homes.items():
            if joined.get(home) is not None:
                group = self.of_vector[home]
                start, shape = group.offsets[plain], group.shapes[plain]
                tensors[name] = joined[home][start : start + shape_size(shape)].view(shape)
        return tensors


def divides(group: Group, role: str) -> bool:
    """Whether each rank has only its share of a group's vectors of this role, where the group is divided at all."""
    return role.startswith("opt/") or (group.kind == COPIED and role.startswith("param"))


def shape_size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size

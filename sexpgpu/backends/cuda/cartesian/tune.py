"""The tile of a kernel: rows and channels of a program, and its warps; and the choices that measuring kept on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from sexpgpu.backends.cuda.cartesian.cache import Cache, generation
from sexpgpu.backends.cuda.cartesian.plan import Launch, rank_costs
from sexpgpu.backends.cuda.cartesian.product import Product

REGISTERS = 110  # of values that live through the loop, a thread


class Tile(NamedTuple):
    """`rows` of edges and `channels` of a program; so many `warps`. Each warp has rows of its own where it can."""

    rows: int
    channels: int
    warps: int


def live(product: Product, launch: Launch) -> int:
    """Values a channel that live through the loop of a launch: sums, and what is read once a node."""
    total = 0
    read: set[int] = set()
    for n in launch.outputs:
        o = product.outputs[n]
        read |= {number for use in o.uses for number in use}
        if o.target == "result":
            total += sum(1 for rank, cost in enumerate(rank_costs(product)) if rank in launch.ranks for _ in range(cost))
        elif o.target != "weights" or product.shared:
            total += product.components(o.target)
    for number in read:
        slot = product.slots[number]
        if launch.mode == "receiver" and slot == "result":
            total += sum(cost for rank, cost in enumerate(rank_costs(product)) if rank in launch.ranks)
        elif slot in ("a", "b"):
            total += product.components(slot) if launch.mode == "sender" or slot == "b" else (2 * product.form.first + 1)
    return total


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def default(product: Product, launch: Launch, interpreted: bool = False) -> Tile:
    """By count of what lives: two channels a thread where registers allow, four rows a program."""
    c = product.form.channels
    if interpreted:
        return Tile(16, min(128, power(c)), 4)
    wide = product.dtype == "f64"
    if c < 32:
        channels = power(c)
        rows = max(1, 128 // channels)
        return Tile(rows, channels, max(1, rows * channels // 32))
    double = c % 64 == 0 and live(product, launch) * (4 if wide else 2) <= REGISTERS
    return Tile(4, 64 if double else 32, 4)


def candidates(product: Product, launch: Launch) -> list[Tile]:
    """Tiles that are worth measuring, the default first."""
    c = product.form.channels
    found = [default(product, launch)]
    if c >= 32:
        found += [Tile(1, 32, 1), Tile(2, 32, 2), Tile(4, 32, 4), Tile(8, 32, 8)]
    if c % 64 == 0:
        found += [Tile(2, 64, 2), Tile(4, 64, 4), Tile(2, 64, 4)]
    return list(dict.fromkeys(found))


class Kept:
    """tune.json of the cache folder: what was measured, by device and kernel."""

    def __init__(self, cache: Cache, device: str):
        self.cache, self.device = cache, device
        self.path = cache.folder / "tune.json"
        self.choices: dict[str, list] = {}
        try:
            found = json.loads(self.path.read_text())
            self.choices = found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            pass  # nothing was measured yet

    def key(self, *what: object) -> str:
        return "|".join(map(str, (generation()[:12], self.device, *what)))

    def tile(self, product: Product, launch: Launch) -> Tile | None:
        found = self.choices.get(self.key(product, launch))
        return Tile(*found) if found is not None and _three(found) else None

    def walk(self, product: Product) -> str | None:
        """`sender` or `receiver`, of a product's gradients."""
        found = self.choices.get(self.key(product, "walk"))
        return found[0] if isinstance(found, list) and found and found[0] in ("sender", "receiver") else None

    def keep(self, choices: Iterable[tuple[str, list]]) -> None:
        self.choices |= dict(choices)
        self.cache.write(self.path, json.dumps(self.choices, indent=1))


def _three(found: object) -> bool:
    return isinstance(found, list) and len(found) == 3 and all(isinstance(n, int) and n > 0 for n in found)

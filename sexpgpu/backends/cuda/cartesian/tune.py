"""The tile of a kernel: rows and channels of a program, and its warps; and the choices that measuring kept on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from sexpgpu.backends.cuda.cartesian.cache import Cache, generation
from sexpgpu.backends.cuda.cartesian.lanes import Lanes, suits
from sexpgpu.backends.cuda.cartesian.plan import Launch, held_by_rows, rank_costs
from sexpgpu.backends.cuda.cartesian.product import Product
from sexpgpu.backends.cuda.cartesian.source import AT_NODE

REGISTERS = 110  # of values that live through the loop, a thread
FORWARD = 50  # values that a result by rows may hold a channel so that a thread takes two


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


def warps_of(channels: int, each: int) -> int:
    """Warps of a program that divide the blocks of `each` channels, up to four."""
    blocks = -(-channels // each)
    return 4 if blocks % 4 == 0 else 2 if blocks % 2 == 0 else 1


def lanes(product: Product, across: int, deep: int = 1, wide: int = 2) -> Lanes:
    """`across` lanes, of `wide` channels each, for an edge."""
    return Lanes(across, wide, deep, warps_of(product.form.channels, wide * across), early=int(deep == 1))


def wide_of(product: Product) -> int:
    """Channels of a thread, which travel as one word: four of bf16 where there is room for their sums, else two. Measured: of rank 2
    without second derivatives, which spill (0.79 of the speed of f32), and not of 20 channels."""
    c, top = product.form.channels, max(product.form.first, product.form.top)
    return 4 if product.dtype == "bf16" and c % 4 == 0 and (top < 2 or (top == 2 and c % 64 == 0 and not product.second)) else 2


def across_of(threads: int) -> int:
    """Lanes of an edge whose channels take so many threads: 16 of them where that leaves none idle, or fewer that leave the least idle."""
    if threads % 16 == 0:
        return 16
    most = min(16, threads)

    def busy(lanes: int) -> float:
        return threads / (-(-threads // lanes) * lanes) * (32 // lanes * lanes) / 32

    return max(range(min(8, most), most + 1), key=lambda n: (busy(n), n))


def default(product: Product, launch: Launch, interpreted: bool = False) -> Tile | Lanes:
    """A convolution thread by thread: 128 bytes of an edge's channels to a group of lanes, less where they fit better. Otherwise tiles, by count
    of what lives: two channels a thread where registers allow, four rows a program. A product by rows of all channels: a warp a row, one row after another."""
    c = product.form.channels
    if launch.mode in AT_NODE and suits(product):
        if any(product.inner):
            return lanes(product, 4, 2)
        wide = wide_of(product)
        if wide == 2 and c % 64 == 0 and max(product.form.first, product.form.top) < 2 and (product.second or launch.mode == "sender"):
            return lanes(product, 32)  # few components an edge: 256 bytes of each
        return lanes(product, across_of(c // wide), wide=wide)
    if interpreted:
        return Tile(16, min(128, power(c)), 4)
    wide = product.dtype == "f64"
    if c < 32:
        channels = power(c)
        rows = max(1, 128 // channels)
        return Tile(rows, channels, max(1, rows * channels // 32))
    if launch.mode == "rows" and product.narrow is None:
        alone = all(product.outputs[n].target == "result" for n in launch.outputs) and not product.second
        return Tile(1, 64 if alone and c % 64 == 0 and held_by_rows(product, launch.outputs) <= FORWARD else 32, 1)
    double = c % 64 == 0 and live(product, launch) * (4 if wide else 2) <= REGISTERS
    return Tile(4, 64 if double else 32, 4)


def candidates(product: Product, launch: Launch) -> list[Tile | Lanes]:
    """What is worth measuring, the default first."""
    c = product.form.channels
    found = [default(product, launch)]
    if isinstance(found[0], Lanes):
        first = found[0]
        if not any(product.inner):
            found += [lanes(product, n) for n in (4, 8, 16, 32) if 2 * n <= power(c)]
        found += [first._replace(early=1 - first.early)]
        found += [first._replace(warps=n) for n in (1, 2) if n < first.warps]
        found += [first._replace(registers=n) for n in (168, 128)]  # three or four programs of four warps at once
        return list(dict.fromkeys(found))
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

    def tile(self, product: Product, launch: Launch) -> Tile | Lanes | None:
        found = self.choices.get(self.key(product, launch))
        if not isinstance(found, list) or not all(isinstance(n, int) and n >= 0 for n in found):
            return None
        if len(found) not in (3, len(Lanes._fields)):
            return None
        tile = Tile(*found) if len(found) == 3 else Lanes(*found)
        return tile if all(n > 0 or name in ("registers", "early") for name, n in zip(tile._fields, tile, strict=True)) else None

    def walk(self, product: Product) -> str | None:
        """`sender` or `receiver`, of a product's gradients."""
        found = self.choices.get(self.key(product, "walk"))
        return found[0] if isinstance(found, list) and found and found[0] in ("sender", "receiver") else None

    def keep(self, choices: Iterable[tuple[str, list]]) -> None:
        self.choices |= dict(choices)
        self.cache.write(self.path, json.dumps(self.choices, indent=1))


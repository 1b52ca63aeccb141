"""The f32 products of many rows and the sums by atom that stand in a potential's step, beside torch's: JSON lines with ms (medians of blocks that take
turns), GB/s over the bytes that must move, and errors against f64, of the largest entry. Needs a GPU; about 40 s.

    python benchmarks/tall.py

`inside`: the same sums, added up inside the tensor cores, to see what is cut off there (decision 0059). `tile`: other tiles.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sides import say

from sexpgpu.backends.cuda import modules, tall
from sexpgpu.backends.cuda.cartesian.launch import Products, on_device
from sexpgpu.ir import Node
from sexpgpu.ops import build

EDGES, ATOMS, HIDDEN, PATHS = 157_952, 1008, 64, 17 * 64
BLOCKS, CALLS = 7, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ms(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Of a call of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for number in range(BLOCKS):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                ways[name]()
            stop.record()
            stop.synchronize()
            found[name].append(start.elapsed_time(stop) / CALLS)
    return {name: round(statistics.median(times), 5) for name, times in found.items()}


def leaf(name: str, shape: tuple[int, ...], dtype: str = "f32") -> Node:
    return build("input", name=name, dtype=dtype, shape=shape, batch=False)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@contextmanager
def tiles(rows: tuple[int, int, int] = tall.ROWS, sums: tuple[int, int, int] = tall.SUMS) -> Iterator[None]:
    """Other tiles than the module's."""
    before = tall.ROWS, tall.SUMS
    tall.ROWS, tall.SUMS = rows, sums
    clear()
    try:
        yield
    finally:
        tall.ROWS, tall.SUMS = before
        clear()


@contextmanager
def inside() -> Iterator[None]:
    """Sums that Triton may put into the tensor cores."""
    load = modules.load
    modules.load = lambda text, name: load(text.replace("total += tl.dot(", "total = tl.dot(").replace(", input_precision", ", total, input_precision").replace(" * scale", ""), name)  # type: ignore[assignment]
    clear()
    try:
        yield
    finally:
        modules.load = load  # type: ignore[assignment]
        clear()


def clear() -> None:
    tall._rows_kernel.cache_clear()
    tall._sums_kernels.cache_clear()


def made(node: Node, operands: list[torch.Tensor], out: torch.Tensor) -> Callable[[], None]:
    scratch = torch.empty(tall.tall_scratch(node), dtype=torch.uint8, device=DEVICE)
    return lambda: tall.matmul_sum(node, operands, {0: out}, scratch)


def product(name: str, node: Node, operands: list[torch.Tensor], exact: torch.Tensor, moved: int, others: list[dict[str, tuple[int, int, int]]]) -> None:
    out = torch.empty(node.type.shape, device=DEVICE)

    def vendor() -> None:
        for i in range(0, len(operands), 2):
            torch.addmm(out, operands[i], operands[i + 1], beta=1.0 if i else 0.0, alpha=node.attrs["scale"], out=out)

    errors = {}
    for way, run in {"ours": made(node, operands, out), "torch": vendor}.items():
        out.fill_(float("nan"))
        run()
        errors[way] = off(out, exact)
    with inside():
        made(node, operands, out)()
        errors["inside"] = off(out, exact)
    again = out.new_empty(out.shape)
    made(node, operands, out)()
    made(node, operands, again)()
    same = torch.equal(out, again)
    times = ms({"ours": made(node, operands, out), "torch": vendor})
    say(name, ms=times, over=round(times["torch"] / times["ours"], 3), gb_s=round(moved / times["ours"] / 1e6, 1), errors=errors, same_bits=same,
        right=errors["ours"] <= 2e-5)
    for other in others:
        try:
            with tiles(**other):
                say(f"{name}: tile", tile=other, ms=ms({"ours": made(node, operands, out)})["ours"])
        except Exception as error:  # noqa: BLE001 - a tile that the device has no room for
            say(f"{name}: tile", tile=other, failed=f"{type(error).__name__}: {error}"[:200])


def products() -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=generator, device=DEVICE)  # noqa: E731
    grads, matrix = [new(EDGES, PATHS) for _ in range(2)], new(HIDDEN, PATHS) / 8
    hidden = [new(EDGES, HIDDEN).abs() + 0.1 for _ in range(2)]
    turn = {"permutation": (1, 0)}
    g, h, w = leaf("g", (EDGES, PATHS)), leaf("h", (EDGES, HIDDEN)), leaf("w", (HIDDEN, PATHS))
    exact = torch.cat([part.double() @ matrix.double().t() for part in grads[0].split(16384)])
    product("rows", build("matmul-sum", g, build("transpose", w, **turn), scale=1.0), [grads[0], matrix.t()], exact, 4 * EDGES * (PATHS + HIDDEN),
            [{"rows": t} for t in ((64, 32, 4), (64, 64, 4), (128, 32, 4), (128, 64, 8))])
    exact = sum((x[i : i + 16384].double().t() @ y[i : i + 16384].double() for x, y in zip(hidden, grads, strict=True) for i in range(0, EDGES, 16384)),
                torch.zeros(HIDDEN, PATHS, dtype=torch.float64, device=DEVICE))
    node = build("matmul-sum", build("transpose", h, **turn), g, build("transpose", leaf("h2", (EDGES, HIDDEN)), **turn), leaf("g2", (EDGES, PATHS)), scale=1.0)
    product("sums", node, [x for a, b in zip(hidden, grads, strict=True) for x in (a.t(), b)], exact, 8 * EDGES * (PATHS + HIDDEN),
            [{"sums": t} for t in ((64, 32, 4), (64, 32, 8), (128, 32, 8), (64, 64, 8))])


def sums_by_atom() -> None:
    """Forces: rows of 3 by edge, at receivers in order and at senders in none."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = torch.randn((EDGES, 3), generator=generator, device=DEVICE)
    kept = Products(on_device)
    for name, index in (("receivers", torch.arange(EDGES, device=DEVICE, dtype=torch.int32) * ATOMS // EDGES),
                        ("senders", torch.randint(0, ATOMS, (EDGES,), generator=generator, device=DEVICE, dtype=torch.int32))):
        node = build("scatter-add", leaf("rows", (EDGES, 3)), leaf(name, (EDGES,), "i32"), axis=0, count=ATOMS)
        exact = torch.zeros(ATOMS, 3, dtype=torch.float64, device=DEVICE).index_add_(0, index, rows.double())
        found = kept.added(node, [rows, index])
        torchs = lambda index=index: torch.zeros(ATOMS, 3, device=DEVICE).index_add_(0, index, rows)  # noqa: E731
        times = ms({"ours": lambda node=node, index=index: kept.added(node, [rows, index]), "torch": torchs})
        torch.use_deterministic_algorithms(True)
        times |= ms({"torch, deterministic": torchs})
        torch.use_deterministic_algorithms(False)
        say(f"sums at {name}", ms=times, error=off(found, exact), right=off(found, exact) <= 2e-6, same_bits=torch.equal(found, kept.added(node, [rows, index])))


def main() -> None:
    for part in (products, sums_by_atom):
        try:
            part()
        except Exception:  # noqa: BLE001 - one part's failure shall not cost the others
            say(part.__name__, failed=traceback.format_exc()[-1500:])


if __name__ == "__main__":
    main()

"""How long launches take on a GPU: each the longest of its traffic, its arithmetic and its start; a step is their sum.

The rates are what one H200 reached (docs/decisions/0047): they are of kinds of work, none of a program. docs/explain.md says the model in
words, `benchmarks/step_time.py` compares it with measured steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from sexpgpu.explain.lowering import Lowered
from sexpgpu.ir import Node
from sexpgpu.ops import table
from sexpgpu.passes.schedule.fuse import PERSISTENT, REDUCTIONS, Call, Kernel, Launch, original
from sexpgpu.passes.schedule.views import CHOOSING, data

#: calls that are one matrix product, whatever stands behind it
PRODUCTS = ("matmul", "convolve", "equivariant-linear", "einsum")
HEAD = "linear-cross-entropy"


@dataclass(frozen=True)
class Gpu:
    """What a GPU reaches. flops: of large products by dtype, in bursts; bandwidth: of a copy, bytes read and written a second.

    kernel: the share of the bandwidth that a fused kernel reaches; product: what a product takes over its arithmetic at `flops`
    (last waves, power); fill: seconds that a large product spends reading in and writing out besides; node: seconds from one launch of
    a CUDA graph to the next; start: until a kernel's first values are there; tile: until a product's or attention's are.
    """

    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    launch: float  # seconds of a node, `--assume launch`
    kernel: float = 0.9
    product: float = 1.095
    fill: float = 15.4e-6
    start: float = 1e-6
    tile: float = 2.5e-6
    attention: Mapping[str, float] = field(default_factory=lambda: {"bf16": 341e12, "f16": 341e12})
    attention_grad: Mapping[str, float] = field(default_factory=lambda: {"bf16": 252e12, "f16": 252e12})


@dataclass(frozen=True)
class Time:
    """Seconds of a launch, and what bounds it: arithmetic, memory or launches."""

    seconds: float
    bound: str


def step_time(graphs: Iterable[Lowered], gpu: Gpu, precision: str) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and of them by what bounds each launch."""
    limits = {"arithmetic": 0.0, "memory": 0.0, "launches": 0.0}
    for graph in graphs:
        for launch in graph.schedule.launches:
            found = launch_time(launch, gpu, precision)
            limits[found.bound] += graph.times * found.seconds
    return sum(limits.values()), limits


def launch_time(launch: Launch, gpu: Gpu, precision: str) -> Time:
    """One launch."""
    if isinstance(launch, Kernel):
        return _kernel(launch, gpu)
    node = launch.node
    if node.op.startswith(HEAD):
        return _head(launch, gpu, precision)
    if node.op.startswith(PRODUCTS):
        return _longest(gpu, *_product(_product_flops(node), moved(launch), dtype_of(node, precision), gpu), gpu.tile)
    if node.op.startswith("attend"):
        return _attention(launch, gpu, precision)
    seconds = moved(launch) / (gpu.bandwidth * gpu.kernel)
    return _longest(gpu, table()[node.op].cost(node)[0] / _rate(gpu.flops, dtype_of(node, precision)), seconds, gpu.tile)


def _longest(gpu: Gpu, arithmetic: float, memory: float, start: float) -> Time:
    work = max(arithmetic, memory)
    seconds = gpu.launch + start + work
    bound = "launches" if gpu.launch + start > work else "arithmetic" if arithmetic > memory else "memory"
    return Time(seconds, bound)


def _rate(rates: Mapping[str, float], dtype: str) -> float:
    return rates.get(dtype, min(rates.values()))


def dtype_of(node: Node, precision: str) -> str:
    """What a product's operands are multiplied in."""
    floats = [i.type.dtype for i in node.inputs if i.type.is_float]
    dtype = floats[0] if floats else node.type.dtype
    return "tf32" if precision == "tf32" and dtype == "f32" else dtype


def _product_flops(node: Node) -> int:
    """Of a product by its two matrices; an op of several results is paid by its first."""
    if node.op.startswith("matmul"):
        if node.op == "matmul-sum":
            return sum(2 * node.type.size * a.type.shape[-1] for a in node.inputs[: len(node.inputs) // 2 * 2 : 2])
        if node.attrs.get("of", 0):
            return 0
        a, b = node.inputs[:2]
        rows = prod(a.type.shape[:-1]) if b.type.rank == 2 else prod(node.type.shape[:-1])
        return 2 * rows * a.type.shape[-1] * b.type.shape[-1]
    return table()[node.op].cost(node)[0]


def _product(flops: float, count: int, dtype: str, gpu: Gpu) -> tuple[float, float]:
    """(arithmetic, memory): a product overlaps the two, but for what it reads before its first sums and writes after the last."""
    traffic = count / gpu.bandwidth
    return gpu.product * flops / _rate(gpu.flops, dtype) + min(gpu.fill, traffic), traffic


def _attention(launch: Call, gpu: Gpu, precision: str) -> Time:
    """Two products of each pair of a query and a key that it sees, five for the gradients."""
    node = launch.node
    back = node.op != "attend"
    q, k = node.inputs[1:3] if back else node.inputs[:2]
    if node.attrs.get("of", 0) and node.op == "attend-grad":
        return Time(0.0, "launches")  # the first of the three makes them all
    pairs = prod(q.type.shape[:-1]) * k.type.shape[-2] // (2 if node.attrs["causal"] else 1)
    rates = gpu.attention_grad if back else gpu.attention
    dtype = dtype_of(node, precision)
    rate = rates.get(dtype) or _rate(gpu.flops, dtype) / 2
    start = gpu.tile * (3 if back else 1)
    return _longest(gpu, (10 if back else 4) * pairs * q.type.shape[-1] / rate, moved(launch) / (gpu.bandwidth * gpu.kernel), start)


def _head(launch: Call, gpu: Gpu, precision: str) -> Time:
    """Logits in parts, their statistics and gradient where they stand, and with gradients two products more."""
    node = launch.node
    if node.attrs.get("of", 0):
        return Time(0.0, "launches")  # the first of the results makes them all
    x, weight = node.inputs[:2]
    rows, classes, width = x.type.size // x.type.shape[-1], weight.type.shape[-1], x.type.bytes // max(1, x.type.size)
    products, passes = (3, 3) if node.op != HEAD else (1, 2)
    logits = rows * classes * width
    arithmetic, _ = _product(2 * rows * classes * x.type.shape[-1], logits, dtype_of(node, precision), gpu)
    return _longest(gpu, products * arithmetic + passes * logits / (gpu.bandwidth * gpu.kernel), 0.0, 2 * gpu.tile)


def _kernel(launch: Kernel, gpu: Gpu) -> Time:
    inside = values_inside(launch)
    flops = sum(table()[n.op].cost(n)[0] for n in inside)
    count = moved(launch, inside)
    if launch.columns > PERSISTENT and any(u.op in REDUCTIONS for u in launch.units):  # a row is longer than a program holds: read twice
        count += sum(n.type.bytes for n in launch.reads)
    start = gpu.start * (2 if any(u.op in REDUCTIONS for u in launch.units) else 1)
    return _longest(gpu, flops / _rate(gpu.flops, "f32"), count / (gpu.bandwidth * gpu.kernel), start)


def values_inside(launch: Kernel) -> list[Node]:
    """Values that a kernel computes, each once; of views those that choose their elements, which read no more than these."""
    seen: set[Node] = set()
    outside, found = {*launch.reads, *map(original, launch.reads)}, []  # of a value that is made twice, the second in memory is read
    stack = list(launch.units)
    kinds = table()
    while stack:
        node = stack.pop()
        if node in seen or node in outside or (not node.inputs and node.op != "iota"):
            continue
        seen.add(node)
        stack += data(node)
        if kinds[node.op].lowering.kind != "view" or node.op in CHOOSING:
            found.append(node)
    return found


def moved(launch: Launch, inside: Iterable[Node] = ()) -> int:
    """Bytes that a launch reads and writes, each tensor once; of a table, the rows that are asked for."""
    reads = {base: base.type.bytes for base in launch.reads}
    for node in inside:
        if node.op in ("embed", "gather", "take-along") and node.inputs[0] in reads:
            reads[node.inputs[0]] = min(reads[node.inputs[0]], node.type.bytes)
    return sum(reads.values()) + sum(n.type.bytes for n in launch.stores)

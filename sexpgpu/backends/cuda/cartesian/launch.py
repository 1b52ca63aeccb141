"""Products run on a device: indices sorted once a step, launches by plan, parts of sums added in a fixed order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.cartesian import lanes
from sexpgpu.backends.cuda.cartesian.cache import Cache
from sexpgpu.backends.cuda.cartesian.config import Config, config
from sexpgpu.backends.cuda.cartesian.plan import Launch, plan
from sexpgpu.backends.cuda.cartesian.product import Product, of_node, rows_of
from sexpgpu.backends.cuda.cartesian.source import NAME, Kernel, generate
from sexpgpu.backends.cuda.cartesian.tune import Kept, Tile, default
from sexpgpu.backends.cuda.references import reference
from sexpgpu.diagnostics import Diagnostic, render
from sexpgpu.ir import Node

Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or packed factors of weights
TORCH = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
WIDE = 128
WORDS = 1024  # of a program that packs
FOLDED = 512  # columns of a row that a program adds another walk's to
LONGEST = 256  # edges of a walk
SPLIT = 128  # nodes of a program that divides walks
TILE = 512  # numbers that a program adds up at once
WAVE = 1056  # programs that an H200 runs at once, eight of one warp a multiprocessor: rows of partial sums beyond that would be read again for nothing
SPAN = 2048  # rows of partial sums that one program adds up
SUMMED, ACROSS = 8192, 32  # numbers of partial sums that a program adds up at once, and their columns
FEW = 16  # columns of rows that are added at indices which no product has: more of them the library adds


class Walk(NamedTuple):
    """The edges in order of one end, by node; i32. Walks: one a node, and one more for each LONGEST edges that a node has besides."""

    starts: torch.Tensor  # [nodes + 1] where a node's edges begin in `order`
    order: torch.Tensor  # [edges] places of edges
    others: torch.Tensor  # [edges] their other ends
    begins: torch.Tensor  # [walks] in `order`
    ends: torch.Tensor
    nodes: torch.Tensor  # [walks]
    more: torch.Tensor  # [nodes + 1] a node's walks beyond its first, among those that come after the nodes' own

    @property
    def arguments(self) -> list[torch.Tensor]:
        """As a kernel takes them."""
        return [self.begins, self.ends, self.nodes, self.order, self.others]


class PartWalk(NamedTuple):
    """As `Walk`, of a part of the edges: one walk a node, in the order of all edges; places of edges are those within the part. states: of a node, whether
    its sums are stored (1), added to what earlier parts have left (2), or there are none (0)."""

    begins: torch.Tensor
    ends: torch.Tensor
    nodes: torch.Tensor
    order: torch.Tensor
    others: torch.Tensor
    states: torch.Tensor

    @property
    def arguments(self) -> list[torch.Tensor]:
        """As a kernel takes them."""
        return list(self)


class Part:
    """Edges `start` to `stop` of a graph, as `Outputs` takes edges."""

    extra = 0

    def __init__(self, whole: Edges, number: int, size: int):
        self.whole, self.number, self.edges = whole, number, size
        start, stop = number * size, min((number + 1) * size, whole.size)
        self.count, self.size = whole.count, stop - start
        self.ends = {end: index[start:stop] for end, index in whole.ends.items()}

    def by(self, end: str) -> PartWalk:
        """The walks by sender or receiver."""
        return self.whole.parted(end, self.edges)[self.number]

    def folded(self, rows: torch.Tensor, end: str) -> torch.Tensor:
        """One row a node: so they are."""
        return rows


class Edges:
    """Senders and receivers [edges] of a graph of `count` nodes, in order of each.

    Equal receivers keep the order of the edges. Indices out of range are clamped at the far end and skipped at the near one: the
    step that has them is refused anyway. All padding of a batch hangs on one node: no walk is longer than LONGEST edges.
    """

    def __init__(self, senders: torch.Tensor, receivers: torch.Tensor, count: int):
        self.ends = {"sender": senders.to(torch.int32).contiguous(), "receiver": receivers.to(torch.int32).contiguous()}
        self.count, self.size = count, senders.shape[0]
        self.longest = LONGEST
        self._sorted: dict[str, Walk] = {}
        self._parted: dict[tuple[str, int], list[PartWalk]] = {}

    @property
    def extra(self) -> int:
        """Walks beside one a node: as many as any graph of so many edges can need."""
        return self.size // self.longest if self.count else 0

    def by(self, end: str) -> Walk:
        """The walks by sender or receiver."""
        if end not in self._sorted:
            own, other = self.ends[end], self.ends["sender" if end == "receiver" else "receiver"]
            values, order = torch.sort(own, stable=True)
            bounds = torch.arange(self.count + 1, dtype=torch.int32, device=own.device)
            starts = torch.searchsorted(values, bounds, out_int32=True)
            others = other.index_select(0, order).clamp(0, max(0, self.count - 1))
            self._sorted[end] = self._walks(starts, order.to(torch.int32), others, bounds)
        return self._sorted[end]

    def parts(self, size: int) -> list[Part]:
        """The edges in parts of `size`."""
        return [Part(self, n, size) for n in range(-(-self.size // size))]

    def parted(self, end: str, size: int) -> list[PartWalk]:
        """The walks of each part of `size` edges. Equal ends are in the order of the edges, so a node's edges of a part stand together."""
        if (end, size) not in self._parted:
            walk, parts = self.by(end), -(-self.size // size)
            device = walk.order.device
            wide = -(-self.count // 4) * 4  # rows that begin where 16 bytes do: a kernel is compiled for how its tensors lie
            cuts, states = (torch.empty((rows, wide), dtype=torch.int32, device=device)[:, : self.count] for rows in (parts + 1, parts))
            split = import_module("sexpgpu.backends.cuda.cartesian.kernels").split
            split[(-(-self.count // SPLIT), parts + 1)](walk.starts, walk.order, cuts, states, self.count, wide, size, self.size.bit_length(), SPLIT, num_warps=4)
            nodes = torch.arange(self.count, dtype=torch.int32, device=device)
            local = torch.remainder(walk.order, size)
            self._parted[end, size] = [PartWalk(cuts[n], cuts[n + 1], nodes, local, walk.others, states[n]) for n in range(parts)]
        return self._parted[end, size]

    def folded(self, rows: torch.Tensor, end: str) -> torch.Tensor:
        """One row a node, from one a walk, added in the order of the walks."""
        if not self.extra:
            return rows
        fold = import_module("sexpgpu.backends.cuda.cartesian.kernels").fold
        walk, columns = self.by(end), rows.shape[1]
        fold[(self.extra, -(-columns // FOLDED))](rows, walk.nodes, walk.more, self.count, columns, FOLDED, rows.dtype == torch.bfloat16, num_warps=4)
        return rows[: self.count]

    def _walks(self, starts: torch.Tensor, order: torch.Tensor, others: torch.Tensor, bounds: torch.Tensor) -> Walk:
        begins, ends, nodes = starts[:-1], starts[1:], bounds[:-1]
        if not self.extra:
            return Walk(starts, order, others, begins, ends, nodes, torch.zeros_like(starts))
        sizes = ends - begins
        walks = torch.div(sizes + self.longest - 1, self.longest, rounding_mode="floor").clamp(min=1)
        span = torch.div(sizes + walks - 1, walks, rounding_mode="floor")  # a node's edges are divided evenly
        more = torch.zeros_like(starts)
        torch.cumsum(walks - 1, 0, dtype=torch.int32, out=more[1:])
        numbers = torch.arange(self.extra, dtype=torch.int32, device=starts.device)
        node = torch.searchsorted(more[1:], numbers, right=True, out_int32=True).clamp(max=self.count - 1)
        begin = begins[node] + (numbers - more[node] + 1) * span[node]
        begin = torch.where(numbers < more[-1], torch.minimum(begin, ends[node]), ends[node])
        last = torch.minimum(begin + span[node], ends[node])
        first = torch.minimum(begins + span, ends)
        return Walk(starts, order, others, torch.cat([begins, begin]), torch.cat([first, last]), torch.cat([nodes, node]), more)


class Runner:
    """Runs products with one process's settings. `say` gets warnings; `interpreted`: kernels run on the CPU."""

    def __init__(self, settings: Config, say: Callable[[Diagnostic], None], interpreted: bool, device: str):
        self.config, self.interpreted = settings, interpreted
        self.cache = Cache(settings.folder, say)
        self.kept = Kept(self.cache, device)
        self._functions: dict[Any, Any] = {}
        self.tiles: dict[tuple[Product, Launch], Tile | lanes.Lanes] = {}
        self.walks: dict[Product, str] = {}

    def takes(self, product: Product) -> bool:
        """Whether there are kernels for it."""
        f = product.form
        return product.dtype in TORCH and max(f.first, f.second, f.top) <= self.config.l_max

    def function(self, product: Product, launch: Launch, tile: Tile | lanes.Lanes, onto: bool = False) -> tuple[Any, Any]:
        """The compiled function of a launch, and how it takes its arguments. `onto`: that of a part of the edges."""
        part = product.only([product.outputs[n] for n in launch.outputs])
        common = part, launch.mode, launch.paths(product.form)
        made: Callable[[], Kernel]
        if isinstance(tile, lanes.Lanes):
            own = tile._replace(registers=0)
            key, made = (*common, own, *["onto"] * onto), lambda: lanes.generate(*common, own, onto)
        else:
            whole, single = product.form.channels % tile.channels == 0, launch.mode == "rows" and tile.rows == 1
            key, made = (*common, whole, *["single"] * single), lambda: generate(*common, whole, single)
        if key not in self._functions:
            kernel = made()
            text = self.cache.source(repr(key), lambda: kernel.source)
            self._functions[key] = modules.load(text, NAME), kernel
        return self._functions[key]

    def tile(self, product: Product, launch: Launch) -> Tile | lanes.Lanes:
        found = self.tiles.get((product, launch))
        if found is None:
            found = None if self.interpreted else self.kept.tile(product, launch)
            found = found or default(product, launch, self.interpreted)
            self.tiles[product, launch] = found
        return found

    def plan(self, product: Product) -> list[Launch]:
        return plan(product, self.config, self.walks.get(product) or self.kept.walk(product))

    def packed_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """A left factor of weights, [edges inner], as the kernels read it."""
        rows, inner = hidden.shape
        low = hidden.dtype == torch.bfloat16
        pieces = 1 if low else 2
        out = torch.empty((rows + 1) * -(-inner // lanes.DEEP) * pieces * 8, dtype=torch.int32, device=hidden.device)
        pack = import_module("sexpgpu.backends.cuda.cartesian.kernels").pack_rows
        pack[(-(-out.shape[0] // WORDS),)](hidden.contiguous(), out, rows, inner, pieces, low, WORDS, num_warps=4)
        return out

    def packed_matrix(self, matrix: torch.Tensor, paths: int) -> torch.Tensor:
        """The right factor, [inner paths·channels]."""
        inner, channels = matrix.shape[0], matrix.shape[1] // paths
        low = matrix.dtype == torch.bfloat16
        pieces = 1 if low else 2
        out = torch.empty(-(-channels // 8) * paths * -(-inner // lanes.DEEP) * pieces * 64, dtype=torch.int32, device=matrix.device)
        pack = import_module("sexpgpu.backends.cuda.cartesian.kernels").pack_matrix
        pack[(-(-out.shape[0] // WORDS),)](matrix.contiguous(), out, inner, paths, channels, pieces, low, WORDS, num_warps=4)
        return out

    def added(self, rows: torch.Tensor, edges: Edges, end: str, dtype: str) -> torch.Tensor:
        """Rows by edge [edges columns] added at one end of it: [nodes columns], sums in f32 at least."""
        columns, walk, hand = rows.shape[1], edges.by(end), import_module("sexpgpu.backends.cuda.cartesian.kernels")
        wide, low = torch.float64 if dtype == "f64" else torch.float32, dtype == "bf16"
        across = min(WIDE, 1 << (columns - 1).bit_length())
        out = torch.empty((edges.count + edges.extra, columns), dtype=wide, device=rows.device)
        types = import_module("triton.language")
        grid = out.shape[0], -(-columns // across)
        hand.gathered[grid](rows.contiguous(), walk.begins, walk.ends, walk.order, out, columns, max(1, TILE // across), across,
                            types.float64 if dtype == "f64" else types.float32, low, num_warps=4)
        return edges.folded(out, end).to(TORCH[dtype])

    def summed(self, parts: torch.Tensor, dtype: str) -> torch.Tensor:
        """Rows of sums [rows columns] added up: [1 columns], of the storage dtype, or of their own if it is "". More than SPAN of them, of a walk each, are
        added in two turns: a few columns are few programs."""
        types, hand = import_module("triton.language"), import_module("sexpgpu.backends.cuda.cartesian.kernels")
        wide = types.float64 if parts.dtype == torch.float64 else types.float32
        columns = parts.shape[1]
        while True:
            rows = parts.shape[0]
            span = rows if rows <= SPAN else -(-rows // -(-rows // SPAN))
            pieces = max(1, -(-rows // max(1, span)))
            low = dtype == "bf16" and pieces == 1
            out = torch.empty((pieces, columns), dtype=torch.bfloat16 if low else parts.dtype, device=parts.device)
            hand.summed[(-(-columns // ACROSS), pieces)](parts, out, rows, columns, span, SUMMED // ACROSS, ACROSS, wide, low, num_warps=16)
            if pieces == 1:
                return out
            parts = out

    def run(self, product: Product, operands: Sequence[Operand], edges: Edges | None, rows: int, launches: Sequence[Launch] | None = None) -> list[torch.Tensor]:
        """Each output [rows components·channels], in the storage dtype. rows: of a product by rows, or nodes of a graph."""
        done = Outputs(self, product, operands, edges, rows)
        together([work for launch in (self.plan(product) if launches is None else launches) if (work := done.prepared(launch))], done.device)
        return [done.finish(n) for n in range(len(product.outputs))]


def together(launches: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Launches that do not depend on each other, side by side on a GPU: the last programs of one leave multiprocessors to the first of the next. Rank 3
    of 1,000 atoms is 1,000 programs a launch, of which 792 run at once: one launch after another, the second wave of each would be a quarter full."""
    if device.type != "cuda" or len(launches) < 2:
        for launch in launches:
            launch()
        return
    main = torch.cuda.current_stream(device)
    begin = main.record_event()
    for n, launch in enumerate(launches):
        if n == 0:
            launch()
            continue
        side = _side(device, n)
        side.wait_event(begin)
        with torch.cuda.stream(side):
            launch()
    for n in range(1, len(launches)):
        main.wait_stream(_side(device, n))


@cache
def _side(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Outputs:
    """The outputs of one product while its launches run."""

    onto = False  # whether they are added to those of other parts of the edges

    def __init__(self, runner: Runner, product: Product, operands: Sequence[Operand], edges: Edges | None, rows: int):
        self.runner, self.product, self.rows = runner, product, rows
        self.operands = [x if isinstance(x, tuple) else (_aligned(x.contiguous()),) for x in operands]
        self.edges = edges
        self.usual = 0 if edges is None else edges.size  # edges by which walks are divided
        self.device = self.operands[0][0].device
        self.wide = torch.float64 if product.dtype == "f64" else torch.float32
        self.raw: dict[int, list[torch.Tensor]] = {}  # output -> [parts rows width], to be added over lists and parts
        self.scratch: set[int] = set()  # gradients by node features that stand by edge
        self.walked: dict[int, str] = {}  # outputs that stand by walk, by sender or receiver

    @property
    def _walks(self) -> int:
        return self.rows + (self.edges.extra if self.edges is not None else 0)

    def _width(self, number: int) -> int:
        slot = self.product.outputs[number].target
        return self.product.components(slot) * self.product.channels(slot)

    def _summed(self, number: int) -> bool:
        """Whether it is the gradient by weights that all rows share, a row a program."""
        return self.product.shared and self.product.outputs[number].target == "weights"

    def _new(self, number: int, parts: int, rows: int, zero: bool, low: bool) -> torch.Tensor:
        dtype = torch.bfloat16 if low and self.product.dtype == "bf16" else self.wide
        make = torch.zeros if zero else torch.empty
        return make((parts, rows, self._width(number)), dtype=dtype, device=self.device)

    def prepared(self, launch: Launch) -> Callable[[], None] | None:
        """One launch with everything that it reads and writes, not begun; None where there is nothing to work on."""
        product, edges = self.product, self.edges
        tile = self.runner.tile(product, launch)
        blocks = -(-product.form.channels // tile.channels)
        looped = launch.mode in ("receiver", "sender")
        size = self.rows if edges is None else edges.size
        nodes = self.rows
        results = any(product.outputs[n].target == "result" for n in launch.outputs)
        slots = self.runner.config.slots_of(self.usual, nodes) if looped and not results else 1
        span = self._span(launch, tile, blocks)
        programs = self._walks if looped or isinstance(tile, lanes.Lanes) else -(-size // (span or tile.rows))
        made = [self._place(n, launch, slots, blocks * (tile.warps if isinstance(tile, lanes.Lanes) else 1), programs, size) for n in launch.outputs]
        if not programs:
            for tensor in made:
                tensor.zero_()
            return None
        function, kernel = self.runner.function(product, launch, tile, self.onto)
        index: list[Any] = []
        if looped:
            assert edges is not None
            index = edges.by(launch.mode).arguments
        elif edges is not None:
            index = [edges.ends["sender"], edges.ends["receiver"]]
        types = import_module("triton.language")
        wide = types.float64 if product.dtype == "f64" else types.float32
        lows = [t.dtype == torch.bfloat16 for t in made]
        constants = [tile.rows, tile.channels, wide] if isinstance(tile, Tile) else []
        given = [x for n in kernel.operands for x in self.operands[n]]
        most = {"maxnreg": tile.registers} if isinstance(tile, lanes.Lanes) and tile.registers and not self.runner.interpreted else {}
        sizes = [nodes, size, slots, *[span] * bool(span)]
        return lambda: function[(programs, blocks, slots)](*given, *made, *index, *sizes, *constants, *lows, num_warps=tile.warps, **most)

    def _span(self, launch: Launch, tile: Tile | lanes.Lanes, blocks: int) -> int:
        """Rows of a program that sums the gradient by the weights of all rows, 0 of others: so many that WAVE programs take all."""
        if launch.mode != "rows" or not any(self._summed(n) for n in launch.outputs):
            return 0
        tiles = -(-self.rows // tile.rows)
        return -(-tiles // max(1, WAVE // blocks)) * tile.rows if tiles else tile.rows

    def _place(self, number: int, launch: Launch, slots: int, blocks: int, programs: int, size: int) -> torch.Tensor:
        """Where a launch writes an output: a new tensor, or that of an earlier launch that wrote other components."""
        product, mode = self.product, launch.mode
        target = product.outputs[number].target
        some = launch.ranks != tuple(range(product.form.top + 1))
        apart = mode == "rows" and some and self._summed(number)  # launches may have other numbers of programs
        parted = apart or target == "b" or (target == "a" and not launch.firsts)  # every launch reaches all components: one tensor each
        if number in self.raw and not parted:
            return self.raw[number][0]
        narrow = blocks if target == product.narrow else 1
        if target == {"receiver": "result", "sender": "a"}.get(mode):
            reached = {p.first for p in product.form.paths} == set(range(product.form.first + 1))  # by one launch or another
            parts, rows, zero = slots * narrow, self._walks, target == "a" and bool(launch.firsts) and not reached
            self.walked[number] = mode
        elif self._summed(number):
            parts, rows, zero = 1, slots * programs, apart
        elif mode == "edge" and target in ("a", "result"):
            parts, rows, zero = 1, self.rows, True
        else:
            parts, rows, zero = narrow, size, False
        summed = parts > 1 or zero or self._summed(number) or narrow > 1 or target == product.narrow
        if target == "a" and mode == "receiver":
            self.scratch.add(number)
            summed = True
        several = parted and (bool(launch.firsts) or some)
        made = self._new(number, parts, rows, zero, not summed and not several)
        self.raw.setdefault(number, []).append(made)
        return made

    def finish(self, number: int) -> torch.Tensor:
        """An output [rows width], its parts added in their order."""
        product = self.product
        whole = [x[0] if x.shape[0] == 1 else x.sum(0) for x in self.raw[number]]
        if self._summed(number):
            whole = [self.runner.summed(x, self.product.dtype if len(whole) == 1 else "") for x in whole]
        total = whole[0]
        for more in whole[1:]:
            total = total + more
        if number in self.walked and self.edges is not None:
            total = self.edges.folded(total, self.walked[number])
        if number in self.scratch:
            total = self._segments(total)
        return total.to(TORCH[product.dtype])

    def _segments(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.edges is not None
        starts, order = self.edges.by("sender")[:2]
        out = torch.empty((self.rows, rows.shape[1]), dtype=self.wide, device=self.device)
        types = import_module("triton.language")
        if self.rows:
            segment = import_module("sexpgpu.backends.cuda.cartesian.kernels").segment
            grid = (self.rows, -(-rows.shape[1] // WIDE))
            segment[grid](rows, starts, order, out, rows.shape[1], WIDE, types.float64 if rows.dtype == torch.float64 else types.float32, False, num_warps=4)
        return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor where two channels may be read as one word: a view may begin anywhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


@cache
def runner(interpreted: bool, device: str) -> Runner:
    """The process's runner for a device. Warnings go to stderr."""
    return Runner(config(), _say, interpreted, device)


def _say(warning: Diagnostic) -> None:
    print(render(warning), file=sys.stderr)


class Products:
    """The product nodes of a graph on a device: joint outputs wait for their nodes, and indices are sorted once a step."""

    def __init__(self, run: Callable[[], Runner]):
        self._run = run
        self.left: dict[Any, list[Any]] = {}
        self.edges: dict[Any, Edges] = {}
        self.packed: dict[Any, torch.Tensor] = {}  # factors of weights, by node

    def call(self, node: Node, operands: list[torch.Tensor]) -> torch.Tensor:
        """A node's value. `operands` are those of the node, indices last."""
        product, inputs, ends = of_node(node)
        run = self._run()
        if not run.takes(product):
            return reference(node, operands)
        if node.op != "tensor-product-joint":
            return self._made(run, node, product, operands, ends)[0].reshape(node.type.shape)
        key = node.inputs, node.attrs["slots"], node.attrs["outputs"], node.attrs["paths"], node.attrs["inner"]
        if key not in self.left:
            self.left[key] = list(self._made(run, node, product, operands, ends))
        waiting, of = self.left[key], node.attrs["of"]
        value, waiting[of] = waiting[of], None
        if all(v is None for v in waiting):
            del self.left[key]
        return value.reshape(node.type.shape)

    def added(self, node: Node, operands: list[torch.Tensor]) -> torch.Tensor:
        """A `scatter-add`, in an order that is fixed: rows by edge to the atom at an end of it, as forces are, along the walks that products have; and
        narrow rows anywhere. Others by the library."""
        updates, indices = operands
        count, own = node.attrs["count"], node.inputs[1]
        columns = updates[0].numel() if indices.dim() == 1 and len(updates) else 0  # of a row, where one index has one
        known = next(((edges, ends) for (ends, rows), edges in self.edges.items() if own in ends and rows == count), None)
        dtype = node.type.dtype
        if not columns or not count or node.attrs["axis"] or dtype not in TORCH or (known is None and columns > FEW):
            return reference(node, operands)
        if known is None:
            known = self.edges.setdefault(((own,), count), Edges(indices, indices, count)), (own,)
        edges, ends = known
        return self._run().added(updates.reshape(len(updates), columns), edges, "receiver" if own is ends[-1] else "sender", dtype).reshape(node.type.shape)

    def edges_of(self, node: Node, operands: Sequence[torch.Tensor]) -> Edges:
        """The sorted edges of a product over a graph, whose indices are its last operands."""
        key = node.inputs[-2:], rows_of(node)
        if key not in self.edges:
            self.edges[key] = Edges(operands[-2], operands[-1], key[1])
        return self.edges[key]

    def _made(self, run: Runner, node: Node, product: Product, operands: list[torch.Tensor], ends: tuple[Node, ...]) -> list[torch.Tensor]:
        rows, edges = rows_of(node), self.edges_of(node, operands) if ends else None
        count = len(product.slots)
        given: list[Operand] = list(operands[:count])
        factors = zip(node.inputs[count:], operands[count:], strict=True)
        for n in range(count):
            if product.factored(n):
                matrix, value = next(factors)
                rest = matrix, len(product.form.paths)
                if node.inputs[n] not in self.packed:
                    self.packed[node.inputs[n]] = run.packed_rows(operands[n])
                if rest not in self.packed:
                    self.packed[rest] = run.packed_matrix(value, len(product.form.paths))
                given[n] = self.packed[node.inputs[n]], self.packed[rest]
        return run.run(product, given, edges, rows)

    def forget(self) -> None:
        """What belongs to one step."""
        self.left.clear()
        self.edges.clear()
        self.packed.clear()


def on_device() -> Runner:
    """The runner of the current GPU."""
    return runner(False, torch.cuda.get_device_name())

"""Which algorithm computes each matrix product: measured once on the device, kept on disk and in checkpoints.

The candidates of a product are the algorithms that cuBLASLt proposes and the way without it ("apart": torch's own product, and what
follows it as passes of their own). They are timed in turns, replayed back to back so that the device is as warm and as throttled as in a
step, and of a large product the best once more, each for so long that its own power decides its clock; the fastest is taken whose
numbers are those of the way apart and whose bits repeat. A choice is the text of the algorithm's configuration: a file or a checkpoint
names one of the candidates that the library proposes, and never hands it bytes.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sexpgpu.backends.cuda import cublaslt
from sexpgpu.backends.cuda.cublaslt import Candidate, Product, Unavailable
from sexpgpu.diagnostics import note_warning, printable, render
from sexpgpu.passes.epilogues import KINDS

APART = "apart"
PROPOSED = 24  # candidates that a choice may name
TIMED = 8  # of them, those that are timed
ROUNDS = 5
BLOCK = 2.0  # ms of a candidate's block in one round
LARGE = 0.05  # ms of a product from which its finalists are timed again
CLOSE = 1.06  # of the fastest time: finalists, `FINALISTS` at most
FINALISTS = 4
SUSTAINED = 30.0  # ms of a finalist's block; half as long before it settles clock and power
WARM = 300.0  # ms of products before the first timing of large ones: clocks and power settle
BETTER = 0.99  # a later candidate is taken if it takes at most so much of an earlier one's time
SLICE = 128  # rows at each end of a result that are compared
NEAR = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 0.005}  # of the largest element
_NAME = re.compile(r"apart|\d{1,6}(\.\d{1,6}){8}", re.ASCII)


@dataclass
class Switch:
    """The one place that says what of the vendor's library is used; benchmarks set it before a program is made.

    epilogues: of `passes.epilogues.KINDS`. The residual's is left out until it is measured: it moves as many bytes as adding the residual
    where the norm behind it reads it. products: whether cuBLASLt is used at all; without it every product is torch's.
    """

    epilogues: frozenset[str] = frozenset(KINDS) - {"residual"}
    products: bool = True
    passes: bool = True  # gelu's gradient, with its sum over rows, in a kernel of its own where that is faster than epilogues
    tall: bool = True  # f32 products of many rows by our kernels, as three of TF32 parts (`tall.py`); else by torch
    once: bool = True  # a head's rows of logits stay in registers, where they fit; else they are read twice: 1.3% of a step of GPT-2
    over: bool = True  # what a kernel makes lies where what it is made of lay
    aside: bool = True  # small products that nothing waits for run on a stream of their own


SWITCH = Switch()


@dataclass
class Choices:
    """The choices of a process. machine: device and library version, in every key; folder: where they are kept, or None."""

    machine: str
    folder: Path | None
    given: dict[str, str] = field(default_factory=dict)  # of a checkpoint; before those on disk
    used: dict[str, str] = field(default_factory=dict)
    ready: dict[str, Candidate | None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # product -> what a person may want to know
    measured: int = 0
    measures: bool = True  # else what was never measured takes the library's first proposal

    def __post_init__(self) -> None:
        self.disk = self._read()

    def take(self, kernels: Mapping[str, Any]) -> None:
        """The choices of a checkpoint's manifest, as far as they are of the right form."""
        found = kernels.get("products")
        if isinstance(found, dict):
            self.given |= {k: v for k, v in found.items() if _sound(k, v)}

    def find(self, key: str) -> str | None:
        whole = f"{self.machine}: {key}"
        return self.given.get(whole) or self.disk.get(whole)

    def keep(self, key: str, name: str, measured: bool) -> None:
        whole = f"{self.machine}: {key}"
        self.used[whole] = name
        self.measured += measured
        if measured and self.folder is not None:
            self.disk = self._read() | {whole: name}
            self._write()

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder / "products.json"

    def _read(self) -> dict[str, str]:
        if self.path is None:
            return {}
        try:
            facts = self.path.stat()
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o022 or facts.st_size > 1 << 24:
                return {}
            found = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}  # nothing was measured yet, or a file that is written anew
        return {k: v for k, v in found.items() if _sound(k, v)} if isinstance(found, dict) else {}

    def _write(self) -> None:
        """The file, whole or not at all; where it cannot be written, choices are measured again by the next process."""
        assert self.folder is not None and self.path is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, aside = tempfile.mkstemp(dir=self.folder, prefix="products", suffix=".new")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    json.dump(self.disk, stream, indent=0, sort_keys=True)
                os.replace(aside, self.path)
            except BaseException:
                Path(aside).unlink(missing_ok=True)
                raise
        except OSError as error:
            self.notes["products.json"] = f"choices are not kept: {error.strerror or type(error).__name__}"

    def lines(self) -> list[str]:
        """For the lowering report."""
        if not self.used and not self.notes:
            return []
        apart = sum(name == APART for name in self.used.values())
        head = f"matrix products: {len(self.used)} shapes, {self.measured} measured now, {len(self.used) - apart} by cuBLASLt, {apart} by torch"
        return [head, *(f"  {printable(what)}: {printable(why)}" for what, why in sorted(self.notes.items()))]


def _sound(key: Any, name: Any) -> bool:
    return isinstance(key, str) and len(key) < 1000 and isinstance(name, str) and _NAME.fullmatch(name) is not None


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(home) / "sexpgpu" / "products"


@cache
def choices() -> Choices:
    """Of the current device and the library that is there; raises `Unavailable`."""
    version = cublaslt.library().version
    return Choices(f"{torch.cuda.get_device_name()}, cuBLASLt {version}", _folder())


@cache
def _space(device: torch.device, stream: bool) -> torch.Tensor:
    return torch.empty(cublaslt.WORKSPACE, dtype=torch.uint8, device=device)


def workspace(device: torch.device) -> torch.Tensor:
    """The bytes that every product of a device may use, one product after another; those set aside have their own. First asked for
    before anything is captured."""
    return _space(device, bool(_beside))


@cache
def stream() -> torch.cuda.Stream:
    """The stream on which graphs are rehearsed and captured, and products measured: one, as torch keeps a workspace of 32 MiB for each that it has
    seen."""
    return torch.cuda.Stream()


@cache
def side() -> torch.cuda.Stream:
    """The stream of launches that are set aside."""
    return torch.cuda.Stream()


_beside: list[bool] = []


@contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """On this stream, after what the current one has been given so far."""
    stream.wait_stream(torch.cuda.current_stream())
    _beside.append(True)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        _beside.pop()


@cache
def warn(why: str) -> None:
    """E-DEV-012, once a process and reason."""
    sys.stderr.write(render(note_warning("E-DEV-012", f"cuBLASLt is not used for matrix products: {printable(why)}",
                                         notes=("torch computes them, and what follows them takes passes of its own",))) + "\n")


def used() -> dict[str, Any]:
    """What a checkpoint keeps of them: the entry `kernels` of its manifest."""
    return {"products": dict(choices().used)} if _reached() and choices().used else {}


def take(kernels: Mapping[str, Any]) -> None:
    """Choices of a checkpoint, before the first step."""
    if _reached():
        choices().take(kernels)


def agree(tell: Callable[[str], str], first: bool) -> None:
    """Of several ranks, before the first step: all take what rank 0 knows, and `first`, rank 0, alone goes on measuring, as each would
    choose for itself. `tell`: rank 0's text, for every rank that asks."""
    known = choices() if _reached() else None
    _settled(tell(json.dumps({**known.disk, **known.given} if known is not None else {})), measures=first)


def settle(tell: Callable[[str], str]) -> None:
    """Once rank 0 has been through a step alone: all take what it took, and nothing is measured any more. A product that comes later
    takes the library's first proposal, which is the same on every rank."""
    known = choices() if _reached() else None
    _settled(tell(json.dumps({**known.given, **known.used} if known is not None else {})), measures=False)


def _settled(told: str, measures: bool) -> None:
    if _reached():
        known = choices()
        known.given = {k: v for k, v in json.loads(told).items() if _sound(k, v)}
        known.disk, known.measures = {}, measures


def lines() -> list[str]:
    """What was chosen, for the lowering report; nothing where no device is."""
    return choices().lines() if _reached() else []


def _reached() -> bool:
    if not SWITCH.products or not torch.cuda.is_available():
        return False
    try:
        choices()
    except Unavailable as error:
        warn(str(error))
        return False
    return True


def run(make: Callable[[], Product], apart: Callable[[], None], outputs: Sequence[torch.Tensor]) -> None:
    """One product on the device: by the algorithm of choice, or `apart`, which writes the same `outputs`."""
    if not _reached():
        apart()
        return
    known = choices()
    try:
        product = make()
    except Unavailable as error:  # a layout that the library does not have
        known.notes[f"{[tuple(t.shape) for t in outputs]}"] = str(error)
        apart()
        return
    key = product.key
    if key not in known.ready:
        _settle(known, product, key, apart, outputs)
    candidate = known.ready[key]
    if candidate is None:
        apart()
        return
    try:
        product.run(candidate, workspace(outputs[0].device))
    except Unavailable as error:
        warn(str(error))
        known.ready[key] = None
        known.keep(key, APART, False)
        apart()


def _settle(known: Choices, product: Product, key: str, apart: Callable[[], None], outputs: Sequence[torch.Tensor]) -> None:
    """Finds, or measures, the choice for a product."""
    try:
        found = {c.name: c for c in product.candidates(PROPOSED)}
    except Unavailable as error:
        known.notes[key] = str(error)
        known.ready[key] = None
        known.keep(key, APART, False)
        return
    name = known.find(key)
    if name is not None and name != APART and name not in found:
        known.notes[key] = f"the choice that was kept, {name}, is not proposed here"
        if f"{known.machine}: {key}" in known.given:
            sys.stderr.write(f"not bit-exact: the checkpoint's algorithm of a matrix product, {printable(key)}, is not proposed here\n")
        name = None
    measured = name is None
    if name is None and (not known.measures or torch.cuda.is_current_stream_capturing()):  # nothing can be measured now
        name, measured = next(iter(found)), False
    if name is None:
        name = measure(product, list(found.values())[:TIMED], apart, outputs, known.notes)
    known.ready[key] = found.get(name)
    known.keep(key, name, measured)


def measure(product: Product, candidates: Sequence[Candidate], apart: Callable[[], None], outputs: Sequence[torch.Tensor], notes: dict[str, str]) -> str:
    """The name of the fastest way that is right and repeats its bits; `outputs` are written."""
    space = workspace(outputs[0].device)
    ways: dict[str, Callable[[], None]] = {APART: apart}
    ways |= {c.name: lambda c=c: product.run(c, space) for c in candidates}  # type: ignore[misc]
    current, clock = torch.cuda.current_stream(), stream()
    clock.wait_stream(current)
    with torch.cuda.stream(clock):
        before = outputs[0].clone() if product.onto else None
        chosen = pick(timed(ways), ways, outputs, before, lambda why: notes.__setitem__(product.key, why))
        if before is not None:
            outputs[0].copy_(before)
    current.wait_stream(clock)
    return chosen


def pick(times: Mapping[str, float], ways: Mapping[str, Callable[[], None]], outputs: Sequence[torch.Tensor], before: torch.Tensor | None,
         say: Callable[[str], Any]) -> str:
    """The fastest way whose numbers are those of `APART` and whose bits repeat; of almost equal ones the first. before: what the first
    output holds that a way adds to."""
    least = min(times.values())
    order = sorted(times, key=lambda name: (times[name] * BETTER > least, times[name]))
    first_best = next(name for name in times if times[name] * BETTER <= least)
    order.remove(first_best)
    expected = _result(ways[APART], outputs, before)
    for name in (first_best, *order):
        if name == APART:
            break
        first, second = (_result(ways[name], outputs, before) for _ in range(2))
        wrong = _differs(first, expected)
        if not wrong and all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
            return name
        say(f"{name} is left out: " + (wrong or "its bits do not repeat"))
    return APART


def _result(way: Callable[[], None], outputs: Sequence[torch.Tensor], before: torch.Tensor | None) -> list[torch.Tensor]:
    """The first and last rows of what a way gives, over memory of NaN."""
    for number, out in enumerate(outputs):
        if number == 0 and before is not None:
            out.copy_(before)
        else:
            out.fill_(float("nan"))
    way()
    return [torch.cat([out[:SLICE], out[-SLICE:]]) for out in outputs]


def _differs(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """How far apart they are, if that is more than rounding explains; what is not finite in `expected` is left out."""
    for x, y in zip(found, expected, strict=True):
        known = y.isfinite()
        off = torch.where(known, (x.float() - y.float()).abs(), 0.0).max()
        most = torch.where(known, y.float().abs(), 0.0).max()
        if not bool(off <= NEAR[y.dtype] * most + 1e-30):
            return f"off by {float(off):.1e} where the largest is {float(most):.1e}"
    return ""


def timed(ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """ms a call of each way that runs, the median of blocks that take turns. Call it on a stream that is not the default one."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for name, way in ways.items():
        try:
            way()
            start.record()
            way()
            stop.record()
            stop.synchronize()
            count = max(1, min(32, int(BLOCK / max(1e-3, start.elapsed_time(stop)))))
            graphs[name] = _captured(way, count), count
        except (Unavailable, RuntimeError):
            if name == APART:
                raise
    _warm(graphs)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS):
        for name in list(graphs) if number % 2 == 0 else list(reversed(graphs)):
            graph, count = graphs[name]
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / count)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return _sustained(graphs, medians) if min(medians.values()) >= LARGE else medians


def _sustained(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], times: Mapping[str, float]) -> dict[str, float]:
    """The times of the ways that are nearly as fast as the fastest, each in blocks so long that the device's power limit answers to it alone:
    in the steps of a large model joules decide, and in turns all have the clock that their sum leaves. The others' times, as much longer."""
    near = sorted((t, name) for name, t in times.items() if t <= CLOSE * min(times.values()))[:FINALISTS]
    found: dict[str, list[float]] = {name: [] for _, name in near}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for order in (list(found), list(found)[::-1]) if len(found) > 1 else ():
        for name in order:
            graph, count = graphs[name]
            turns = max(1, round(SUSTAINED / (times[name] * count)))
            for _ in range(max(1, turns // 2)):
                graph.replay()
            start.record()
            for _ in range(turns):
                graph.replay()
            stop.record()
            stop.synchronize()
            found[name].append(start.elapsed_time(stop) / (turns * count))
    steady = {name: statistics.mean(blocks) for name, blocks in found.items() if blocks}
    slower = max((t / times[name] for name, t in steady.items()), default=1.0)
    return {name: steady.get(name, max(t, t * slower)) for name, t in times.items()}


def _captured(way: Callable[[], None], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(count):
            way()
    finally:
        graph.capture_end()
    return graph


_warmed: list[bool] = []


def _warm(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]]) -> None:
    """The state of a long run, once a process: products until clocks and power have settled."""
    graph, _ = next(iter(graphs.values()))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    one = start.elapsed_time(stop)
    if _warmed or one < BLOCK / 4:  # small products do not warm a device
        return
    _warmed.append(True)
    for _ in range(int(WARM / one)):
        graph.replay()
    torch.cuda.current_stream().synchronize()

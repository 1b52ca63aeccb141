"""Times of a step's launches on the device, one by one, against what the device can do.

A long wait is put in front of the launches, so that the host has sent all of them before the first begins: what lies between two
events is then the launch alone, however short. The step's flag is down meanwhile, so nothing is written.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sexpgpu.backends.cuda.device import memory_errors
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.cuda.report import Row, rows
from sexpgpu.diagnostics import printable

REPEATS = 5
WAIT = 400_000_000  # cycles that the device waits, about 0.2 s


@dataclass(frozen=True)
class Ceilings:
    """What was measured of the device: bytes/s of a copy, read and written; operations/s of matrix products by dtype."""

    bytes: float
    operations: Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """Launches of one name and model path (call numbers left out) in a step."""

    name: str
    kind: str
    path: str
    phase: str
    calls: int
    seconds: float
    share: float
    bytes_per_second: float
    operations_per_second: float
    of_ceiling: float  # the larger share of the two ceilings
    bound: str  # "bytes" or "operations"


@dataclass(frozen=True)
class Profile:
    """A step by its launches. `step_seconds`: of a replayed step; `launch_seconds`: the sum of its launches."""

    device: str
    step_seconds: float
    launch_seconds: float
    launches: int
    ceilings: Ceilings
    lines: tuple[Line, ...]

    def document(self) -> dict[str, Any]:
        """The whole as JSON."""
        return asdict(self)


def plain_path(path: str) -> str:
    """A model path without call numbers."""
    return re.sub(r"/\d+(?=/|$)", "", path)


def make(device: str, step: float, timed: Sequence[tuple[Row, float]], ceilings: Ceilings, dtype: str) -> Profile:
    """The table from times in seconds; equal names at equal paths share a line, the longest first."""
    groups: dict[tuple[str, str, str, str], list[tuple[Row, float]]] = {}
    for row, seconds in timed:
        groups.setdefault((row.name, row.kind, plain_path(row.path), row.phase), []).append((row, seconds))
    total = sum(seconds for _, seconds in timed)
    lines = [_line(key, members, total, ceilings, dtype) for key, members in groups.items()]
    return Profile(device, step, total, len(timed), ceilings, tuple(sorted(lines, key=lambda line: (-line.seconds, line.name, line.path))))


def _line(key: tuple[str, str, str, str], members: list[tuple[Row, float]], total: float, ceilings: Ceilings, dtype: str) -> Line:
    seconds = sum(s for _, s in members)
    moved, operations = (sum(getattr(row, what) for row, _ in members) for what in ("bytes", "flops"))
    rate = {"bytes": moved / seconds if seconds else 0.0, "operations": operations / seconds if seconds else 0.0}
    library = key[1] == "library"
    most = ceilings.operations.get(dtype if library else "f32", 0.0)
    shares = {"bytes": rate["bytes"] / ceilings.bytes if ceilings.bytes else 0.0, "operations": rate["operations"] / most if library and most else 0.0}
    bound = max(shares, key=lambda what: shares[what])
    return Line(*key, len(members), seconds, seconds / total if total else 0.0, rate["bytes"], rate["operations"], shares[bound], bound)


def lines(profile: Profile, most: int | None = None) -> list[str]:
    """The table of a person."""
    shown = profile.lines[:most]
    head = [
        f"{profile.device}: a step takes {profile.step_seconds * 1e3:.3f} ms; its {profile.launches} launches {profile.launch_seconds * 1e3:.3f} ms one by one",
        f"ceilings measured: copy {profile.ceilings.bytes / 1e12:.2f} TB/s, products "
        + ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in profile.ceilings.operations.items()),
    ]
    cells = [("share", "ms", "calls", "GB/s", "GFLOP/s", "of ceiling", "launch", "path")]
    cells += [
        (f"{100 * x.share:.1f}%", f"{x.seconds * 1e3:.3f}", str(x.calls), f"{x.bytes_per_second / 1e9:,.0f}", f"{x.operations_per_second / 1e9:,.0f}",
         f"{100 * x.of_ceiling:.0f}% {x.bound}", x.name if x.kind == "kernel" else f"library {x.name}", printable(x.path))
        for x in shown
    ]  # fmt: skip
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    table = ["  " + "  ".join(c.rjust(w) if i < 5 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    rest = profile.lines[len(shown) :]
    more = [f"  and {len(rest)} more, {100 * sum(x.share for x in rest):.1f}%"] if rest else []
    return [*head, *table, *more]


# --- measuring ---


def profile(program: CudaProgram, batch: Mapping[str, Any]) -> Profile:
    """The profile of an initialised program's step on this batch; its state is as before."""
    with memory_errors(program.plan):
        step, found = measured(program, batch)
    precision = {"tf32": "tf32", "bf16": "bf16", "f64": "f64"}.get(program.precision, "f32")
    return make(program.device, step, [row for _, timed in found for row in timed], ceilings(program.place), precision)


def measured(program: CudaProgram, batch: Mapping[str, Any]) -> tuple[float, list[tuple[Compiled, list[tuple[Row, float]]]]]:
    """Seconds of a replayed step, and of each of its graphs the launches with their seconds."""
    program.step(batch, False)  # compiles, and sets up the libraries
    device = program.place.type == "cuda"
    step = _step_time(program, batch, device)
    _, capacity = program._latest[1:]
    forward, update = program._graphs(False, capacity)
    program._alive.zero_()
    with torch.no_grad(), program._modes():
        fields = {name: tensor[0] for name, tensor in program._fields[1, capacity].tensors.items()}
        arena = program._activation(max(forward.plan.size, update.plan.size))  # the step's own: there may be no room for another
        homes: dict[str, torch.Tensor] = {}
        place = lambda name: homes.setdefault(name, torch.zeros((), dtype=program.dtype, device=program.place))  # noqa: E731
        works = program._one_step(forward, update, arena, fields, place)
        bounds = [owner for owner in (getattr(work, "__self__", None) for work in works) if isinstance(owner, Bound)]
        found = [(bound.compiled, times(bound, rows(bound.compiled, program.traced.origins), device)) for bound in bounds]
    program._alive.fill_(True)
    return step, found


def _step_time(program: CudaProgram, batch: Mapping[str, Any], device: bool) -> float:
    """Seconds of a step that is replayed, the median of some; what it changes is put back."""
    before = {name: tensor.clone() for name, tensor in program.state().items()}
    updates, found = program.updates, []
    for _ in range(REPEATS if not device else 20):
        start = time.perf_counter()
        program.step(batch, False)
        found.append(time.perf_counter() - start)
    program.load(before, updates)
    return statistics.median(found)


def times(bound: Bound, found: list[Row], device: bool) -> list[tuple[Row, float]]:
    """The median time of each launch, with the copies behind the last one left out."""
    works = _launches(bound, found)
    rounds = [_on_device(works, bound) if device else _on_host(works, bound) for _ in range(REPEATS if device else 1)]
    return [(row, statistics.median(r[i] for r in rounds)) for i, (row, _) in enumerate(works)]


def _launches(bound: Bound, found: list[Row]) -> list[tuple[Row, Callable[[], None]]]:
    """Each row with its work; launches over nothing have none."""
    schedule = bound.compiled.schedule.launches
    made = [row for row, launch in zip(found, schedule, strict=True) if launch in bound.compiled.emitted or row.kind == "library"]
    return list(zip(made, bound.work, strict=False))


def _on_host(works: list[tuple[Row, Callable[[], None]]], bound: Bound) -> list[float]:
    found = []
    for _, work in works:
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    bound.library.forget()
    return found


def _on_device(works: list[tuple[Row, Callable[[], None]]], bound: Bound) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    wait = getattr(torch.cuda, "_sleep", None)  # a torch that has it no more shows short launches with their gaps
    if wait is not None:
        wait(WAIT)
    events[0].record()
    for (_, work), event in zip(works, events[1:], strict=True):
        work()
        event.record()
    torch.cuda.synchronize()
    bound.library.forget()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def ceilings(place: torch.device) -> Ceilings:
    """A copy of 1 GiB and products of 8192 x 8192 matrices on a GPU; small ones on the CPU, to try the command."""
    device = place.type == "cuda"
    size, edge = (1 << 28, 8192) if device else (1 << 20, 256)
    source = torch.rand(size, dtype=torch.float32, device=place)
    target = torch.empty_like(source)
    moved = 2 * 4 * size / _best(lambda: target.copy_(source), device)
    found = {}
    kinds = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16} if device else {"f32": torch.float32}
    allowed = torch.backends.cuda.matmul.allow_tf32
    for name, dtype in kinds.items():
        a = torch.randn(edge, edge, device=place).to(dtype)
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        found[name] = 2 * edge**3 / _best(lambda a=a: torch.mm(a, a), device)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return Ceilings(moved, found)


def _best(work: Callable[[], Any], device: bool) -> float:
    """The least seconds of some calls, by the device's clock where there is one."""
    work()
    best = float("inf")
    for _ in range(REPEATS):
        if device:
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            best = min(best, begun.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
    return best

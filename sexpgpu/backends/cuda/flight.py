"""What a replay takes with it and brings back: batches in host memory, scalars on their way, and the replay itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.cuda import choice
from sexpgpu.backends.interpreter.program import Result
from sexpgpu.passes.bounds import BAD

INDEX = "index"  # of Result.fell: an index of the step was out of range
ROOMS = 5  # that are handed out in turn: two of launches in the air, three that are filled for the next
LINE = 256  # bytes
STAGED = 1 << 20  # bytes of a launch's batches from which their way to the device runs beside the steps before


class Reading:
    """Where the scalars of one step stand in a report. `parts`: micro-batches of a step."""

    def __init__(self, places: Mapping[str, int], parts: int):
        self.parts = parts
        self.loss, self.norm, self.ok = places["loss"], places["gradient-norm"], places["ok"]
        self.bad = [i for name, i in places.items() if name.startswith(f"part/{BAD}")]
        self.count = places.get("part/count")
        self.rates = {n.removeprefix("learning-rate/"): i for n, i in places.items() if n.startswith("learning-rate/")}
        self.taps = {n.removeprefix("part/tap/"): i for n, i in places.items() if n.startswith("part/tap/")}
        totals = {n.split("/")[2]: i for n, i in places.items() if n.startswith("part/metric/") and n.endswith("/total")}
        self.metrics = {short: (i, places.get(f"part/metric/{short}/count")) for short, i in totals.items()}

    def result(self, values: Sequence[float]) -> Result:
        loss, norm, ok = values[self.loss], values[self.norm], values[self.ok] != 0
        fell = "" if ok else INDEX if any(values[i] for i in self.bad) else "loss" if not math.isfinite(loss) else "gradient norm"
        metrics = {}
        for name, (total, count) in self.metrics.items():
            number = float(self.parts) if count is None else values[count]
            metrics[name] = values[total] / number if number else math.nan
        taps = {name: values[i] / self.parts for name, i in self.taps.items()}
        rates = {name: values[i] for name, i in self.rates.items()}
        return Result(loss, norm, rates, ok, metrics, taps, None if self.count is None else values[self.count], fell)


class InFlight:
    """Scalars on their way to the host; `begun` and `ended`: events of the device, or on the CPU seconds of a clock."""

    def __init__(self, names: Mapping[str, int], values: torch.Tensor, begun: Any, ended: Any, readings: Sequence[Reading] = ()):
        self.names, self.values, self.readings = names, values, readings
        self._begun, self._ended = begun, ended

    def wait(self) -> None:
        if isinstance(self._ended, torch.cuda.Event):
            self._ended.synchronize()

    def read(self) -> dict[str, float]:
        self.wait()
        return dict(zip(self.names, self.values[: len(self.names)].tolist(), strict=True))

    def results(self) -> list[Result]:
        """Of each step, up to the first that is not finite: those after it changed nothing."""
        self.wait()
        values = self.values.tolist()
        found = []
        for reading in self.readings:
            found.append(reading.result(values))
            if not found[-1].finite:
                break
        return found

    @property
    def seconds(self) -> float:
        """That the device took for its steps, once it was waited for."""
        if isinstance(self._ended, torch.cuda.Event):
            return float(self._begun.elapsed_time(self._ended)) / 1e3
        return float(self._ended - self._begun)


class Report:
    """The scalars of some steps, side by side in one tensor: one copy brings them to the host."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int = 4096):
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.names: dict[str, int] = {}
        self.hosts: dict[int, torch.Tensor] = {}
        self._readings: list[Reading] = []

    def place(self, name: str) -> torch.Tensor:
        number = self.names.setdefault(name, len(self.names))
        return self.values[number]

    def readings(self, parts: int) -> list[Reading]:
        """Of the steps 0, 1, …, whose names begin with their number; every name has its place."""
        if not self._readings:
            steps: dict[int, dict[str, int]] = {}
            for name, i in self.names.items():
                number, _, rest = name.partition("/")
                steps.setdefault(int(number), {})[rest] = i
            self._readings = [Reading(steps[number], parts) for number in sorted(steps)]
        return self._readings

    def begin(self) -> Any:
        """Before the work of which it reports."""
        if self.values.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def send(self, turn: int = 0, begun: Any = None, readings: Sequence[Reading] = ()) -> InFlight:
        """Begins the copy into the pinned memory of this turn."""
        count = len(self.names)
        if self.values.device.type != "cuda":
            now = time.perf_counter()
            return InFlight(self.names, self.values[:count].clone(), now if begun is None else begun, now, readings)
        if turn not in self.hosts:
            self.hosts[turn] = torch.empty(count, dtype=self.values.dtype, pin_memory=True)
        self.hosts[turn].copy_(self.values[:count], non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return InFlight(self.names, self.hosts[turn], event if begun is None else begun, event, readings)

    def read(self) -> dict[str, float]:
        return self.send().read()


class Lines:
    """Memory for the batches of some steps, each from a place that is a multiple of `LINE`: how a matrix lies decides which algorithm
    multiplies it, and a step must take the same wherever it stands in a launch. `bytes`: field -> [steps, bytes]; `tensors`: field ->
    [steps batch …] in it."""

    def __init__(self, count: int, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device | None = None, pinned: bool = False):
        self.shapes = dict(shapes)
        self.bytes: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            size = math.prod(shape) * dtype.itemsize
            self.bytes[name] = torch.empty((count, max(1, -(-size // LINE)) * LINE), dtype=torch.uint8, device=device, pin_memory=pinned)
            self.tensors[name] = self.bytes[name][:, :size].view(dtype).view(count, *shape)

    @property
    def size(self) -> int:
        return sum(t.nbytes for t in self.bytes.values())

    def take(self, other: Lines) -> None:
        """The bytes of others of these shapes, on the current stream."""
        for name, tensor in self.bytes.items():
            tensor.copy_(other.bytes[name], non_blocking=True)


class Room(list):
    """Host memory, pinned where there is a device, for the batches of one launch: {field: array} for each of its steps, to be filled
    in place."""

    def __init__(self, count: int, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], pinned: bool):
        self.lines = Lines(count, shapes, pinned=pinned)
        arrays = {n: t.numpy() for n, t in self.lines.tensors.items()}
        super().__init__({n: a[i] for n, a in arrays.items()} for i in range(count))
        self.flight: InFlight | None = None  # that took it with it

    def stack(self, batches: Sequence[Mapping[str, Any]]) -> None:
        for mine, given in zip(self, batches, strict=True):
            for name, array in mine.items():
                np.copyto(array, given[name], casting="same_kind")


def on_device(batch: int) -> int:
    """Bytes that batches of so many take there."""
    return 2 * batch if batch >= STAGED else batch


class Fields:
    """The batches of one launch on the device, where its graph reads them: `tensors`, field -> [steps batch …].

    Small ones come in the order of the work. Large ones come on a stream of their own while the launch before is at work, and are
    copied over on the device before theirs.
    """

    def __init__(self, room: Room, device: torch.device):
        count = len(room)
        self._lines = Lines(count, room.lines.shapes, device)
        self.tensors = self._lines.tensors
        self._stage: Lines | None = None
        if device.type == "cuda" and self._lines.size >= STAGED:
            self._stage = Lines(count, room.lines.shapes, device)
            self._stream = torch.cuda.Stream()
            self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()
            self._taken.record()

    def take(self, room: Room) -> None:
        if self._stage is None:
            self._lines.take(room.lines)
            return
        with torch.cuda.stream(self._stream):
            self._taken.wait()
            self._stage.take(room.lines)
            self._arrived.record()
        self._arrived.wait()
        self._lines.take(self._stage)
        self._taken.record()


class Replay:
    """Launches that are captured once, if the device captures, and then replayed. `rehearse`: what is done before, to compile
    kernels and to set up the libraries, if not the work itself."""

    def __init__(self, work: Callable[[], None], device: torch.device, pool: Any, rehearse: Callable[[], None] | None = None):
        self.work, self.graph = work, None
        if device.type != "cuda":
            return
        stream = choice.stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            (rehearse or work)()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()

    def run(self) -> None:
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()

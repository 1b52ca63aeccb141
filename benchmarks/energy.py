"""Where a step's energy goes: on a device at its power limit, joules and not kernel times from idle clocks make the steady step.

Every kind of launch of a file's step runs alone, back to back, until clocks and power are steady; NVML's counter gives the joules.
JSON lines: a line a kind (calls a step, ms from idle clocks, ms sustained, J a call, J a step), then the step itself. Needs a GPU.

    python benchmarks/energy.py examples/gpt2.lisp --set batch=32 --fast
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sexpgpu import compiler
from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda import profile as profiling
from sexpgpu.backends.cuda.executable import Bound
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.cuda.report import Row, rows
from sexpgpu.backends.interpreter.program import source_of
from sexpgpu.compiler import Selection, load

SECONDS = 0.8  # of each kind; in windows below half a second the counter, which moves some 30 times a second, gave joules that were off by half


class Meter:
    """NVML's counters of device 0: joules since the driver was loaded, and the clock in MHz."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        for code in (self._nvml.nvmlInit_v2(), self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))):
            if code:
                raise OSError(f"NVML says {code}")

    def joules(self) -> float:
        found = ctypes.c_ulonglong()
        code = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(found))
        if code:
            raise OSError(f"NVML says {code}: no energy counter")
        return found.value / 1e3

    def clock(self) -> int:
        found = ctypes.c_uint()
        self._nvml.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(found))
        return int(found.value)


def sustained(work: Callable[[], Any], meter: Meter, seconds: float = SECONDS) -> tuple[float, float, int]:
    """Seconds and joules of a call that runs back to back, and the clock at the end. The first half only warms."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    work()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        start = time.perf_counter()
        work()
        stream.synchronize()
        single = max(time.perf_counter() - start, 2e-6)
        inner = max(1, min(200, int(0.01 / single)))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                work()

    def run(length: float) -> tuple[float, float, int]:
        calls, began, before = 0, time.perf_counter(), meter.joules()
        while time.perf_counter() - began < length:
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            calls += 2 * inner
        return time.perf_counter() - began, meter.joules() - before, calls

    run(seconds)
    took, spent, calls = run(seconds)
    return took / calls, spent / calls, meter.clock()


def program_of(file: str, sets: tuple[str, ...], fast: bool) -> tuple[CudaProgram, Any]:
    loaded = load(file, Selection(sets=sets))
    run = next(iter(loaded.experiment.runs.values()))
    if fast:
        run = dataclasses.replace(run, deterministic=False)
    program = CudaProgram(compiler.stages(loaded, run, "cuda"), 1)
    program.initialise()
    return program, run


def batch_of(program: CudaProgram, classes: int) -> dict[str, np.ndarray]:
    """Random numbers in the shapes of the step's inputs."""
    random = np.random.default_rng(0)
    forward, _ = program._graphs(False, None)
    found = {}
    for leaf in forward.leaves:
        kind, name = source_of(leaf)
        if kind == "input":
            shape = leaf.type.shape
            found[name] = random.integers(0, classes, shape).astype(np.int32) if leaf.type.is_integer else random.standard_normal(shape).astype(np.float32)
    return found


class Memo:
    """What launches leave for one another outside the arena (an attention's statistics, a call's result), to be put back before each call."""

    def __init__(self, bound: Bound):
        self._values, self._held = bound.values, dict(bound.values)
        self._kept = (bound.library.attention.left,)
        self._then = [{key: list(parts) for key, parts in left.items()} for left in self._kept]

    def back(self) -> None:
        self._values.clear()
        self._values.update(self._held)
        for left, then in zip(self._kept, self._then, strict=True):
            left.clear()
            left.update({key: list(parts) for key, parts in then.items()})


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _one(row: Row, key: tuple[str, str, str, int], times: list[float], work: Callable[[], None], memo: Memo, arena: torch.Tensor, meter: Meter,
         length: float, total: dict[str, float]) -> None:
    """Measures a kind of launch where it stands in the step, and leaves the arena as it was."""
    before, calls = arena.clone(), len(times)
    facts = dict(benchmark="energy", kind=key[0], shape=key[1], path=key[2], calls=calls, idle_ms=round(sum(times) / calls * 1e3, 4))

    def once() -> None:
        memo.back()
        work()

    try:
        each, spent, clock = sustained(once, meter, length)
    except Exception:  # a launch that cannot run alone
        say(**facts, failed=traceback.format_exc().splitlines()[-1][:200])
        return
    finally:
        arena.copy_(before)
    for name, value in (("joules", spent * calls), ("sustained", each * calls), ("idle", sum(times))):
        total[name] += value
    say(**facts, ms=round(each * 1e3, 4), joules=round(spent, 5), watts=round(spent / each), mhz=clock, step_joules=round(spent * calls, 3),
        tflops=round(row.flops / each / 1e12, 1), tbps=round(row.bytes / each / 1e12, 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--fast", action="store_true", help="as with :deterministic false")
    parser.add_argument("--classes", type=int, default=50304, help="integers of the batch are below it")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--least", type=float, default=0.002, help="kinds with a smaller share of the step's time are left out")
    options = parser.parse_args()
    choice.SWITCH.over = False  # a launch that runs alone, over what it made itself, would soon have zeros to do with
    meter = Meter()
    program, _ = program_of(options.file, tuple(options.set), options.fast)
    batch = batch_of(program, options.classes)
    program.step(batch, False)
    forward, update = program._graphs(False, None)
    flight = program.launch([batch], False)
    torch.cuda.synchronize()
    before, start = meter.joules(), time.perf_counter()
    steps = 0
    while time.perf_counter() - start < 6:  # the step as it runs
        following = program.launch([batch], False)
        program.collect(flight)
        flight, steps = following, steps + 1
    program.collect(flight)
    took, spent = time.perf_counter() - start, meter.joules() - before
    say(benchmark="energy", kind="step", ms=round(took / steps * 1e3, 3), joules=round(spent / steps, 3), watts=round(spent / took), mhz=meter.clock())
    program._alive.zero_()
    total = {"joules": 0.0, "sustained": 0.0, "idle": 0.0}
    with torch.no_grad(), program._modes():
        fields = {name: tensor[0] for name, tensor in program._fields[1, None].tensors.items()}
        arena = torch.zeros(max(forward.plan.size, update.plan.size), dtype=torch.uint8, device=program.place)
        homes: dict[str, torch.Tensor] = {}
        place = lambda name: homes.setdefault(name, torch.zeros((), dtype=program.dtype, device=program.place))  # noqa: E731
        works = program._one_step(forward, update, arena, fields, place)
        for bound in (owner for owner in (getattr(work, "__self__", None) for work in works) if isinstance(owner, Bound)):
            launches = profiling._launches(bound, rows(bound.compiled, program.traced.origins))
            profiling._on_device(launches, bound)
            times = profiling._on_device(launches, bound)
            kinds: dict[tuple[str, str, str, int], list[float]] = {}
            for (row, _), seconds in zip(launches, times, strict=True):
                kinds.setdefault((row.name, row.shape, profiling.plain_path(row.path), row.bytes), []).append(seconds)
            done: set[tuple[str, str, str, int]] = set()
            for row, work in launches:
                key = row.name, row.shape, profiling.plain_path(row.path), row.bytes
                memo = Memo(bound)
                if key not in done and sum(kinds[key]) >= options.least * took / steps:
                    done.add(key)
                    _one(row, key, kinds[key], work, memo, arena, meter, options.seconds, total)
                memo.back()
                work()
            bound.library.forget()
    say(benchmark="energy", kind="all launches", idle_ms=round(total["idle"] * 1e3, 3), ms=round(total["sustained"] * 1e3, 3), joules=round(total["joules"], 3))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

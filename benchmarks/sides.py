"""What the benchmarks of a GPU share: our program without its data, batches, and sides that are measured in turn.

A *side* is a process of its own that answers questions, one JSON object a line: it imports while the others do, is prepared when it is
told to, and then asked for blocks of steps in turn, so that one process at a time uses the device and a failure of one leaves the others.
Ours are prepared one by one, as they time their products then. The process is the same script with `--side NAME --answers FD`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sexpgpu import compiler
from sexpgpu.backends import state
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.compiler import Selection, load

ROOT = Path(__file__).resolve().parents[1]
Batch = dict[str, np.ndarray]
Answers = Mapping[str, Callable[..., dict[str, Any]]]


def python_path() -> str:
    """PYTHONPATH for a process of ours: this checkout before what was there."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def say(name: str, **fields: Any) -> dict[str, Any]:
    """One JSON object a line, kept in $OUT as well where that is a folder; times in ms unless a key says otherwise."""
    row = {"name": name, **fields}
    print(json.dumps(row), flush=True)
    if os.environ.get("OUT") and Path(os.environ["OUT"]).is_dir():
        with open(Path(os.environ["OUT"]) / "rows.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


def summary(times: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(times)
    return {"median": round(middle, 5), "least": round(min(times), 5), "most": round(max(times), 5), "spread": round((max(times) - min(times)) / 2 / middle, 4), "blocks": len(times)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of theirs over ours, block by block: above 1 ours is faster."""
    return round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 4)


def last_lines(text: str, count: int = 6) -> list[str]:
    return [line[:300] for line in text.strip().splitlines()[-count:]]


# --- programs ------------


def staged_of(file: str, sets: Sequence[str] = (), deterministic: bool = True, variant: str | None = None) -> Any:
    """The stages of a file's only run for the device; its data is not opened."""
    loaded = load(str(ROOT / file), Selection(variant=variant, sets=tuple(sets)))
    run = dataclasses.replace(next(iter(loaded.experiment.runs.values())), deterministic=deterministic)
    return compiler.stages(loaded, run, "cuda")


def program_of(file: str, sets: Sequence[str] = (), deterministic: bool = True, device: str | None = None) -> CudaProgram:
    """The program of it, initialised. device: `cpu` under Triton's interpreter."""
    program = CudaProgram(staged_of(file, sets, deterministic), 1, device)
    program.initialise()
    return program


def initial(staged: Any) -> dict[str, torch.Tensor]:
    """The initial state on the host, by name."""
    tensors = {n: torch.empty(shape, dtype=TORCH[dtype]) for n, (dtype, shape) in state.schema(staged.traced, "f32").items()}
    state.initialise(staged.traced, staged.run.seed, tensors)
    return tensors


def tokens(count: int, batch: int, context: int, vocabulary: int, seed: int = 0) -> list[Batch]:
    """Batches of a stream in which each token mostly decides the next: a model learns it."""
    rng = np.random.default_rng(seed)
    follow = rng.permutation(vocabulary).astype(np.int32)
    rows = count * batch
    stream = np.empty((context + 1, rows), np.int32)
    stream[0] = rng.integers(0, vocabulary, rows)
    for t in range(context):
        random = rng.integers(0, vocabulary, rows, dtype=np.int32)
        stream[t + 1] = np.where(rng.random(rows, dtype=np.float32) < 0.2, random, follow[stream[t]])
    whole = np.ascontiguousarray(stream.T).reshape(count, batch, context + 1)
    return [{"tokens": np.ascontiguousarray(b[:, :-1]), "targets": np.ascontiguousarray(b[:, 1:])} for b in whole]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(steps: Callable[[int], Any], count: int) -> dict[str, Any]:
    """A block of steps: ms a step by the clock, from idle to idle."""
    synchronize()
    start = time.perf_counter()
    steps(count)
    synchronize()
    return {"ms": (time.perf_counter() - start) * 1e3 / count}


def launches(work: Callable[[], Any], steps: int, most: int = 8) -> dict[str, Any]:
    """What the device did in `work`, `steps` steps: kernels, copies and fills a step, their time, and the longest by name. Nothing of it
    where there is no device."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        work()
        return {"nodes": 0, "device_us": 0.0, "top": []}
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            found.setdefault(event.name, []).append(event.device_time)
    total = sum(map(sum, found.values()))
    rows = sorted(((sum(t) / steps, len(t) / steps, name[:70]) for name, t in found.items()), reverse=True)
    return {"nodes": round(sum(map(len, found.values())) / steps, 2), "device_us": round(total / steps, 2), "top": [[round(us, 2), round(n, 2), name] for us, n, name in rows[:most]]}


# --- sides ------------


class Failed(Exception):
    """A side that gave no answer; `told`: what to print of it."""

    def __init__(self, told: dict[str, Any]):
        super().__init__(told.get("error", ""))
        self.told = told


class Side:
    """The parent's end of a side. `limit`: seconds that its preparation may take; `variables`: of its environment."""

    def __init__(self, name: str, words: Sequence[str], limit: float, variables: Mapping[str, str] | None = None):
        self.name, self._limit, self._started, self._end = name, limit, 0.0, 0.0
        self._read, write = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, sys.argv[0], *words, "--side", name, "--answers", str(write)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._said, stderr=subprocess.STDOUT, pass_fds=(write,), env={**os.environ, **(variables or {})})
        os.close(write)
        self._rest = b""

    def go(self) -> None:
        """Begins its preparation."""
        self._started = time.time()
        self._send("prepare", self._limit, {})

    def ready(self) -> dict[str, Any]:
        """What it says of its preparation; `start_seconds` that it took, what was left of the imports included."""
        answer = self._answer()
        return answer | {"start_seconds": round(answer.pop("clock") - self._started, 2)}

    def ask(self, question: str, limit: float, **given: Any) -> dict[str, Any]:
        self._send(question, limit, given)
        return self._answer()

    def _send(self, question: str, limit: float, given: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._end = time.monotonic() + limit
        try:
            self._process.stdin.write((json.dumps({"do": question, **given}) + "\n").encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(f"it has ended: {error}") from None

    def _answer(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            left = self._end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise self._failed("no answer in time")
            part = os.read(self._read, 1 << 16)
            if not part:
                raise self._failed("it ended without an answer")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise Failed(answer)
        return answer

    def _failed(self, why: str) -> Failed:
        self.close()
        self._said.seek(0)
        return Failed({"error": why, "trace": last_lines(self._said.read().decode(errors="replace"))})

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def serve(descriptor: int, prepare: Callable[[], tuple[dict[str, Any], Answers]]) -> None:
    """A side's own end: `prepare` gives what to say first, and question -> its answer. Ends with its input."""

    def send(answer: Mapping[str, Any]) -> None:
        os.write(descriptor, (json.dumps(answer) + "\n").encode())

    try:
        sys.stdin.readline()  # "prepare"
        first, answers = prepare()
        send(first | {"clock": time.time()})
        for line in sys.stdin:
            given = json.loads(line)
            send(answers[given.pop("do")](**given))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"[:600], "trace": last_lines(traceback.format_exc(), 10)})
        raise


class Sides:
    """Some sides by name; those that fail are said and left out."""

    def __init__(self, case: str, sides: Mapping[str, Side]):
        self.case, self.sides = case, dict(sides)

    def each(self, question: str, limit: float, **given: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, answer) of every side that answers, one after another."""
        for name in list(self.sides):
            answer = self._try(name, lambda side: side.ask(question, limit, **given))
            if answer is not None:
                yield name, answer

    def prepare(self) -> dict[str, dict[str, Any]]:
        """Ours one after another, then PyTorch's together; what each says first."""
        return self.prepare_ours() | self.prepare_theirs()

    def prepare_ours(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in [n for n in self.sides if not n.startswith("torch")]:
            told = self._try(name, lambda side: (side.go(), side.ready())[1])  # type: ignore[func-returns-value]
            found |= {name: told} if told is not None else {}
        return found

    def begin_theirs(self) -> None:
        for name in [n for n in self.sides if n.startswith("torch")]:
            self._try(name, lambda side: side.go() or {})  # type: ignore[func-returns-value]

    def prepare_theirs(self) -> dict[str, dict[str, Any]]:
        self.begin_theirs()
        return self.theirs_ready()

    def theirs_ready(self) -> dict[str, dict[str, Any]]:
        found = {name: self._try(name, Side.ready) for name in [n for n in self.sides if n.startswith("torch")]}
        return {name: told for name, told in found.items() if told is not None}

    def _try(self, name: str, work: Callable[[Side], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return work(self.sides[name])
        except Failed as failed:
            say(f"{self.case} {name} FAILED", **failed.told)
            del self.sides[name]
            return None

    def alternate(self, steps: int, rounds: int, limit: float) -> dict[str, list[float]]:
        """ms a step of each side, in blocks that take turns; the first block of each is left out."""
        times: dict[str, list[float]] = {name: [] for name in self.sides}
        for _ in self.each("steps", limit, count=max(10, steps // 6)):
            pass
        for number in range(rounds):
            self.sides = dict(list(self.sides.items())[:: -1 if number else 1])
            for name, answer in self.each("steps", limit, count=steps):
                times[name].append(answer["ms"])
        return {name: found for name, found in times.items() if name in self.sides}

    def close(self) -> None:
        for side in self.sides.values():
            side.close()

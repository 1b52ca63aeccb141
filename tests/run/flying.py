"""The tiny program of `fake_run`, flying: it takes launches and keeps a record of them, and its steps stand behind one sticky flag."""

from __future__ import annotations

import numpy as np
from fake_run import FakeProgram

from sexpgpu.diagnostics import fail
from sexpgpu.run.program import StepResult


class Flight:
    def __init__(self, results, seconds):
        self.results, self.seconds, self.collected = results, seconds, False


class FlyingProgram(FakeProgram):
    """`seconds`: that a step takes on its device. `bad_at`: the update whose index is out of range. Whoever looks at the state while a
    step is in the air fails the test."""

    device, apart = "flying fake", True

    def __init__(self, *given, seconds=1e-4, bad_at=None, rooms=True, **keys):
        super().__init__(*given, **keys)
        self.seconds, self.bad_at, self.rooms = seconds, bad_at, rooms
        self.alive, self.air, self.launches, self.most, self.handed, self.shapes = True, [], [], 0, [], None

    def launch(self, batches, logged):
        assert len(batches) == len(logged) and len(self.air) < 2
        self.shapes = {name: (a.shape, a.dtype) for name, a in batches[0].items()}
        results = []
        for batch, one in zip(batches, logged, strict=True):
            if not self.alive:
                results.append(StepResult(0.0, 0.0, {}, False, {}, {}, fell="gradient norm"))
                continue
            if self.bad_at == self.count + 1:
                results.append(StepResult(1.0, 1.0, {"": self.lr}, False, {}, {}, fell="index"))
            else:
                results.append(super().step({name: a.copy() for name, a in batch.items()}, one))
            self.alive = results[-1].finite
        self.air.append(Flight(results, self.seconds * len(batches)))
        self.launches.append((tuple(logged), any(batches is room for room in self.handed)))
        self.most = max(self.most, len(self.air))
        return self.air[-1]

    def collect(self, flight):
        assert flight is self.air.pop(0) and not flight.collected
        flight.collected = True
        found = []
        for result in flight.results:
            found.append(result)
            if not result.finite:
                self.alive = not self.air
                break
        return found

    def room(self, count):
        if not self.rooms:
            return None
        self.handed.append([{n: np.full(shape, 77, dtype) for n, (shape, dtype) in self.shapes.items()} for _ in range(count)])
        return self.handed[-1]

    def blame(self, batch, logged):
        assert self.count == self.bad_at - 1
        fail("E-RUN-031", f"an index is out of range; the batch begins with {batch['y'][0]:.6f}", exit_code=3)

    def step(self, batch, logged):
        raise AssertionError("a program that flies is not stepped")

    def evaluate(self, name, batch):
        assert not self.air
        return super().evaluate(name, batch)

    def state(self):
        assert not self.air
        return super().state()

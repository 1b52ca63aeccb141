"""What `explain` shows of an experiment: plain data, made by `sexpgpu.explain`, printed by the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from sexpgpu.experiment.model import Experiment


@dataclass(frozen=True)
class ParameterRow:
    """A tensor of the model: its outward path, shape, dtype, and the place that made it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    state: bool = False
    place: str = ""
    init: str = ""

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Large:
    """A tensor that lives when memory is at its peak."""

    bytes: int
    what: str  # op, and model path or name
    type: str
    place: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes of a run: what lies there between steps by kind, what a step adds at its peak, and the largest tensors then."""

    kept: Mapping[str, int]
    batch: int  # the fields of a micro-batch
    step: int  # activations and temporaries at the peak
    largest: tuple[Large, ...]
    evaluations: Mapping[str, int] = field(default_factory=dict)  # of each, its batch and the most it holds

    @property
    def peak(self) -> int:
        return sum(self.kept.values()) + max(self.batch + self.step, *self.evaluations.values(), 0)


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by the roofline; `limits`: share of the time by what bounds it (arithmetic, memory, launches)."""

    device: str
    seconds: float
    limits: Mapping[str, float]
    assumed: Mapping[str, float]


@dataclass(frozen=True)
class Ranks:
    """A step of several ranks: `samples` of each; `sent`: bytes that a rank sends in a step, by what they are."""

    count: int
    samples: int
    divided: bool  # optimizer state over the ranks
    sent: Mapping[str, int]
    weights: bool = False  # f32 weights over the ranks, as far as a step reads their bf16 copies alone


@dataclass(frozen=True)
class RunReport:
    """What tracing a run gives. `flops`: floating operations of one train step; `moved`: its bytes if nothing is cached;
    `hash`: of the train graph."""

    run: str
    parameters: tuple[ParameterRow, ...]
    flops: int
    moved: int
    nodes: int
    hash: str
    text: str
    memory: Memory
    estimate: Estimate
    fits: Any = None  # where a budget was given: `explain.memory.Fits`
    taps: tuple[str, ...] = ()
    warnings: tuple[Any, ...] = ()
    ranks: Ranks | None = None  # where several were assumed; memory is then one device's
    remat: tuple[int, int] | None = None  # calls of layers that run again, and the peak of memory if none did


@dataclass(frozen=True)
class Report:
    """An experiment and its traced runs. `influences`: knob -> what it decides, a line each."""

    experiment: Experiment
    runs: tuple[RunReport, ...]
    influences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

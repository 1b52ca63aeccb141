"""What `explain` shows of an experiment: plain data, made by the compiler, printed by the command line."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

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
class RunReport:
    """What tracing a run gives. `flops`: floating operations of one train step; `hash`: of the train graph."""

    run: str
    parameters: tuple[ParameterRow, ...]
    flops: int
    nodes: int
    hash: str
    text: str
    taps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """An experiment and its traced runs."""

    experiment: Experiment
    runs: tuple[RunReport, ...]

"""What `session.execute` is handed: how this process was called, and what it is to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from sexpgpu.experiment.model import Experiment, Run
from sexpgpu.run.data.dataset import FieldBound
from sexpgpu.run.metrics.target import Service
from sexpgpu.run.program import Program


@dataclass(frozen=True)
class RunOptions:
    """Flags and variables, resolved; None is unset. Relative paths go by `folder`, the working directory."""

    metrics: str | None = None
    status: str | None = None
    checkpoint_dir: str | None = None
    resume: str | None = None
    max_time: str | None = None
    accept: bool = False
    with_data: bool = False  # whether a reproducer of a step that is not finite holds its batch
    folder: str = "."
    slug_base: str | None = None
    quiet: bool = False
    strict_metrics: bool = False
    command: str = ""  # how to call this run again, for the line that says how to resume
    stream: TextIO | None = None  # progress and messages; None is standard error
    service: Service = Service()  # of the metrics target `syvain`


@dataclass(frozen=True)
class RunPlan:
    """A run of an experiment. `compile` is called once, when all that can be checked before it was.

    `trajectory`: component (graph, optimizer, seed, precision, …) -> hash, without the data's digests, which are
    added here. `bounds`: ranges that ops ask of fields they take directly (E-DATA-014 if the data breaks one).
    """

    experiment: Experiment
    run: Run
    compile: Callable[[], Program]
    ir_hash: str
    trajectory: Mapping[str, str]
    versions: Mapping[str, str]
    several_runs: bool = False
    bounds: tuple[FieldBound, ...] = ()
    kernels: Mapping[str, Any] = field(default_factory=dict)
    step_graphs: Callable[..., Any] | None = None  # (capacity of a packed batch, or None) -> `backends.interpreter.replay.StepGraphs`
    selection: Mapping[str, Any] = field(default_factory=dict)  # variant and sets, as the command line gave them
    team: Any = None  # `ranks.team.Team` of a run of several ranks

    @property
    def ranks(self) -> int:
        return 1 if self.team is None else int(self.team.place.ranks)

"""The run that `,run` steps: its data, its program, and where it stands. Nothing is saved and no metrics are sent."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any

from sexpgpu import compiler
from sexpgpu.diagnostics import Diagnostic
from sexpgpu.experiment.load import Loaded
from sexpgpu.experiment.model import Run
from sexpgpu.experiment.trace import text
from sexpgpu.run.bind import bind
from sexpgpu.run.data.dataset import FieldBound
from sexpgpu.run.events import EvalDone, StepDone, Stopped, Warned
from sexpgpu.run.loop import train
from sexpgpu.run.measure import measured


class _Controls:
    """Ctrl-C ends a run between two steps, so that its state is whole; a second one ends the step."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._before: Any = None

    def __enter__(self) -> _Controls:
        self._before = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _caught(self, number: int, frame: Any) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number

    def stopping(self) -> int | None:
        return self._signal

    def take_save_request(self) -> bool:
        return False


class Running:
    """A run bound to its data and compiled for the CPU, at its initial values until `steps` is called."""

    def __init__(self, loaded: Loaded, run: Run, say: Callable[[str], None]):
        self.run = measured(run, say)
        self.traced = compiler.train_graph(loaded, self.run)
        compiler.check_evals(loaded, self.run, self.traced)
        bounds = [FieldBound(*bound) for bound in compiler.label_bounds(self.traced)]
        self.data = bind(self.run, bounds, say)
        self.program = compiler.program(compiler.stages(loaded, self.run), "cpu", None)
        self.program.initialise()
        self.step = 0
        self._names = {text(spec.path): name for name, spec in self._specs().items()}

    def _specs(self) -> dict[str, Any]:
        found = {f"param/{n}": s for n, s in self.traced.params.items()}
        return found | {f"state/{n}": s for n, s in self.traced.states.items()}

    def value(self, path: str) -> Any:
        """The tensor of a parameter or state by its full path; None for one that the run has not."""
        name = self._names.get(path)
        return None if name is None else self.program.state()[name]

    def steps(self, count: int, show: Callable[[str], None], report: Callable[[Iterable[Diagnostic | str]], None]) -> None:
        """So many more steps, printed as they are logged; evaluations are made as a run makes them."""
        begin, end = self.step, self.step + count
        with _Controls() as controls:
            for event in train(self.program, self.run, self.data.feeds, begin, end, controls=controls):
                if isinstance(event, StepDone):
                    self.step = event.step
                    if event.logged:
                        show(f"step {event.step}  loss {event.result.loss:.6g}  gradient norm {event.result.gradient_norm:.4g}")
                elif isinstance(event, EvalDone):
                    show(f"step {event.step}  {event.name}  " + "  ".join(f"{n} {v:.6g}" for n, v in event.metrics.items()))
                elif isinstance(event, Warned):
                    report([event.diagnostic])
                elif isinstance(event, Stopped):
                    report([f"stopped after step {self.step}; ,run goes on from there"])

    def close(self) -> None:
        self.program.close()

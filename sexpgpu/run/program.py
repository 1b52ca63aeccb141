"""What the run loop is handed: a compiled program. It knows neither Lisp nor how the program computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class StepResult:
    """Scalars of one optimizer step: of its batch, with the parameters before it.

    `finite` false: nothing was written (contracts.md, "one sticky flag"). `metrics`: name -> value, `taps`: full
    path -> value; both empty unless asked for. `tokens`: the loss's count for `(list sum count)` losses, else None.
    """

    loss: float
    gradient_norm: float
    learning_rates: Mapping[str, float]  # group -> rate; one group is named ""
    finite: bool
    metrics: Mapping[str, float]
    taps: Mapping[str, float]
    tokens: float | None = None
    fell: str = ""  # when not finite: "loss", "gradient norm", or "index" (`Flying.blame` says which)


class Program(Protocol):
    """A run compiled for one device. Batches are {field: numpy array}, axis 0 the samples."""

    device: str
    threads: int

    def initialise(self) -> None:
        """Parameters, states and optimizer slots at their initial values; the update counter at 0."""

    def step(self, batch: Mapping[str, Any], logged: bool) -> StepResult:
        """One optimizer step over a whole batch (micro-batches inside). `logged`: compute metrics and taps."""

    def evaluate(self, name: str, batch: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Metric -> (sum, count) of one evaluation batch; a batch of another size is a graph of its own."""

    def state(self) -> dict[str, Any]:
        """Named torch tensors: `param/<path>`, `state/<path>`, `opt/<slot>/<path>`. Copying is the caller's."""

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Takes tensors of these names and the update counter; shapes and dtypes were checked by the caller."""

    def share(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Of several ranks: each takes rank 0's state, and the update counter. `saved`: as for `load`; None elsewhere."""

    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of what `state` gives."""

    def close(self) -> None: ...


class Flight(Protocol):
    """Steps that were launched. `seconds`: that the device took for them, once they were collected."""

    @property
    def seconds(self) -> float: ...


class Flying(Program, Protocol):
    """A program that takes steps without waiting for them; `run.flights` uses it. Two launches at most are in the air.

    Where a step is not finite, those after it change nothing, in its launch and in the one that was launched before it was known.
    `apart`: a logged step is another graph than the others.
    """

    @property
    def apart(self) -> bool: ...

    def launch(self, batches: Sequence[Mapping[str, Any]], logged: Sequence[bool]) -> Any:
        """Steps, one a batch, all sent at once: a `Flight`."""

    def collect(self, flight: Any) -> Sequence[StepResult]:
        """Of the oldest launch: each step's, up to the first that is not finite. Waits for them."""

    def room(self, count: int) -> Sequence[Mapping[str, Any]] | None:
        """Host arrays {field: array} for `count` batches of one shape, to be filled in place and launched; five in turn. None where
        steps go one by one."""

    def blame(self, batch: Mapping[str, Any], logged: bool) -> None:
        """Raises the error of a step that fell by "index" and changed nothing, from its batch."""

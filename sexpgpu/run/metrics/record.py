"""Metrics records as contracts.md fixes them: plain dictionaries, one line of JSON each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sexpgpu.run.events import EvalDone, NotFinite, StepDone

#: how the rates of a run come about, for whoever reads them far from the docs
THROUGHPUT = {
    "step-seconds": "mean wall time of a step since the record before: fetching the batch included, evaluations and saves left out",
    "samples-per-second": ":batch / step-seconds",
    "tokens-per-second": "the loss's count, or for windows :batch * :context, / step-seconds",
}


def metric(name: str, value: float, step: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    """One number. A non-finite one is null, with its name in `nonfinite`."""
    value = float(value)  # a numpy or torch scalar is no JSON
    record: dict[str, Any] = {"type": "metric", "name": name, "value": value, "step": step, "metadata": dict(metadata)}
    if not math.isfinite(value):
        record["value"] = None
        record["nonfinite"] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return record


def step_records(event: StepDone) -> Iterator[dict[str, Any]]:
    """What a logged step says without being asked, then the user's metrics, then taps."""
    train, step, result = {"split": "train"}, event.step, event.result
    yield metric("loss", result.loss, step, train)
    for group, rate in result.learning_rates.items():
        yield metric("learning-rate", rate, step, train | ({"group": group} if group else {}))
    yield metric("gradient-norm", result.gradient_norm, step, train)
    for name, value in event.rates().items():
        yield metric(name, value, step, train)
    for name, value in result.metrics.items():
        yield metric(name, value, step, train)
    for path, value in result.taps.items():
        yield metric(tap_name(path), value, step, train | {"path": path})


def lost_records(event: NotFinite) -> Iterator[dict[str, Any]]:
    """Loss and gradient norm of an update that was not made, logged or not: one of them at least is not finite."""
    yield metric("loss", event.result.loss, event.step, {"split": "train"})
    yield metric("gradient-norm", event.result.gradient_norm, event.step, {"split": "train"})


def eval_records(event: EvalDone) -> Iterator[dict[str, Any]]:
    metadata = {"eval": event.name} | ({"split": event.split} if event.split else {})
    for name, value in event.metrics.items():
        yield metric(name, value, event.step, metadata)


def tap_name(path: str) -> str:
    """Layer and tap: `gpt/block/3/attention/norm` is `attention/norm`, `gpt/block/3/norm` is `block/norm`."""
    return "/".join([part for part in path.split("/") if not part.isdigit()][-2:])


def key_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two metric records of one run the same point."""
    return (record.get("name"), record.get("step"), tuple(sorted(record.get("metadata", {}).items())))


def lineage(trajectory: str, accepted: Sequence[int]) -> str:
    """Which history of a run a record is of: its trajectory, and the steps after which `--accept` changed it before.

    The second part tells a return to an earlier trajectory from that one, also where no file holds its records any more.
    """
    return "#".join([trajectory, *map(str, accepted)])


def line_of(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace") + b"\n"

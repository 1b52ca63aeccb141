"""What a plot of runs shows: panels of series, and a table of the knobs that tell the runs apart. Draws nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.run.metrics.read import RunRecords

#: what every run records; their panels come in this order, others where the star is
FIRST, LAST = ("loss",), ("learning-rate", "gradient-norm", "tokens-per-second", "samples-per-second")
LEFT_OUT = frozenset({"step-seconds"})  # the rate says the same
UNITS = {"tokens-per-second": "tokens/s", "samples-per-second": "samples/s"}
MOST = 1e250  # a value beyond it is drawn as one that is not finite: axes cannot be made for it
MOST_LINES = 12  # of one run in a panel of taps
MOST_PANELS = 24
MOST_KNOBS = 16
AS_IT_IS = frozenset({"learning-rate"})  # a schedule has no noise to smooth away


@dataclass(frozen=True)
class Series:
    """One line. `run`: which of the plot's runs; `label`: what tells it from the run's others in the panel; `marked`:
    few points that stand for themselves, such as evaluations. A value that was not finite is NaN."""

    run: int
    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    marked: bool = False


@dataclass
class Panel:
    """One pair of axes. `kind`: `loss`, `metric`, `rate`, `tap` …; `hidden`: lines that there was no room for."""

    title: str
    kind: str
    series: list[Series] = field(default_factory=list)
    smooth: bool = False
    hidden: int = 0

    @property
    def unit(self) -> str:
        return UNITS.get(self.title, self.title)

    @property
    def logarithmic(self) -> bool:
        """Where values are positive and span more than two orders of magnitude."""
        values = [v for s in self.series for v in s.values if math.isfinite(v)]
        return bool(values) and min(values) > 0 and max(values) / min(values) > 100


def panels(runs: Sequence[RunRecords]) -> list[Panel]:
    """Losses, then the user's metrics and evaluations, learning rate, gradient norm, rate, and taps; at most MOST_PANELS."""
    found: dict[tuple[str, str], Panel] = {}
    for number, run in enumerate(runs):
        for (kind, title), lines in _lines(run).items():
            panel = found.setdefault((kind, title), Panel(title, kind, smooth=title not in AS_IT_IS))
            for i, (label, points) in enumerate(sorted(lines.items(), key=lambda item: _order(item[0]))):
                if i >= MOST_LINES:
                    panel.hidden += 1
                    continue
                steps, values = zip(*points, strict=True)
                panel.series.append(Series(number, label, steps, values, marked=label.startswith("eval ")))
    ordered = sorted(found.values(), key=_place)
    return ordered[:MOST_PANELS]


def knob_rows(runs: Sequence[RunRecords]) -> list[list[str]]:
    """Rows of knob, value in each run: those that differ; of one run alone, those that are not at their default."""
    knobs = [run.about.get("knobs") or {} for run in runs]
    names = list(dict.fromkeys(name for each in knobs for name in each))
    if len(runs) == 1:
        names = [n for n in names if isinstance(knobs[0][n], Mapping) and knobs[0][n].get("source") != "default"]
    else:
        names = [n for n in names if len({_shown(each.get(n)) for each in knobs}) > 1]
    rows = [[n, *(_shown(each.get(n)) for each in knobs)] for n in names]
    if len(rows) > MOST_KNOBS:
        rows = [*rows[:MOST_KNOBS], [f"and {len(rows) - MOST_KNOBS} more", *("" for _ in runs)]]
    return rows


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """An exponential mean, free of the bias towards its start; values that are not finite are left out and stay NaN."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
            out.append(total / norm)
        else:
            out.append(math.nan)
    return out


def thinned(steps: Sequence[int], values: Sequence[float], most: int = 4000) -> tuple[list[int], list[float]]:
    """At most about `most` points that look the same: the smallest and the largest of each stretch."""
    if len(steps) <= most:
        return list(steps), list(values)
    size = math.ceil(2 * len(steps) / most)
    kept: list[int] = []
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        finite = [i for i in stretch if math.isfinite(values[i])] or [start]
        kept += sorted({min(finite, key=lambda i: values[i]), max(finite, key=lambda i: values[i])})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _lines(run: RunRecords) -> dict[tuple[str, str], dict[str, list[tuple[int, float]]]]:
    """(kind, title) -> label -> points, in order of steps, the last record of a step winning."""
    points: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    names = {record.get("name") for record in run.metrics}
    for record in run.metrics:
        name, step, metadata = str(record.get("name")), record.get("step"), record.get("metadata") or {}
        if name in LEFT_OUT or not isinstance(step, int) or (name == "samples-per-second" and "tokens-per-second" in names):
            continue
        value = record.get("value")
        kind, label = _kind(metadata)
        number = float(value) if isinstance(value, int | float) and abs(value) < MOST else math.nan
        points.setdefault((kind, name), {}).setdefault(label, {})[step] = number
    return {key: {label: sorted(line.items()) for label, line in lines.items()} for key, lines in points.items()}


def _kind(metadata: Mapping[str, Any]) -> tuple[str, str]:
    if "path" in metadata:
        return "tap", str(metadata["path"])
    if "eval" in metadata:
        return "metric", f"eval {metadata['eval']}"
    if "group" in metadata:
        return "metric", str(metadata["group"])
    return "metric", str(metadata.get("split", ""))


def _place(panel: Panel) -> tuple[int, int, str]:
    if panel.kind == "tap":
        return 3, 0, panel.title
    for group, names in ((0, FIRST), (2, LAST)):
        if panel.title in names:
            return group, names.index(panel.title), panel.title
    return 1, 0, panel.title


def _order(label: str) -> tuple[bool, list[tuple[int, str]]]:
    """Training before evaluations, `block/10` after `block/9`."""
    return label.startswith("eval "), [(int(part), "") if part.isdecimal() else (-1, part) for part in label.split("/")]


def _shown(knob: Any) -> str:
    if knob is None:
        return "-"
    value = knob.get("value") if isinstance(knob, Mapping) else knob
    text = value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 32 else text[:31] + "…"

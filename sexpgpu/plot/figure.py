"""Draws what `series` found, with matplotlib's own canvas: no window, no global state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sexpgpu.plot.series import Panel, Series, knob_rows, panels, smoothed, thinned
from sexpgpu.run.metrics.read import RunRecords

COLUMNS = 3
WIDTH, HEIGHT, ROW = 5.2, 3.3, 0.26  # inches of a panel, and of a row of the table
STYLES = ("-", "--", "-.", ":")
COLOURS = tuple(f"C{i}" for i in range(10))
RAW = 0.25  # opacity of what is also drawn smoothed


def draw(runs: Sequence[RunRecords], labels: Sequence[str], smooth: float) -> Any:
    """A matplotlib Figure of the runs; `smooth`: the weight of the past in the smoothed lines, 0 for none."""
    from matplotlib.figure import Figure

    shown, rows = panels(runs), knob_rows(runs)
    height = math.ceil(len(shown) / COLUMNS)
    below = (len(rows) + 2) * ROW if rows else 0.0
    above = 0.5 + 0.22 * math.ceil(len(runs) / 3)
    figure = Figure(figsize=(WIDTH * min(COLUMNS, len(shown)), above + HEIGHT * height + below), layout="constrained", dpi=100)
    total = above + HEIGHT * height + below
    heights = [above / total, HEIGHT * height / total, *([below / total] if rows else [])]
    head, *parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat
    _heading(head, labels)
    axes = list(parts[0].subplots(height, min(COLUMNS, len(shown)), squeeze=False).flat)
    for ax, panel in zip(axes, shown, strict=False):
        _panel(ax, panel, len(runs), smooth)
    for ax in axes[len(shown):]:
        ax.remove()
    if rows:
        _table(parts[1], rows, labels)
    return figure


def _heading(part: Any, labels: Sequence[str]) -> None:
    """Which colour is which run."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_colour(i), linewidth=3, label=plain(label)) for i, label in enumerate(labels)]
    part.legend(handles=handles, loc="center", ncols=min(3, len(labels)), frameon=False)


def _panel(ax: Any, panel: Panel, runs: int, smooth: float) -> None:
    ax.set_title(plain(panel.title), fontsize=10)
    ax.set_xlabel("step", fontsize=8)
    ax.set_ylabel(plain(panel.unit), fontsize=8)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    if panel.logarithmic:
        ax.set_yscale("log")
    labels = list(dict.fromkeys(s.label for s in panel.series))
    for series in panel.series:
        _line(ax, series, labels, panel, runs, smooth)
    if len(labels) > 1 or (panel.series and panel.kind == "tap"):
        handles, texts = ax.get_legend_handles_labels()
        first = dict(zip(reversed(texts), reversed(handles), strict=True))  # one entry a label, not one a run
        ax.legend([first[t] for t in dict.fromkeys(texts)], list(dict.fromkeys(texts)), fontsize=6.5, framealpha=0.6)
    if panel.hidden:
        ax.annotate(f"{panel.hidden} more not shown", (0.99, 0.01), xycoords="axes fraction", ha="right", fontsize=7)


def _line(ax: Any, series: Series, labels: list[str], panel: Panel, runs: int, smooth: float) -> None:
    """Colour is the run; with one run alone, the label. Style is the label."""
    which = labels.index(series.label)
    look: dict[str, Any] = {"color": _colour(series.run if runs > 1 else which), "linestyle": STYLES[which % len(STYLES)] if runs > 1 else "-",
                            "linewidth": 1.4, "label": plain(series.label or panel.title)}
    steps, values = thinned(series.steps, series.values)
    if series.marked or len(steps) < 3:
        look |= {"marker": "o", "markersize": 3.5}
    if panel.smooth and smooth > 0 and not series.marked and len(steps) >= 3:
        ax.plot(steps, values, **{**look, "alpha": RAW, "linewidth": 0.8, "linestyle": "-", "label": "_raw"}, gid="raw")
        steps, values = thinned(series.steps, smoothed(series.values, smooth))
        ax.plot(steps, values, **look, gid="smoothed")
    else:
        ax.plot(steps, values, **look, gid="raw")
    odd = [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
    if odd:  # at the upper edge: where no number can be drawn
        ax.plot(odd[:200], [0.98] * len(odd[:200]), "x", color="red", markersize=5, transform=ax.get_xaxis_transform(), label="_odd", gid="not finite")


def _table(part: Any, rows: list[list[str]], labels: Sequence[str]) -> None:
    """Knobs down, runs across, each run's column headed in its colour."""
    ax = part.subplots()
    ax.set_axis_off()
    names = [label if len(label) <= 28 else "…" + label[-27:] for label in labels]
    table = ax.table(cellText=[[plain(cell) for cell in row] for row in rows], colLabels=["knob", *(plain(n) for n in names)],
                     loc="center", cellLoc="left", colLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (row, column), cell in table.get_celld().items():
        cell.set_linewidth(0.4)
        if row == 0:
            cell.get_text().set_weight("bold")
            if column and len(labels) > 1:
                cell.get_text().set_color(_colour(column - 1))


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def plain(text: str) -> str:
    """No mathematics, and no leading underscore, by which matplotlib hides a label."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text

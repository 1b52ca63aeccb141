"""Plots: what is drawn is looked up in the axes, and the picture is not blank where there should be something."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from support_metrics import append, run_record

from sexpgpu.cli.main import perform
from sexpgpu.cli.plot import _runs
from sexpgpu.plot.series import MOST_LINES, knob_rows, panels, smoothed, thinned
from sexpgpu.run.metrics.read import read_runs
from sexpgpu.run.metrics.record import metric

pytest.importorskip("matplotlib")
from matplotlib.image import imread  # noqa: E402

from sexpgpu.plot.figure import draw  # noqa: E402

TRAIN = {"split": "train"}


def knobs(**values):
    return {name: {"value": value, "source": "set" if name == "lr" else "default", "place": "a.lisp:1:1"} for name, value in values.items()}


def made(path: Path, name: str, lr: float, steps: int = 60, taps: int = 3) -> Path:
    """A run with everything that a plot shows; a NaN at step 30."""
    noise = random.Random(name)
    records = [run_record("start", slug=f"slug-{name}", knobs=knobs(lr=lr, hidden=128, note=f"run ${name}$ _{name}"))]
    for step in range(1, steps + 1):
        loss = 300 * math.exp(-step / 5) + noise.random() + 0.5
        records += [metric("loss", math.nan if step == 30 else loss, step, TRAIN), metric("learning-rate", lr / step, step, TRAIN),
                    metric("gradient-norm", noise.random(), step, TRAIN), metric("step-seconds", 0.01, step, TRAIN),
                    metric("samples-per-second", 6000 + noise.random(), step, TRAIN), metric("_odd $name", step, step, TRAIN)]
        records += [metric("attention/norm", i + noise.random(), step, {**TRAIN, "path": f"gpt/block/{i}/attention/norm"}) for i in range(taps)]
        if step % 20 == 0:
            records += [metric(k, loss * 1.1, step, {"split": "valid", "eval": "valid"}) for k in ("loss", "accuracy")]
    append(path, [*records, run_record("done")], name * 32)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots")
    return [made(folder / "a.jsonl", "a", 0.1), made(folder / "b.jsonl", "b", 0.2)]


def runs_of(files):
    return [next(iter(read_runs(f).values())) for f in files]


def axes_by_title(figure):
    return {ax.get_title(): ax for part in figure.subfigs for ax in part.axes if ax.get_title()}


def test_everything_is_drawn(files):
    runs = runs_of(files)
    figure = draw(runs, [r.slug for r in runs], 0.9)
    axes = axes_by_title(figure)
    assert list(axes) == ["loss", r" _odd \$name", "accuracy", "learning-rate", "gradient-norm", "samples-per-second", "attention/norm"]
    assert len(figure.subfigs[1].axes) == len(axes)  # no empty axes fill up the last row
    lines = {gid: [line for line in axes["loss"].lines if line.get_gid() == gid] for gid in ("raw", "smoothed", "not finite")}
    raw, smooth, odd = lines["raw"], lines["smoothed"], lines["not finite"]
    assert len(smooth) == 2 and len(raw) == 4 and len(odd) == 2 and axes["loss"].get_yscale() == "log"
    assert [len(line.get_xdata()) for line in raw] == [60, 3, 60, 3] and list(odd[0].get_xdata()) == [30]
    first = [m["value"] for m in runs[0].metrics if m["name"] == "loss" and m["metadata"] == TRAIN]
    assert list(raw[0].get_ydata())[:29] == first[:29] and math.isnan(raw[0].get_ydata()[29])
    assert list(raw[1].get_xdata()) == [20, 40, 60] and raw[1].get_marker() == "o"
    assert raw[0].get_color() != raw[2].get_color() and smooth[0].get_color() == raw[0].get_color()
    noise, calm = axes["gradient-norm"].lines[:2]
    spread = [max(line.get_ydata()[30:]) - min(line.get_ydata()[30:]) for line in (calm, noise)]
    assert spread[0] < spread[1] / 2
    assert [t.get_text() for t in axes["loss"].get_legend().get_texts()] == ["train", "eval valid"]
    assert [line.get_gid() for line in axes["learning-rate"].lines] == ["raw", "raw"]
    assert [t.get_text() for t in axes["attention/norm"].get_legend().get_texts()] == [f"gpt/block/{i}/attention/norm" for i in range(3)]
    heads = [t.get_text() for t in figure.subfigs[0].legends[0].get_texts()]
    assert heads == ["slug-a", "slug-b"]
    table = [cell.get_text().get_text() for cell in figure.subfigs[2].axes[0].tables[0].get_celld().values()]
    assert {"lr", "0.1", "0.2", "note"} <= set(table) and "hidden" not in table


def test_the_picture(files, tmp_path, capsys):
    """Every axes of the PNG holds ink of its runs' colours, and so does the table."""
    out = tmp_path / "p.png"
    assert perform(["plot", *map(str, files), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    picture = imread(out)[..., :3]
    runs = runs_of(files)
    figure = draw(runs, [r.slug for r in runs], 0.9)
    figure.canvas.draw()
    height, width = picture.shape[:2]
    assert (width, height) == tuple(int(v) for v in figure.bbox.size)
    blue, orange = (31 / 255, 119 / 255, 180 / 255), (1.0, 127 / 255, 14 / 255)
    for title, ax in axes_by_title(figure).items():
        box = ax.get_window_extent()
        part = picture[int(height - box.y1) : int(height - box.y0), int(box.x0) : int(box.x1)]
        for colour in (blue, orange):
            near = (abs(part - colour).max(axis=-1) < 0.1).sum()
            if title != r" _odd \$name":  # both runs' lines are one there, the later on top
                assert near > 50, (title, near)
        assert (part.min(axis=-1) < 0.9).mean() < 0.5, title
    bottom = picture[int(height * 0.93) :]
    assert (bottom.max(axis=-1) < 0.3).sum() > 100


def test_one_run_and_defaults(files, capsys):
    assert perform(["plot", str(files[0]), "--smooth", "0"]) == 0
    assert files[0].with_suffix(".png").exists()
    runs = runs_of(files[:1])
    figure = draw(runs, ["a"], 0)
    assert {line.get_gid() for ax in axes_by_title(figure).values() for line in ax.lines} == {"raw", "not finite"}
    assert knob_rows(runs) == [["lr", "0.1"]]


def test_mistakes(files, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text("dear diary\n")
    append(tmp_path / "empty.jsonl", [run_record("start")])
    for words, code in ((["absent.jsonl"], "E-RUN-015"), ([str(tmp_path / "text.jsonl")], "E-RUN-015"),
                        ([str(tmp_path / "empty.jsonl")], "E-RUN-016"), ([str(files[0]), "-o", "a.pdf"], "E-ENV-001"),
                        ([str(files[0]), "-o", str(tmp_path / "no" / "a.png")], "E-ENV-001"), ([str(files[0]), "--smooth", "1"], "E-ENV-001"),
                        ([str(files[0]), "--smooth", "much"], "E-ENV-001")):
        assert perform(["plot", *words]) == 2
        assert code in capsys.readouterr().err


ODD = [
    {"type": "metric", "name": 7, "step": 1, "value": 1}, {"type": "metric", "name": "x", "step": "q", "value": 1}, {"type": "metric", "name": "x", "value": 1},
    {"type": "metric", "name": "x", "step": 1, "value": "text"}, {"type": "metric", "name": "x", "step": 1, "value": 10**400},
    {"type": "metric", "name": "x", "step": 10**30, "value": 1}, {"type": "metric", "name": "x", "step": 1, "value": 1, "metadata": 3},
    {"type": "run", "event": "start", "slug": 5}, {"type": "run", "event": "resume", "knobs": [1]}, {"type": "run", "event": "resume", "accepted": 3},
    {"type": "annotation", "text": None}, {"type": [], "seq": "x"}, {"type": "metric", "name": "x", "step": 1, "value": True},
]  # fmt: skip


def test_lines_of_others_are_left_out(tmp_path):
    """A file that somebody edited is drawn from what is left of it."""
    file = tmp_path / "odd.jsonl"
    good = {"type": "metric", "run_id": "a", "seq": 0, "time": 1.0, "name": "$\\alpha$ <x>", "step": -5, "value": 1e249, "metadata": {"split": "$x"}}
    lines = [json.dumps({"run_id": "a", **record}) for record in ODD]
    file.write_text("\n".join([*lines, "[1]", "null", "{", json.dumps(good), json.dumps({**good, "value": -1.7e308, "seq": 1}), '{"type": "metric", "run']))
    found = read_runs(file)["a"]
    assert [m["name"] for m in found.metrics] == [good["name"]] * 2 and found.about == {}
    assert perform(["plot", str(file)]) == 0 and file.with_suffix(".png").stat().st_size > 1000


def test_without_matplotlib(files, monkeypatch, capsys):
    monkeypatch.setattr("sexpgpu.cli.plot.find_spec", lambda name: None)
    assert perform(["plot", str(files[0])]) == 2
    err = capsys.readouterr().err
    assert "E-ENV-014" in err and "sexpgpu[plot]" in err


def test_several_runs_of_a_file(tmp_path):
    path = made(tmp_path / "m.jsonl", "a", 0.1, 5)
    made(path, "b", 0.2, 5)
    assert _runs((str(path),), False)[1] == ["slug-b"]
    assert _runs((str(path),), True)[1] == ["slug-a", "slug-b"]
    assert _runs((str(path), str(path)), False)[1] == [f"slug-b ({path})"] * 2


def test_many_lines_and_many_points(tmp_path):
    run = runs_of([made(tmp_path / "m.jsonl", "a", 0.1, 3, taps=MOST_LINES + 5)])[0]
    tap = next(p for p in panels([run]) if p.kind == "tap")
    assert len(tap.series) == MOST_LINES and tap.hidden == 5
    assert [s.label for s in tap.series][-1] == f"gpt/block/{MOST_LINES - 1}/attention/norm"
    steps, values = list(range(100_000)), [float(i % 977) for i in range(100_000)]
    values[50_000], values[70_001] = 5000.0, math.nan
    x, y = thinned(steps, values)
    assert len(x) <= 4002 and 5000.0 in y and x == sorted(x) and all(values[i] == v for i, v in zip(x, y, strict=True))


def test_smoothing():
    assert smoothed([2.0, 2.0, 2.0], 0.9) == pytest.approx([2, 2, 2])
    found = smoothed([1.0, math.nan, 3.0], 0.5)
    assert found[0] == 1 and math.isnan(found[1]) and found[2] == pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)

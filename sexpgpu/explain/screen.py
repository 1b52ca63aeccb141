"""What `explain` found, as lines for a person and as a document for a program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import printable
from sexpgpu.experiment.model import Batches, Eval, Knob, Run
from sexpgpu.experiment.report import ParameterRow, Ranks, Report, RunReport
from sexpgpu.explain.compare import Verdict
from sexpgpu.explain.lines import Line, Nodes
from sexpgpu.explain.why import Why
from sexpgpu.read.printer import print_value
from sexpgpu.run.plain import plain_knobs

FOLD = 24  # rows of tensors that are all printed
MOST_ROWS = 20  # differences of a kind that are printed


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells), default=0))]
    return [
        (indent + "  ".join(c if i == len(row) - 1 else c.ljust(widths[i]) for i, c in enumerate(row))).rstrip()
        for row in cells
    ]  # fmt: skip


# --- the screen of a file ----------------------------------------------------------


def lines(report: Report, ir: bool = False) -> list[str]:
    """The whole report."""
    experiment = report.experiment
    out = [experiment.file + (f"  (variant {experiment.variant})" if experiment.variant else "")]
    out += _section("knobs", [line for k in _columns(report) for line in k])
    for traced in report.runs:
        out += _run(experiment.runs[traced.run], traced)
    for e in experiment.evals.values():
        out += _eval(e)
    if ir:
        for traced in report.runs:
            out += ["", f"graph of {traced.run}", traced.text.rstrip("\n")]
    return out


def _section(title: str, body: list[str]) -> list[str]:
    return ["", title, *(body or ["  none"])]


def _columns(report: Report) -> Iterable[list[str]]:
    """The line of each knob and those of what it decides."""
    knobs = report.experiment.knobs.values()
    for row, knob in zip(table(_knob(k) for k in knobs), knobs, strict=True):
        yield [row, *(f"      {printable(line)}" for line in report.influences.get(knob.name, ()))]


def _knob(k: Knob) -> tuple[str, ...]:
    origin = k.source + (f" {k.via}" if k.via else "")
    changed = f", file {datum(k.file_value)}" if k.source == "override" and k.file_value is not None else ""
    changed = f", default {datum(k.default)}" if k.source in ("variant", "set") else changed
    remarks = [k.doc] if k.doc else []
    remarks += [] if k.used or k.source == "override" else ["never read"]
    return (k.name, datum(k.value), f"({origin}{changed})", k.place, printable("; ".join(remarks)))


def datum(value: Any) -> str:
    """A knob's value as the file would write it."""
    if value is None:
        return "nil"
    if isinstance(value, list | tuple):
        return "[" + " ".join(datum(v) for v in value) + "]"
    if isinstance(value, bool | int | float | str | Fraction):
        return printable(print_value(value))
    return printable(str(getattr(value, "name", value)))


def _run(run: Run, traced: RunReport) -> list[str]:
    trained = [p for p in traced.parameters if not p.state]
    states = [p for p in traced.parameters if p.state]
    facts = [
        ("steps", str(run.steps)),
        ("data", _data(run.data) + _cut(run.accumulate)),
        ("seed", str(run.seed)),
        ("precision", run.precision),
        ("loss", run.loss.function.name),
        ("metrics", ", ".join(m.name for m in run.metrics) or "none"),
        ("evals", ", ".join(e.name for e in run.evals) or "none"),
        ("checkpoints", f"every {run.checkpoint_every} steps" if run.checkpoint_every else "at the end only"),
        ("graph", f"{traced.nodes:,} nodes, {traced.flops:,} FLOPs a step, hash {traced.hash}"),
        ("traffic", f"{size(traced.moved)} a step if nothing is cached"),
        ("memory", _memory(traced)),
        ("step time", _estimate(traced)),
    ]
    if traced.ranks is not None:
        facts.append(("ranks", _ranks(run, traced.ranks)))
    if traced.fits is not None:
        facts.append(("budget", traced.fits.line()))
    if traced.remat is not None:
        calls, peak = traced.remat
        facts.append(("remat", f"{calls} calls of layers run again: {size(traced.memory.peak)} at the peak, {size(peak)} without"))
    if run.clip_norm is not None:
        facts.append(("clip norm", str(run.clip_norm)))
    if run.ema is not None:
        facts.append(("averages", f"decay {run.ema:g}"))
    if run.frozen:
        facts.append(("frozen", ", ".join(run.frozen)))
    if run.keep_best is not None:
        best = run.keep_best
        facts.append(("keeps best", f"{best.eval} {best.metric}, the {'largest' if best.largest else 'least'}"))
    if run.init is not None:
        rules = "".join(f", {new} from {old}" for new, old in run.init.renames)
        facts.append(("starts from", printable(run.init.path + rules)))
    if traced.taps:
        facts.append(("taps", ", ".join(traced.taps)))
    out = _section(f"run {run.name}", table(facts))
    out += _section(f"largest tensors of {run.name} at the peak", table((size(t.bytes), t.type, t.what, t.place) for t in traced.memory.largest))
    out += _section(f"parameters of {run.name}: {sum(p.count for p in trained):,} values", _tensors(trained))
    return out + (_section(f"states of {run.name}", _tensors(states)) if states else [])


def _memory(traced: RunReport) -> str:
    held = traced.memory
    parts = [*((kind, n) for kind, n in held.kept.items()), ("batch", held.batch), ("step", held.step)]
    evaluation = max(held.evaluations, key=lambda name: held.evaluations[name], default="")
    more = f"; eval {evaluation} takes more than a step: {size(held.evaluations[evaluation])}" if evaluation and held.evaluations[evaluation] > held.batch + held.step else ""
    return f"{size(held.peak)} at the peak: " + ", ".join(f"{kind} {size(n)}" for kind, n in parts if 1000 * n >= held.peak) + more


def _ranks(run: Run, found: Ranks) -> str:
    sent = ", ".join(f"{what} {size(n)}" for what, n in found.sent.items())
    divided = f"; optimizer state {'and f32 weights ' if found.weights else ''}divided" if found.divided else ""
    return (f"{found.count}, each {found.samples} of {run.data.batch} samples a step{divided}; a rank sends {size(sum(found.sent.values()))} a step: {sent}; "
            "memory and step time are of one device, without the exchange")


def _estimate(traced: RunReport) -> str:
    found = traced.estimate
    name, share = max(found.limits.items(), key=lambda item: item[1])
    rates = f"{found.assumed['bandwidth'] / 1e9:g} GB/s, " + ", ".join(
        f"{value / 1e9:g} GFLOP/s {key.removeprefix('flops ')}" for key, value in found.assumed.items() if key.startswith("flops"))
    return f"about {duration(found.seconds)} on {found.device}, {100 * share:.0f}% of it bounded by {name}; assumed {rates} (--assume)"


def size(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _data(data: Batches) -> str:
    """The source and how it is cut into samples."""
    windows = "" if data.context is None else f", windows of {data.context} tokens, {data.stride} from one to the next"
    return f"{data.source.name}{_split(data.split)}{windows}, batch {data.batch}"


def _split(split: str | None) -> str:
    return f" ({split})" if split else ""


def _cut(accumulate: int) -> str:
    return f" in {accumulate} micro-batches" if accumulate > 1 else ""


def _tensors(rows: Iterable[ParameterRow]) -> list[str]:
    return table((path, f"{p.dtype}[{' '.join(map(str, p.shape))}]", f"{times * p.count:,}", p.init, p.place) for path, times, p in folded(list(rows)))


def folded(rows: list[ParameterRow]) -> list[tuple[str, int, ParameterRow]]:
    """(path, how many, the first of them): of many rows, those that differ in call numbers alone are one."""
    if len(rows) <= FOLD:
        return [(p.path, 1, p) for p in rows]
    groups: dict[tuple[Any, ...], list[ParameterRow]] = {}
    for p in rows:
        groups.setdefault((re.sub(r"(?<=/)[0-9]+(?=/)", "*", p.path), p.dtype, p.shape, p.init, p.place), []).append(p)
    return [(f"{key[0]} (x{len(group)})" if len(group) > 1 else group[0].path, len(group), group[0]) for key, group in groups.items()]


def _eval(e: Eval) -> list[str]:
    facts = [
        ("data", _data(e.data) + (f", at most {e.data.limit} batches" if e.data.limit else "")),
        ("every", f"{e.every} steps" if e.every else "never"),
        ("metrics", ", ".join(m.name for m in e.metrics)),
    ]
    return _section(f"eval {e.name}", table(facts))


# --- a parameter, a line, a comparison ---------------------------------------------


def why_lines(w: Why) -> list[str]:
    """`--why PATH`."""
    by = lambda knobs: f"from knob {', '.join(knobs)}" if knobs else "fixed"  # noqa: E731
    out = [f"{w.kind} {w.path} of run {w.run}: {w.type}"]
    out += [f"  axis {i}: {n}, {by(knobs)}" for i, (n, knobs) in enumerate(w.axes)]
    out.append(f"  starts as {w.init}" + (f", {by(w.init_knobs)}" if w.init_knobs else ""))
    out += [f"  made at {w.made}", *(f"    in the call at {place}" for place in reversed(w.calls))]
    out += [f"  is there, and as often, by knob {knob}, which decides at {place}" for knob, place in w.exists]
    if w.frozen:
        out.append(f"  not trained: :frozen {w.frozen}")
    elif w.optimizer:
        group = f" (group {w.group})" if w.group else ""
        out.append(f"  updated by {w.optimizer}{group} at {w.optimizer_place}")
        out += [f"    :{key} {value}" + (f", {by(knobs)}" if knobs else "") for key, value, knobs in w.settings]
    out.append("  knobs: " + (", ".join(w.knobs) or "none"))
    return [printable(line) for line in out]


def line_lines(found: Line) -> list[str]:
    """`explain FILE:LINE`, of one run."""
    out = [f"{found.place} in run {found.run}: {found.text}"]
    out += [f"  form      {_cut_off(text)}" for text in found.forms]
    out += [f"  expanded  {_cut_off(text)}" for text in found.expanded]
    for title, groups in (("of the ops on it", found.written), ("of calls from it", found.called)):
        out += [f"  {title}: {_nodes(group)}" for group in groups]
    if not found.written and not found.called:
        out.append("  no node of the step came of it")
    for k in found.kernels:
        names = ", ".join(f"{n} {name}" for name, n in k.names[:8]) + (" …" if len(k.names) > 8 else "")
        out.append(f"  computed in {k.graph} by {k.count} of its {'launches' if any(name == 'kernel' or name.startswith('library ') for name, _ in k.names) else 'calls'}"
                   f" ({names}), which make {k.flops:,} FLOPs and move {size(k.moved)}")
    out += [f"  knob {text}" for text in found.decides]
    out += [f"  parameter {path}  {p.dtype}[{' '.join(map(str, p.shape))}]  {p.place}" for path, _, p in folded(list(found.parameters))]
    return [printable(line) for line in out]


def _nodes(group: Nodes) -> str:
    kinds = ", ".join(f"{n} {op}" for op, n in group.ops[:8]) + (" …" if len(group.ops) > 8 else "")
    return f"{group.phase}: {group.count} node{'s' if group.count != 1 else ''} ({kinds}), {group.flops:,} FLOPs, {size(group.bytes)} made, {size(group.moved)} moved"


def _cut_off(text: str) -> str:
    return text if len(text) <= 150 else text[:149] + "…"


def verdict_lines(v: Verdict) -> list[str]:
    """`--diff A B`."""
    meaning = {
        "equal": "nothing differs", "harmless": "a run goes on, and its numbers are the same",
        "trajectory-changing": "a run goes on with --accept, and its numbers change", "impossible": "a run cannot go on",
    }  # fmt: skip
    out = [f"from {v.a} to {v.b}: {v.word}: {meaning[v.word]}"]
    c = v.comparison
    for title, rows in (("impossible", c.impossible), ("trajectory-changing", c.changing), ("harmless", c.harmless), ("not bit for bit", c.inexact)):
        shown = sorted(rows, key=lambda row: row.startswith(("opt/", "ema/")))[:MOST_ROWS]  # slots follow their parameters
        more = [f"    and {len(rows) - MOST_ROWS} more (--json has all)"] if len(rows) > MOST_ROWS else []
        out += [f"  {title}:", *(f"    {row}" for row in shown), *more] if rows else []
    return [printable(line) for line in out]


# --- documents ---------------------------------------------------------------------


def report_document(report: Report) -> dict[str, Any]:
    """The report for `--json`."""
    experiment, known = report.experiment, plain_knobs(report.experiment.knobs)
    knobs = {
        name: known[name] | {"doc": k.doc, "used": k.used or k.source == "override", "decides": list(k.decides),
                             "influences": list(report.influences.get(name, ()))}
        for name, k in experiment.knobs.items()
    }  # fmt: skip
    return {
        "file": experiment.file,
        "variant": experiment.variant,
        "knobs": knobs,
        "runs": {r.run: _run_document(experiment.runs[r.run], r) for r in report.runs},
        "evals": {e.name: {"data": e.data.source.name, "split": e.data.split, "batch": e.data.batch, "every": e.every,
                           "metrics": [m.name for m in e.metrics]} for e in experiment.evals.values()},
    }  # fmt: skip


def _run_document(run: Run, r: RunReport) -> dict[str, Any]:
    rows = [{"path": p.path, "kind": "state" if p.state else "param", "dtype": p.dtype, "shape": list(p.shape), "init": p.init, "place": p.place}
            for p in r.parameters]  # fmt: skip
    return {
        "steps": run.steps, "seed": run.seed, "precision": run.precision, "batch": run.data.batch, "accumulate": run.accumulate,
        "data": run.data.source.name, "loss": run.loss.name, "evals": [e.name for e in run.evals], "parameters": rows,
        "values": sum(p.count for p in r.parameters if not p.state), "flops": r.flops, "bytes_moved": r.moved, "nodes": r.nodes, "hash": r.hash,
        "memory": plain(asdict(r.memory)) | {"peak": r.memory.peak}, "estimate": plain(asdict(r.estimate)), "taps": list(r.taps),
        **({"budget": r.fits.document()} if r.fits is not None else {}), **({"ranks": plain(asdict(r.ranks))} if r.ranks is not None else {}),
        **({"remat": {"calls": r.remat[0], "peak-without": r.remat[1]}} if r.remat is not None else {}),
    }  # fmt: skip


def plain(value: Any) -> Any:
    """Tuples as lists, mappings as dicts: what JSON can say."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value

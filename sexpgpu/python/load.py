"""`sexpgpu.load`: an experiment's file, and perhaps trained weights, as torch modules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from sexpgpu.compiler import Selection, choose_run, train_graph
from sexpgpu.compiler import load as load_file
from sexpgpu.diagnostics import fail
from sexpgpu.python.mistakes import mistakes, warn
from sexpgpu.python.module import Model
from sexpgpu.python.weights import start
from sexpgpu.run.storage import grant
from sexpgpu.settings import load as load_settings

Sets = Mapping[str, Any] | Iterable[str]


def load(
    file: str | os.PathLike[str],
    variant: str | None = None,
    set: Sets = (),  # noqa: A002 - the command line's word
    checkpoint: str | os.PathLike[str] | None = None,
    run: str | None = None,
    weights: str = "raw",
) -> Model:
    """The run of a file as a torch module, in `eval()`.

    set: knobs, `{"lr": 1e-3}` or `["lr=1e-3"]`. checkpoint: a folder step-N or its s3:// address, a location (its newest healthy
    checkpoint), or a file that `sexpgpu export` wrote; without it the weights are the run's initial values. weights: "ema" takes a
    checkpoint's averages. Neither data nor a device is opened. Raises SexpError, whose text is the command line's.
    """
    with mistakes():
        if weights not in ("raw", "ema"):
            fail("E-RUN-054", f"weights={weights!r}: weights are 'raw' or 'ema'")
        settings = load_settings(os.environ)
        grant(settings)
        loaded = load_file(os.fspath(file), Selection(variant, tuple(_texts(set)), limit=settings.eval_limit))
        chosen = choose_run(loaded.experiment, run)
        traced = train_graph(loaded, chosen)
        begun = start(loaded, traced, None if checkpoint is None else os.fspath(checkpoint), weights == "ema")
    warn([*settings.warnings, *loaded.experiment.warnings, *begun.warnings])
    return Model(loaded, traced, begun.values, begun.updates, begun.threads, begun.statistics)


def _texts(sets: Sets) -> list[str]:
    if isinstance(sets, str) or not isinstance(sets, Mapping | Iterable):
        fail("E-RUN-054", f"set={sets!r} is no mapping and no list", help="set={'lr': 1e-3}, or set=['lr=1e-3']")
    if isinstance(sets, Mapping):
        return [f"{name}={_text(name, value)}" for name, value in sets.items()]
    return [str(text) for text in sets]


def _text(name: str, value: Any) -> str:
    """A knob's value as `--set` takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Fraction | str):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{' '.join(_text(name, item) for item in value)}]"
    fail("E-RUN-054", f"set: `{name}` is a {type(value).__name__}, and a knob is a number, a string, a boolean or a list")

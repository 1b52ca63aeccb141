"""Small experiments as text, loaded from a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sexpgpu.compiler import Selection, load, train_graph
from sexpgpu.diagnostics import SexpError

HEAD = """(import "nn" "optim" "loss")
(defknob batch 8)
(defknob width 4 "units" :min 1)
(defdata d (csv "d.csv" :fields ((x f32 [3]) (label i32))) :split ((train 4/5) (valid 1/5)))
"""
MODEL = """(deflayer model (x) (linear (relu (linear x width :name "in")) 5 :name "out"))
(defun f (x label) (cross-entropy (model x) label))
"""
RUN = "(defrun train :data (batches d :split train :batch batch :shuffle true) :loss f :optimizer (adamw :lr 1e-3) :steps 10 {})\n"


def loaded(folder: Path, text: str, **selection):
    path = folder / "p.lisp"
    path.write_text(text, encoding="utf-8")
    return load(str(path), Selection(**selection))


def traced(folder: Path, text: str, run: str = "train", **selection):
    found = loaded(folder, text, **selection)
    return found, train_graph(found, found.experiment.runs[run])


def error(folder: Path, text: str, code: str, trace: bool = True, **selection):
    """The diagnostic of a wrong program; fails if there is none or it has another code."""
    with pytest.raises(SexpError) as caught:
        found = loaded(folder, text, **selection)
        if trace:
            for run in found.experiment.runs.values():
                train_graph(found, run)
    assert caught.value.diagnostic.code == code, caught.value
    return caught.value.diagnostic

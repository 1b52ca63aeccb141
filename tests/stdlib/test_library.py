"""The library as a whole: docstrings everywhere, no name twice, no name of an op, and little of the budget spent."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from library import LIBRARY, MODULES, made

from sexpgpu.compiler import Selection, load
from sexpgpu.diagnostics import SexpError
from sexpgpu.lisp.builtins import BUILTINS
from sexpgpu.lisp.elsewhere import FORMS, WORDS
from sexpgpu.ops import table

DEFINITION = re.compile(r"^\((defun|deflayer|defoptimizer|defmacro|defparameter) (\S+)", re.MULTILINE)


def definitions():
    return [
        (path.stem, kind, name)
        for path in sorted(LIBRARY.glob("*.lisp"))
        for kind, name in DEFINITION.findall(path.read_text("utf-8"))
    ]


def test_the_tests_import_every_module():
    assert set(MODULES) == {path.stem for path in LIBRARY.glob("*.lisp")}


def test_every_definition_has_its_own_name():
    names = [name for _, _, name in definitions()]
    assert len(set(names)) == len(names) > 60
    assert not set(names) & (set(BUILTINS) | {n for n, op in table().items() if op.lisp})


@pytest.mark.parametrize("module", MODULES)
def test_every_definition_has_a_docstring(module):
    for form in re.split(r"\n\n(?=\()", (LIBRARY / f"{module}.lisp").read_text("utf-8")):
        found = DEFINITION.search(form)
        if found:
            assert form.count('"') >= 2 and re.search(r'^(  |\(defparameter .*)"[^"]{15,}', form, re.MULTILINE), (
                found.group(2)
            )


def test_importing_all_costs_little(tmp_path):
    path = tmp_path / "p.lisp"
    path.write_text(f"(import {' '.join(chr(34) + m + chr(34) for m in MODULES)})", encoding="utf-8")
    load(str(path), Selection(limit=20_000))


def test_a_file_may_define_the_librarys_names(tmp_path):
    text = '(deflayer feed-forward (x) (linear x 1 :name "mine"))(defmacro residual (x layer) `(let ((s ,x)) (+ s (,layer (layer-norm s)))))'
    p = made(tmp_path, text + "(defun f (x) (mean (residual x feed-forward)))")
    assert "param/feed-forward/mine/weight" in p.state()


CHARACTERS = """(defknob layers 2)
(deflayer block (x) (transformer-block x :heads 2 :causal true :rotary true :drop-rate 0.1))
(deflayer model (tokens) (linear (layer-norm (reduce (lambda (x i) (block x)) (range layers)
  :initial-value (embedding tokens 256 16 :init (normal :std 0.02)))) 256 :name "head"))
(defun f (tokens targets) (cross-entropy (model tokens) targets :ignore 0))
"""


def test_a_transformer_over_bytes_learns(tmp_path):
    """Most of the library in one program: loops over a knob, dropout, a schedule, (list sum count), muon by rank."""
    rate = "(warmup-cosine :peak 0.02 :warmup 5 :steps 60)"
    p = made(
        tmp_path,
        CHARACTERS,
        "(tokens i32 [12]) (targets i32 [12])",
        8,
        optimizer=f"(muon :lr {rate} :adam-lr {rate})",
        keys=":clip-norm 1.0",
    )
    draw = np.random.default_rng(0)
    text = np.arange(13)[None] * draw.integers(1, 4, (8, 1)) + 65
    rows = {"tokens": text[:, :-1].astype(np.int32), "targets": text[:, 1:].astype(np.int32)}
    losses = [p.step(rows, False).loss for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(256), rel=0.1) and losses[-1] < 0.5 * losses[0]


IMAGES = """(deflayer net (x)
  (let* ((h (relu (batch-norm (convolution (reshape x [(dim x 0) 1 6 6]) 4 3 :padding 1))))
         (h (max-pool h 2))
         (h (reshape (transpose h [0 2 3 1]) [(dim h 0) 9 4]))
         (h (rms-norm (lstm h 5))))
    (linear (dropout (mean h :axis 1) 1/10) 3)))
(defun f (x label) (cross-entropy (net x) label :smoothing 0.1))
"""


@pytest.mark.parametrize("keys", ["", ":precision bf16", ":accumulate 2", ":precision f64 :clip-norm 1.0"])
def test_a_network_over_images_learns(tmp_path, keys):
    """Convolution, batch norm with its states, pooling, recurrence and dropout under every precision and in parts."""
    p = made(tmp_path, IMAGES, "(x f32 [36]) (label i32)", 8, optimizer="(adamw :lr 0.02)", keys=keys)
    draw = np.random.default_rng(0)
    label = draw.integers(0, 3, 8).astype(np.int32)
    rows = {"x": (draw.normal(size=(8, 36)) + label[:, None]).astype(np.float32), "label": label}
    losses = [p.step(rows, False).loss for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert abs(p.state()["state/net/batch-norm/mean"]).max() > 0


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_here_instead_of_pytorch_works(tmp_path, name):
    """As the help says it, in a program; a number is a shape's and goes into a sum."""
    form = FORMS[name]
    loss = f"(let ((found {form})) (+ (* 0 (mean (linear x 2))) (if (tensorp found) (mean (cast found f32)) (if (listp found) (mean (first found)) 0))))"
    fields = "(x f32 [6]) (y f32 [6]) (z f32 [3 4 4]) (i i32)"
    if "attention" in form or "attend" in form:
        fields = fields.replace("(x f32 [6])", "(x f32 [5 6])")
    made(tmp_path, f"(deflayer net (x y z i) {loss}) (defun f (x y z i) (net x y z i))", fields, 4)


def test_a_name_of_pytorch_is_explained(tmp_path):
    with pytest.raises(SexpError) as caught:
        made(tmp_path, "(defun f (x) (mean (torch.masked_fill x (> x 0) 0)))")
    assert "(where (> x 0) 0 x)" in caught.value.diagnostic.help[0]
    with pytest.raises(SexpError) as caught:
        made(tmp_path, "(defun f (x) (for (i 3) x))")
    assert "dotimes" in caught.value.diagnostic.help[0]
    assert not set(FORMS | WORDS) & ({n for _, _, n in definitions()} | set(BUILTINS) | {n for n, op in table().items() if op.lisp})

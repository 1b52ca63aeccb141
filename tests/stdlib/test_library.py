"""The library as a whole: docstrings everywhere, no name twice, no name of an op, and little of the budget spent."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from library import LIBRARY, MODULES, made

from sexpgpu.compiler import Selection, load
from sexpgpu.lisp.builtins import BUILTINS
from sexpgpu.ops import table

DEFINITION = re.compile(r"^\((defun|deflayer|defoptimizer|defmacro|defparameter) (\S+)", re.MULTILINE)


def definitions():
    return [(path.stem, kind, name) for path in sorted(LIBRARY.glob("*.lisp")) for kind, name in DEFINITION.findall(path.read_text("utf-8"))]


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
            assert form.count('"') >= 2 and re.search(r'^(  |\(defparameter .*)"[^"]{15,}', form, re.MULTILINE), found.group(2)


def test_importing_all_costs_little(tmp_path):
    path = tmp_path / "p.lisp"
    path.write_text(f"(import {' '.join(chr(34) + m + chr(34) for m in MODULES)})", encoding="utf-8")
    load(str(path), Selection(limit=20_000))


def test_a_file_may_define_the_librarys_names(tmp_path):
    text = '(deflayer feed-forward (x) (linear x 1 :name "mine"))(defmacro residual (x layer) `(let ((s ,x)) (+ s (,layer (layer-norm s)))))'
    p = made(tmp_path, text + "(defun f (x) (mean (residual x feed-forward)))")
    assert "param/feed-forward/mine/weight" in p.state()

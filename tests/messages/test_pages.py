"""The page of every code: what happened, a wrong example, a right one; examples that are expressions are run."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from sexpgpu.cli.explain import page
from sexpgpu.compiler import Selection, check
from sexpgpu.diagnostics.catalogue.shape import EXAMPLES
from sexpgpu.diagnostics.core import CATALOGUE, Entry

CODES: dict[str, Entry] = {code: found for module in CATALOGUE.values() for code, found in import_module(module).CODES.items()}
PROGRAM = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((x f32 [4]) (y f32 [5]) (image f32 [3 8 8]) (label i32))))
(defun f (x y image label)
  {}
  (mean (linear (concat x y (reshape image [8 192]) (cast (expand-dims label :axis 1) f32) :axis 1) 1)))
(defrun train :data (batches d :batch 8) :loss f :optimizer (sgd :lr 0.1) :steps 1)
"""


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_page_teaches(code: str) -> None:
    text = page(code)
    assert text.startswith(f"{code}: {CODES[code].title}\n\n") and "See also: " in text
    assert "Wrong:" in text and "Right:" in text and text.index("Wrong:") < text.index("Right:")


def texts(folder: str, *suffixes: str) -> str:
    """The texts of a folder, the catalogue's own and the pages left out."""
    root = Path(__file__).parents[2]
    return "".join(p.read_text("utf-8") for p in sorted((root / folder).rglob("*"))
                   if p.suffix in suffixes and "catalogue" not in p.parts and p != Path(__file__))


def test_each_code_is_written_once() -> None:
    for module in CATALOGUE.values():
        tree = ast.parse(Path(str(import_module(module).__file__)).read_text("utf-8"))
        for table in (n for n in ast.walk(tree) if isinstance(n, ast.Dict)):
            keys = [k.value for k in table.keys if isinstance(k, ast.Constant)]
            assert len(keys) == len(set(keys)), f"{module} writes a code twice: {[k for k in keys if keys.count(k) > 1]}"


def test_each_code_has_a_raiser_and_a_test() -> None:
    raised, tested = texts("sexpgpu", ".py"), texts("tests", ".py", ".txt") + " ".join(EXAMPLES)
    assert [code for code in sorted(CODES) if code not in raised] == []
    assert [code for code in sorted(CODES) if code not in tested] == []


def errors(folder: Path, text: str) -> list[str]:
    (folder / "p.lisp").write_text(text, "utf-8")
    return [d.code for d in check(str(folder / "p.lisp"), Selection()).findings if d.severity == "error"]


@pytest.mark.parametrize("code", sorted(EXAMPLES))
def test_examples_of_shapes(tmp_path: Path, code: str) -> None:
    wrong, right = EXAMPLES[code]
    assert errors(tmp_path, PROGRAM.format(wrong)) == [code]
    assert errors(tmp_path, PROGRAM.format(right)) == []


def examples(code: str) -> tuple[str, str]:
    found = re.search(r"Wrong:\n(.*?)\n\nRight:\n(.*)", CODES[code].page, re.S)
    assert found, code
    return found[1].strip(), found[2].strip()


def whole(code: str) -> bool:
    """Whether both examples are programs of their own: nothing left out, no other file, no command line."""
    found = re.search(r"Wrong:\n", CODES[code].page)
    return bool(found) and not any(mark in part for part in examples(code) for mark in ("…", "--", ".lisp", "(import", "move ", "a model file", "choose"))


ALONE = [code for code in sorted(CODES) if re.match(r"E-(READ|EVAL)-0", code) and whole(code)]
GIVEN = "(defparameter xs [1 2 3]) (defparameter ys [4 5 6]) (defun f (x &key (rate 1)) x) (defparameter x 1)\n"


@pytest.mark.parametrize("code", ALONE)
def test_examples_of_the_language(tmp_path: Path, code: str) -> None:
    wrong, right = examples(code)
    given = "" if "READ" in code else GIVEN
    if code in ("E-EVAL-002", "E-EVAL-009"):  # about tensors
        assert errors(tmp_path, PROGRAM.format(wrong.replace("[2 3]", "[8 4]").replace("(2 3)", "(8 4)"))) == [code]
        return
    assert code in errors(tmp_path, given + _called(wrong)), wrong
    found = errors(tmp_path, given + _called(right))
    assert not [c for c in found if "READ" not in code or c.startswith("E-READ")], right  # a text of names reads


def _called(text: str) -> str:
    """A page's definitions do not run by themselves."""
    calls = {"total": "(total 5000 0)" if "sum" in text else "(total 5000)", "m": "(m 1)", "choose": "(choose 1 2)"}
    found = re.match(r"\(def(?:un|macro) (\S+)", text)
    return text + "\n" + (calls.get(found[1], "") if found else "")


def test_most_pages_of_the_language_are_run() -> None:
    assert len(ALONE) >= 25, ALONE

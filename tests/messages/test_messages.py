"""What wrong programs and command lines say, word for word; `python tests/messages/show.py --update` renews the texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from cases import CASES, CSV, GOOD, HEAD, MODEL, RUN, Case, model
from show import GOLDEN, said

from sexpgpu.backends.cuda.device import memory_errors
from sexpgpu.cli import main
from sexpgpu.compiler import Selection, check
from sexpgpu.diagnostics import Diagnostic, Related, SexpError, document, entry, one_or_all, problem, render
from sexpgpu.source import Source, Span


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_says(case: Case) -> None:
    text = said(case)
    assert text == (GOLDEN / f"{case.name}.txt").read_text("utf-8"), "renew it with tests/messages/show.py --update, and read it"
    assert "Traceback" not in text and "exit 70" not in text
    for code in re.findall(r"\[([EW]-[A-Z]+-[0-9]{3})\]", text):
        assert entry(code) is not None


def test_five_of_each_family() -> None:
    for family in ("READ", "EVAL", "SHAPE", "KNOB", "ENV", "DATA", "CKPT", "NET", "RUN", "MEM", "DEV"):
        texts = [(GOLDEN / f"{c.name}.txt").read_text("utf-8") for c in CASES if c.name.startswith(f"{family}-")]
        assert len(texts) >= 5 and all(re.search(rf"^(error|warning)\[[EW]-{family}-", text, re.M) for text in texts), family
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {c.name for c in CASES}, "a golden without a case"


def checked(folder: Path, text: str, **selection: object) -> list[Diagnostic]:
    (folder / "p.lisp").write_text(text, "utf-8")
    return list(check(str(folder / "p.lisp"), Selection(**selection)).findings)  # type: ignore[arg-type]


WARNED = [
    ("W-KNOB-001", GOOD + "(defknob spare 3)\n", "spare"),
    ("W-EVAL-001", model('(part x 3)', "(defun part (x n) (linear x 5))\n"), "`n`"),
    ("W-EVAL-002", model('(let ((unused (linear x 7 :name "side"))) (linear x 5 :name "main"))'), "model/side/"),
    ("W-EVAL-003", GOOD + "(defun mse (a b) a)\n(defun g (a) a)\n", "`mse`"),
    ("W-EVAL-004", GOOD.replace(":optimizer (", ':optimizer (by-path ("**/bais" (sgd :lr 1)) (else (', 1).replace(" :steps 3", ")) :steps 3", 1), "**/bais"),
    ("W-RUN-001", GOOD + '(defun big (x label) (tap "big" (reduce-max (model x))))\n'
     "(defeval v :data (batches d :split valid :batch 2) :every 1 :metrics ((big big)))\n", "`big`"),
    ("W-RUN-002", GOOD.replace(":steps 3", ':steps 3 :diagnostics ("nothing/*")'), "nothing/*"),
    ("W-RUN-003", GOOD.replace(":steps 3", ":steps 3 :evals ()") +
     "(defeval v :data (batches d :split valid :batch 2) :every 1 :metrics ((loss f)))\n", "`v`"),
    ("W-RUN-003", GOOD + "(defeval v :data (batches d :split valid :batch 2) :every 0 :metrics ((loss f)))\n", "0"),
    ("W-DATA-001", GOOD.replace("(label i32)", "(label i32) (weight f32)"), "`weight`"),
    ("W-DATA-002", GOOD + '(defdata e (csv "e.csv" :fields ((x f32))))\n', "`e`"),
    ("W-DATA-003", HEAD + MODEL.replace("(model x) label)", "(model x) (argmax (model x) :axis -1 ))").replace("(model x) (arg", "(model x) (arg")
     .replace("(argmax (model x)", "(argmax x") + RUN, "`label`"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text", "words"), WARNED, ids=lambda v: v if isinstance(v, str) and v.startswith("W-") else "")
def test_check_warns(tmp_path: Path, code: str, text: str, words: str) -> None:
    found = checked(tmp_path, text)
    ours = [d for d in found if d.code == code]
    assert ours and all(d.severity == "warning" and d.span is not None and d.help or code == "W-RUN-002" for d in ours), found
    assert any(words in d.message for d in ours), ours


def test_check_of_a_good_file_and_of_the_examples(tmp_path: Path, root: Path) -> None:
    assert checked(tmp_path, GOOD) == []
    for name in ("digits", "vae", "pinn", "own_optimizer", "conv_digits"):
        assert not check(str(root / "examples" / f"{name}.lisp"), Selection()).findings, name


def test_check_finds_mistakes_in_every_variant_run_and_evaluation(tmp_path: Path) -> None:
    text = GOOD.replace("(defvariant wide :width 8)", "(defvariant wide :width 8)\n(defvariant odd :width 0)") + (
        RUN.replace("train\n", "second\n").replace(":loss f", ":loss g") +
        "(defun g (x label) (model x))\n"
        "(defeval never :data (batches d :split valid :batch 2) :every 1 :metrics ((a a) (b b)))\n"
        "(defun a (x label) (x))\n(defun b (x label) (relu y))\n")  # fmt: skip
    found = checked(tmp_path, text)
    assert [d.code for d in found if d.severity == "error"] == ["E-EVAL-002", "E-EVAL-001", "E-EVAL-110", "E-KNOB-002"]
    assert any("--variant odd" in note for d in found for note in d.notes)


def test_a_warning_that_one_variant_refutes_is_none(tmp_path: Path) -> None:
    text = HEAD + "(defknob with-label true)\n(defvariant plain :with-label false)\n" + MODEL.replace(
        "  (cross-entropy (model x) label))", "  (if with-label (cross-entropy (model x) label) (mean (model x))))") + RUN
    assert checked(tmp_path, text) == []
    assert [d.code for d in checked(tmp_path, text, variant="plain")] == ["W-DATA-003"]


def test_check_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.lisp").write_text(GOOD, "utf-8")
    assert main.perform(["check", "p.lisp"]) == 0 and "nothing found (1 run, 0 evaluations, 1 variant)" in capsys.readouterr().out
    (tmp_path / "p.lisp").write_text(GOOD + "(defknob spare 3)\n(lenght 3)\n", "utf-8")
    assert main.perform(["check", "p.lisp", "--json"]) == 1
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert err == "" and said["errors"] == 1 and said["findings"][0]["code"] == "E-EVAL-001"
    assert said["findings"][0]["place"] == {
        "file": "p.lisp", "line": 16, "column": 2, "end_line": 16, "end_column": 8, "start": 518, "end": 524
    } or said["findings"][0]["place"]["line"] == 16
    assert main.perform(["check", "no.lisp"]) == 2 and "E-READ-014" in capsys.readouterr().err


def test_check_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.lisp").write_text(GOOD, "utf-8")
    assert main.perform(["check", "p.lisp", "--data"]) == 1 and "E-DATA-001" in capsys.readouterr().out


def test_diagnostics_as_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.lisp").write_text(GOOD + "(lenght 3)\n(defparameter a (/ 1 0))\n", "utf-8")
    assert main.perform(["run", "p.lisp", "--json"]) == 2
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in err.splitlines()]
    assert out == "" and [d["code"] for d in lines] == ["E-EVAL-001", "E-EVAL-007"]
    assert lines[0]["help"] == ["did you mean `length`?"] and lines[0]["title"] == "unknown name"
    assert main.perform(["run", "p.lisp"]) == 2 and capsys.readouterr().err.startswith("error[")


def test_a_consequence_is_no_second_mistake(tmp_path: Path) -> None:
    text = GOOD + "(defparameter a (lenght [1]))\n(defparameter b (+ a 1))\n(defparameter c (first 3))\n"
    assert [d.message.split("`")[1] for d in checked(tmp_path, text)] == ["lenght", "first"]
    assert [d.code for d in checked(tmp_path, GOOD.replace('"optim"', '"optimm"'))] == ["E-EVAL-011"]


def test_a_layer_whose_body_is_a_text(tmp_path: Path) -> None:
    """Its value, and no docstring: found by fuzzing."""
    assert [d.code for d in checked(tmp_path, GOOD.replace('(linear (relu (linear x width :name "in")) 5 :name "out")', '"a text"'))] == ["E-EVAL-114"]


def names(found: list[Diagnostic]) -> list[str]:
    return [d.message.split("`")[1] for d in found if d.code == "E-EVAL-001"]


def test_unknown_names_of_one_function_are_said_together(tmp_path: Path) -> None:
    assert names(checked(tmp_path, model("(lienar (rellu x) widht)"))) == ["lienar", "rellu", "widht"]
    assert names(checked(tmp_path, GOOD + "(defun g (a) (if a (lenght a) (frist a)))\n(g [1])\n")) == ["lenght", "frist"]
    many = checked(tmp_path, GOOD + f"(list {' '.join(f'unknown-{i}' for i in range(9))})\n")
    assert names(many) == [f"unknown-{i}" for i in range(5)]  # the rest says itself when these are mended


def test_a_name_that_is_defined_later_is_none_of_them(tmp_path: Path) -> None:
    later = "(defun g (a) (lenght (later a)))\n(g [1])\n(progn (defun later (a) a))\n"
    assert names(checked(tmp_path, GOOD + later)) == ["lenght"]
    macro = "(defmacro make (name) `(defun ,name (a) a))\n(defun g (a) (lenght (made a)))\n(g [1])\n(make made)\n"
    assert names(checked(tmp_path, GOOD + macro)) == ["lenght"]
    bound = "(defun g (a) (let ((b 1)) (destructuring-bind (c d) [1 2] (dotimes (i 2) (lenght a b c d i)))))\n(g 1)\n"
    assert names(checked(tmp_path, GOOD + bound)) == ["lenght"]
    assert names(checked(tmp_path, GOOD + "(defun g (a) (quote (lenght b)) `(lenght b) (frist a))\n(g 1)\n")) == ["frist"]
    lost = "(defparameter p (lenght [1]))\n(defun g (a) (frist p))\n(g 1)\n"
    assert names(checked(tmp_path, GOOD + lost)) == ["lenght", "frist"]


def test_a_plan_over_the_device_s_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned before a kernel is compiled, so no GPU is needed to see it."""
    monkeypatch.chdir(tmp_path)
    for module in ("device", "program"):  # whichever of them was imported first
        monkeypatch.setattr(f"sexpgpu.backends.cuda.{module}.interpreted", lambda: True)
    monkeypatch.setattr("sexpgpu.cli.device.cache", lambda environ: [])
    (tmp_path / "d.csv").write_text(CSV, "utf-8")
    (tmp_path / "p.lisp").write_text(model("(linear (linear x 1000) 5)").replace(":split train :batch 8", ":batch 20"), "utf-8")
    for memory, words in (("0.00001", "parameters, gradients and optimizer state take"), ("0.0625", "the program takes")):
        monkeypatch.setenv("SEXPGPU_MEMORY", memory)
        assert main.perform(["run", "p.lisp", "--device", "cuda"]) == 2
        said = capsys.readouterr().err
        assert f"error[E-MEM-002] more than the device's memory: {words}" in said and "  help: " in said, said


def test_a_device_that_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sexpgpu.backends.cuda.device.neighbours", lambda: ["process 7 (python) uses 9 GiB"])
    with pytest.raises(SexpError) as mistake, memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    d = mistake.value.diagnostic
    assert (d.code, d.exit_code) == ("E-MEM-003", 3) and d.notes == ("CUDA out of memory. Tried to allocate 2 GiB.", "process 7 (python) uses 9 GiB")
    assert d.help == ("end the other process",)


def test_a_text_of_many_mistakes_stops_at_twenty(tmp_path: Path) -> None:
    found = checked(tmp_path, "(lenght 1)\n" * 100)
    assert len(found) == 20
    assert len(checked(tmp_path, "1.2.3 " * 100)) == 20


def test_render_hides_nothing_and_lets_nothing_out() -> None:
    bad = "a\n  --> /etc/passwd\x1b[2J\u202eevil\x00"
    source = Source(bad, f"(x {bad}")
    d = problem("E-EVAL-001", f"nothing is named `{bad}`", Span(source, 3, 9), label=bad, notes=[bad], help=bad,
                related=[Related(Span(source, 0, 2), bad)]).diagnostic  # fmt: skip
    text = render(d)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert not any(line.strip().startswith("--> /etc") for line in text.splitlines())
    assert json.loads(json.dumps(document(d)))["message"] == d.message


def test_wide_characters_keep_the_caret_in_its_column() -> None:
    source = Source("w.lisp", "(名前 x)")
    lines = render(problem("E-EVAL-001", "?", Span(source, 4, 5)).diagnostic).splitlines()
    assert lines[4].index("^") == lines[3].index("x") + 2  # two characters of two columns each before it


def test_equal_mistakes_are_said_once() -> None:
    one = problem("E-EVAL-001", "same").diagnostic
    assert one_or_all([one, one]).diagnostics == (one,)
    assert isinstance(one_or_all([one]), SexpError)

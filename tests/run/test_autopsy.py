"""Planted sources of NaN and infinity: the right op is named each time, through the real command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from sexpgpu.cli.main import perform

ROWS = 8
BAD = 2  # the row of the batch that a case spoils
FINE = [(0.1 + 0.01 * i, 0.2 + 0.01 * i) for i in range(ROWS)]

PROGRAM = """(import "nn" "optim" "loss")
(defdata pts (csv "d.csv" :fields ((x f32 [2]) (y f32))))
(deflayer net (x)
  (let ((z (* x (param "w" [2] :init ones))))
    {body}))
(defun l (x y) {loss})
(defrun train :data (batches pts :batch 8) :loss l :optimizer (sgd :lr {lr}) :steps {steps} :seed 1 :log-every 1{keys})
"""

#: name -> (body, bad row, op, word of its phase, piece of its form)
FORWARD = {
    "log of a negative": ("(log z)", (-1, 0.2), "log", "(log z)"),
    "log of zero": ("(log z)", (0, 0.2), "log", "(log z)"),
    "0/0": ("(/ z (* 1.0 z))", (0, 0.2), "/", "(/ z (* 1.0 z))"),
    "1/0": ("(/ 1.0 z)", (0, 0.2), "/", "(/ 1.0 z)"),
    "reciprocal of zero": ("(reciprocal z)", (0, 0.2), "reciprocal", "(reciprocal z)"),
    "overflow in exp": ("(exp (* 100.0 z))", (1, 0.2), "exp", "(exp (* 100.0 z))"),
    "overflow in exp2": ("(exp2 (* 100.0 z))", (2, 0.2), "exp2", "(exp2 "),
    "overflow in expm1": ("(expm1 (* 100.0 z))", (1, 0.2), "expm1", "(expm1 "),
    "overflow in cosh": ("(cosh (* 100.0 z))", (1, 0.2), "cosh", "(cosh "),
    "inf - inf is exp's": ("(- (exp (* 100.0 z)) (exp (* 101.0 z)))", (1, 0.2), "exp", "(exp (* 100.0 z))"),
    "sqrt of a negative": ("(sqrt z)", (-1, 0.2), "sqrt", "(sqrt z)"),
    "rsqrt of zero": ("(rsqrt z)", (0, 0.2), "rsqrt", "(rsqrt z)"),
    "power of a negative": ("(power z 0.5)", (-1, 0.2), "power", "(power z 0.5)"),
    "log1p below -1": ("(log1p z)", (-2, 0.2), "log1p", "(log1p z)"),
    "log2 of a negative": ("(log2 z)", (-2, 0.2), "log2", "(log2 z)"),
    "asin outside": ("(asin z)", (2, 0.2), "asin", "(asin z)"),
    "acos outside": ("(acos z)", (-2, 0.2), "acos", "(acos z)"),
    "acosh below 1": ("(acosh (+ z 1.0))", (-0.5, 0.2), "acosh", "(acosh "),
    "atanh at 1": ("(atanh z)", (1, 0.2), "atanh", "(atanh z)"),
    "softmax of all -inf": ("(softmax (where (> z 0.0) z -1e39) :axis -1)", (-1, -1), "softmax", "(softmax "),
    "a sample too large": ("(square (* 1e19 z))", (2, 0.2), "square", "(square "),
    "product overflows": ("(* (* 1e19 z) (* 1e19 z))", (2, 0.2), "*", "(* (* 1e19 z) (* 1e19 z))"),
    "sum overflows": ("(sum (* 3e38 z) :axis -1)", (1, 1), "sum", "(sum "),
    "prod overflows": ("(prod (* 1e19 z) :axis -1)", (10, 10), "prod", "(prod "),
    "matmul overflows": ("(matmul (* 3e38 z) (param \"m\" [2 2] :init ones))", (1, 1), "matmul", "(matmul "),
    "division by a zero deviation": (
        "(/ (- z (mean z :axis -1 :keep-dims true)) (sqrt (variance z :axis -1 :keep-dims true)))", (0.5, 0.5), "/", "(/ (- z (mean"),
    "normalize without eps": ("(normalize z :eps 0.0)", (0.5, 0.5), "normalize", "(normalize z"),
}
BACKWARD = {
    "sqrt at 0": ("(sqrt (* z z))", (0, 0.2), "(sqrt (* z z))"),
    "norm at 0": ("(sqrt (sum (square z) :axis -1))", (0, 0), "(sqrt (sum"),
    "power at 0": ("(power z 0.5)", (0, 0.2), "(power z 0.5)"),
    "hypot at 0": ("(hypot z (* 2.0 z))", (0, 0.2), "(hypot z"),
    "where does not hide the gradient of log": ("(where (> z 0.0) (log z) (* 0.0 z))", (0, 0.2), "(log z)"),
    "acos at 1": ("(acos z)", (1, 0.2), "(acos z)"),
}


def fails(folder: Path, capsys, body="z", bad=None, loss="(mean (net x))", lr="0.1", steps=1, keys="", flags=(), rows=FINE):
    """The lines of E-RUN-001 of one run."""
    rows = [bad if bad is not None and i == BAD else row for i, row in enumerate(rows)]
    (folder / "d.csv").write_text("x_0,x_1,y\n" + "".join(f"{a},{b},0.5\n" for a, b in rows))
    (folder / "n.lisp").write_text(PROGRAM.format(body=body, loss=loss, lr=lr, steps=steps, keys=keys))
    capsys.readouterr()
    code = perform(["run", str(folder / "n.lisp"), "--status", str(folder / "s.json"), "--metrics", f"jsonl:{folder}/m.jsonl", *flags])
    said = capsys.readouterr().err
    assert code == 3 and "E-RUN-001" in said, said
    return said


def named(said: str) -> tuple[str, str]:
    """(op, the rest of the line)."""
    line = re.search(r"first offending op(?: \([^)]*\))?: (.*)", said)
    assert line, said
    return line[1].split(" ", 1)[0], line[1]


@pytest.mark.parametrize("name", FORWARD)
def test_forward(tmp_path, capsys, name):
    body, bad, op, form = FORWARD[name]
    said = fails(tmp_path, capsys, body, bad)
    found, line = named(said)
    assert found == op and form in line and "the gradient" not in line, said
    assert "n.lisp:5:" in line and " in net/0" in line
    assert f"samples of the batch: {BAD} (samples {BAD} of data pts" in said, said
    assert re.search(r"operand 1, .*: min \S+, max \S+, mean \S+, 0 nan, \d+ inf", said), said


@pytest.mark.parametrize("name", BACKWARD)
def test_gradient(tmp_path, capsys, name):
    body, bad, form = BACKWARD[name]
    said = fails(tmp_path, capsys, body, bad)
    _, line = named(said)
    assert "in the gradient of" in line and form in line and "n.lisp:5:" in line, said
    assert "the gradient norm is" in said
    assert f"samples of the batch: {BAD} " in said, said


def test_an_overflow_that_where_left_out_is_named_when_the_gradient_takes_it(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(where (< z 1.0) (exp (* 100.0 z)) (* 0.0 z))", (2, 0.2))
    assert named(said)[0] == "exp" and "the gradient norm is" in said


def test_an_exploding_update(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(square z)", lr="1e30", steps=9)
    assert named(said)[0] == "square" and "step 2:" in said
    assert re.search(r"operand 1, .*max \d\S*e\+2\d", said) or re.search(r"min -\d\S*e\+2\d", said), said


def test_a_parameter_that_an_update_made_infinite(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(* 1e3 z)", lr="1e37", steps=9)
    assert "first offending op: parameter net/0/w, which was not finite before the step" in said, said
    assert "the update of step 1 made it so" in said


def test_the_gradient_norm_alone(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(* 1e25 z)")
    op, line = named(said)
    assert op == "*" and "net/w" in line and "for the gradient norm" in line, said


def test_bfloat16_overflows_in_the_cast(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(linear x 2)", (3.4e38, 0), keys=" :precision bf16")
    assert named(said)[0] == "cast" and "bf16" in named(said)[1], said


def test_a_count_of_zero(tmp_path, capsys):
    said = fails(tmp_path, capsys, loss="(list (sum (net x)) (sum (* 0.0 y)))")
    assert "the loss's count is 0" in said and "(sum (* 0.0 y))" in said


def test_micro_batches_keep_the_numbers_of_samples(tmp_path, capsys):
    rows = [(-1, 0.2) if i == 6 else row for i, row in enumerate(FINE)]
    said = fails(tmp_path, capsys, "(log z)", rows=rows, keys=" :accumulate 2")
    assert "first offending op (micro-batch 2 of 2): log" in said and "samples of the batch: 6 " in said, said


def test_bad_numbers_in_the_data_are_refused_before(tmp_path, capsys):
    (tmp_path / "n.lisp").write_text(PROGRAM.format(body="z", loss="(mean (net x))", lr=1, steps=1, keys="").replace(
        'csv "d.csv"', 'npy "d.npz"'))
    x = np.ones((8, 2), np.float32)
    x[BAD, 1] = np.nan
    np.savez(tmp_path / "d.npz", x=x, y=np.ones(8, np.float32))
    assert perform(["run", str(tmp_path / "n.lisp")]) == 2
    assert "is not a finite f32" in capsys.readouterr().err


def reproducer(said: str) -> Path:
    return Path(re.search(r"reproducer \(.*\): (\S+)", said)[1])


def test_the_reproducer_replays_and_holds_no_data(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(log z)", (-1, 0.2))
    folder = reproducer(said)
    assert folder.parent == tmp_path
    assert sorted(p.name for p in folder.iterdir()) == ["program", "reproducer.json", "state.safetensors"]
    assert [p.name for p in (folder / "program").rglob("*.lisp")] == ["n.lisp"]
    assert perform(["autopsy", str(folder)]) == 0
    told = capsys.readouterr().out
    assert named(told)[1] == named(said)[1]
    (tmp_path / "d.csv").write_text((tmp_path / "d.csv").read_text().replace("-1", "0.5"))
    assert perform(["autopsy", str(folder)]) == 1
    assert "finite here" in capsys.readouterr().out
    (tmp_path / "d.csv").unlink()
    assert perform(["autopsy", str(folder)]) == 2


def test_with_data_it_needs_nothing_else(tmp_path, capsys):
    said = fails(tmp_path, capsys, "(log z)", (-1, 0.2), flags=["--with-data"])
    (tmp_path / "d.csv").unlink()
    assert perform(["autopsy", str(reproducer(said))]) == 0
    assert named(capsys.readouterr().out)[0] == "log"


def test_what_is_no_reproducer(tmp_path, capsys):
    folder = reproducer(fails(tmp_path, capsys, "(log z)", (-1, 0.2)))
    facts = json.loads((folder / "reproducer.json").read_text())
    for change in ({"format": 2}, {"file": "../../n.lisp"}, {"file": "m.lisp"}, {"step": 0}):
        (folder / "reproducer.json").write_text(json.dumps(facts | change))
        assert perform(["autopsy", str(folder)]) == 2
        assert "E-RUN-040" in capsys.readouterr().err
    (folder / "reproducer.json").write_text(json.dumps(facts))
    (folder / "state.safetensors").write_bytes(b"\0" * 9)
    for place in (folder, tmp_path, tmp_path / "nowhere"):
        assert perform(["autopsy", str(place)]) == 2
        assert "E-RUN-040" in capsys.readouterr().err


def test_a_step_that_fell_is_in_the_metrics(tmp_path, capsys):
    fails(tmp_path, capsys, "(log z)", (-1, 0.2))
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    loss = next(r for r in records if r.get("name") == "loss")
    assert (loss["step"], loss["value"], loss["nonfinite"]) == (1, None, "nan")
    autopsy = next(r for r in records if r["type"] == "annotation" and r["metadata"]["kind"] == "autopsy")
    assert "first offending op: log" in autopsy["text"] and autopsy["metadata"]["step"] == "1"


def test_without_a_folder_of_its_own_it_goes_to_the_users_state(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fails(tmp_path, capsys, "(log z)", (-1, 0.2))
    capsys.readouterr()
    assert perform(["run", str(tmp_path / "n.lisp")]) == 3
    assert reproducer(capsys.readouterr().err).parent == tmp_path / "state" / "sexpgpu" / "autopsies"

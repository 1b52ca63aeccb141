"""Files into experiments: knobs, data, runs, parameters, paths, and the wrong ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import HEAD, MODEL, RUN, error, loaded, traced

from sexpgpu.compiler import graph_results, knob_notes, trajectory
from sexpgpu.ir.text import document, graph_hash, read_graph

DIGITS = Path(__file__).parents[2] / "examples" / "digits.lisp"


def test_digits_has_the_parameters_of_its_text(tmp_path):
    found, run = traced(tmp_path, DIGITS.read_text())
    shapes = {name: spec.shape for name, spec in run.params.items()}
    assert shapes == {
        "perceptron/in/weight": (64, 128), "perceptron/in/bias": (128,),
        "perceptron/out/weight": (128, 10), "perceptron/out/bias": (10,),
    }  # fmt: skip
    assert set(run.slots) == {f"{slot}/{name}" for slot in "mv" for name in shapes}
    assert found.experiment.runs["train"].evals[0].name == "valid"


def test_set_wins_over_variant_over_default(tmp_path):
    text = HEAD + MODEL + RUN.format("") + "(defvariant wide :width 16 :batch 4)\n"
    knobs = loaded(tmp_path, text, variant="wide", sets=("batch=2",)).experiment.knobs
    assert (knobs["width"].value, knobs["width"].source, knobs["width"].via) == (16, "variant", "wide")
    assert (knobs["batch"].value, knobs["batch"].source) == (2, "set")


def test_a_default_sees_final_values_and_a_variant_sees_defaults(tmp_path):
    text = "(defknob a 2)\n(defknob b (* 2 a))\n(defvariant v :a (* 10 b))\n"
    knobs = loaded(tmp_path, text, variant="v").experiment.knobs
    assert (knobs["a"].value, knobs["b"].value) == (40, 80)


def test_int_promotes_to_float_and_back_only_when_integral(tmp_path):
    text = "(defknob rate 0.5)\n(defknob count 3)\n"
    knobs = loaded(tmp_path, text, sets=("rate=1", "count=4.0")).experiment.knobs
    assert isinstance(knobs["rate"].value, float) and knobs["count"].value == 4
    error(tmp_path, text, "E-KNOB-003", sets=("count=4.5",))


def test_steps_override_is_recorded_and_changes_no_hash(tmp_path):
    text = HEAD + MODEL + RUN.format("")
    plain, one = traced(tmp_path, text)
    cut, two = traced(tmp_path, text, steps=3)
    assert cut.experiment.runs["train"].steps == 3
    knob = cut.experiment.knobs["run/train/steps"]
    assert (knob.source, knob.value, knob.file_value, knob.via) == ("override", 3, 10, "--steps")
    runs = plain.experiment.runs["train"], cut.experiment.runs["train"]
    assert trajectory(one, runs[0]) == trajectory(two, runs[1])


@pytest.mark.parametrize("change", [("width 4", "width 5"), ("adamw :lr 1e-3", "adamw :lr 1e-4"), ("relu", "tanh")])
def test_what_changes_numbers_changes_the_hash(tmp_path, change):
    text = HEAD + MODEL + RUN.format("")
    found, one = traced(tmp_path, text)
    other, two = traced(tmp_path, text.replace(*change))
    assert trajectory(one, found.experiment.runs["train"]) != trajectory(two, other.experiment.runs["train"])


def test_comments_and_taps_do_not_change_the_hash(tmp_path):
    _, one = traced(tmp_path, HEAD + MODEL + RUN.format(""))
    tapped = MODEL.replace("(defun f (x label)", '; a comment\n(defun f (x label) (tap "m" (mean x))')
    _, two = traced(tmp_path, HEAD + tapped + RUN.format(':diagnostics ("m")'))
    assert graph_hash(graph_results(one)) == graph_hash(graph_results(two))
    assert [tap.path for tap in two.taps] == ["m"]


def test_unnamed_calls_are_numbered_and_lone_numbers_left_out(tmp_path):
    model = "(deflayer block (x) (linear x width))\n(deflayer model (x) (linear (block (block x)) 5))\n"
    model += "(defun f (x label) (cross-entropy (model x) label))\n"
    _, run = traced(tmp_path, HEAD + model + RUN.format(""))
    names = {name.removesuffix("/weight") for name in run.params if name.endswith("weight")}
    assert names == {"model/block/0/linear", "model/block/1/linear", "model/linear"}


def test_share_uses_the_same_parameters(tmp_path):
    model = '(defun f (x label) (+ (cross-entropy (linear x 5 :name "a") label) (cross-entropy (linear x 5 :name "a" :share true) label)))\n'
    _, run = traced(tmp_path, HEAD + model + RUN.format(""))
    assert set(run.params) == {"a/weight", "a/bias"}
    d = error(tmp_path, HEAD + model.replace(" :share true", "") + RUN.format(""), "E-EVAL-108")
    assert "first made here" in [r.label for r in d.related]


WRONG = [
    ("E-KNOB-001", HEAD + MODEL + RUN.format(""), {"sets": ("widht=3",)}, "did you mean `width`?"),
    ("E-KNOB-002", HEAD + MODEL + RUN.format(""), {"sets": ("width=0",)}, ""),
    ("E-KNOB-005", HEAD + "(defvariant wide :width 8)" + MODEL + RUN.format(""), {"variant": "wied"}, "did you mean `wide`?"),
    ("E-KNOB-006", HEAD, {"sets": ("width=1", "width=2")}, ""),
    ("E-KNOB-004", "(defknob a 1)(defknob a 2)", {}, ""),
    ("E-KNOB-008", "(defknob a/b 1)", {}, ""),
    ("E-KNOB-009", "(defvariant a :extends b)(defvariant b :extends a)", {"variant": "a"}, ""),
    ("E-EVAL-101", HEAD + MODEL + RUN.format(":lag-every 3"), {}, "did you mean `:log-every`?"),
    ("E-EVAL-101", (HEAD + MODEL + RUN.format("")).replace(":batch batch", ":btch batch"), {}, "did you mean `:batch`?"),
    ("E-EVAL-102", (HEAD + MODEL + RUN.format("")).replace(":loss f", ""), {}, ""),
    ("E-EVAL-107", (HEAD + MODEL + RUN.format("")).replace("batches d ", "batches e "), {}, ""),
    ("E-EVAL-107", (HEAD + MODEL + RUN.format("")).replace(":split train", ":split trian"), {}, "did you mean `train`?"),
    ("E-EVAL-109", HEAD + MODEL.replace("(x label) (cross", "(x lable) (cross") + RUN.format(""), {}, "did you mean `label`?"),
    ("E-EVAL-110", HEAD + "(defun f (x) (* x x))" + RUN.format(""), {}, ""),
    ("E-EVAL-107", HEAD + MODEL + RUN.format(":remat (liner)"), {}, "did you mean `linear`?"),
    ("E-EVAL-103", HEAD + MODEL + RUN.format(":remat 3"), {}, ""),
    ("E-EVAL-103", HEAD + MODEL + RUN.format(":remat (linear 3)"), {}, ""),
    ("E-RUN-104", HEAD + MODEL + RUN.format(":accumulate 3"), {}, ""),
    ("E-EVAL-103", HEAD + MODEL + RUN.format(':seed "a"'), {}, ""),
    ("E-EVAL-103", HEAD + MODEL + RUN.format(":precision f16"), {}, ""),
    ("E-EVAL-113", HEAD + "(defun f (x label) (mean (cast (* label 0.5) f32)))" + RUN.format(""), {}, ""),
]


@pytest.mark.parametrize(("code", "text", "selection", "help_line"), WRONG)
def test_wrong_programs_have_a_code_and_a_mend(tmp_path, code, text, selection, help_line):
    d = error(tmp_path, text, code, **selection)
    assert d.message
    if help_line:
        assert help_line in d.help


def test_a_shape_mismatch_names_both_sides_and_their_knobs(tmp_path):
    text = HEAD + "(defun f (x label) (mean (matmul x (param \"w\" [width 2] :init zeros))))" + RUN.format("")
    d = error(tmp_path, text, "E-SHAPE-003")
    assert "3 and 4" in d.message
    assert any("4 from knob width (default, p.lisp:3" in note for note in d.notes), d.notes


def test_a_metric_may_not_make_parameters(tmp_path):
    text = HEAD + MODEL + "(defun g (x) (mean (linear x 2 :name \"extra\")))" + RUN.format(":metrics ((m g))")
    error(tmp_path, text, "E-EVAL-111")


def test_the_ir_document_says_knobs_and_places_and_reads_back(tmp_path):
    found, run = traced(tmp_path, HEAD + MODEL + RUN.format(""), steps=3, sets=("width=5",))
    text = document(graph_results(run), run.origins, knob_notes(found))
    assert "; knob width 5 (set --set, --set width)" in text and "; knob run/train/steps 3 (override --steps, p.lisp:7:1)" in text
    assert re.search(r"^; %\d+ p\.lisp:5:\d+$", text, re.M), text
    again = read_graph(text)
    assert all(again[name] is node for name, node in graph_results(run).items())
    assert graph_hash(again) == graph_hash(graph_results(run))


def test_fields_reach_parameters_with_defaults_by_name(tmp_path):
    text = HEAD + "(defun f (x &optional (label nil)) (cross-entropy (linear x 5) label))" + RUN.format("")
    keyed = HEAD + "(defun f (x &key (label nil) (scale 2)) (* scale (cross-entropy (linear x 5) label)))" + RUN.format("")
    for program in (text, keyed):
        _, run = traced(tmp_path, program)
        assert "linear/weight" in run.params


def test_names_of_layers_and_paths_are_components(tmp_path):
    """`..` and names with a slash would be other paths; a `where` of numbers is f32."""
    for body, words in (('(linear x 5 :name "..")', '".."'), ('(linear x 5 :name "a/b")', "a-b"), ('(param "." [5] :init zeros)', '"."')):
        d = error(tmp_path, HEAD + MODEL.replace('(linear (relu (linear x width :name "in")) 5 :name "out")', body) + RUN.format(""), "E-EVAL-103")
        assert words in d.message + d.help[0]
    error(tmp_path, HEAD + MODEL.replace("deflayer model", "deflayer a/b").replace("(model x)", "(a/b x)") + RUN.format(""), "E-EVAL-104")
    found, traced_run = traced(tmp_path, HEAD + MODEL.replace("(relu ", "(* (where (> (dim x 0) 0) 1.0 0) ").replace("(where (> (dim x 0) 0)", "(where (> x -1e9)")
                               .replace("(linear x width", "(linear x 3") + RUN.format(""))
    assert traced_run.params


def test_settings_that_are_no_finite_numbers(tmp_path):
    for key in (":clip-norm +nan", ":steps +inf", ":seed (expt 10 100)", ":accumulate +inf"):
        text = HEAD + MODEL + RUN.format(key).replace(":steps 10 :steps", ":steps").replace(":steps 10", "" if ":steps" in key else ":steps 10")
        assert error(tmp_path, text, "E-EVAL-103", trace=False).help

"""Sentences of contracts.md and language.md on paths, sharing and knobs, each tried as a stranger would."""

from __future__ import annotations

import pytest
from support import HEAD, MODEL, RUN, error, loaded, traced

from sexpgpu.compiler import choose_run
from sexpgpu.diagnostics import SexpError


def test_a_shared_call_leaves_the_layers_below_it_lone(tmp_path):
    """Call counters restart in a shared scope: sharing must not rename what was there."""
    once = "(deflayer net (x) (linear x 5))\n(defun f (x label) (cross-entropy (net x) label))\n"
    twice = once.replace("(net x)", "(+ (net x) (net x :share true))")
    names = [set(traced(tmp_path, HEAD + text + RUN.format(""))[1].params) for text in (once, twice)]
    assert names[0] == names[1] == {"net/linear/weight", "net/linear/bias"}


def test_a_shared_call_that_goes_further_is_numbered(tmp_path):
    text = ("(deflayer net (x n) (if (= n 1) (linear x 5) (+ (linear x 5) (linear x 5))))\n"
            "(defun f (x label) (cross-entropy (+ (net x 1) (net x 2 :share true)) label))\n")
    found = set(traced(tmp_path, HEAD + text + RUN.format(""))[1].params)
    assert found == {f"net/linear/{n}/{leaf}" for n in (0, 1) for leaf in ("weight", "bias")}


def test_two_taps_of_one_path_are_an_error(tmp_path):
    text = '(defun f (x label) (tap "a" (mean x)) (tap "a" (sum x)) (cross-entropy (linear x 5) label))\n'
    d = error(tmp_path, HEAD + text + RUN.format(""), "E-EVAL-108")
    assert "`a`" in d.message and "tap" in d.help[0]


def test_taps_below_a_shared_call_are_one(tmp_path):
    text = ('(deflayer net (x) (tap "a" (mean x)) (linear x 5))\n'
            "(defun f (x label) (cross-entropy (+ (net x) (net x :share true)) label))\n")
    run = RUN.format(':diagnostics ("**")')
    assert [t.path for t in traced(tmp_path, HEAD + text + run)[1].taps] == ["net/a"]


def test_an_evaluation_named_twice_is_an_error(tmp_path):
    text = HEAD + MODEL + RUN.format(":evals (v v)") + (
        "(defeval v :data (batches d :split valid :batch 8) :every 5 :metrics ((l f)))\n")
    assert "twice" in error(tmp_path, text, "E-EVAL-104").message


@pytest.mark.parametrize("values", ["3", "()"])
def test_one_of_needs_a_list(tmp_path, values):
    assert ":one-of" in error(tmp_path, HEAD + MODEL + RUN.format("") + f'(defknob k 3 "k" :one-of {values})', "E-EVAL-103").message


def test_a_bound_on_a_string_is_an_error(tmp_path):
    error(tmp_path, HEAD + MODEL + RUN.format("") + '(defknob k "x" "k" :min 1)', "E-KNOB-003")


def test_a_name_that_means_a_function_needs_a_quote(tmp_path):
    d = error(tmp_path, HEAD + MODEL + RUN.format("") + '(defknob k relu "k" :one-of (relu tanh))', "E-KNOB-002")
    assert "'relu" in d.help[0]


def test_a_set_value_is_shown_as_lisp(tmp_path):
    d = error(tmp_path, HEAD + MODEL + RUN.format(""), "E-KNOB-003", sets=("width=(+ 1 2)",))
    assert "(+ 1 2) is not" in d.message and "Symbol(" not in d.message


def test_a_mistyped_key_is_guessed_with_its_colon(tmp_path):
    assert error(tmp_path, HEAD + MODEL + RUN.format(":sed 3"), "E-EVAL-101").help[0] == "did you mean `:seed`?"


def test_several_runs_are_named_in_a_command_that_can_be_typed(tmp_path):
    text = HEAD + MODEL + RUN.format("") + RUN.format("").replace("defrun train", "defrun second")
    found = loaded(tmp_path, text)
    with pytest.raises(SexpError) as caught:
        choose_run(found.experiment, None)
    assert found.experiment.file in caught.value.diagnostic.help[0] and "train" in caught.value.diagnostic.help[0]

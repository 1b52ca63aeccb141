"""The manifest form, `:pad` and `:tokens (bpe …)`: what a file may say, without opening anything."""

import pytest
from support import error, loaded

MODEL = "(import \"nn\" \"optim\" \"loss\")\n(defun g (ids label) (cross-entropy (linear (cast ids f32) 4) label))\n"
FIELDS = ":fields ((ids i32 [8] :pad 0) (label i32))"
DATA = "(batches d :split train :batch 8)"


def program(keys="", fields=FIELDS, data=DATA, more="", after=""):
    return (f'{MODEL}(defdata d (manifest "m.json" {keys} {fields}){after})\n{more}\n'
            f"(defrun r :data {data} :loss g :optimizer (adamw :lr 1e-3) :steps 10)\n")


@pytest.mark.parametrize(("keys", "options"), [
    ("", {}),
    (":split train", {"split": "train"}),
    (':split "a b"', {"split": "a b"}),
    (":stages (easy)", {"stages": [[["easy"], None]]}),
    (':stages (easy "hard 2")', {"stages": [[["easy", "hard 2"], None]]}),
    (":stages ((easy :until 10) (easy hard :until 20) (hard))", {"stages": [[["easy"], 10], [["easy", "hard"], 20], [["hard"], None]]}),
    (":stages ((easy :until ,(* 2 5)) (hard))", {"stages": [[["easy"], 10], [["hard"], None]]}),
    (":stages ((easy hard))", {"stages": [[["easy", "hard"], None]]}),
])
def test_options(tmp_path, keys, options):
    data = "(batches d :batch 8)" if ":split" in keys else DATA
    found = loaded(tmp_path, program(keys, data=data)).experiment
    assert found.data["d"].options == options and found.data["d"].fields[0].pad == 0
    assert found.runs["r"].data.split == (None if ":split" in keys else "train")


@pytest.mark.parametrize(("code", "keys", "fields", "says"), [
    ("E-EVAL-102", "", "", ":fields"),
    ("E-EVAL-101", ":stage (easy)", FIELDS, "stage"),
    ("E-EVAL-103", ":stages easy", FIELDS, ":stages is a list"),
    ("E-EVAL-103", ":stages ()", FIELDS, ":stages is a list"),
    ("E-EVAL-103", ":stages ((easy :until 5))", FIELDS, "every phase but the last has :until"),
    ("E-EVAL-103", ":stages ((easy) (hard))", FIELDS, "every phase but the last"),
    ("E-EVAL-103", ":stages ((easy :until 9) (hard :until 9) (easy))", FIELDS, "grow"),
    ("E-EVAL-103", ":stages ((easy :until 0) (hard))", FIELDS, "grow"),
    ("E-EVAL-103", ":stages ((easy :from 5) (hard))", FIELDS, ":stages is a list"),
    ("E-EVAL-103", ":stages ((:until 5) (hard))", FIELDS, ":stages is a list"),
    ("E-EVAL-103", ":stages (easy 3)", FIELDS, ":stages is a list"),
    ("E-EVAL-103", "", ":fields ((ids i32 [8]) (label i32 :pad 0))", "is one number"),
    ("E-EVAL-103", "", ":fields ((ids u8 [8] :pad -1) (label i32))", ":pad -1 is no u8 (0…255)"),
    ("E-EVAL-103", "", ":fields ((ids i32 [8] :pad 0.5) (label i32))", ":pad"),
    ("E-EVAL-103", "", ":fields ((ids bool [8] :pad 2) (label i32))", ":pad of a bool"),
    ("E-EVAL-103", "", ":fields ((ids f32 [8] :pad 1/3) (label i32))", "decimal"),
    ("E-EVAL-104", "", ":fields ((ids i32 [8] :pad 0 :pad 1) (label i32))", "a field is"),
    ("E-EVAL-104", "", ":fields ((ids i32 [8] :pda 0) (label i32))", "a field is"),
])
def test_mistakes_of_the_form(tmp_path, code, keys, fields, says):
    assert says in error(tmp_path, program(keys, fields), code).message


def test_a_manifest_is_split_once(tmp_path):
    twice = error(tmp_path, program(":split train"), "E-EVAL-103")
    assert "the split `train` of its manifest already" in twice.message
    shares = error(tmp_path, program(after=" :split ((train 1/2) (valid 1/2))"), "E-EVAL-103")
    assert "has its splits already" in shares.message


def test_stages_that_switch_are_for_training(tmp_path):
    more = "(defeval v :data (batches d :split valid :batch 8) :every 5 :metrics ((loss g)))"
    assert "no steps" in error(tmp_path, program(":stages ((easy :until 5) (hard))", more=more), "E-EVAL-103").message


def test_rows_of_csv_are_not_padded(tmp_path):
    text = program().replace('(manifest "m.json"', '(csv "m.csv"')
    assert ":pad is for jsonl and manifest" in error(tmp_path, text, "E-EVAL-103").message


def test_padding_is_part_of_the_trajectory(tmp_path):
    from sexpgpu.compiler import train_graph, trajectory

    words = []
    for pad in ("", ":pad 0", ":pad 1"):
        found = loaded(tmp_path, program(fields=f":fields ((ids i32 [8] {pad}) (label i32))"))
        run = found.experiment.runs["r"]
        words.append(trajectory(train_graph(found, run), run)["data"])
    assert len(set(words)) == 3

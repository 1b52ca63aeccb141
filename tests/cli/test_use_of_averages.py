"""eval, predict and export with `:ema` and `:init`; an export that is ended; what explain says of such runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sexpgpu.cli.main import perform

ROOT = Path(__file__).resolve().parents[2]
TEXT = """(import "nn" "optim" "loss")
(defknob start "w.safetensors")
(defdata d (csv "d.csv" :fields ((x f32 [3]) (label i32))) :split ((train 4/5) (valid 1/5)))
(deflayer model (x) (linear x 5 :name "out"))
(deflayer other (x) (linear x 5 :name "out"))
(defun f (x label) (cross-entropy (model x) label))
(defun g (x label) (cross-entropy (other x) label))
(defrun train :data (batches d :split train :batch 8) :loss f :optimizer (adamw :lr 1e-1) :steps 6 :ema 0.5
  :frozen ("**/bias") :keep-best (smooth loss max) :evals (raw smooth))
(defrun again :data (batches d :split train :batch 8) :loss g :optimizer (adamw :lr 1e-1) :steps 2
  :init (from start :map (("other/**" "model/**"))) :evals (fresh))
(defeval raw :data (batches d :split valid :batch 3) :every 3 :metrics ((loss f)))
(defeval smooth :data (batches d :split valid :batch 3) :every 3 :weights ema :metrics ((loss f)))
(defeval fresh :data (batches d :split valid :batch 3) :every 1 :metrics ((loss g)))
"""
STREAM = """(import "nn" "optim" "loss")
(defdata t (text "t.txt" :tokens bytes) :split ((train 4/5) (valid 1/5)))
(defun f (tokens targets) (cross-entropy (linear (embedding tokens 256 4) 256) targets))
(defrun train :data (windows t :split train :context 16 :stride 4 :batch 8) :loss f :optimizer (adamw) :steps 6)
(defeval v :data (windows t :split valid :context 16 :batch 2 :limit 3) :every 3 :metrics ((loss f)))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program, a run of it in `a`, its averages in w.safetensors, and a run from those in `b`."""
    folder = tmp_path_factory.mktemp("averages")
    rows = [f"{i % 7 / 7},{i % 3 - 1},{i % 5 / 5},{i % 5}" for i in range(40)]
    (folder / "d.csv").write_text("x_0,x_1,x_2,label\n" + "\n".join(rows) + "\n")
    (folder / "p.lisp").write_text(TEXT)
    file = str(folder / "p.lisp")
    assert perform(["run", file, "train", "--checkpoint-dir", str(folder / "a"), "--metrics", f"jsonl:{folder / 'a.jsonl'}"]) == 0
    assert perform(["export", str(folder / "a" / "step-6"), str(folder / "w.safetensors"), "--weights", "ema"]) == 0
    assert perform(["run", file, "again", "--checkpoint-dir", str(folder / "b"), "--metrics", f"jsonl:{folder / 'b.jsonl'}"]) == 0
    return folder


def logged(file: Path, evaluation: str, step: int) -> float:
    records = map(json.loads, file.read_text("utf-8").splitlines())
    return next(r["value"] for r in records if r["type"] == "metric" and r["metadata"].get("eval") == evaluation and r["step"] == step)


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, float]]:
    capsys.readouterr()
    assert perform(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["evals"]


def test_eval_takes_the_weights_that_the_evaluation_names(made: Path, capsys) -> None:
    found = evaluated(capsys, str(made / "p.lisp"), "train", "--resume", str(made / "a" / "step-6"))
    assert found["raw"]["loss"] == logged(made / "a.jsonl", "raw", 6)
    assert found["smooth"]["loss"] == logged(made / "a.jsonl", "smooth", 6) != found["raw"]["loss"]


def test_eval_of_a_run_that_started_from_a_file(made: Path, capsys) -> None:
    """The file may be gone: the checkpoint has the weights."""
    (made / "w.safetensors").rename(made / "elsewhere")
    try:
        found = evaluated(capsys, str(made / "p.lisp"), "again", "--resume", str(made / "b" / "step-2"))
        assert found["fresh"]["loss"] == logged(made / "b.jsonl", "fresh", 2)
        np.savez(made / "x.npz", x=np.ones((2, 3), np.float32))
        words = ["--run", "again", "--resume", str(made / "b" / "step-2"), "--input", str(made / "x.npz"), "--out", str(made / "y.npz")]
        assert perform(["predict", str(made / "p.lisp"), "other", *words]) == 0
        w = load_file(made / "b" / "step-2" / "part-00001-of-00001.safetensors")
        expected = torch.ones(2, 3) @ w["param/other/out/weight"] + w["param/other/out/bias"]
        np.testing.assert_allclose(np.load(made / "y.npz")["output"], expected.numpy(), rtol=1e-6)
    finally:
        (made / "elsewhere").rename(made / "w.safetensors")


def test_predict_takes_the_raw_weights(made: Path) -> None:
    np.savez(made / "x.npz", x=np.ones((2, 3), np.float32))
    words = ["--run", "train", "--resume", str(made / "a" / "step-6"), "--input", str(made / "x.npz"), "--out", str(made / "z.npz")]
    assert perform(["predict", str(made / "p.lisp"), "model", *words]) == 0
    w = load_file(made / "a" / "step-6" / "part-00001-of-00001.safetensors")
    assert not torch.equal(w["param/model/out/weight"], w["ema/model/out/weight"])
    expected = torch.ones(2, 3) @ w["param/model/out/weight"] + w["param/model/out/bias"]
    np.testing.assert_allclose(np.load(made / "z.npz")["output"], expected.numpy(), rtol=1e-6)


def test_explain_says_what_a_run_keeps_and_starts_from(made: Path, tmp_path: Path, capsys) -> None:
    capsys.readouterr()
    assert perform(["explain", str(made / "p.lisp")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("averages decay 0.5", "frozen **/bias", "keeps best smooth loss, the largest",
                  "starts from w.safetensors, other/** from model/**"):  # fmt: skip
        assert words in text, text
    (tmp_path / "s.lisp").write_text(STREAM)
    assert perform(["explain", str(tmp_path / "s.lisp")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "t (train), windows of 16 tokens, 4 from one to the next, batch 8" in text
    assert "t (valid), windows of 16 tokens, 16 from one to the next, batch 2, at most 3 batches" in text


SLOW = """
import sys, time
from pathlib import Path
from sexpgpu.cli import main
from sexpgpu.run.checkpoints import export
def slow(tensors, stage, metadata=None):
    Path(stage).write_bytes(b"half")
    time.sleep(60)
export.save_file = slow
main.main(sys.argv[1:])
"""


def test_an_export_that_is_ended_leaves_nothing(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    words = [sys.executable, "-c", SLOW, "export", str(made / "a" / "step-6"), str(out)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 100
    while not list(tmp_path.iterdir()) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert [p.name for p in tmp_path.iterdir()] == [f".out.safetensors.tmp-{process.pid}"]
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143 and said == b""
    assert not list(tmp_path.iterdir())

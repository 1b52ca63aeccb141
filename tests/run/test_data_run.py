"""Runs over a manifest and over BPE tokens, from the command line: resumes are exact, another manifest is noticed."""

import contextlib
import io
import json
import os

import pytest

from sexpgpu.cli import main
from sexpgpu.run import storage

PROGRAM = """
(import "nn" "optim" "loss")
(defdata corpus
  (manifest "m/data-manifest-v1.json" :split train :stages ((easy :until 3) (easy hard))
    :fields ((ids i32 [6] :pad 0) (label i32))))
(defdata held (manifest "m/data-manifest-v1.json" :split valid :fields ((ids i32 [6] :pad 0) (label i32))))
(deflayer net (ids) (linear (mean (embed (param "table" [40 4] :init (normal :std 0.1)) ids) :axis 1) 5))
(defun ce (ids label) (cross-entropy (net ids) label))
(defeval valid :data (batches held :batch 8) :every 4 :metrics ((loss ce)))
(defrun main :data (batches corpus :batch 8 :shuffle true) :loss ce :optimizer (adamw :lr 1e-2) :steps 6 :seed 1
  :log-every 1 :keep 9)
"""


def call(folder, *words, code=0):
    """The command line in this process: ten imports of torch would be most of this file's time."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SEXPGPU_", "AWS_"))}
    said, before = io.StringIO(), storage.granted()
    with (pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said)):
        patch.setattr(os, "environ", clean | {"XDG_CACHE_HOME": str(folder / "cache")})
        patch.chdir(folder)
        found = main.perform([str(word) for word in words])
    storage.grant(before)
    assert found == code, said.getvalue()
    return said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    for name, first in (("easy", 0), ("hard", 100), ("valid", 200)):
        rows = [{"ids": list(range(i % 9)), "label": i % 5} for i in range(first, first + 30)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call(path, "data", "build", "train/easy=easy.jsonl", "train/hard=hard.jsonl", "valid=valid.jsonl", "--out", "m", "--records", 7)
    (path / "e.lisp").write_text(PROGRAM)
    return path


def weights(folder, place, step):
    return {p.name: p.read_bytes() for p in (folder / place / f"step-{step}").glob("*.safetensors")}


def losses(path):
    return [(r["step"], r["value"]) for r in map(json.loads, path.read_text().splitlines()) if r.get("name") == "loss"]


def test_a_resume_is_exact_at_and_after_a_switch_of_stages(folder):
    call(folder, "run", "e.lisp", "--checkpoint-dir", "whole", "--metrics", "jsonl:whole.jsonl")
    wanted = weights(folder, "whole", 6)
    assert wanted
    for k in (3, 4):
        call(folder, "run", "e.lisp", "--steps", k, "--checkpoint-dir", f"cut-{k}")
        call(folder, "run", "e.lisp", "--checkpoint-dir", f"cut-{k}", "--resume", "latest", "--metrics", f"jsonl:cut-{k}.jsonl")
        assert weights(folder, f"cut-{k}", 6) == wanted
        assert set(losses(folder / f"cut-{k}.jsonl")) <= set(losses(folder / "whole.jsonl"))


def test_a_republished_manifest_is_noticed(folder):
    call(folder, "run", "e.lisp", "--steps", 2, "--checkpoint-dir", "old")
    path = folder / "m/data-manifest-v1.json"
    text = path.read_text()
    path.write_text(text + "\n")
    try:
        said = call(folder, "run", "e.lisp", "--checkpoint-dir", "old", "--resume", "latest", code=2)
    finally:
        path.write_text(text)
    assert "E-CKPT-021" in said and "data corpus" in said


def test_a_damaged_shard_is_found_before_the_first_step(folder, tmp_path):
    shard = folder / "m/shards/valid/part-00002.jsonl.gz"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    try:
        said = call(folder, "run", "e.lisp", code=2)
    finally:
        shard.write_bytes(data)
    assert "E-DATA-024" in said and "shards/valid/part-00002.jsonl.gz" in said and "e.lisp:" in said


def test_bpe_tokens_of_a_text(folder):
    (folder / "c.txt").write_text("the quick brown fox\njumps over the lazy dog\n" * 60)
    call(folder, "data", "tokenize", "c.txt", "--vocab", 280, "--out", "tok")
    (folder / "t.lisp").write_text("""
(import "nn" "optim" "loss")
(defdata corpus (text "c.txt" :tokens (bpe "tok/tokenizer.json")))
(defun ce (tokens targets)
  (cross-entropy (linear (embed (param "table" [280 4] :init (normal :std 0.1)) tokens) 280) targets))
(defrun main :data (windows corpus :context 8 :batch 4) :loss ce :optimizer (adamw :lr 1e-2) :steps 3 :seed 1)
""")
    call(folder, "run", "t.lisp", "--metrics", "jsonl:t.jsonl", "--checkpoint-dir", "t")
    record = json.loads((folder / "tok/tokens.json").read_text())
    manifest = json.loads((folder / "t/step-3/manifest.json").read_text())
    assert manifest["data"]["corpus"]["count"] == record["files"][0]["tokens"] and len(losses(folder / "t.jsonl")) >= 1

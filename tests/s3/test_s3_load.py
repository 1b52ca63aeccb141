"""`sexpgpu.load` of a checkpoint and of exported weights in a bucket: the same tensors as from disk."""

import pytest
import torch

import sexpgpu
from sexpgpu.cli import main
from sexpgpu.run import storage

PROGRAM = """
(import "nn" "optim" "loss")
(defdata rows (csv "rows.csv" :fields ((x f32 [1]) (y f32 [1]))))
(defun off (x y) (let ((d (- (linear x 1) y))) (mean (* d d))))
(defrun main :data (batches rows :batch 4 :shuffle true) :loss off :optimizer (adamw :lr 1e-2) :steps 3 :seed 1)
"""


@pytest.fixture
def folder(server, tmp_path, monkeypatch):
    (tmp_path / "e.lisp").write_text(PROGRAM)
    (tmp_path / "rows.csv").write_text("x_0,y_0\n" + "".join(f"{i},{2 * i}\n" for i in range(8)))
    monkeypatch.chdir(tmp_path)
    for name, value in server.environ("checkpoint").items():
        monkeypatch.setenv(name, value)
    before = storage.granted()
    yield tmp_path
    storage.grant(before)


def test_a_checkpoint_in_a_bucket(server, place, folder):
    assert main.perform(["run", "e.lisp", "--checkpoint-dir", f"s3://{place}/run"]) == 0
    assert main.perform(["run", "e.lisp", "--checkpoint-dir", "here"]) == 0
    assert main.perform(["export", "here/step-3", "out.safetensors"]) == 0
    server.storage(place).put("out.safetensors", (folder / "out.safetensors").read_bytes())
    storage.grant(storage.read({}))  # as a fresh process is: `load` itself reads the variables
    wanted = dict(sexpgpu.load("e.lisp", checkpoint="here/step-3").named_parameters())
    first = dict(sexpgpu.load("e.lisp").named_parameters())
    assert wanted and any(not torch.equal(first[name], value) for name, value in wanted.items())
    for source in ("run/step-3", "run", "out.safetensors"):
        found = dict(sexpgpu.load("e.lisp", checkpoint=f"s3://{place}/{source}").named_parameters())
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items()), source


def test_what_is_missing_is_named(place, folder, monkeypatch):
    with pytest.raises(sexpgpu.SexpError) as error:
        sexpgpu.load("e.lisp", checkpoint=f"s3://{place}/nothing")
    assert error.value.diagnostic.code.startswith("E-CKPT-")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(sexpgpu.SexpError) as error:
        sexpgpu.load("e.lisp", checkpoint=f"s3://{place}/nothing")
    assert error.value.diagnostic.code == "E-NET-010"

"""Using what was trained: eval, predict and export on a checkpoint of 20 steps of the digits example."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_commands import DIGITS, ROOT, sexpgpu

from sexpgpu.cli.main import perform
from sexpgpu.run.checkpoints.export import export
from sexpgpu.run.checkpoints.find import Found
from sexpgpu.run.checkpoints.manifest import read_manifest
from sexpgpu.run.storage.file import open_folder

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Done]


@dataclass(frozen=True)
class Made:
    """A location with one checkpoint, and the metrics of the run that wrote it."""

    location: Path
    metrics: list[dict]

    @property
    def checkpoint(self) -> Path:
        return self.location / "step-20"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("use")
    location = folder / "runs"
    done = sexpgpu("run", DIGITS, "--steps", "20", "--checkpoint-dir", str(location), "--metrics", f"jsonl:{folder}/m")
    assert done.returncode == 0, done.stderr
    return Made(location, [json.loads(line) for line in (folder / "m").read_text("utf-8").splitlines()])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """A command in this process, which is quicker; torch is imported already."""
    monkeypatch.chdir(ROOT)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def call(*words: str) -> Done:
        capsys.readouterr()
        code = perform(words)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


def test_export_has_the_checkpoints_bits(made: Made, here: Here, tmp_path: Path) -> None:
    out = tmp_path / "digits.safetensors"
    done = here("export", str(made.checkpoint), str(out))
    assert done.returncode == 0 and "4 tensors" in done.stdout, done.stderr
    saved = load_file(made.checkpoint / "part-00001-of-00001.safetensors")
    expected = {n.partition("/")[2]: t for n, t in saved.items() if n.startswith(("param/", "state/"))}
    assert len(expected) < len(saved)
    written = load_file(out)
    assert "perceptron/in/weight" in written and written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert tensor.numpy().tobytes() == expected[name].numpy().tobytes(), name

    before = out.read_bytes()
    again = here("export", str(made.checkpoint), str(out))
    assert again.returncode == 2 and "E-CKPT-030" in again.stderr and "--force" in again.stderr
    out.write_bytes(b"old")
    forced = here("export", str(made.checkpoint), str(out), "--force")
    assert forced.returncode == 0 and out.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_export_of_what_is_no_checkpoint(made: Made, here: Here, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    torn = tmp_path / "step-20"
    shutil.copytree(made.checkpoint, torn)
    part = torn / "part-00001-of-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(bytes(data))
    for words, code, text in (
        ([str(made.location), str(out)], "E-CKPT-001", str(made.checkpoint)),
        (["latest", str(out)], "E-CKPT-001", "step-100"),
        ([str(tmp_path / "none"), str(out)], "E-CKPT-001", "none"),
        ([str(torn), str(out)], "E-CKPT-002", "SHA-256"),
        ([str(made.checkpoint), str(tmp_path)], "E-CKPT-031", "folder"),
        ([str(made.checkpoint), str(tmp_path / "no" / "o")], "E-CKPT-031", "mkdir"),
    ):
        done = here("export", *words)
        assert done.returncode == 2 and code in done.stderr and text in done.stderr, done.stderr
        assert done.stdout == "" and not out.exists()


def test_export_of_averages(made: Made, here: Here, tmp_path: Path) -> None:
    none = here("export", str(made.checkpoint), str(tmp_path / "o"), "--weights", "ema")
    assert none.returncode == 2 and "E-CKPT-036" in none.stderr
    manifest = read_manifest(open_folder(str(made.checkpoint)))
    raw, mean = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    tensors = {name: raw.clone() for name in ("param/a", "param/b", "opt/m/a", "state/c")} | {"ema/a": mean}
    save_file(tensors, tmp_path / "part")
    data = (tmp_path / "part").read_bytes()
    part = {"name": "part", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    found = Found(open_folder(str(tmp_path)), replace(manifest, files=[part]))
    for averaged, first in ((False, raw), (True, mean)):
        export(found, tmp_path / "out", force=True, averaged=averaged)
        written = load_file(tmp_path / "out")
        assert list(written) == ["a", "b", "c"] and torch.equal(written["a"], first) and torch.equal(written["b"], raw)


def test_eval_is_the_runs_own_evaluation(made: Made, here: Here) -> None:
    own = {r["name"]: r["value"] for r in made.metrics if r["type"] == "metric" and r["step"] == 20 and _is_eval(r)}
    done = sexpgpu("eval", DIGITS, "--resume", str(made.checkpoint), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["step"] == 20 and said["run"] == "train" and said["checkpoint"] == str(made.checkpoint)
    values = said["evals"]["valid"]
    assert set(values) == {"loss", "accuracy"} and len(own) >= 2
    for name, value in values.items():
        assert value in [v for n, v in own.items() if n.split("/")[-1] == name], (name, value, own)
    table = here("eval", DIGITS, "train", "--resume", "latest", "--checkpoint-dir", str(made.location))
    assert table.returncode == 0 and f"{values['loss']:.6g}" in table.stdout, table.stderr
    assert [p.name for p in made.location.iterdir() if p.is_dir()] == ["step-20"]


def _is_eval(record: dict) -> bool:
    return bool((record.get("metadata") or {}).get("eval"))


def test_eval_of_another_program(made: Made, here: Here, tmp_path: Path) -> None:
    at = ["--resume", str(made.checkpoint)]
    for words, code in (
        ([DIGITS, *at, "--set", "hidden=32"], "E-CKPT-020"),
        ([DIGITS, *at, "--variant", "wide"], "E-CKPT-020"),
        ([DIGITS, *at, "--set", "lr=1e-4"], "E-CKPT-021"),
        ([DIGITS, "trian", *at], "E-RUN-102"),
        ([DIGITS], "E-CKPT-032"),
        ([DIGITS, "--resume", str(made.location)], "E-CKPT-001"),
        ([DIGITS, "--resume", "latest", "--checkpoint-dir", str(tmp_path / "none")], "E-CKPT-001"),
    ):
        done = here("eval", *words)
        assert done.returncode == 2 and code in done.stderr and done.stdout == "", (words, done.stderr)
    accepted = here("eval", DIGITS, *at, "--set", "lr=1e-4", "--accept")
    assert accepted.returncode == 0 and "differs" in accepted.stderr, accepted.stderr


def test_eval_of_a_file_without_evaluations(made: Made, here: Here, tmp_path: Path) -> None:
    text = (ROOT / DIGITS).read_text("utf-8")
    (tmp_path / "digits.lisp").write_text(text[: text.index("(defeval")], encoding="utf-8")
    done = here("eval", str(tmp_path / "digits.lisp"), "--resume", str(made.checkpoint))
    assert done.returncode == 2 and "E-CKPT-033" in done.stderr, done.stderr


def test_predict_is_the_layer_on_the_checkpoints_weights(made: Made, here: Here, tmp_path: Path) -> None:
    rows = np.random.default_rng(3).random((70, 64)).astype(np.float32)  # a batch of 64, and one of 6
    np.savez(tmp_path / "x.npz", image=rows)
    words = ["--resume", str(made.checkpoint), "--input", str(tmp_path / "x.npz"), "--out", str(tmp_path / "y.npz")]
    done = sexpgpu("predict", DIGITS, "perceptron", *words)
    assert done.returncode == 0 and "f32[70 10]" in done.stdout, done.stderr
    w = load_file(made.checkpoint / "part-00001-of-00001.safetensors")
    hidden = torch.relu(torch.from_numpy(rows) @ w["param/perceptron/in/weight"] + w["param/perceptron/in/bias"])
    expected = hidden @ w["param/perceptron/out/weight"] + w["param/perceptron/out/bias"]
    with np.load(tmp_path / "y.npz") as file:
        assert file.files == ["output"]
        np.testing.assert_allclose(file["output"], expected.numpy(), rtol=1e-5, atol=1e-5)
    again = here("predict", DIGITS, "perceptron", *words)
    assert again.returncode == 2 and "E-CKPT-030" in again.stderr


def test_mistakes_of_predict(made: Made, here: Here, tmp_path: Path) -> None:
    files = {
        "good": {"image": np.zeros((2, 64), np.float32), "label": np.zeros(2, np.int64)},
        "other": {"picture": np.zeros((2, 64), np.float32)},
        "flat": {"image": np.zeros((2, 63), np.float32)},
        "ragged": {"image": np.zeros((2, 64), np.float32), "label": np.zeros(3, np.int64)},
        "wild": {"image": np.zeros((2, 64), np.float32), "label": np.full(2, 10)},
        "none": {"image": np.zeros((0, 64), np.float32)},
    }
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    (tmp_path / "text.npz").write_text("no", encoding="utf-8")
    out, file = tmp_path / "y.npz", tmp_path / "digits.lisp"
    text = (ROOT / DIGITS).read_text("utf-8")
    more = "\n(defun row-loss (image label) (softmax-cross-entropy (perceptron image) label))\n"
    file.write_text(text + more, encoding="utf-8")  # its data is not there, and is not opened
    for function, name, code, said in (
        ("percepton", "good", "E-CKPT-034", "perceptron"), ("hidden", "good", "E-CKPT-034", "hidden"),
        ("digit-loss", "good", "E-CKPT-034", "row"), ("perceptron", "other", "E-CKPT-035", "picture"),
        ("perceptron", "flat", "E-CKPT-035", "63"), ("digit-loss", "ragged", "E-CKPT-035", "rows"),
        ("row-loss", "wild", "E-CKPT-035", "label"), ("perceptron", "none", "E-CKPT-035", "rows"),
        ("perceptron", "text", "E-CKPT-035", "text.npz"), ("perceptron", "absent", "E-CKPT-035", "absent.npz"),
    ):  # fmt: skip
        words = ["--resume", str(made.checkpoint), "--input", str(tmp_path / f"{name}.npz"), "--out", str(out)]
        done = here("predict", str(file), function, *words)
        assert done.returncode == 2 and code in done.stderr and said in done.stderr, (function, name, done.stderr)
        assert not out.exists() and done.stdout == ""
    words = ["--resume", str(made.checkpoint), "--input", str(tmp_path / "good.npz"), "--out", str(out)]
    done = here("predict", str(file), "row-loss", *words)
    assert done.returncode == 0 and "f32[2]" in done.stdout and "digits.lisp has changed" in done.stderr, done.stderr

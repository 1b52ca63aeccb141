"""`:init` and `:keep-best` in whole sessions on a small csv."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from support import HEAD, MODEL, RUN, error, loaded

from sexpgpu import compiler
from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.experiment.model import KeepBest
from sexpgpu.run.best import Best
from sexpgpu.run.checkpoints import manifest as manifests
from sexpgpu.run.checkpoints.export import export
from sexpgpu.run.checkpoints.find import at_path
from sexpgpu.run.checkpoints.manifest import Torn
from sexpgpu.run.checkpoints.store import Store
from sexpgpu.run.events import EvalDone
from sexpgpu.run.options import RunOptions, RunPlan
from sexpgpu.run.session import execute
from sexpgpu.run.storage.file import open_folder
from sexpgpu.run.trained import evaluations

EVAL = "(defeval valid :data (batches d :split valid :batch 8) :every {every} :metrics ((loss f)))"
NAMES = ("model/in/weight", "model/in/bias", "model/out/weight", "model/out/bias")


def planned(folder: Path, text: str, **selection) -> RunPlan:
    if not (folder / "d.csv").exists():
        rows = [f"{i % 7 / 7},{i % 3 - 1},{i % 5 / 5},{i % 5}" for i in range(40)]
        (folder / "d.csv").write_text("x_0,x_1,x_2,label\n" + "\n".join(rows) + "\n")
    found = loaded(folder, text, **selection)
    run = found.experiment.runs["train"]
    traced = compiler.train_graph(found, run)
    return RunPlan(found.experiment, run, lambda: compiler.program(compiler.stages(found, run), "cpu", 1),
                   "ab" * 32, compiler.trajectory(traced, run), compiler.versions())


def go(folder: Path, text: str, where: str, resume: str | None = None, accept: bool = False, **selection) -> str:
    stream = io.StringIO()
    plan = planned(folder, text, **selection)
    assert execute(RunOptions(folder=str(folder), checkpoint_dir=where, resume=resume, accept=accept, stream=stream), plan) == 0
    return stream.getvalue()


def refused(code: str, folder: Path, text: str, where: str = "no", **keys) -> SexpError:
    with pytest.raises(SexpError) as caught:
        go(folder, text, where, **keys)
    assert (caught.value.diagnostic.code, caught.value.diagnostic.exit_code) == (code, 2), caught.value
    assert not list((folder / where).glob("step-*"))
    return caught.value


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "part-00001-of-00001.safetensors")


def steps(folder: Path) -> set[int]:
    return {int(p.name[5:]) for p in folder.glob("step-*")}


# --- :keep-best


def read_manifest(folder):
    return manifests.read_manifest(open_folder(str(folder)))


def rising(keys: str, rate: str = "-1.0", every: int = 2) -> str:
    """The rate's sign decides whether the loss of the evaluation falls or rises."""
    return HEAD + MODEL + EVAL.format(every=every) + RUN.replace("(adamw :lr 1e-3)", f"(sgd :lr {rate})").format(keys)


def test_the_best_is_written_at_its_step_and_never_removed(tmp_path):
    said = go(tmp_path, rising(":keep-best (valid loss) :keep 1 :checkpoint-every 3"), "ck")
    assert steps(tmp_path / "ck") == {2, 10}  # the loss only rises: the first evaluation is the best
    best = read_manifest(tmp_path / "ck" / "step-10").best
    assert best == read_manifest(tmp_path / "ck" / "step-2").best
    assert best["step"] == 2 and "step-2 (valid loss" in said
    go(tmp_path, rising(":keep-best (valid loss max) :keep 1 :checkpoint-every 3"), "most")
    assert steps(tmp_path / "most") == {10}
    assert read_manifest(tmp_path / "most" / "step-10").best["step"] == 10


@pytest.mark.parametrize("best", [3, {"step": 2}, '"x"', {"eval": "valid", "metric": "loss", "largest": False, "step": 2, "value": 10**400}])
def test_a_manifest_with_an_odd_best_is_no_checkpoint(tmp_path, best):
    go(tmp_path, rising(""), "ck")
    path = tmp_path / "ck" / "step-10" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best": best}))
    with pytest.raises(Torn):
        read_manifest(path.parent)


def test_a_resume_goes_on_comparing_and_the_key_is_harmless(tmp_path):
    keys = ":keep-best (valid loss) :keep 1"
    go(tmp_path, rising(keys), "ck", steps=4)
    go(tmp_path, rising(keys), "ck", resume="latest")
    assert steps(tmp_path / "ck") == {2, 10}
    go(tmp_path, rising(":keep 1"), "ck", resume="latest", steps=12)  # no --accept is needed
    assert read_manifest(tmp_path / "ck" / "step-12").best is None
    go(tmp_path, rising(":keep-best (valid loss max) :keep 1"), "ck", resume="latest", steps=14)
    assert read_manifest(tmp_path / "ck" / "step-14").best["largest"] is True


def test_only_finite_improvements_are_the_best():
    def done(step, value, name="valid"):
        return EvalDone(step, name, None, {"loss": value}, 0.0)

    best = Best(KeepBest("valid", "loss"))
    assert not best.take(done(1, float("nan"))) and not best.take(done(1, float("-inf"))) and best.record() is None
    assert best.take(done(2, 3.0)) and not best.take(done(3, 3.0)) and not best.take(done(3, float("nan")))
    assert not best.take(done(3, 1.0, "other"))
    assert best.take(done(4, 2.0))
    best.lost(4)
    record = best.record()
    assert (record["step"], record["value"]) == (2, 3.0)
    assert not Best(KeepBest("valid", "loss"), record).take(done(5, 3.5))
    assert Best(KeepBest("valid", "loss", True), record).take(done(5, 0.5))


def test_a_best_that_is_not_written_is_not_the_best(tmp_path, monkeypatch):
    real = Store.save

    def save(store, state, manifest, keep, cancel):
        if manifest.step == 2:
            raise problem("E-CKPT-012", "full", exit_code=3)
        return real(store, state, manifest, keep, cancel)

    monkeypatch.setattr(Store, "save", save)
    said = go(tmp_path, rising(":keep-best (valid loss) :keep 1"), "ck")
    assert "E-CKPT-012" in said and steps(tmp_path / "ck") == {4, 10}
    assert read_manifest(tmp_path / "ck" / "step-10").best["step"] == 4  # worse than step 2, whose weights are lost


@pytest.mark.parametrize(
    ("code", "keys", "help_line"),
    [
        ("E-EVAL-107", ":keep-best (vaild loss)", "did you mean `valid`?"),
        ("E-EVAL-107", ":keep-best (valid los)", "did you mean `loss`?"),
        ("E-EVAL-107", ":keep-best (valid loss) :evals ()", ""),
        ("E-EVAL-104", ":keep-best (valid loss most)", ""),
        ("E-EVAL-104", ":keep-best (valid)", ""),
        ("E-EVAL-103", ":keep-best valid", ""),
        ("E-EVAL-104", ":init 3", ""),
        ("E-EVAL-104", ':init (from "w" :mop ())', ""),
        ("E-EVAL-103", ":init (from 3)", ""),
        ("E-EVAL-104", ':init (from "w" :map (("a/**" "b")))', ""),
        ("E-EVAL-104", ':init (from "w" :map (("*/a" "b")))', ""),
        ("E-EVAL-104", ':init (from "w" :map (("a**" "b**")))', ""),
        ("E-EVAL-104", ':init (from "w" :map (("a")))', ""),
        ("E-EVAL-107", ':init (from "w" :map (("modle/**" "b/**")))', ""),
    ],
)
def test_wrong_keys(tmp_path, code, keys, help_line):
    d = error(tmp_path, rising(keys), code)
    assert not help_line or help_line in d.help


# --- :init


def starting(init: str, more: str = ":checkpoint-every 1 :keep 99") -> str:
    return rising(f':init (from "w.safetensors"{init}) :seed 5 {more}', "0.1", 5)


@pytest.fixture
def made(tmp_path):
    """A trained location `ck` and the export of it."""
    go(tmp_path, rising("", "0.1"), "ck")
    export(at_path(tmp_path / "ck" / "step-10"), tmp_path / "w.safetensors")
    return tmp_path


def first_state(folder: Path, text: str) -> tuple[dict[str, torch.Tensor], str]:
    """The state before any step: a run of rate 0 stands still."""
    said = go(folder, text.replace("(sgd :lr 0.1)", "(sgd :lr 0.0)"), "first", steps=1)
    return tensors(folder / "first" / "step-1"), said


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_starts_from_the_file(made, shard):
    trained = tensors(made / "ck" / "step-10")
    if shard:
        (made / "ck/step-10/part-00001-of-00001.safetensors").rename(made / "w.safetensors")
    state, said = first_state(made, starting("", ":ema 0.5"))
    for name in NAMES:
        assert torch.equal(state[f"param/{name}"], trained[f"param/{name}"]), name
        assert torch.equal(state[f"ema/{name}"], trained[f"param/{name}"]), name
    assert "4 of 4 tensors" in said


def test_renames_and_absent_names(made):
    plain = load_file(made / "w.safetensors")
    save_file({"old/enc/weight": plain["model/in/weight"], "b": plain["model/out/bias"], "extra": torch.zeros(2)}, made / "w.safetensors")
    state, said = first_state(made, starting(' :map (("model/in/**" "old/enc/**") ("model/out/bias" "b"))'))
    assert torch.equal(state["param/model/in/weight"], plain["model/in/weight"])
    assert torch.equal(state["param/model/out/bias"], plain["model/out/bias"])
    assert not torch.equal(state["param/model/out/weight"], plain["model/out/weight"])
    assert "2 of 4 tensors" in said and "model/in/bias, model/out/weight" in said


def test_a_resume_needs_no_file_and_gives_the_same_bits(made):
    go(made, starting(""), "whole")
    go(made, starting(""), "cut", steps=4)
    (made / "w.safetensors").unlink()
    go(made, starting(""), "cut", resume="latest")
    whole, cut = tensors(made / "whole" / "step-10"), tensors(made / "cut" / "step-10")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[n], cut[n]) for n in whole)
    found = at_path(made / "whole" / "step-10")
    comparison, _ = evaluations(found, planned(made, starting("")), False, lambda text: None)
    assert not comparison.changing
    refused_text = starting(' :map (("model/**" "model/**"))')
    with pytest.raises(SexpError, match="E-CKPT-021|trajectory"):
        go(made, refused_text, "cut", resume="latest", steps=12)
    with pytest.raises(SexpError):
        go(made, rising(":seed 5", "0.1", 5), "cut", resume="latest", steps=12)


def test_the_digest_is_part_of_the_trajectory(made):
    go(made, starting(""), "a", steps=1)
    save_file({k: v + 1 for k, v in load_file(made / "w.safetensors").items()}, made / "w.safetensors")
    go(made, starting(""), "b", steps=1)
    a, b = (read_manifest(made / name / "step-1").trajectory for name in ("a", "b"))
    assert {k for k in a if a[k] != b[k]} == {"init file"} and a.keys() == b.keys()


def test_every_mismatch_is_listed_before_anything_is_made(made):
    plain = load_file(made / "w.safetensors")
    plain["model/in/weight"] = torch.zeros(3, 9)
    plain["model/out/bias"] = plain["model/out/bias"].double()
    save_file(plain, made / "w.safetensors")
    notes = refused("E-DATA-042", made, starting("")).diagnostic.notes
    assert sorted(notes) == ["model/in/weight: f32[3 9] in the file, f32[3 4] in the program",
                             "model/out/bias: f64[5] in the file, f32[5] in the program"]


@pytest.mark.parametrize("kind", ["missing", "folder", "words", "cut", "long header", "other names"])
def test_files_that_cannot_be_used(made, kind):
    path = made / "w.safetensors"
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "words":
        path.write_text("weights, honestly")
    elif kind == "cut":
        path.write_bytes(data[:-4])
    elif kind == "long header":
        path.write_bytes(struct.pack("<Q", (64 << 20) + 1) + b"{}")
    elif kind == "other names":
        save_file({"x": torch.zeros(1)}, path)
    code = {"missing": "E-DATA-040", "folder": "E-DATA-040", "other names": "E-DATA-043"}.get(kind, "E-DATA-041")
    refused(code, made, starting(""))


@pytest.mark.parametrize("entry", [{"dtype": "F32"}, 3, {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]},
                                   {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}])
def test_hostile_headers(made, entry):
    header = json.dumps({"model/in/weight": entry}).encode()
    (made / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    refused("E-DATA-041", made, starting(""))

"""Checkpoints beside the steps, lineage, forks, and what a resume says of differences; through the real command."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import manifest, points, run, status, steps, write

from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.run.checkpoints.manifest import Torn
from sexpgpu.run.checkpoints.tensors import HostCopy, decode, encode, groups, state_digest
from sexpgpu.run.checkpoints.writer import Writer
from sexpgpu.run.events import Saved
from sexpgpu.run.storage.file import FolderStorage


def changed(folder, old, new):
    path = folder / "r.lisp"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- the format


def test_files_are_safetensors_and_read_back(tmp_path):
    state = {"param/a": torch.randn(3, 5), "param/b": torch.tensor(2.5, dtype=torch.float64), "state/n": torch.tensor([1, 2], dtype=torch.int32),
             "opt/m": torch.randn(7).bfloat16(), "opt/flag": torch.tensor([True, False, True]), "opt/none": torch.empty(0, 4), "opt/h": torch.randn(2).half()}
    data = b"".join(bytes(piece) for piece in encode(state))
    (tmp_path / "x.safetensors").write_bytes(data)
    for found in (load_file(tmp_path / "x.safetensors"), dict(decode(bytearray(data)))):
        assert found.keys() == state.keys()
        assert all(found[n].dtype == t.dtype and found[n].shape == t.shape and torch.equal(found[n], t) for n, t in state.items())
    save_file(state, tmp_path / "y.safetensors")
    theirs = dict(decode(bytearray((tmp_path / "y.safetensors").read_bytes())))
    assert state_digest(theirs) == state_digest(state)


@pytest.mark.parametrize("spoil", [
    lambda h: h["a"].update(data_offsets=[4, 16]), lambda h: h["a"].update(shape=[4]), lambda h: h["a"].update(shape=[-3]),
    lambda h: h["a"].update(data_offsets=[0, 800]), lambda h: h["a"].update(dtype="F99"), lambda h: h.pop("a"),
    lambda h: h.update(b={"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}), lambda h: h["a"].pop("shape")])
def test_headers_are_not_trusted(spoil):
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}
    spoil(header)
    text = json.dumps(header).encode()
    with pytest.raises((Torn, KeyError, ValueError, TypeError)):
        dict(decode(bytearray(len(text).to_bytes(8, "little") + text + bytes(12))))


def test_groups_never_divide_a_tensor(monkeypatch):
    monkeypatch.setattr("sexpgpu.run.checkpoints.tensors.PART_BYTES", 40)
    cut = groups({name: torch.zeros(n) for name, n in (("c", 4), ("a", 8), ("b", 20), ("d", 5))})
    assert [list(group) for group in cut] == [["a"], ["b"], ["c", "d"]]


def test_a_copy_is_not_changed_by_later_steps():
    tensor = torch.arange(6.0).reshape(2, 3).T
    copy = HostCopy().take({"x": tensor})["x"]
    tensor.mul_(2)
    assert copy.is_contiguous() and copy.tolist() == [[0, 3], [1, 4], [2, 5]]


# --- beside the steps


def test_one_is_in_flight_and_the_next_one_waits():
    gate, order = threading.Event(), []

    def prepare(step, owed):
        order.append(f"copy {step}")

        def write_(cancel):
            if step == 1:
                gate.wait(30)
            if step == 2:
                raise problem("E-CKPT-012", "full", exit_code=3)
            order.append(f"wrote {step}")
            return Saved(step, "here")

        return write_

    told = []
    writer = Writer(prepare, lambda saved: told.append(saved.step))
    assert writer.begin(1) == [] and writer.poll() == []
    threading.Timer(0.1, gate.set).start()
    ended = writer.begin(2)
    assert [(o.step, o.saved.step) for o in ended] == [(1, 1)] and order == ["copy 1", "wrote 1", "copy 2"]
    ended = writer.finish()
    assert ended[0].step == 2 and ended[0].error.diagnostic.code == "E-CKPT-012" and told == [1]
    assert writer.finish() == []


def test_a_bug_in_the_writing_thread_is_not_swallowed():
    def prepare(step, owed):
        def write_(cancel):
            raise ZeroDivisionError
        return write_

    writer = Writer(prepare)
    writer.begin(1)
    with pytest.raises(ZeroDivisionError):
        writer.finish()


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    write(tmp_path, steps=40, every=5, keys=" :log-every 1")
    real, during = FolderStorage.put, []

    def slow(self, name, data, **keys):
        if name == "step-5/manifest.json":
            before, end = status(tmp_path)["checkpoint"], time.monotonic() + 20
            while time.monotonic() < end and "\"step\":8," not in (tmp_path / "m.jsonl").read_text():
                time.sleep(0.01)
            during.append((before, (tmp_path / "m.jsonl").read_text().count('"name":"loss"') >= 8))
        return real(self, name, data, **keys)

    monkeypatch.setattr(FolderStorage, "put", slow)
    assert run(tmp_path) == 0
    assert during == [({"location": str(tmp_path / "ck"), "step": None, "durable": False}, True)]
    assert steps(tmp_path) == [30, 35, 40]


def test_the_status_says_durable_when_it_is_and_not_before(tmp_path, monkeypatch):
    write(tmp_path)
    real, seen = FolderStorage.put, []

    def watched(self, name, data, **keys):
        if name.endswith("manifest.json"):
            seen.append((int(name.split("/")[0][5:]), status(tmp_path)["checkpoint"]))
        return real(self, name, data, **keys)

    monkeypatch.setattr(FolderStorage, "put", watched)
    assert run(tmp_path) == 0
    place = str(tmp_path / "ck")
    assert seen == [(5, {"location": place, "step": None, "durable": False}),
                    *((s, {"location": place, "step": s - 5, "durable": True}) for s in (10, 15, 20))]
    assert status(tmp_path)["checkpoint"] == {"location": place, "step": 20, "durable": True}


# --- lineage


def test_a_fork(tmp_path, capsys):
    write(tmp_path)
    assert run(tmp_path) == 0
    parent = manifest(tmp_path, 10)
    assert run(tmp_path, "--resume", str(tmp_path / "ck/step-10"), location="other") == 0
    said = capsys.readouterr().err
    assert "is a fork of" in said and "at step 10" in said
    for step in (15, 20):
        found = manifest(tmp_path, step, "other")
        assert found["parent"] == {"run_id": parent["run_id"], "step": 10, "digest": parent["digest"]}
        assert found["run_id"] != parent["run_id"] and found["slug"] != parent["slug"]
        assert found["digest"] == manifest(tmp_path, step)["digest"]
    assert steps(tmp_path, "other") == [15, 20] and manifest(tmp_path, 20)["parent"] is None
    # the fork goes on as itself, and keeps its parent
    assert run(tmp_path, "--resume", "latest", "--steps", "23", location="other") == 0
    later = manifest(tmp_path, 23, "other")
    assert later["parent"] == found["parent"] and later["run_id"] == found["run_id"]
    # once more into the same place is another run's place
    assert run(tmp_path, "--resume", str(tmp_path / "ck/step-10"), location="other") == 2
    assert "E-CKPT-007" in capsys.readouterr().err
    assert run(tmp_path, "--resume", str(tmp_path / "ck/step-10")) == 2
    said = capsys.readouterr().err
    assert "E-CKPT-009" in said and "a fork" in said


def test_a_fork_with_a_slug_in_its_location(tmp_path):
    write(tmp_path)
    assert run(tmp_path) == 0
    assert run(tmp_path, "--resume", str(tmp_path / "ck/step-10"), location="forks/{slug}") == 0
    (only,) = (tmp_path / "forks").iterdir()
    assert json.loads((only / "step-20/manifest.json").read_text())["slug"] == only.name


def test_retention_leaves_what_another_run_wrote(tmp_path):
    write(tmp_path, keys=" :keep 1")
    assert run(tmp_path) == 0 and steps(tmp_path) == [20]
    path = tmp_path / "ck/step-20/manifest.json"
    foreign = tmp_path / "ck/step-3"
    foreign.mkdir()
    for file in (tmp_path / "ck/step-20").iterdir():
        (foreign / file.name).write_bytes(file.read_bytes())
    raw = json.loads(path.read_text()) | {"step": 3, "run_id": "f" * 32}
    (foreign / "manifest.json").write_text(json.dumps(raw))
    left = tmp_path / "ck/step-4"
    left.mkdir()
    (left / "part-00001-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "ck/step-2").mkdir()
    (tmp_path / "ck/step-2/notes.txt").write_text("mine")
    assert run(tmp_path, "--resume", "latest", "--steps", "30") == 0
    assert steps(tmp_path) == [3, 30]
    assert not left.exists() and (tmp_path / "ck/step-2/notes.txt").exists()


def test_suspect_ones_of_a_dead_branch_hold_no_place(tmp_path):
    write(tmp_path, keys=" :keep 2")
    assert run(tmp_path, "--steps", "15") == 0
    path = tmp_path / "ck/step-15/manifest.json"
    path.write_text(path.read_text().replace('"healthy"', '"suspect"'))
    assert run(tmp_path, "--resume", "latest", "--steps", "12") == 0  # from 10
    assert steps(tmp_path) == [10, 12]


def test_nothing_is_left_to_do(tmp_path, capsys):
    write(tmp_path)
    assert run(tmp_path, "--steps", "6") == 0
    capsys.readouterr()
    assert run(tmp_path, "--resume", "latest", "--steps", "3") == 0
    assert "has made 6 steps, and 3 are asked for: nothing is left to do" in capsys.readouterr().err
    assert run(tmp_path, "--resume", "latest", "--steps", "6") == 0
    assert "has made all 6 steps: nothing is left to do" in capsys.readouterr().err


# --- differences


@pytest.fixture
def ten(tmp_path):
    write(tmp_path)
    assert run(tmp_path, "--steps", "10") == 0
    return tmp_path


def said(folder, capsys, *flags, code=2):
    capsys.readouterr()
    assert run(folder, "--resume", "latest", *flags) == code
    return capsys.readouterr().err


def test_equal_values_are_equal_whatever_their_spelling(tmp_path, capsys):
    write(tmp_path, scale=" :scale 1/16")
    assert run(tmp_path, "--steps", "10") == 0
    changed(tmp_path, ":scale 1/16", ":scale 0.0625")
    changed(tmp_path, "(defknob lr 0.05", "(defknob lr 1/20")
    text = said(tmp_path, capsys, code=0)
    assert "--accept" not in text and "knob lr:" not in text


@pytest.mark.parametrize(("old", "new", "lines"), [
    (":batch 8", ":batch 4", ["data: batch: was 8, is 4"]),
    ("(x f32 [2])", "(x f32 [2] :scale 2)", ["data: fields: x: scale: was 1.0, is 2.0"]),
    (":shuffle true", ":shuffle false", ["data: shuffle: was true, is false"]),
    ("(train 4/5) (valid 1/5)", "(train 3/5) (valid 2/5)", ["data: split: train: was 4/5, is 3/5", "data: split: valid: was 1/5, is 2/5"]),
    (":seed 1", ":seed 2", ["seed: was 1, is 2"]),
    (":optimizer (adamw :lr lr)", ":optimizer (adamw :lr lr) :clip-norm 1.0", ["clip-norm: was null, is 1.0"]),
    ("(tanh (linear", "(relu (linear", ["graph: differs from the checkpoint's", "r.lisp:5 was `(deflayer net (x) (linear (tanh", "r.lisp:5 is  `(deflayer net (x) (linear (relu"]),
    ("(defknob lr 0.05", "(defknob lr 0.1", ["optimizer: differs", "knob lr: was 0.05, is 0.1"]),
])
def test_each_difference_is_named(ten, capsys, old, new, lines):
    changed(ten, old, new)
    text = said(ten, capsys)
    assert "E-CKPT-021" in text and "--accept" in text
    for line in lines:
        assert line in text, text
    assert run(ten, "--resume", "latest", "--accept") == 0


def test_other_data_are_named_by_what_differs_in_them(ten, capsys):
    path = ten / "d.csv"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows, "9.0,9.0,9.0"]) + "\n")
    text = said(ten, capsys)
    assert "data pts: the content's digest was" in text and "data pts: count: was 40, is 41" in text, text


def test_every_impossible_difference_is_named(ten, capsys):
    changed(ten, "width 4", "width 5")
    changed(ten, ':name "out"', ':name "last"')
    text = said(ten, capsys)
    assert "E-CKPT-020" in text
    for line in ("param/net/in/weight: f32[2 4] in the checkpoint, f32[2 5] in the program", "param/net/in/bias: f32[4]",
                 "param/net/out/weight: the checkpoint has it, the program has not", "param/net/last/weight: the program has it",
                 "knob width: was 4, is 5"):
        assert line in text, text
    assert text.count("opt/") >= 8
    assert "E-CKPT-020" in said(ten, capsys, "--accept")


def test_a_resumed_run_is_the_same_after_every_step(tmp_path):
    write(tmp_path / "whole", keys=" :keep 30")
    assert run(tmp_path / "whole") == 0
    for k in (1, 9, 10, 14):
        write(tmp_path / str(k))
        assert run(tmp_path / str(k), "--steps", str(k)) == 0
        assert run(tmp_path / str(k), "--resume", "latest") == 0
        assert manifest(tmp_path / str(k), 20)["digest"] == manifest(tmp_path / "whole", 20)["digest"]
        whole = points(tmp_path / "whole")
        assert {key: v for key, v in points(tmp_path / str(k)).items() if key in whole} == whole


def test_the_state_is_checked_before_the_program_takes_it(ten, monkeypatch):
    from sexpgpu.run.checkpoints.find import at_path
    from sexpgpu.run.checkpoints.store import load

    found = at_path(ten / "ck/step-10")
    assert state_digest(load(found)) == found.manifest.digest
    monkeypatch.setattr("sexpgpu.run.checkpoints.store.state_digest", lambda tensors: "0" * 64)
    with pytest.raises(SexpError) as error:
        load(found)
    assert error.value.diagnostic.code == "E-CKPT-002"

"""Sentences of contracts.md on status files and resuming, each tried as a stranger would."""

from __future__ import annotations

import json

import pytest

from sexpgpu.diagnostics import SexpError
from sexpgpu.run.checkpoints.compare import Identity, compare
from sexpgpu.run.status import StatusFile


@pytest.mark.parametrize("text", ["(defrun train)", "{}", "[1]", '{"state": "x"}', "image_0,label\n1,2\n", "[" * 5000])
def test_a_status_path_does_not_replace_a_persons_file(tmp_path, text):
    path = tmp_path / "model.lisp"
    path.write_text(text)
    with pytest.raises(SexpError) as caught:
        StatusFile(path)
    d = caught.value.diagnostic
    assert (d.code, d.exit_code) == ("E-RUN-020", 2) and d.help
    assert path.read_text() == text and [p.name for p in tmp_path.iterdir()] == ["model.lisp"]


def test_a_status_path_replaces_an_empty_file_and_an_earlier_status(tmp_path):
    path = tmp_path / "s.json"
    path.touch()
    for _ in range(2):
        StatusFile(path).close()
        assert json.loads(path.read_text())["state"] == "starting"


def test_changed_steps_are_said_once():
    class Old:
        run, steps, trajectory, program, versions, device, ranks, threads = "train", 6, {}, [], {}, "cpu", 1, 1
        knobs, kernels = {"lr": {"value": 1}}, {}

    now = Identity("train", {}, {"lr": {"value": 2}, "run/train/steps": {"value": 8}}, {}, {}, "cpu", 1, 1, steps=8)
    assert compare(Old, now, {}, {}).harmless == ("knob lr: was 1, is 2", ":steps was 6, is 8")

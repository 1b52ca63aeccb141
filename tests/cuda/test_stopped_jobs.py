"""A part of `benchmarks/on_gpu.py` that takes too long: nothing of it runs on beside the next, and it says where it was."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from support_cuda import ROOT

PARENT = """
import subprocess, sys
def wait_for_the_child(child):
    child.wait()
wait_for_the_child(subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]))
"""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("on_gpu")


def test_a_stopped_process_takes_what_it_started_along(on_gpu: Any) -> None:
    """The child holds the pipe too: its end comes when both are gone."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONFAULTHANDLER": "1"})
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    on_gpu.stop(process)
    out, err = process.communicate()
    assert process.returncode < 0 and not out
    told = on_gpu.Done(None, "begun\n", err, 7.4).trouble()
    assert told[0] == "stopped after 7 s" and "begun" in told and any("wait_for_the_child" in line for line in told), (told, err)


def test_a_process_that_ends_by_itself(on_gpu: Any) -> None:
    assert on_gpu.Done(3, "", "one\ntwo\n", 1.0).trouble() == ["exit 3", "one", "two"]

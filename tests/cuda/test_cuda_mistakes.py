"""What goes wrong at run time, and what must not: memory that runs out in a launch, a cache that cannot be written, very large tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support_cuda import ROOT, environment

from sexpgpu import compiler
from sexpgpu.backends.cuda import device, profile
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.cli.main import perform
from sexpgpu.compiler import Selection, load
from sexpgpu.diagnostics import SexpError
from sexpgpu.ops import build


def test_memory_that_runs_out_in_a_launch_names_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(ROOT / "examples/digits.lisp"), Selection(sets=("hidden=8", "batch=4")))
    program = CudaProgram(compiler.stages(loaded, next(iter(loaded.experiment.runs.values())), "cuda"), 1, device="cpu")
    monkeypatch.setattr(device.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout="4242, other, 70000 MiB\n"))

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(program, "_build_step", full)
    with pytest.raises(SexpError) as caught:
        program.step({"image": np.zeros((4, 64), np.float32), "label": np.zeros(4, np.int32)}, False)
    d = caught.value.diagnostic
    assert (d.code, d.exit_code) == ("E-MEM-003", 3)
    notes = " ".join(d.notes)
    assert "20.00 GiB" in notes and "plan: " in notes and "process 4242 (other) uses 70000 MiB" in notes


@pytest.mark.parametrize(("rows", "wide"), [(65536, True), (64, False)])
def test_offsets_have_64_bits_where_a_tensor_needs_them(rows: int, wide: bool) -> None:
    """The logits of GPT-2 at batch 64 have 3.3e9 elements."""
    x = build("input", name="x", dtype="bf16", shape=(rows, 50304), batch=False)
    row = build("input", name="row", dtype="f32", shape=(50304,), batch=False)
    y = build("*", build("cast", x, dtype="f32"), row)
    results = {"y": build("cast", y, dtype="bf16"), "rows": build("logsumexp", y, axis=1), "columns": build("sum", y, axis=0)}
    sources = [e.source for e in Compiled(results, None, "cuda").emitted.values()]
    large = [s for s in sources if "50304" in s]
    assert large and all((".to(tl.int64)" in s) == wide for s in large)


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "examples/data/digits.csv.gz", tmp_path / "data")
    shutil.copy(ROOT / "examples/digits.lisp", tmp_path)
    (tmp_path / "cache").write_text("no folder")
    variables = environment(XDG_CACHE_HOME=str(tmp_path / "cache" / "below"), XDG_STATE_HOME=str(tmp_path / "state"))
    variables.pop("TRITON_CACHE_DIR", None)
    words = ["run", "digits.lisp", "--device", "cuda", "--set", "hidden=4", "--set", "batch=8", "--steps", "2", "--eval-every", "0"]
    done = subprocess.run([sys.executable, "-m", "sexpgpu", *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "E-DEV-007" in done.stderr and "is not used" in done.stderr and "done at step 2" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("profile", "examples/digits.lisp"), ("profile", "examples/digits.lisp", "--json"), ("doctor", "examples/digits.lisp", "--numerics", "--device", "cuda")])
def test_what_looks_at_a_gpu_says_that_there_is_none(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = perform([words[0], str(ROOT / words[1]), *words[2:]])
    said = capfd.readouterr()
    expected = "E-DEV-001" if torch.version.cuda is None else "E-DEV-002"
    assert code == (1 if words[0] == "doctor" else 2) and expected in said.err + said.out and "Traceback" not in said.err + said.out


def test_a_device_that_fills_up_while_it_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(profile, "measured", full)
    monkeypatch.setattr(device.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=""))
    with pytest.raises(SexpError) as caught:
        profile.profile(SimpleNamespace(plan=SimpleNamespace(lines=lambda: ["plan: 11 GiB"])), {})  # type: ignore[arg-type]
    assert caught.value.diagnostic.code == "E-MEM-003" and "plan: 11 GiB" in caught.value.diagnostic.notes


def test_a_torch_without_the_wait_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda._sleep` is no public name."""
    marks: list[int] = []

    class Event:
        def __init__(self, **given: object):
            self.at = 0

        def record(self) -> None:
            marks.append(len(marks))
            self.at = marks[-1]

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)

    monkeypatch.delattr(torch.cuda, "_sleep", raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    done: list[str] = []
    bound = SimpleNamespace(library=SimpleNamespace(forget=lambda: done.append("forgotten")))
    times = profile._on_device([(SimpleNamespace(), lambda: done.append("a")), (SimpleNamespace(), lambda: done.append("b"))], bound)  # type: ignore[list-item, arg-type]
    assert times == [1e-3, 1e-3] and done == ["a", "b", "forgotten"]

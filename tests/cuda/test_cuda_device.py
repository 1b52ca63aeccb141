"""What is wrong with a machine's GPU, faked: each condition has its code, and its message says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sexpgpu.backends.cuda import device
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.cuda.memory import MemoryPlan, check_plan, check_state
from sexpgpu.cli import device as cli
from sexpgpu.cli.main import perform
from sexpgpu.diagnostics import SexpError
from sexpgpu.ir import Origin, Origins
from sexpgpu.ops import build
from sexpgpu.passes.schedule import decompose

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two GPUs, whose facts a test changes."""
    facts = SimpleNamespace(build="12.8", count=2, trouble=None, current=None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def init() -> None:
        if facts.trouble:
            raise RuntimeError(facts.trouble)

    monkeypatch.setattr(torch.version, "cuda", facts.build, raising=False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: facts.count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i=0: (100 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda i=0: 1 << 30)
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: setattr(facts, "current", i))
    return facts


def refused(code: str, chosen: tuple[int, ...] | None = (0,)) -> str:
    with pytest.raises(SexpError) as caught:
        device.open_device(chosen)
    d = caught.value.diagnostic
    assert (d.code, d.exit_code) == (code, 2) and d.help
    return " ".join((d.message, *d.notes, *d.help))


def test_a_gpu_is_opened(machine: SimpleNamespace) -> None:
    opened = device.open_device((1,))
    assert (opened.ordinal, opened.label, machine.current) == (1, "cuda NVIDIA H200", 1)
    assert device.free_memory(opened) == 101 << 30
    machine.count = 1
    assert device.open_device(None).ordinal == 0


def test_a_torch_without_cuda(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None, raising=False)
    assert "built without CUDA" in refused("E-DEV-001")


def test_no_visible_gpu(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.count = 0
    assert "nvidia-smi" in refused("E-DEV-002")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ``" in refused("E-DEV-002")
    machine.trouble = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
    assert "Found no NVIDIA driver" in refused("E-DEV-002")


def test_an_old_driver(machine: SimpleNamespace) -> None:
    machine.trouble = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    text = refused("E-DEV-003")
    assert "found version 11040" in text and "CUDA 12.8" in text


def test_an_ordinal_that_is_not_there(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "device 7, and there are 2 GPUs, 0 … 1" in refused("E-DEV-004", (7,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    machine.count = 1
    text = refused("E-DEV-004", (3,))
    assert "one GPU, number 0" in text and "CUDA_VISIBLE_DEVICES=3" in text


def test_several_gpus_and_none_chosen(machine: SimpleNamespace) -> None:
    text = refused("E-DEV-005", None)
    assert "0: NVIDIA H200" in text and "1: NVIDIA H200" in text and "SEXPGPU_DEVICES=0" in text


def test_no_triton(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert "pip install triton" in refused("E-DEV-008")


def test_an_op_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(decompose._RULES, "random-categorical")
    origins = Origins()
    with origins.at(Origin(paths=("model/choice",))):
        node = build("random-categorical", build("input", name="x", shape=(3, 4), dtype="f32", batch=False), path="p", number=0)
        origins.add(node, Origin(paths=("model/choice",)))
    with pytest.raises(SexpError) as caught:
        Compiled({"y": node}, None, "cuda", origins)
    assert caught.value.diagnostic.code == "E-DEV-006" and "model/choice" in caught.value.diagnostic.message


PLAN = MemoryPlan(1 << 30, 1 << 30, 2 << 30, 0, 0, 6 << 30, 1 << 30, 1 << 20, 64, 1, ())


def test_out_of_memory_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = f"{os.getpid()}, python, 900 MiB\n4242, /usr/bin/other\x1b[31m, 70000 MiB\n"
    monkeypatch.setattr(device.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=rows))
    with pytest.raises(SexpError) as caught, device.memory_errors(PLAN):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    d = caught.value.diagnostic
    assert (d.code, d.exit_code) == ("E-MEM-003", 3)
    text = " ".join(d.notes)
    assert "plan: 11.20 GiB" in text and "process 4242" in text and "70000 MiB" in text and "\x1b" not in text and str(os.getpid()) not in text
    monkeypatch.setattr(device.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
    with pytest.raises(SexpError) as caught, device.memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert any("no other process" in note for note in caught.value.diagnostic.notes)


def test_a_plan_over_the_memory() -> None:
    check_plan(PLAN, 12 << 30)
    check_plan(PLAN, None)
    with pytest.raises(SexpError) as caught:
        check_plan(PLAN, 8 << 30)
    d = caught.value.diagnostic
    assert (d.code, d.exit_code) == ("E-MEM-002", 2) and "11.20 GiB" in d.message and "8.00 GiB" in d.message
    fitting = PLAN.fitting(8 << 30)
    assert 0 < fitting < 64 and f":batch {fitting}" in " ".join(d.help) and ":accumulate 2" in " ".join(d.help)
    smaller = PLAN.moving * fitting // 64 + PLAN.fixed
    assert smaller <= 8 << 30  # what is said to fit does
    light = replace(PLAN, arena=2 << 30)
    for budget, said in ((8 << 30, "which fits"), (6 << 30, "which does not fit either")):
        with pytest.raises(SexpError) as caught:
            check_plan(PLAN, budget, lambda: light)
        assert caught.value.diagnostic.help[-1] == f":remat true takes 7.20 GiB, {said}; with it about :batch {light.fitting(budget)} does"
        assert light.fitting(budget) > PLAN.fitting(budget)
    with pytest.raises(SexpError) as caught:
        check_plan(PLAN, 8 << 30, lambda: PLAN)  # no less with it
    assert not any("remat" in line for line in caught.value.diagnostic.help)
    with pytest.raises(SexpError, match="parameters, gradients"):
        check_state({"param/w": ("f32", (1 << 20, 1 << 10))}, 7 << 30)
    check_state({"param/w": ("f32", (1 << 20, 1 << 10))}, 8 << 30)


def test_the_cache_of_kernels(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert cli.cache(environ) == []
    folder = tmp_path / "sexpgpu/triton"
    assert environ["TRITON_CACHE_DIR"] == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    (warning,) = cli.cache(environ)
    assert warning.code == "E-DEV-007" and warning.severity == "warning" and "others may write" in warning.message
    assert environ["TRITON_CACHE_DIR"] != str(folder) and Path(environ["TRITON_CACHE_DIR"]).is_dir()
    (tmp_path / "file").write_text("")
    (warning,) = cli.cache({"TRITON_CACHE_DIR": str(tmp_path / "file" / "below")})
    assert warning.code == "E-DEV-007" and "file/below" in warning.message


def test_what_is_set_before_torch() -> None:
    for given, device_name, deterministic, name, expected in (
        ({}, "cuda", True, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ({}, "cuda", False, "CUBLAS_WORKSPACE_CONFIG", None),
        ({}, "cpu", True, "CUBLAS_WORKSPACE_CONFIG", None), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "cuda", True, "CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        ({}, "cuda", True, "TRITON_DEFAULT_FP_FUSION", "1"), ({}, "cpu", True, "TRITON_CACHE_DIR", None),
    ):  # fmt: skip
        environ = dict(given)
        cli.prepare(environ, device_name, deterministic)
        assert environ.get(name) == expected, (given, device_name, name)


def test_run_without_cuda_says_so_before_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert perform(["run", str(ROOT / "examples/digits.lisp"), "--device", "cuda"]) == 2
    said = capfd.readouterr()
    assert "E-DEV-001" in said.err and said.out == ""


def test_explain_lowers_without_a_gpu(tmp_path: Path) -> None:
    """Launches, plan and sources on a machine without one."""
    code = f"import sys\nfrom sexpgpu.cli.main import perform\nsys.exit(perform(['explain', {str(ROOT / 'examples/digits.lisp')!r}, '--device', 'cuda', '--after', sys.argv[1]]))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for stage, expected in (("fused", "is the result gradient/perceptron/out/bias"), ("plan", "arena of"), ("triton", "def k_perceptron_forward_relu(")):
        done = subprocess.run([sys.executable, "-c", code, stage], capture_output=True, text=True, env=environ, timeout=120)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    kernels = subprocess.run(
        [sys.executable, "-m", "sexpgpu", "explain", str(ROOT / "examples/digits.lisp"), "--device", "cuda"], capture_output=True, text=True,
        env={**environ, "SEXPGPU_EXPLAIN": "kernels"}, timeout=120,
    )  # fmt: skip
    assert kernels.returncode == 0 and "launches of train on cuda" in kernels.stdout and "library matmul" in kernels.stdout

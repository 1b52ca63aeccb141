"""What `doctor` says of GPUs, with devices that are made up: which are looked at, and what is found where one computes wrongly."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.doctor import Ask, child, kernels
from sexpgpu.ops import build

NAMES = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three GPUs as torch would show them, whose kernels run on the CPU; gives the ordinals that were opened."""
    opened: list[int] = []

    def open_device(chosen: Sequence[int] | None = None) -> None:
        if chosen is None:
            raise problem("E-DEV-005", "3 GPUs are visible, and none is chosen")
        if chosen[0] >= len(NAMES):
            raise problem("E-DEV-004", f"SEXPGPU_DEVICES names device {chosen[0]}, and there are 3 GPUs, 0 … 2")
        opened.append(chosen[0])

    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "open_device", open_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(NAMES))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAMES[int(str(device).partition(":")[2])])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
    return opened


def said(capsys: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_devices_that_are_named(gpus: list[int]) -> None:
    assert kernels.targets({"devices": [0, 2], "asked": True}) == ["cuda:0", "cuda:2"] and gpus == [0, 2]


def test_a_device_that_is_not_there_has_its_code(gpus: list[int], capsys: Any) -> None:
    with pytest.raises(Exception, match="names device 7") as found:
        kernels.targets({"devices": [0, 7], "asked": True})
    assert found.value.diagnostic.code == "E-DEV-004" and gpus == [0]
    assert kernels.targets({"devices": [7], "asked": False}) == [], "a run on the CPU works all the same"
    assert "not usable" in said(capsys)[0]["text"]


def test_none_is_named(gpus: list[int], capsys: Any) -> None:
    assert kernels.targets({"devices": [], "asked": True}) == ["cuda:0", "cuda:1", "cuda:2"]
    assert [line["code"] for line in said(capsys)] == ["E-DEV-005"]
    assert kernels.targets({"devices": [], "asked": False}) == ["cuda:0", "cuda:1", "cuda:2"] and not said(capsys)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each device in turn adds to every result of the CPU's."""
    errors: list[float] = []
    results, bindings = kernels.small_graph()
    right = kernels.compile_graph(results).run(bindings)
    monkeypatch.setattr(kernels, "run_poisoned", lambda *_: {name: value + errors.pop(0) if name == "value" else value for name, value in right.items()})
    return errors


def test_healthy_devices(gpus: list[int], computed: list[float], capsys: Any) -> None:
    computed += [0.0, 0.0, 0.0]
    kernels.each_device(["cuda:0", "cuda:1", "cuda:2"])
    lines = said(capsys)
    assert [line["fact"] for line in lines] == ["cuda:0 (NVIDIA H200)", "cuda:1 (NVIDIA H200)", "cuda:2 (NVIDIA L4)"]
    assert all("agree with the CPU; 100.0 GiB of 140.0 GiB free" in line["text"] for line in lines)


def test_a_device_that_computes_wrongly(gpus: list[int], computed: list[float], capsys: Any) -> None:
    computed += [0.0, float("nan"), 1e9]
    kernels.each_device(["cuda:0", "cuda:1", "cuda:2"])
    found = [line for line in said(capsys) if "code" in line]
    assert {line["code"] for line in found} == {"E-DEV-010"} and any("cuda:1" in line["message"] for line in found) and any("cuda:2" in line["message"] for line in found)
    assert all(line["help"] for line in found)


def test_other_bits_are_a_finding_on_equal_models_alone(gpus: list[int], computed: list[float], capsys: Any) -> None:
    computed += [0.0, 1e-3, 1e-3]  # near enough to the CPU's sum of some thousand squares
    kernels.each_device(["cuda:0", "cuda:1", "cuda:2"])
    found = [line["message"] for line in said(capsys) if "code" in line]
    assert len(found) == 1 and "cuda:1" in found[0] and "other bits than cuda:0" in found[0]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("found", "expected", "says"), [
    ([1.0, 2.0], [1.0, 2.0], ""),
    ([1.0, 2.001], [1.0, 2.0], ""),
    ([1.0, 2.1], [1.0, 2.0], "off by 1.0e-01"),
    ([NAN, INF, 2.0], [NAN, INF, 2.0], ""),
    ([NAN, INF, 2.1], [NAN, INF, 2.0], "off by 1.0e-01"),
    ([NAN, 2.0], [1.0, 2.0], "1 elements that are not finite"),
    ([1.0, 2.0], [1.0, NAN], "1 elements that are not finite"),
    ([-INF, 2.0], [INF, 2.0], "1 elements that are not finite"),
    ([1.0, INF], [NAN, INF], "1 elements that are not finite"),
    ([NAN], [NAN], ""),
    ([], [], ""),
])
def test_how_two_values_differ(found: list[float], expected: list[float], says: str) -> None:
    text = kernels.differs(torch.tensor(found), torch.tensor(expected), 1e-2)
    assert says in text and bool(text) == bool(says)


def test_operations_are_those_of_products() -> None:
    """A graph of many elements and no product is little work; a product of few elements may be much."""
    x, w = (build("input", name=n, dtype="f32", shape=shape, batch=False) for n, shape in (("x", (30, 40)), ("w", (40, 50))))
    assert kernels.operations_of({"y": build("sin", x)}) == 0
    assert kernels.operations_of({"y": build("matmul", x, w), "z": build("sin", build("matmul", x, w))}) == 2 * 30 * 40 * 50


def test_kernels_that_are_late_say_what_they_had_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found before the time was over is told, and half a line is left."""
    said = [{"doing": "the first"}, {"fact": "odd sizes", "text": "agree"}, {"doing": "train: update"}]
    out = "\n".join(map(json.dumps, said)) + '\n{"fact": "hal'

    def late(*words: Any) -> tuple[int, str, str]:
        raise subprocess.TimeoutExpired("kernels", 7, output=out.encode())

    monkeypatch.setattr(child, "finished", late)
    ask = Ask(settings=None, environ={}, folder=str(tmp_path), scratch=tmp_path)  # type: ignore[arg-type]
    told = []
    with pytest.raises(SexpError) as found:
        for fact in child.kernels(ask, {}, 7.0):
            told.append(fact)
    assert told == [("odd sizes", "agree")]
    assert found.value.diagnostic.code == "E-ENV-020" and "train: update" in found.value.diagnostic.message

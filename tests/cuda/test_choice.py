"""Choices of algorithms: what is measured, kept, taken from a file or a checkpoint, and what happens where the library fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vendor import Library, Vendor

from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda.choice import APART, Choices, pick
from sexpgpu.backends.cuda.cublaslt import Product

FIRST, SECOND = "1.1.6.2.3.4.5.7.8", "2.1.6.2.3.4.5.7.8"  # what `Vendor` proposes


def aligned(*shape: int) -> torch.Tensor:
    """f32 that begins at a multiple of 256 bytes, as on a device: an algorithm depends on it."""
    count = shape[0] * shape[1]
    room = torch.empty(count + 64)
    return room[(-room.data_ptr() % 256) // 4 :][:count].view(shape)


class Case:
    """A product and its ways on the CPU."""

    def __init__(self, vendor: Vendor | None = None):
        g = torch.Generator().manual_seed(0)
        self.a, self.b = aligned(300, 8).normal_(generator=g), aligned(8, 24).normal_(generator=g)
        self.out = aligned(300, 24)
        self.lt, self.apart_calls = Library(vendor or Vendor()), 0

    def make(self) -> Product:
        return Product(self.a, self.b, self.out, lt=self.lt)

    def apart(self) -> None:
        self.apart_calls += 1
        torch.mm(self.a, self.b, out=self.out)

    def run(self) -> torch.Tensor:
        self.out.fill_(float("nan"))
        choice.run(self.make, self.apart, [self.out])
        torch.testing.assert_close(self.out, self.a @ self.b, rtol=1e-5, atol=1e-5)
        return self.out


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choices:
    found = Choices("device, cuBLASLt 1", tmp_path / "products")
    choice.warn.cache_clear()
    monkeypatch.setattr(choice, "_reached", lambda: True)
    monkeypatch.setattr(choice, "choices", lambda: found)
    monkeypatch.setattr(choice, "measure", lambda product, candidates, apart, outputs, notes: candidates[1].name)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_a_product_is_measured_once_and_kept_on_disk(known: Choices, monkeypatch: pytest.MonkeyPatch):
    case = Case()
    case.run()
    monkeypatch.delattr(choice, "measure")
    case.run()
    assert list(known.used.values()) == [SECOND] and known.measured == 1 and not case.apart_calls
    again = Choices(known.machine, known.folder)
    monkeypatch.setattr(choice, "choices", lambda: again)
    case.run()
    assert again.used == known.used and again.measured == 0
    assert known.path is not None and json.loads(known.path.read_text()) == known.used
    assert any("1 measured now" in line for line in known.lines())


def test_another_machine_or_library_measures_anew(known: Choices, monkeypatch: pytest.MonkeyPatch):
    Case().run()
    other = Choices("device, cuBLASLt 2", known.folder)
    monkeypatch.setattr(choice, "choices", lambda: other)
    Case().run()
    assert other.measured == 1 and len(Choices("", known.folder).disk) == 2


def test_the_choice_of_a_checkpoint_comes_first(known: Choices, monkeypatch: pytest.MonkeyPatch):
    Case().run()
    whole = next(iter(known.used))
    resumed = Choices(known.machine, known.folder)
    monkeypatch.setattr(choice, "choices", lambda: resumed)
    choice.take({"products": {whole: FIRST}})
    Case().run()
    assert resumed.used == {whole: FIRST} and resumed.measured == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choice.used() == {"products": {whole: FIRST}}


def test_ranks_take_the_first_ones_choices_and_only_it_measures(known: Choices, monkeypatch: pytest.MonkeyPatch):
    """Rank 0 knows nothing, measures in its first step, and the other takes that; later products are measured by neither."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said: list[str] = []
    tell = lambda text: said.append(text) or text  # noqa: E731
    choice.agree(tell, True)
    Case().run()
    whole = next(iter(known.used))
    choice.settle(tell)
    assert known.measured == 1 and known.given == {whole: SECOND}
    other = Choices(known.machine, None)
    other.disk = {whole: FIRST, "other": FIRST}
    later = Case()
    later.b, later.out = aligned(8, 32).normal_(), aligned(300, 32)
    monkeypatch.delattr(choice, "measure")
    later.run()
    monkeypatch.setattr(choice, "choices", lambda: other)
    choice.agree(lambda text: said[0], False)
    assert other.given == other.disk == {}
    choice.settle(lambda text: said[1])
    Case().run()
    assert other.used == {whole: SECOND} and other.given == {whole: SECOND}
    later.run()
    assert other.used == known.used and list(other.used.values()) == [SECOND, FIRST] and other.measured == 0 and known.measured == 1


def test_what_no_checkpoint_of_ours_says_is_not_taken(known: Choices):
    for kernels in ({}, {"products": 1}, {"products": {"k": "0" * 4000}}, {"products": {"k": ["1"]}}, {"products": {"k": "1;2"}}, {"products": {"k" * 2000: FIRST}}):
        choice.take(kernels)
    assert not known.given


def test_a_choice_that_is_not_proposed_is_measured_again_and_said(known: Choices, capsys: pytest.CaptureFixture[str]):
    case = Case()
    known.given[f"{known.machine}: {case.make().key}"] = "9.9.9.9.9.9.9.9.9"
    case.run()
    assert list(known.used.values()) == [SECOND] and known.measured == 1
    assert any("is not proposed here" in line for line in known.lines())
    assert capsys.readouterr().err.startswith("not bit-exact: the checkpoint's algorithm")


def test_nothing_is_measured_while_a_graph_is_captured(known: Choices, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(choice, "measure")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    Case().run()
    assert list(known.used.values()) == [FIRST] and not known.disk


@pytest.mark.parametrize("vendor", [Vendor(algorithms=0), Vendor(refuses={"cublasLtMatmulAlgoGetHeuristic": 15}), Vendor(refuses={"cublasLtMatmulDescCreate": 7})], ids=["none", "refused", "undescribed"])
def test_a_product_that_the_library_does_not_have_is_torchs(known: Choices, vendor: Vendor):
    case = Case(vendor)
    case.run()
    case.run()
    assert case.apart_calls == 2 and set(known.used.values()) <= {APART} and known.notes


def test_a_call_that_fails_is_warned_of_once_and_torch_goes_on(known: Choices, capsys: pytest.CaptureFixture[str]):
    case = Case(Vendor(refuses={"cublasLtMatmul": 13}))
    case.run()
    case.run()
    assert case.apart_calls == 2 and list(known.used.values()) == [APART]
    said = capsys.readouterr().err
    assert said.count("warning[E-DEV-012]") == 1 and "execution failed" in said


def test_a_library_that_is_not_there_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def gone() -> Choices:
        raise choice.Unavailable("libcublasLt is not there: no file")

    choice.warn.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "choices", gone)
    case = Case()
    case.run()
    assert case.apart_calls == 1 and choice.used() == {} and choice.lines() == []
    assert capsys.readouterr().err.count("warning[E-DEV-012]") == 1


def test_without_the_switch_everything_is_torchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "SWITCH", choice.Switch(products=False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case = Case()
    case.run()
    assert case.apart_calls == 1


def test_a_file_that_others_may_write_is_not_read(known: Choices):
    Case().run()
    assert known.path is not None
    known.path.chmod(0o666)
    assert Choices(known.machine, known.folder).disk == {}
    known.path.chmod(0o600)
    known.path.write_text("{ cut")
    assert Choices(known.machine, known.folder).disk == {}


def test_a_folder_that_cannot_be_made_is_said_in_the_report(tmp_path: Path):
    (tmp_path / "file").write_text("")
    found = Choices("device", tmp_path / "file" / "products")
    found.keep("1x1x1x1", FIRST, True)
    assert found.used and any("choices are not kept" in line for line in found.lines())


def test_the_fastest_that_is_right_and_repeats_is_picked():
    out, said = torch.empty(300, 4), []
    calls = iter(range(100))
    ways = {
        APART: lambda: out.fill_(1.0),
        "wrong": lambda: out.fill_(1.5),
        "partial": lambda: out[1:].fill_(1.0),
        "unsteady": lambda: out.fill_(1.0 + 1e-6 * next(calls)),
        "right": lambda: out.fill_(1.0),
        "slow": lambda: out.fill_(1.0),
    }
    times = {APART: 1.0, "wrong": 0.1, "partial": 0.2, "unsteady": 0.3, "right": 0.5, "slow": 0.9}
    assert pick(times, ways, [out], None, said.append) == "right"
    assert [text.split(" ")[0] for text in said] == ["wrong", "partial", "unsteady"] and "bits do not repeat" in said[2]
    assert pick({**times, APART: 0.05}, ways, [out], None, said.append) == APART
    assert pick({APART: 1.0, "slow": 0.5, "right": 0.499}, ways, [out], None, said.append) == "slow"


def test_what_adds_to_a_result_is_compared_from_one_start():
    out = torch.full((4, 4), 2.0)
    ways = {APART: lambda: out.add_(1.0), "right": lambda: out.add_(1.0), "over": lambda: out.fill_(1.0)}
    assert pick({APART: 1.0, "over": 0.1, "right": 0.2}, ways, [out], out.clone(), [].append) == "right"


def test_what_is_not_finite_anyway_is_not_held_against_an_algorithm():
    out = torch.empty(2, 2)
    ways = {APART: lambda: out.copy_(torch.tensor([[float("inf"), 1.0], [2.0, 3.0]])), "same": lambda: out.copy_(torch.tensor([[float("inf"), 1.0], [2.0, 3.0]]))}
    assert pick({APART: 1.0, "same": 0.5}, ways, [out], None, [].append) == "same"


class Clock:
    """A device whose ways are throttled when they run alone: ms in turns, and ms of a block of its own."""

    def __init__(self, ways: dict[str, tuple[float, float]], monkeypatch: pytest.MonkeyPatch):
        self.now, self.row, self.last = 0.0, 0, ""
        outer = self

        class Event:
            def __init__(self, enable_timing: bool):
                self.at = 0.0

            def record(self) -> None:
                self.at = outer.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def __init__(self, name: str):
                self.name = name

            def replay(self) -> None:
                outer.row = outer.row + 1 if outer.last == self.name else 0
                outer.last = self.name
                outer.now += 10 * ways[self.name][outer.row > 3]

        monkeypatch.setattr(choice.torch.cuda, "Event", Event)
        self.graphs = {name: (Graph(name), 10) for name in ways}


def test_finalists_are_timed_under_their_own_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest in turns takes more power, and is the slower one in a long run; one that is far behind is not timed again."""
    ways = {"apart": (0.30, 0.30), "1.2": (0.20, 0.26), "3.4": (0.205, 0.22)}
    clock = Clock(ways, monkeypatch)
    found = choice._sustained(clock.graphs, {name: burst for name, (burst, _) in ways.items()})  # type: ignore[arg-type]
    assert min(found, key=found.__getitem__) == "3.4" and abs(found["3.4"] - 0.22) < 0.01 and abs(found["1.2"] - 0.26) < 0.01
    assert found["apart"] > found["1.2"]


def test_one_finalist_needs_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"apart": (0.30, 0.30), "1.2": (0.20, 0.26)}, monkeypatch)
    assert choice._sustained(clock.graphs, {"apart": 0.30, "1.2": 0.20}) == {"apart": 0.30, "1.2": 0.20}  # type: ignore[arg-type]
    assert clock.now == 0

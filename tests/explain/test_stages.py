"""Stages of the example programs and what passes change, against goldens; the stages' own rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.load import Selection
from sexpgpu.explain.stages import GRAPHS, STAGES, Traced, after, changed, pretty, watched
from sexpgpu.ir import postorder
from sexpgpu.ir.text import graph_text, read_graph
from sexpgpu.read.printer import print_form, same
from sexpgpu.read.reader import read
from sexpgpu.source import Source


def _goldens() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explain_goldens", Path(__file__).parent / "goldens.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


goldens = _goldens()


@pytest.mark.parametrize("example", goldens.EXAMPLES)
def test_goldens(example: str) -> None:
    found = goldens.dumps(example)
    kept = {path.name for path in goldens.HERE.glob(f"{example}.*")}
    assert kept == set(found)
    wrong = [name for name, text in found.items() if (goldens.HERE / name).read_text("utf-8") != text]
    assert not wrong, f"{wrong} differ: look at what changed, then `python tests/explain/goldens.py`"


@pytest.fixture(scope="module")
def own() -> Traced:
    return goldens.traced("own_optimizer")


def test_forms_and_expansions_read_back(own: Traced) -> None:
    main = own.loaded.ev.loader.main
    again = read(Source("again", after(own, "forms")))
    assert len(again) == len(main.forms) and all(same(a, b) for a, b in zip(again, main.forms, strict=True))
    assert "(chain image" in after(own, "forms") and "(chain image" not in after(own, "expanded")
    assert "(linear (relu (linear image hidden :name \"in\")) 10 :name \"out\")" in after(own, "expanded")
    assert "(blend" not in after(own, "expanded").split("(defoptimizer")[1]


def test_graphs_read_back_and_keep_their_results(own: Traced) -> None:
    results = set(own.graph("differentiated"))
    for stage in GRAPHS:
        text = after(own, stage)
        assert read_graph(text) == dict(own.graph(stage)), stage
        assert "; knob hidden 128" in text
        if stage != "ir":
            assert set(own.graph(stage)) == results
    assert not [n for n in postorder(own.graph("simplified").values()) if n.op in ("grad", "gradient")]


def test_a_difference_names_exactly_what_went_and_came(own: Traced) -> None:
    text = changed(own, "ir", "simplified").splitlines()
    a, b = own.graph("ir"), own.graph("simplified")
    old, new = set(postorder(a.values())), set(postorder(b.values()))
    assert sum(line.startswith("-%") for line in text) == len(old - new)
    assert sum(line.startswith("+%") for line in text) == len(new - old)
    lines_a, lines_b = graph_text(a).splitlines(), graph_text(b).splitlines()
    assert all(line[1:] in (lines_a if line[0] == "-" else lines_b) for line in text if line[1:2] == "%")
    assert "are the same" in text[2] and str(len(old & new)) in text[2]
    same_stage = changed(own, "ir", "ir").splitlines()
    assert len(same_stage) == 3, "nothing went, nothing came"


def test_no_such_stage(own: Traced) -> None:
    with pytest.raises(SexpError) as found:
        after(own, "simplifed")
    assert found.value.diagnostic.code == "E-ENV-006" and "simplified" in " ".join(found.value.diagnostic.help)
    assert set(GRAPHS) <= set(STAGES)


@pytest.mark.parametrize("text", ["(a)", "()", "[1 2]", f"(f {' '.join(['long-name'] * 40)})", "'(quote x)", f"[{' '.join(['12345'] * 40)}]"])
def test_pretty_reads_back(text: str) -> None:
    form = read(Source("x", text))[0]
    printed = pretty(form)
    assert same(read(Source("y", printed))[0], form)
    assert len(print_form(form)) <= 110 or "\n" in printed


def test_a_deep_form_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "deep.lisp"
    file.write_text("(defparameter x '" + "(" * 900 + ")" * 900 + ")")
    loaded = watched(str(file), Selection())
    form = loaded.ev.loader.main.forms[0]
    assert same(read(Source("again", pretty(form)))[0], form)

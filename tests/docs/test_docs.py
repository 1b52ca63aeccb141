"""The docs agree with the code: links resolve, generated parts are current, code blocks read, commands parse."""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from sexpgpu.cli.main import COMMANDS, cli
from sexpgpu.compiler import Selection, load, train_graph
from sexpgpu.diagnostics.core import CATALOGUE
from sexpgpu.read.reader import read
from sexpgpu.settings import VARIABLES
from sexpgpu.source import Source

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "llms.txt", ROOT / "examples/README.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PROMISED = [  # other pages and the outside link here
    "devices.md#memory",
    "devices.md#several-gpus",
    "devices.md#several-nodes",
    "run.md#the-run-slug",
    "checkpoints.md#resume",
    "metrics.md#targets",
    "lisp.md#evaluation-limits",
    "explain.md#the-lowering-report",
    "knobs.md#the-selection",
]


DIGITS = '(defdata digits (csv "d.csv" :fields ((image f32 [64]) (label i32))) :split ((train 4/5) (valid 1/5)))\n'
GIVEN = {
    "digit-loss": "(defun digit-loss (image label) (cross-entropy (linear image 10) label))\n",
    "digit-accuracy": "(defun digit-accuracy (image label) (mean (cast (= (argmax (linear image 10) :axis -1) label) f32)))\n",
}


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    text = FENCE.sub("", page.read_text("utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page:line, text) of each code block of a language."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append((f"{page.relative_to(ROOT).as_posix()}:{line}", match[2]))
    return found


def generator():
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(to), f"{page.name}: {target}; there are {sorted(anchors(to))}"


@pytest.mark.parametrize("target", PROMISED)
def test_promised_headings(target: str) -> None:
    path, anchor = target.split("#")
    assert anchor in anchors(ROOT / "docs" / path)


def test_index_names_every_page() -> None:
    index = (ROOT / "llms.txt").read_text("utf-8")
    missing = [p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md")]
    missing = [p for p in missing if f"]({p})" not in index]
    assert not missing, f"llms.txt does not name {missing}"


@pytest.mark.parametrize("name", ["errors.md", "environment.md", "ops.md", "functions.md", "stdlib.md"])
def test_generated_pages_are_current(name: str) -> None:
    pages = {path.name: text for path, text in generator().pages().items()}
    now = (ROOT / "docs" / name).read_text("utf-8") if (ROOT / "docs" / name).exists() else ""
    assert now == pages[name], f"docs/{name} is not current: run `python docs/generate.py` and look at what changed"


def test_environment_names_each_variable_and_no_other() -> None:
    text = (ROOT / "docs/environment.md").read_text("utf-8")
    ours = {v.name for v in VARIABLES}
    rows = set(re.findall(r"^\| `([A-Z0-9_]+)` \|", text, re.M))
    assert rows == ours
    named = set(re.findall(r"`((?:SEXPGPU|FLASHCART|SYVAIN|AWS)_[A-Z0-9_]+)(?:=[^`]*)?`", text))
    for page in PAGES:
        named |= set(re.findall(r"\b(?:SEXPGPU|FLASHCART|SYVAIN)_[A-Z0-9_]*[A-Z0-9]\b", page.read_text("utf-8")))
    assert named <= ours, f"the docs name {sorted(named - ours)}, which no row of settings.py has"


def test_run_page_names_each_flag() -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    flags = {o for p in command.params for o in p.opts if o.startswith("--")} - {"--help"}
    text = (ROOT / "docs/run.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(--[a-z-]+)", text, re.M)) == flags


def test_every_code_has_a_title_and_a_page() -> None:
    for family, module in CATALOGUE.items():
        for code, found in import_module(module).CODES.items():
            assert re.fullmatch(rf"[EW]-{family}-[0-9]{{3}}", code), code
            assert found.title and len(found.page.split()) >= 8, f"{code}: a title, and a page of a sentence or more"


def test_no_code_has_two_entries() -> None:
    """Families are put together from several files, where the later entry would win without a word."""
    folder = ROOT / "sexpgpu" / "diagnostics" / "catalogue"
    found = [code for path in folder.glob("*.py") for code in re.findall(r'"([EW]-[A-Z]+-[0-9]{3})": Entry', path.read_text("utf-8"))]
    assert len(found) > 100 and sorted(found) == sorted(set(found))


def test_every_code_that_is_raised_is_in_the_catalogue() -> None:
    known = {code for module in CATALOGUE.values() for code in import_module(module).CODES}
    raised: dict[str, str] = {}
    for path in (ROOT / "sexpgpu").rglob("*.py"):
        if path.parent.name == "catalogue":
            continue
        for code in re.findall(r"[\"']([EW]-[A-Z]+-[0-9]{3})[\"']", path.read_text("utf-8")):
            raised.setdefault(code, path.relative_to(ROOT).as_posix())
    missing = {code: place for code, place in raised.items() if code not in known}
    assert not missing, f"add entries to sexpgpu/diagnostics/catalogue/: {missing}"
    assert not known - set(raised), f"entries that nothing raises: {sorted(known - set(raised))}"


@pytest.mark.parametrize(("place", "text"), blocks("lisp"), ids=lambda v: v if ".md:" in v else "")
def test_lisp_blocks_evaluate(place: str, text: str, tmp_path: Path) -> None:
    """Each block is a program, with the library and a source `digits` where it brings none; its runs are traced."""
    assert read(Source(place, text)), place
    given = "" if "(import" in text else '(import "nn" "optim" "loss")\n'
    given += "" if "(defdata digits" in text or "batches digits" not in text else DIGITS
    given += "".join(definition for name, definition in GIVEN.items() if re.search(rf"[( ]{name}[) \n]", text) and f"({name} " not in text.replace("(defun", ""))
    file = tmp_path / "block.lisp"
    file.write_text(given + text, encoding="utf-8")
    loaded = load(str(file), Selection())
    for run in loaded.experiment.runs.values():
        train_graph(loaded, run)


@pytest.mark.parametrize(("place", "text"), blocks("console"), ids=lambda v: v if ".md:" in v else "")
def test_commands_parse(place: str, text: str) -> None:
    for line in re.sub(r"\\\n", " ", text).splitlines():
        for part in line.removeprefix("$ ").split("&&"):
            words = shlex.split(part, comments=True)
            if words[:1] != ["sexpgpu"]:
                continue
            assert words[1] in COMMANDS, f"{place}: {line}"
            command = cli.get_command(click.Context(cli), words[1])
            assert command is not None
            command.make_context(words[1], words[2:])
            for word in () if place.startswith("docs/tutorial.md") else words[2:]:  # it makes its files: test_walkthroughs.py
                assert not word.endswith(".lisp") or (ROOT / word).exists(), f"{place}: {word}"


def test_no_page_names_a_place_of_this_machine() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        assert not re.search(r"/(?:home|work)/\w", text), page.name

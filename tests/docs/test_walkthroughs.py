"""Pages that run from top to bottom, and the two sides of the tables in docs/from-pytorch.md."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sexpgpu
from sexpgpu.cli.main import perform
from sexpgpu.compiler import Selection, load, train_graph

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
NAME = re.compile(r"`([\w-]+\.lisp)`")
EXIT = re.compile(r"# exit code (\d+)")


def execute(page: Path) -> dict[str, int]:
    """Runs a page's blocks in order in the working directory; how many of each language there were.

    Lisp goes into the file that the text before it names last; commands must exit with 0, or what their comment says; the
    Python blocks are one program.
    """
    text, ran, space = page.read_text("utf-8"), {"lisp": 0, "console": 0, "python": 0}, {"__name__": "page"}
    for match in BLOCK.finditer(text):
        ran[match[1]] += 1
        if match[1] == "lisp":
            Path(NAME.findall(text[: match.start()])[-1]).write_text(match[2], encoding="utf-8")
        elif match[1] == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(match[2], page.name, "exec"), space)  # noqa: S102 - our own page
        else:
            for line in match[2].splitlines():
                assert line.startswith("$ sexpgpu "), line
                expected = EXIT.search(line)
                code = perform(shlex.split(line.removeprefix("$ sexpgpu "), comments=True))
                assert code == (int(expected[1]) if expected else 0), line
    return ran


def test_the_tutorial_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = execute(ROOT / "docs" / "tutorial.md")
    assert min(ran.values()) >= 2 and len(list((tmp_path / "runs").iterdir())) == 3


def test_the_python_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert execute(ROOT / "docs" / "python.md")["python"] >= 5


# --- the tables of from-pytorch.md ------------

HEAD = """(import "nn" "optim" "loss" "schedule")
(defdata points (csv "d.csv" :fields ((x f32 [6]) (label i32))) :split ((train 4/5) (valid 1/5)))
(deflayer model (x) (linear (relu (linear x 8 :name "up")) 6 :name "down"))
(defun my-loss (x label) (cross-entropy (model x) label))
(defun my-accuracy (x label) (accuracy (model x) label))
"""


def rows(section: str) -> list[tuple[str, str]]:
    """The two columns of a section's table."""
    text = (ROOT / "docs" / "from-pytorch.md").read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert all(len(row) == 2 for row in cells)
    return [(left.strip(), right.strip().strip("`")) for left, right in cells]


def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"x": (4, 6), "y": (4, 6), "p": (4, 6), "v": (6,), "z": (2, 3, 8, 8), "k": (5, 3, 3, 3)}
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return found | {"p": found["p"].abs() + 0.1, "i": torch.tensor([0, 5, 2, 2], dtype=torch.int32)}


def free(right: str) -> list[str]:
    """The inputs that an expression names, outside strings."""
    return [n for n in inputs() if re.search(rf"(?<![\w-]){n}(?![\w-])", re.sub(r'"[^"]*"', "", right))]


def module(folder: Path, section: str) -> tuple[Path, list[list[str]]]:
    """A file whose functions row-0, row-1 … are the right-hand sides, and each one's inputs."""
    names = [free(right) for _, right in rows(section)]
    defined = "\n".join(f"(defun row-{n} ({' '.join(names[n])}) {right})" for n, (_, right) in enumerate(rows(section)))
    (folder / "p.lisp").write_text(f"""{HEAD}{defined}
(defun whole (x label) (my-loss x label))
(defrun train :data (batches points :batch 4) :loss whole :optimizer (sgd) :steps 1)""", encoding="utf-8")
    return folder / "p.lisp", names


def test_expressions_have_torchs_values(tmp_path: Path) -> None:
    file, names = module(tmp_path, "Tensors")
    model, given = sexpgpu.load(file), inputs()
    for number, (left, right) in enumerate(rows("Tensors")):
        expected = eval(left.strip("`"), {"torch": torch, "F": F, **given})  # noqa: S307 - our own page
        got = model[f"row-{number}"](*(given[name] for name in names[number]))
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(got.float(), expected.float(), rtol=1e-5, atol=1e-5, msg=f"{left} and {right}")
        else:
            assert got == expected, (left, right)
    assert number > 30


@pytest.mark.parametrize(("left", "right"), rows("Layers"), ids=[left for left, _ in rows("Layers")])
def test_layers_have_torchs_shapes_and_counts(tmp_path: Path, left: str, right: str) -> None:
    given = inputs()
    source = left.strip("`")
    space = {"torch": torch, "nn": nn, **given}
    made = source.rpartition("(")[0] if source.startswith("nn.") and not source.startswith("nn.Parameter") else "nn.Identity()"
    reference = eval(made, space)  # noqa: S307 - our own page
    count = sum(t.numel() for t in reference.parameters()) or 6 * source.startswith("nn.Parameter")
    expected = eval(source, space)  # noqa: S307
    (name,) = free(right)
    field = {"x": "(x f32 [6])", "z": "(z f32 [3 8 8])", "i": "(i i32)"}[name]
    (tmp_path / "p.lisp").write_text(f"""(import "nn" "optim")
(defdata points (csv "d.csv" :fields ({field})))
(defun f ({name}) {right})
(defun whole ({name}) (+ (mean (f {name})) (sum (param "other" [1] :init zeros))))
(defrun train :data (batches points :batch {len(given[name])}) :loss whole :optimizer (sgd) :steps 1)""", encoding="utf-8")
    model = sexpgpu.load(tmp_path / "p.lisp")
    assert model.f(given[name]).shape == expected.shape
    assert sum(t.numel() for t in model.parameters()) - 1 == count


@pytest.mark.parametrize("right", [right for _, right in rows("Training")])
def test_training_keys_are_traced(tmp_path: Path, right: str) -> None:
    data = right if right.startswith("(batches") else "(batches points :split train :batch 8)"
    keys = "" if right.startswith(("(batches", ":every")) else right
    own = keys if ":optimizer" in keys else f"{keys} :optimizer (sgd)"
    evaluation = f"(defeval valid :data (batches points :split valid :batch 4) {right})" if right.startswith(":every") else ""
    (tmp_path / "p.lisp").write_text(f"{HEAD}(defrun train :data {data} :loss my-loss :steps 100 {own})\n{evaluation}", encoding="utf-8")
    loaded = load(str(tmp_path / "p.lisp"), Selection())
    assert train_graph(loaded, loaded.experiment.runs["train"]).new_params

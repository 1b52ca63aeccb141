"""Every example does what its header says: two steps and an evaluation, the parameters of the large one, its data's script."""

from __future__ import annotations

import array
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: file -> further arguments, and metrics of its evaluation
SHIPPED = {
    "char_lm": (["--variant", "tiny"], {"loss"}),
    "conv_digits": (["--variant", "tiny"], {"loss", "accuracy"}),
    "digits": ([], {"loss", "accuracy"}),
    "own_optimizer": ([], {"loss", "accuracy"}),
    "pinn": ([], {"loss", "distance"}),
    "vae": ([], {"loss", "reconstruction", "divergence"}),
    "potential": ([], {"force-error", "relative-force-error", "energy-error-per-atom"}),
}
WITHOUT_DATA = {"gpt2"}
#: one process for several command lines; VmHWM, unlike ru_maxrss, leaves out the memory of the process that started it
SERVE = """
import contextlib, io, json, pathlib, sys
from sexpgpu.cli.main import perform
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        rc = perform(json.loads(line))
    status = pathlib.Path("/proc/self/status")
    peak = next((int(l.split()[1]) / 1024 for l in status.read_text().splitlines() if l.startswith("VmHWM")), 0) if status.exists() else 0
    print(json.dumps([rc, out.getvalue(), err.getvalue(), peak, "torch" in sys.modules]), file=sys.__stdout__, flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """How a command line ended; `peak` is megabytes and `torch` whether it was imported, both up to then in the process."""

    rc: int
    out: str
    err: str
    peak: float
    torch: bool


def sexpgpu(lines: Sequence[Sequence[str]]) -> list[Answer]:
    """Command lines in one process, in order."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SEXPGPU_", "FLASHCART_", "SYVAIN_", "AWS_"))}
    done = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=ROOT, env=clean | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        input="".join(json.dumps(list(words)) + "\n" for words in lines), capture_output=True, encoding="utf-8", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Answer(*json.loads(line)) for line in done.stdout.splitlines()]


def with_tokens(folder: Path) -> Path:
    """A copy of gpt2.lisp beside a token file."""
    (folder / "data").mkdir()
    tokens = array.array("H", [(7 * i * i + i) % 512 for i in range(8_000)])
    if sys.byteorder == "big":
        tokens.byteswap()
    (folder / "data" / "gpt2_tokens.bin").write_bytes(tokens.tobytes())
    return Path(shutil.copy(EXAMPLES / "gpt2.lisp", folder))


def evaluated(file: Path) -> dict[str, float]:
    """Metrics of the evaluation after the last of two steps."""
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert max(r.get("step", 0) for r in records) == 2
    return {
        r["name"]: r["value"] for r in records if r["type"] == "metric" and r["metadata"].get("eval") and r["step"] == 2
    }


def test_no_example_is_forgotten() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.lisp")}
    assert files == set(SHIPPED) | WITHOUT_DATA
    index = (EXAMPLES / "README.md").read_text("utf-8")
    for name in files:
        assert f"`{name}.lisp`" in index, name
        assert (EXAMPLES / f"{name}.lisp").read_text("utf-8").startswith(";;; "), name


@pytest.mark.timeout(240)
def test_two_steps_of_every_example(tmp_path: Path) -> None:
    """One process for all of them, so that torch is imported once."""
    files = {name: EXAMPLES / f"{name}.lisp" for name in SHIPPED} | {"gpt2": with_tokens(tmp_path)}
    words = {name: words for name, (words, _) in SHIPPED.items()} | {"gpt2": ["--variant", "tiny"]}
    expected = {name: metrics for name, (_, metrics) in SHIPPED.items()} | {"gpt2": {"loss"}}
    ends = ["--steps", "2", "--metrics"]
    lines = [["run", str(files[n]), *words[n], *ends, f"jsonl:{tmp_path / n}.jsonl"] for n in files]
    for name, answer in zip(files, sexpgpu(lines), strict=True):
        assert answer.rc == 0, (name, answer.err)
        values = evaluated(tmp_path / f"{name}.jsonl")
        assert set(values) == expected[name], name
        assert all(abs(value) < 1e6 for value in values.values()), (name, values)
    assert 5 < evaluated(tmp_path / "gpt2.jsonl")["loss"] < 7.5  # near log 512 at first


def test_gpt2_is_explained_without_data_or_memory() -> None:
    file = str(EXAMPLES / "gpt2.lisp")
    small, large = sexpgpu([["explain", file, "--variant", "tiny"], ["explain", file]])
    assert small.rc == large.rc == 0, (small.err, large.err)
    assert "parameters of pretrain: 42,880 values" in small.out
    # GPT-2's own count, the padding rows of the vocabulary added
    assert f"parameters of pretrain: {124_439_808 + (50_304 - 50_257) * 768:,} values" in large.out
    for path in ("token", "position", "block/*/self-attention/qkv/weight (x12)", "block/*/feed-forward/out/bias (x12)"):
        assert f"gpt2/{path} " in large.out, path
    assert large.peak < 700 and not large.torch


def test_the_points_are_those_of_the_script() -> None:
    code = "import make_pinn_points as m; print(m.text(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=60,
    )
    assert done.stdout.replace(b"\r\n", b"\n") == (EXAMPLES / "data" / "pinn_points.csv").read_bytes()

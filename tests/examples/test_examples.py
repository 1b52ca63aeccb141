"""Every example does what its header says: two steps and an evaluation, the parameters of the large one, its data's script."""

from __future__ import annotations

import array
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
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


def sexpgpu(lines: Sequence[Sequence[str]]) -> list[tuple[int, str, str, float, bool]]:
    """Command lines in one process, in order: (exit code, stdout, stderr, peak megabytes so far, whether torch is there)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SEXPGPU_", "FLASHCART_", "SYVAIN_", "AWS_"))}
    done = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=ROOT, env=clean | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        input="".join(json.dumps(list(words)) + "\n" for words in lines), capture_output=True, encoding="utf-8", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def evaluated(file: Path) -> dict[str, float]:
    """Metrics of the evaluation after the last of two steps."""
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert max(r.get("step", 0) for r in records) == 2
    return {
        r["name"]: r["value"] for r in records if r["type"] == "metric" and r["metadata"].get("eval") and r["step"] == 2
    }


def two_steps(file: Path, words: Sequence[str], metrics: Path) -> list[str]:
    return ["run", str(file), *words, "--steps", "2", "--metrics", f"jsonl:{metrics}"]


def test_no_example_is_forgotten() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.lisp")}
    assert files == set(SHIPPED) | WITHOUT_DATA
    index = (EXAMPLES / "README.md").read_text("utf-8")
    for name in files:
        assert f"`{name}.lisp`" in index, name
        assert (EXAMPLES / f"{name}.lisp").read_text("utf-8").startswith(";;; "), name


@pytest.mark.timeout(240)
def test_two_steps_of_every_example_with_data(tmp_path: Path) -> None:
    lines = [two_steps(EXAMPLES / f"{n}.lisp", words, tmp_path / f"{n}.jsonl") for n, (words, _) in SHIPPED.items()]
    for (name, (_, metrics)), (rc, _, err, _, _) in zip(SHIPPED.items(), sexpgpu(lines), strict=True):
        assert rc == 0, (name, err)
        values = evaluated(tmp_path / f"{name}.jsonl")
        assert set(values) == metrics, name
        assert all(abs(v) < 1e6 for v in values.values()), (name, values)


def test_gpt2_is_explained_without_data_or_memory() -> None:
    small, large = sexpgpu([["explain", str(EXAMPLES / "gpt2.lisp"), *words] for words in (["--variant", "tiny"], [])])
    assert small[0] == large[0] == 0, (small[2], large[2])
    assert "parameters of pretrain: 42,880 values" in small[1]
    # GPT-2's own count, the padding rows of the vocabulary added
    assert f"parameters of pretrain: {124_439_808 + (50_304 - 50_257) * 768:,} values" in large[1]
    for path in (
        "gpt2/token ",
        "gpt2/position ",
        "gpt2/block/11/self-attention/qkv/weight ",
        "gpt2/block/11/feed-forward/out/bias ",
    ):
        assert path in large[1], path
    assert large[3] < 700 and not large[4]


def test_gpt2_trains_on_a_token_file(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "gpt2.lisp", tmp_path)
    (tmp_path / "data").mkdir()
    tokens = array.array("H", [(7 * i * i + i) % 512 for i in range(8_000)])
    if sys.byteorder == "big":
        tokens.byteswap()
    (tmp_path / "data" / "gpt2_tokens.bin").write_bytes(tokens.tobytes())
    ((rc, _, err, _, _),) = sexpgpu([two_steps(tmp_path / "gpt2.lisp", ["--variant", "tiny"], tmp_path / "m.jsonl")])
    assert rc == 0, err
    assert 5 < evaluated(tmp_path / "m.jsonl")["loss"] < 7.5  # near log 512 at first


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

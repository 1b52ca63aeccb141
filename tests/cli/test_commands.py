"""Commands as a person types them: exit codes, streams, what is imported, messages."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sexpgpu.cli import main, threads
from sexpgpu.diagnostics import InternalError, SexpError, problem
from sexpgpu.run.signals import parse_duration

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "triton", "boto3", "botocore", "rich", "requests"}
DIGITS = "examples/digits.lisp"


def sexpgpu(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SEXPGPU_", "FLASHCART_", "SYVAIN_", "AWS_"))}
    clean |= {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "XDG_STATE_HOME": tempfile.gettempdir(), **environ}
    return subprocess.run(
        [sys.executable, "-m", "sexpgpu", *words], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["run", "--help"], ["explain", "--help"], ["explain", "E-ENV-001"], ["doctor"],
     ["check", DIGITS], ["explain", DIGITS], ["explain", DIGITS, "--ir", "--variant", "wide", "--set", "seed=2"]],
    ids=" ".join,
)  # fmt: skip
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    code = (
        "import sys\nfrom sexpgpu.cli.main import perform\n"
        f"rc = perform({words!r})\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\nsys.exit(rc)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr.rstrip().endswith("HEAVY []"), done.stderr
    assert done.returncode in ((0, 1) if words == ["doctor"] else (0,)), done.stderr
    assert done.stdout


def test_explain_shows_what_the_file_means() -> None:
    done = sexpgpu("explain", DIGITS, "--set", "hidden=32", "--ir")
    assert done.returncode == 0, done.stderr
    for text in (
        "hidden",
        "set",
        "default 128",
        "perceptron/in/weight",
        "f32[64 32]",
        "FLOPs",
        "graph of train",
        "  f32  ",
    ):
        assert text in done.stdout, text


@pytest.mark.parametrize(
    ("words", "message", "guess"),
    [(["rum", "x"], "rum", "`run`"), (["run", "x", "--devise", "cpu"], "--devise", "`--device`"),
     (["run"], "FILE", "sexpgpu run --help"), (["run", "x", "--steps", "1e3"], "1e3", ""),
     (["run", DIGITS, "--set", "hidden"], "name=value", "--set"),
     (["run", "x", "--max-time", "90"], "`90`", "1h30m"), (["explain", "E-ENV-0001"], "no code", "E-ENV-001"),
     (["run", "x", "--device", "gpu"], "--device", "cpu"), (["run", "x", "--metrics", "sylvain"], "sylvain", "syvain"),
     (["run", "x", "--resume", "latest"], "--resume", "--checkpoint-dir")],
)  # fmt: skip
def test_mistakes_on_the_command_line(words: list[str], message: str, guess: str) -> None:
    done = sexpgpu(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and guess in done.stderr and "Traceback" not in done.stderr
    assert "more: sexpgpu explain E-" in done.stderr


@pytest.mark.parametrize("name", ["SEXPGPU_DEVICE", "SEXPGPU_METRICS", "SEXPGPU_CHECKPOINT_DIR", "SEXPGPU_EVAL_LIMIT"])
def test_a_variable_reaches_run(name: str) -> None:
    text = {"SEXPGPU_DEVICE": "gpu", "SEXPGPU_METRICS": "syvain", "SEXPGPU_CHECKPOINT_DIR": "s3://b/p"}.get(name, "0")
    done = sexpgpu("run", DIGITS, **{name: text})
    assert done.returncode == 2 and name in done.stderr and done.stdout == ""


def test_eval_limit_stops_explain() -> None:
    done = sexpgpu("explain", DIGITS, SEXPGPU_EVAL_LIMIT="50")
    assert done.returncode == 2 and "E-EVAL-041" in done.stderr


def test_a_missing_file() -> None:
    for command in ("run", "explain"):
        done = sexpgpu(command, "no-such.lisp")
        assert done.returncode == 2 and "no-such.lisp" in done.stderr and "Traceback" not in done.stderr


def test_doctor() -> None:
    done = sexpgpu("doctor", "--json", SEXPGPU_STATUS="s.json", AWS_SECRET_ACCESS_KEY="hunter2", SEXPGPU_DEVISE="x")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["settings"]["SEXPGPU_STATUS"] == {"value": "s.json", "source": "variable", "via": "SEXPGPU_STATUS"}
    assert said["settings"]["AWS_SECRET_ACCESS_KEY"]["value"] == "***"
    assert "E-ENV-010" in [f["code"] for f in said["findings"]]
    assert "hunter2" not in done.stdout + done.stderr
    text = sexpgpu("doctor", SEXPGPU_MEMORY="much", AWS_SECRET_ACCESS_KEY="hunter2")
    assert text.returncode == 1 and "E-ENV-001" in text.stdout and "hunter2" not in text.stdout


def test_doctor_of_a_file_says_what_it_takes(tmp_path: Path) -> None:
    file = str(Path(__file__).resolve().parents[2] / "examples/digits.lisp")
    fine = sexpgpu("doctor", file, XDG_CACHE_HOME=str(tmp_path))
    assert "E-MEM-002" not in fine.stdout and "memory of run train" in fine.stdout and "at their default" in fine.stdout and "AWS_REGION" not in fine.stdout
    small = sexpgpu("doctor", file, XDG_CACHE_HOME=str(tmp_path), SEXPGPU_MEMORY="0.0001")
    assert small.returncode == 1 and "E-MEM-002" in small.stdout and "SEXPGPU_MEMORY allows" in small.stdout


def test_a_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for error in (ValueError("odd"), InternalError("verify")):
        try:
            raise error
        except Exception as raised:
            assert main.failed(raised, ["run", "x"]) == 70
    out, err = capsys.readouterr()
    assert out == "" and "bug in SexpGPU" in err and "Traceback" not in err
    saved = sorted((tmp_path / "sexpgpu" / "bugs").iterdir())
    assert saved and "Traceback" in saved[0].read_text("utf-8")
    assert stat.S_IMODE(saved[0].stat().st_mode) == 0o600


def test_exit_codes_of_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.failed(problem("E-ENV-001", "no"), []) == 2
    late: SexpError = problem("E-ENV-001", "no", exit_code=3)
    assert main.failed(late, []) == 3
    assert main.failed(MemoryError(), []) == 3
    assert "E-MEM-001" in capsys.readouterr().err


def test_an_interrupt_and_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*a: object, **k: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.cli, "main", interrupt)
    assert main.perform(["doctor"]) == 130
    line = f"set -o pipefail; {sys.executable} -m sexpgpu doctor | true"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("3h", 10800), ("1h30m", 5400)])
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3d", "0s", "-3h", "m", "1m1h"])
def test_no_durations(text: str) -> None:
    with pytest.raises(SexpError):
        parse_duration(text)


def test_threads_follow_a_rule() -> None:
    assert threads.choose(64, None) == threads.choose(64, 10_000) == 1
    assert threads.choose(2, 10**12) == 2 and threads.choose(64, 10**12) == threads.MOST
    expected = {0: 1, 10**8: 1, 199_999_999: 1, 200_000_000: 2, 4 * 10**8: 4, 650_000_000: 6, 10**10: 16}
    assert {operations: threads.choose(16, operations) for operations in expected} == expected
    environ: dict[str, str] = {}
    assert threads.prepare(environ, 10_000) == 1
    assert environ == {
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MKL_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip


def test_threads_of_the_user_and_of_a_checkpoint() -> None:
    assert threads.prepare({}, 10_000, stored=3) == 3
    environ = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active", "PYTORCH_ALLOC_CONF": "x"}
    assert threads.prepare(environ, 10_000, stored=3) == 2
    assert environ["OMP_WAIT_POLICY"] == "active" and "PYTORCH_CUDA_ALLOC_CONF" not in environ


@pytest.mark.timeout(180)
def test_variables_and_flags_reach_a_run(tmp_path: Path) -> None:
    """A run of a few steps: metrics, status, slug, checkpoints by variables; the same run resumed by flags."""
    places = {
        "SEXPGPU_METRICS": f"jsonl:{tmp_path}/m.jsonl",
        "SEXPGPU_STATUS": f"{tmp_path}/status.json",
        "SEXPGPU_RUN_SLUG": "night",
        "SEXPGPU_CHECKPOINT_DIR": f"{tmp_path}/runs/{{slug}}",
        "SEXPGPU_DEVICE": "cpu",
    }
    done = sexpgpu("run", DIGITS, "--steps", "3", **places)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    status = json.loads((tmp_path / "status.json").read_text("utf-8"))
    assert status["state"] == "done" and status["step"] == 3 and status["slug"].startswith("night-")
    assert status["knobs"]["run/train/steps"]["source"] == "override"
    assert (tmp_path / "runs" / status["slug"] / "step-3" / "manifest.json").exists()
    first = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text("utf-8").splitlines()]
    assert {"run", "metric"} <= {record["type"] for record in first}

    flags = ["--metrics", "stdout", "--resume", "latest", "--eval-every", "0", "--status", ""]
    again = sexpgpu("run", DIGITS, "--steps", "5", *flags, **places)
    assert again.returncode == 0, again.stderr
    records = [json.loads(line) for line in again.stdout.splitlines()]
    assert records[0]["event"] == "resume" and records[0]["slug"] == status["slug"]
    assert max(record.get("step", 0) for record in records) == 5
    assert not [record for record in records if record.get("metadata", {}).get("eval")]
    assert json.loads((tmp_path / "status.json").read_text("utf-8")) == status


def test_diagnostics_of_a_flag_a_variable_and_none(tmp_path: Path) -> None:
    """The flag over the variable; a glob that matches no tap is a warning; an empty flag selects none."""
    said = sexpgpu("run", DIGITS, "--steps", "1", "--eval-every", "0", SEXPGPU_DIAGNOSTICS="nothing/*")
    assert said.returncode == 0 and "nothing/*" in said.stderr, said.stderr
    other = sexpgpu("run", DIGITS, "--steps", "1", "--diagnostics", "", SEXPGPU_DIAGNOSTICS="nothing/*")
    assert other.returncode == 0 and "nothing/*" not in other.stderr, other.stderr


@pytest.mark.timeout(180)
def test_the_readme_line_can_be_pasted_twice(tmp_path: Path) -> None:
    """The README's own line, without its pip, in a folder that holds nothing but the examples."""
    text = (ROOT / "README.md").read_text("utf-8").split("<!-- run:begin -->")[1].split("<!-- run:end -->")[0]
    line = text.split("&& sexpgpu ")[1].splitlines()[0]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SEXPGPU_")} | {"PYTHONPATH": str(ROOT)}
    for _ in range(2):
        words = [sys.executable, "-m", "sexpgpu", *shlex.split(line)]
        done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "runs/status.json").read_text("utf-8"))["state"] == "done"
    assert len(list(tmp_path.glob("runs/digits-*/step-500/manifest.json"))) == 2
    assert (tmp_path / "runs/digits.jsonl").read_text("utf-8").count('"start"') == 2


def test_a_dry_run_goes_through_everything_and_leaves_nothing(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    command = [sys.executable, "-m", "sexpgpu", "run", DIGITS, "--dry-run", "--metrics", "jsonl:m", "--status", "s", "--checkpoint-dir", "c"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr and "eval valid" in done.stderr and "saved" in done.stderr
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before


def test_a_pipe_is_no_program_and_a_full_output_is_no_bug(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = sexpgpu("run", str(tmp_path / "pipe"))
    assert done.returncode == 2 and "E-READ-014" in done.stderr
    if Path("/dev/full").exists():
        command = [sys.executable, "-m", "sexpgpu", "explain", DIGITS]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert ended.returncode == 2 and "E-ENV-012" in ended.stderr, ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_are_no_bug(closed: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m sexpgpu explain {DIGITS} {closed}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr

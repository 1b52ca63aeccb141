"""What each variable and flag does, through the command itself: the rows of docs/environment.md one after another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sexpgpu.cli.main import perform

ROOT = Path(__file__).resolve().parents[2]
BEGIN = ["--set", "hidden=8", "--set", "batch=32"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small experiment, `e.lisp`."""
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "examples/data/digits.csv.gz", tmp_path / "data")
    text = (ROOT / "examples/digits.lisp").read_text("utf-8")
    text = (
        text.replace(":steps 500", ":steps 6\n  :log-every 2")
        .replace(":checkpoint-every 100", ":checkpoint-every 2")
        .replace(":every 50", ":every 3")
    )
    (tmp_path / "e.lisp").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(*words: str) -> int:
    return perform(["run", "e.lisp", *BEGIN, *words])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step-*")) if folder.exists() else []


def test_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Unset is nowhere; the variable names targets; the flag replaces it wholly; an empty flag is none."""
    assert run() == 0 and not list(folder.glob("*.jsonl")) and capfd.readouterr().out == ""
    monkeypatch.setenv("SEXPGPU_METRICS", "jsonl:a.jsonl,stdout")
    assert run() == 0 and any(r["type"] == "metric" for r in records(folder / "a.jsonl"))
    assert json.loads(capfd.readouterr().out.splitlines()[0])["type"] == "run"
    size = (folder / "a.jsonl").stat().st_size
    assert run("--metrics", "jsonl:b.jsonl") == 0 and (folder / "b.jsonl").exists() and capfd.readouterr().out == ""
    assert run("--metrics", "") == 0 and (folder / "a.jsonl").stat().st_size == size


def test_a_run_on_this_machine_alone_needs_no_s3_library(folder: Path) -> None:
    code = (
        f"import sys\nfrom sexpgpu.cli.main import perform\nrc = perform(['run', 'e.lisp', *{BEGIN!r}, '--steps', '1', '--checkpoint-dir', 'c'])\n"
        "sys.exit(rc or len({'boto3', 'botocore'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and steps(folder / "c") == ["step-1"], done.stderr


def test_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == 0 and not list(folder.glob("*.json"))
    monkeypatch.setenv("SEXPGPU_STATUS", "v.json")
    assert run() == 0 and json.loads((folder / "v.json").read_text())["state"] == "done"
    (folder / "v.json").unlink()
    assert run("--status", "f.json") == 0 and (folder / "f.json").exists() and not (folder / "v.json").exists()
    assert run("--status", "") == 0 and not (folder / "v.json").exists()


def test_run_slug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--checkpoint-dir", "c/{slug}") == 0
    monkeypatch.setenv("SEXPGPU_RUN_SLUG", "night-1")
    assert run("--checkpoint-dir", "c/{slug}") == 0
    assert sorted(p.name[:-21] for p in (folder / "c").iterdir()) == ["e", "night-1"]


def test_checkpoint_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it `:checkpoint-every` does nothing."""
    assert run() == 0 and {p.name for p in folder.iterdir()} == {"data", "e.lisp"}
    monkeypatch.setenv("SEXPGPU_CHECKPOINT_DIR", "v")
    assert run() == 0 and steps(folder / "v") == ["step-2", "step-4", "step-6"]
    assert run("--checkpoint-dir", "f") == 0 and steps(folder / "f") == ["step-2", "step-4", "step-6"]
    shutil.rmtree(folder / "v")
    assert run("--checkpoint-dir", "") == 0 and not (folder / "v").exists()


def test_resume(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--checkpoint-dir", "c", "--steps", "4") == 0
    monkeypatch.setenv("SEXPGPU_RESUME", "latest")
    monkeypatch.setenv("SEXPGPU_CHECKPOINT_DIR", "c")
    assert run() == 0 and "after step 4" in capfd.readouterr().err
    monkeypatch.setenv("SEXPGPU_RESUME", "c/step-4")
    monkeypatch.delenv("SEXPGPU_CHECKPOINT_DIR")
    assert run() == 0 and "after step 4" in capfd.readouterr().err
    assert run("--resume", "c/step-2") == 0 and "after step 2" in capfd.readouterr().err
    assert run("--resume", "") == 0 and "after step" not in capfd.readouterr().err
    monkeypatch.setenv("SEXPGPU_RESUME", "latest")
    assert run() == 2 and "E-ENV-003" in capfd.readouterr().err


def test_eval_limit(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SEXPGPU_EVAL_LIMIT", "100")
    assert run() == 2 and "E-EVAL-041" in capfd.readouterr().err
    assert perform(["explain", "e.lisp"]) == 2 and "E-EVAL-041" in capfd.readouterr().err
    monkeypatch.setenv("SEXPGPU_EVAL_LIMIT", "10000000")
    assert run("--steps", "1") == 0


def test_steps_and_eval_every_win_over_the_file_and_are_recorded(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the manifest, the status file, the metrics and the IR's header, as knobs of source `override`."""
    assert (
        run(
            "--steps",
            "3",
            "--eval-every",
            "2",
            "--checkpoint-dir",
            "c",
            "--metrics",
            "jsonl:m.jsonl",
            "--status",
            "s.json",
        )
        == 0
    )
    found = records(folder / "m.jsonl")
    assert {r["step"] for r in found if r.get("metadata", {}).get("eval") == "valid"} == {2, 3}
    manifest = json.loads((folder / "c/step-3/manifest.json").read_text())
    status = json.loads((folder / "s.json").read_text())
    for knobs in (manifest["knobs"], status["knobs"], found[0]["knobs"]):
        assert knobs["run/train/steps"]["source"] == "override" and knobs["run/train/steps"]["value"] == 3
        assert knobs["eval/valid/every"]["source"] == "override" and knobs["eval/valid/every"]["value"] == 2
        assert knobs["hidden"]["source"] == "set" and knobs["lr"]["source"] == "default"
    assert status["steps"] == 3


def test_diagnostics(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Flag over variable over file; recorded with its source."""
    text = (folder / "e.lisp").read_text("utf-8")
    text = text.replace(
        '(linear (relu (linear image hidden :name "in")) 10 :name "out")',
        '(tap "size" (mean image))\n  (tap "low" (reduce-min image))\n  (linear (relu (linear image hidden :name "in")) 10 :name "out")',
    )
    text = text.replace("  :seed seed", '  :seed seed\n  :diagnostics ("**/size")')
    (folder / "e.lisp").write_text(text, encoding="utf-8")

    def taps(*words: str) -> set[str]:
        (folder / "m.jsonl").unlink(missing_ok=True)
        assert run("--metrics", "jsonl:m.jsonl", "--status", "s.json", *words) == 0
        return {
            r["metadata"]["path"].rsplit("/")[-1]
            for r in records(folder / "m.jsonl")
            if "path" in r.get("metadata", {})
        }

    def recorded() -> Any:
        return json.loads((folder / "s.json").read_text())["knobs"].get("run/train/diagnostics")

    assert taps() == {"size"} and recorded() is None
    monkeypatch.setenv("SEXPGPU_DIAGNOSTICS", "**/low")
    assert taps() == {"low"} and recorded()["source"] == "override"
    capfd.readouterr()
    assert perform(["explain", "e.lisp", "--ir"]) == 0  # the IR's header says it too
    (line,) = [text for text in capfd.readouterr().out.splitlines() if text.startswith("; knob run/train/diagnostics")]
    assert "**/low" in line and "(override SEXPGPU_DIAGNOSTICS" in line
    assert taps("--diagnostics", "**/size,**/low") == {"size", "low"}
    assert taps("--diagnostics", "") == set()


def test_device_flag_wins(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SEXPGPU_DEVICE", "gpu")
    assert run("--steps", "1") == 2 and "SEXPGPU_DEVICE is `gpu`" in capfd.readouterr().err
    assert run("--steps", "1", "--device", "cpu") == 0


def test_unknown_names_warn_and_known_ones_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SEXPGPU_CHECKPOINTS_DIR", "FLASHCART_TP_CSR_BUDGET"):
        monkeypatch.setenv(name, "x")
    for name in ("FLASHCART_TP_CSR_GROUP_BUDGET", "FLASHCART_KERNEL_L_MAX"):
        monkeypatch.setenv(name, "4")
    assert run("--steps", "1") == 0
    err = capfd.readouterr().err
    assert err.count("warning[E-ENV-010]") == 2 and "SEXPGPU_CHECKPOINT_DIR" in err and "GROUP_BUDGET" in err
    assert "FLASHCART_KERNEL_L_MAX is set" not in err


FOUR = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION")


@pytest.mark.parametrize("missing", FOUR)
def test_a_bucket_without_a_value_is_refused_before_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    for name in FOUR:
        if name != missing:
            monkeypatch.setenv(f"SEXPGPU_CHECKPOINT_AWS_{name}", f"hunter-{name}")
    for words in (
        ["--checkpoint-dir", "s3://b/{slug}"],
        ["--resume", "s3://b/p/step-1"],
        ["--checkpoint-dir", "s3://b/p", "--resume", "latest"],
    ):
        assert run(*words, "--metrics", "jsonl:m.jsonl", "--status", "s.json") == 2
        err = capfd.readouterr().err
        assert (
            "E-NET-010" in err
            and f"SEXPGPU_CHECKPOINT_AWS_{missing}" in err
            and f"AWS_{missing} of the checkpoint role is not set" in err
        )
        assert "hunter-" not in err
    assert not (folder / "m.jsonl").exists()


def test_a_source_in_a_bucket_without_a_value_is_refused_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "e.lisp").write_text(
        (folder / "e.lisp").read_text("utf-8").replace("data/digits.csv.gz", "s3://datasets/digits.csv.gz"),
        encoding="utf-8",
    )
    for name in FOUR[:3]:
        monkeypatch.setenv(f"AWS_{name}", "hunter")
    assert run("--checkpoint-dir", "c") == 2
    err = capfd.readouterr().err
    assert "E-NET-010" in err and "SEXPGPU_DATA_AWS_REGION" in err and "hunter" not in err and steps(folder / "c") == []


def test_plain_http_to_another_machine_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in FOUR:
        monkeypatch.setenv(f"AWS_{name}", "http://store.invalid:9000" if name == "ENDPOINT_URL" else "hunter")
    assert run("--checkpoint-dir", "s3://b/p") == 2
    assert "E-NET-017" in (err := capfd.readouterr().err) and "SEXPGPU_PLAIN_HTTP=store.invalid" in err


def test_doctor_shows_values_with_sources_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEXPGPU_DATA_AWS_ACCESS_KEY_ID", "hunter-id")
    monkeypatch.setenv("SEXPGPU_AWS_SECRET_ACCESS_KEY", "hunter-secret")
    monkeypatch.setenv("SYVAIN_METRICS_API_KEY", "hunter-key")
    monkeypatch.setenv("AWS_REGION", "eu-1")
    monkeypatch.setenv("SEXPGPU_EVAL_LIMIT", "77")
    monkeypatch.setenv("SEXPGPU_STATSU", "x")
    for words in ([], ["--json"]):
        assert perform(["doctor", *words]) == 1
        out = capfd.readouterr().out
        assert "hunter" not in out and "***" in out and "SEXPGPU_STATUS" in out
        for text in ("77", "eu-1", "SEXPGPU_DATA_AWS_ACCESS_KEY_ID", "SEXPGPU_AWS_SECRET_ACCESS_KEY", "missing"):
            assert text in out

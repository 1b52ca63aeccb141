"""Whole runs over a real S3 server: data by one key, checkpoints by another; killed, restarted, resumed, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seaweed import KEYS, Server

import sexpgpu.run.storage.link as link
from sexpgpu.cli.main import perform

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 12, 4
WIDE = ["--set", "hidden=30000", "--set", "batch=32"]  # 2.2 million parameters: 27 MB of state, uploaded in parts
SMALL = ["--set", "hidden=16", "--set", "batch=32"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of this module's own, since it is killed; with the digits in a bucket."""
    server = Server(tmp_path_factory.mktemp("own")).start().make_buckets()
    server.storage("datasets/digits").put("digits.csv.gz", (ROOT / "examples/data/digits.csv.gz").read_bytes())
    yield server
    server.stop()


class Bench:
    """A working directory with the program, and the environment of a run."""

    def __init__(self, folder: Path, server: Server):
        self.folder, self.server, self.prefix = folder, server, f"r-{uuid.uuid4().hex[:8]}"
        text = (ROOT / "examples/digits.lisp").read_text("utf-8")
        for old, new in (
            (":steps 500", f":steps {STEPS}\n  :log-every 1"),
            (":checkpoint-every 100", f":checkpoint-every {EVERY}"),
            (":every 50", ":every 6"),
            ("data/digits.csv.gz", "s3://datasets/digits/digits.csv.gz"),
        ):
            assert old in text
            text = text.replace(old, new)
        (folder / "e.lisp").write_text(text, encoding="utf-8")

    @property
    def environ(self) -> dict[str, str]:
        """The data role by its own four, the checkpoint role by the plain ones; the shared level poisoned where it must not win."""
        return {
            **self.server.environ("data", "SEXPGPU_DATA_"),
            **self.server.environ("checkpoint"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    def place(self, name: str) -> str:
        return f"s3://checkpoints/{self.prefix}/{name}"

    def storage(self, name: str = "") -> Any:
        return self.server.storage(f"checkpoints/{self.prefix}/{name}".rstrip("/"))

    def start(self, name: str, *words: str, knobs: list[str] = WIDE, log: str = "") -> subprocess.Popen[bytes]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SEXPGPU_", "AWS_"))}
        out = (self.folder / f"{log or name}.out").open("ab")
        return subprocess.Popen(
            [sys.executable, "-m", "sexpgpu", "run", "e.lisp", *knobs, "--checkpoint-dir", self.place(name), "--metrics", f"jsonl:{name}.jsonl",
             "--status", f"{name}.status", *words],
            cwd=self.folder, env={**clean, **self.environ, "PYTHONPATH": str(ROOT)}, stdout=out, stderr=out)  # fmt: skip

    def run(self, name: str, *words: str, knobs: list[str] = WIDE) -> int:
        return self.start(name, *words, knobs=knobs).wait(300)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text("utf-8")

    def manifest(self, name: str, step: int = STEPS) -> dict[str, Any]:
        return json.loads(self.storage(name).read(f"step-{step}/manifest.json"))

    def records(self, name: str) -> dict[tuple[Any, ...], float]:
        found: dict[tuple[Any, ...], float] = {}
        for line in (self.folder / f"{name}.jsonl").read_text("utf-8").splitlines():
            r = json.loads(line)
            if r["type"] == "metric" and not r["name"].endswith(("-seconds", "per-second")):
                key = (r["name"], r["metadata"].get("split"), r["step"])
                assert key not in found
                found[key] = r["value"]
        return found

    def uploading(self, name: str, step: int) -> bool:
        page = self.storage(name).link.call("list_multipart_uploads", Prefix=f"{self.prefix}/{name}/step-{step}/")
        return bool(page.get("Uploads"))


def until(what: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, "the run ended before that"
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def bench(tmp_path: Path, own: Server) -> Bench:
    return Bench(tmp_path, own)


def test_killed_and_restarted_in_mid_upload_and_resumed_bit_for_bit(bench: Bench) -> None:
    """The run that nothing happened to, and one whose server restarts in an upload and which is killed in the next."""
    assert bench.run("straight") == 0, bench.said("straight")
    process = bench.start("hit")
    until(lambda: bench.uploading("hit", EVERY), process)
    bench.server.kill()
    time.sleep(0.3)
    bench.server.start()
    until(lambda: bench.uploading("hit", 2 * EVERY), process)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert bench.storage("hit").head(f"step-{EVERY}/manifest.json") is not None
    assert bench.storage("hit").head(f"step-{2 * EVERY}/manifest.json") is None
    assert bench.uploading("hit", 2 * EVERY)  # its parts lie there, and are paid for
    assert bench.run("hit", "--resume", "latest") == 0, bench.said("hit")
    assert f"after step {EVERY}" in bench.said("hit")
    assert bench.manifest("hit")["digest"] == bench.manifest("straight")["digest"]
    assert bench.records("hit") == bench.records("straight")
    assert bench.storage("hit").sweep() == 0 and bench.storage("straight").sweep() == 0
    assert bench.manifest("hit")["data"]["digits"]["location"].startswith("s3://datasets/")
    status = json.loads((bench.folder / "hit.status").read_text())
    assert status["checkpoint"] == {"location": bench.place("hit"), "step": STEPS, "durable": True}
    nothing_secret(bench)


def test_a_slug_in_the_location_and_a_resume_by_name(bench: Bench) -> None:
    assert bench.run("{slug}", "--steps", "8", knobs=SMALL) == 0
    (slug,) = bench.storage().folders()
    assert slug.startswith("e-") and bench.storage(slug).folders() == ["step-4", "step-8"]
    assert bench.run("{slug}", "--resume", "latest", knobs=SMALL) == 0
    assert bench.storage().folders() == [slug] and bench.storage(slug).folders() == ["step-12", "step-4", "step-8"]
    last = bench.manifest(slug)["digest"]
    bench.storage(slug).delete([e.name for e in bench.storage(slug).entries("step-12/")])
    assert bench.run(slug, "--resume", f"{bench.place(slug)}/step-8", knobs=SMALL) == 0
    assert bench.manifest(slug)["digest"] == last
    assert bench.run(slug, "--resume", f"{bench.place(slug)}/step-4", knobs=SMALL) == 2 and "E-CKPT-009" in bench.said(
        slug
    )


def test_what_was_trained_is_used_from_a_bucket(
    bench: Bench, command: Callable[..., tuple[int, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """`eval` and `export` on a checkpoint there, and a run that starts from weights there."""
    assert command("--checkpoint-dir", bench.place("first"))[0] == 0
    at = f"{bench.place('first')}/step-4"
    assert perform(["eval", "e.lisp", *SMALL, "--resume", at]) == 0 and "accuracy" in capfd.readouterr().out
    assert perform(["eval", "e.lisp", *SMALL, "--resume", "latest", "--checkpoint-dir", bench.place("first")]) == 0
    assert (
        perform(["export", bench.place("first"), "w.safetensors"]) == 2
        and f"export {at} w.safetensors" in capfd.readouterr().err
    )
    assert perform(["export", at, "w.safetensors"]) == 0
    bench.server.storage("datasets/weights").put("w.safetensors", (bench.folder / "w.safetensors").read_bytes())
    text = (bench.folder / "e.lisp").read_text("utf-8")
    (bench.folder / "e.lisp").write_text(
        text.replace("  :seed seed", '  :seed seed\n  :init (from "s3://datasets/weights/w.safetensors")'),
        encoding="utf-8",
    )
    rc, err = command()
    assert rc == 0 and "4 of 4 tensors start from" in err, err
    (bench.folder / "e.lisp").write_text(
        text.replace("  :seed seed", '  :seed seed\n  :init (from "s3://datasets/weights/none.safetensors")'),
        encoding="utf-8",
    )
    rc, err = command()
    assert rc == 2 and "E-NET-019" in err and "e.lisp:" in err, err


def test_two_writers_are_told_apart(bench: Bench) -> None:
    first = bench.start("two", "--steps", "1000000", "--set", "lr=1e-9", knobs=SMALL)
    try:
        until(lambda: bench.storage("two").head(".writer") is not None, first)
        assert bench.start("two", "--status", "b.status", "--metrics", "", knobs=SMALL, log="second").wait(120) == 2
        assert "E-CKPT-011" in bench.said("second") or "E-CKPT-007" in bench.said("second")
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 4
    assert bench.storage("two").head(".writer") is None


# --- refusals through the command ------------


@pytest.fixture
def command(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """(exit code, stderr) of a run in this process, with variables changed."""
    monkeypatch.chdir(bench.folder)
    monkeypatch.setattr(link, "FIRST_PATIENCE", 1.0)

    def call(*words: str, **changed: str) -> tuple[int, str]:
        for name, value in {**bench.environ, **changed}.items():
            monkeypatch.setenv(name, value)
        code = perform(["run", "e.lisp", *SMALL, "--steps", "4", *words])
        out = capfd.readouterr()
        for name, value in {**bench.environ, **changed}.items():
            assert not name.endswith(("KEY_ID", "ACCESS_KEY", "TOKEN")) or value not in out.err + out.out
        return code, out.err

    return call


def test_nothing_but_no_checkpoint_is_no_checkpoint(bench: Bench, command: Callable[..., tuple[int, str]]) -> None:
    """`latest` starts anew in an empty place, and in no other case."""
    here = ["--checkpoint-dir", bench.place("x"), "--resume", "latest"]
    for words, changed, code in (
        (
            ["--checkpoint-dir", "s3://no-such-bucket/x", "--resume", "latest"],
            bench.server.environ("admin"),
            "E-NET-013",
        ),
        (here, {"AWS_ACCESS_KEY_ID": "AKIDNOBODY"}, "E-NET-012"),
        (here, {"AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}, "E-NET-012"),
        (here, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "E-NET-011"),
        (here, bench.server.environ("data"), "E-NET-018"),
    ):
        rc, err = command(*words, **changed)
        assert (rc, code in err, "starting at step 0" in err) == (2, True, False), err
    rc, err = command(*here)
    assert rc == 0 and "starting at step 0" in err


@pytest.mark.parametrize(("gone", "rc"), [(("step-4",), 0), (("step-4", "step-8", "step-12"), 3), (("step-12",), 3)])
def test_a_store_that_is_gone_costs_a_warning_and_at_the_end_the_exit_code(
    bench: Bench,
    command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    gone: tuple[str, ...],
    rc: int,
) -> None:
    real = link.Link.send

    def send(self: Any, operation: str, key: str | None = None, **arguments: Any) -> Any:
        if operation == "put_object" and any(f"/{step}/" in (key or "") for step in gone):
            raise link.Transient("no connection")
        return real(self, operation, key, **arguments)

    monkeypatch.setattr(link.Link, "send", send)
    monkeypatch.setattr(link, "PATIENCE", 0.5)
    code, err = command("--checkpoint-dir", bench.place("gone"), "--steps", "12", "--status", "s.json")
    assert code == rc, err
    assert err.count("error[E-CKPT-012]") == (rc == 3) and "warning[E-CKPT-012]" in err or gone == ("step-12",)
    assert bench.storage("gone").folders() == sorted({"step-4", "step-8", "step-12"} - set(gone))
    status = json.loads((bench.folder / "s.json").read_text())
    last = max((int(step[5:]) for step in bench.storage("gone").folders()), default=None)
    assert (status["checkpoint"]["step"], status["checkpoint"]["durable"]) == (last, last is not None)


def test_a_key_that_may_not_write_is_found_before_the_first_step(
    bench: Bench, command: Callable[..., tuple[int, str]]
) -> None:
    rc, err = command(
        "--checkpoint-dir",
        "s3://datasets/out",
        "--status",
        "s.json",
        **bench.server.environ("data", "SEXPGPU_CHECKPOINT_"),
    )
    assert rc == 2 and "E-NET-018" in err and "SEXPGPU_CHECKPOINT_AWS_ACCESS_KEY_ID" in err
    assert not json.loads((bench.folder / "s.json").read_text())["step"]


def test_a_source_that_cannot_be_read_is_found_before_the_first_step(
    bench: Bench, command: Callable[..., tuple[int, str]]
) -> None:
    text = (bench.folder / "e.lisp").read_text("utf-8")
    for change, changed, code in (
        (("digits.csv.gz", "none.csv.gz"), {}, "E-"),
        (("s3://datasets", "s3://checkpoints"), {}, "E-NET-018"),
        (("", ""), {"SEXPGPU_DATA_AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}, "E-NET-012"),
    ):
        (bench.folder / "e.lisp").write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
        shutil.rmtree(bench.folder / "cache", ignore_errors=True)
        rc, err = command(**changed)
        assert rc == 2 and code in err, err
        if change[0] == "digits.csv.gz":
            assert "E-NET-019" in err or "E-DATA-001" in err
    (bench.folder / "e.lisp").write_text(text, encoding="utf-8")
    assert command()[0] == 0


def test_the_role_decides_the_key(bench: Bench, command: Callable[..., tuple[int, str]]) -> None:
    """The shared level stands between: it wins over the plain one and loses to the role's own."""
    wrong = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "wrong-wrong-wrong")
    shared = bench.server.environ("checkpoint", "SEXPGPU_")
    rc, err = command("--checkpoint-dir", bench.place("roles"), **wrong, **shared)
    assert rc == 0, err
    assert bench.storage("roles").folders() == ["step-4"]


def test_the_variables_say_it_too(bench: Bench, command: Callable[..., tuple[int, str]]) -> None:
    """SEXPGPU_CHECKPOINT_DIR and SEXPGPU_RESUME with `s3://`, `latest` and a step."""
    place = bench.place("v")
    rc, err = command(SEXPGPU_CHECKPOINT_DIR=place)
    assert rc == 0 and bench.storage("v").folders() == ["step-4"], err
    rc, err = command("--steps", "8", SEXPGPU_CHECKPOINT_DIR=place, SEXPGPU_RESUME="latest")
    assert rc == 0 and "after step 4" in err and bench.storage("v").folders() == ["step-4", "step-8"], err
    rc, err = command("--steps", "12", "--checkpoint-dir", "", SEXPGPU_RESUME=f"{place}/step-8")
    assert rc == 0 and "after step 8" in err and bench.storage("v").folders() == ["step-4", "step-8"], err


def test_doctor_probes_each_purpose(
    bench: Bench,
    command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in bench.environ.items():
        monkeypatch.setenv(name, value)
    perform(
        ["doctor", "--probe-data", "s3://datasets/digits/digits.csv.gz", "--probe-checkpoints", bench.place("{slug}")]
    )
    out = capfd.readouterr().out
    assert "readable" in out and "written, read back and removed" in out and "conditional" not in out
    assert bench.storage().entries() == []
    assert perform(["doctor", "--probe-checkpoints", "s3://datasets/x", "--probe-data", "s3://checkpoints/x/y"]) == 1
    out = capfd.readouterr().out
    assert out.count("E-NET-018") >= 2
    assert not [word for _, key, _ in KEYS.values() for word in [key] if word in out]


def nothing_secret(bench: Bench) -> None:
    """No file, stream or object that the runs wrote holds a key."""
    texts = {str(p): p.read_bytes() for p in bench.folder.rglob("*") if p.is_file()}
    texts |= {e.name: bench.storage().read(e.name) for e in bench.storage().entries()}
    assert len(texts) > 8
    for where, text in texts.items():
        for key, secret, _ in KEYS.values():
            assert key.encode() not in text and secret.encode() not in text, where


def test_a_bug_of_ours_reports_no_secret(
    bench: Bench, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception whose text holds the secret, in the middle of a request: masked on the screen and in the report."""
    key, secret, _ = KEYS["checkpoint"]

    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"signing with {self.credentials.secret_access_key.reveal()} and {self.credentials.access_key_id.reveal()}"
        )

    monkeypatch.setattr(link.Link, "send", broken)
    rc, err = command("--checkpoint-dir", bench.place("bug"), SEXPGPU_DATA_AWS_REGION="x")
    assert rc == 70 and "***" in err
    reports = list((bench.folder / "state").rglob("bug-*.txt"))
    assert len(reports) == 1 and secret not in (text := reports[0].read_text()) and key not in text and "***" in text

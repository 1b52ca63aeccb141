"""`doctor` finds each planted fault by its code, and nothing on a healthy machine; it leaves everything as it was."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors_server import Refusing
from seaweed import KEYS, Server

from sexpgpu import doctor
from sexpgpu.cli.main import perform
from sexpgpu.doctor import child, clocks, devices, machine, numerics, resume
from sexpgpu.run.data.block import BlockWriter

PROGRAM = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((image f32 [6]) (label i32))))
(defknob hidden 8)
(defun f (image label) (cross-entropy (linear (tanh (linear image hidden :name "in")) 5 :name "out") label))
(defrun train :data (batches d :batch 8) :loss f :optimizer (adam :lr 1e-2) :steps 20 :seed 3)
(defeval valid :data (batches d :batch 8) :every 10 :metrics ((loss f)))
"""
Found = Callable[..., dict[str, Any]]


def rows(count: int = 40) -> str:
    names = ",".join([*(f"image_{i}" for i in range(6)), "label"])
    return "\n".join([names, *(",".join([*(f"{(i * 7 + j * 3) % 11 / 11:.3f}" for j in range(6)), str(i % 5)]) for i in range(count))]) + "\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file, its data and a user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(machine, "LITTLE_MEMORY", 0)  # the machine of the tests is shared
    work = tmp_path / "work"
    work.mkdir()
    (work / "p.lisp").write_text(PROGRAM)
    (work / "d.csv").write_text(rows())
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def found(home: Path, capfd: pytest.CaptureFixture[str]) -> Found:
    """Calls doctor with `--json`: its document with the exit code, and every code it found."""

    def call(*words: str) -> dict[str, Any]:
        capfd.readouterr()
        code = perform(["doctor", *words, "--json"])
        out, err = capfd.readouterr()
        said = json.loads(out)
        assert code == (1 if said["findings"] else 0), err
        assert all(d["help"] for d in said["findings"]), said["findings"]
        assert not [secret for _, secret, _ in KEYS.values() if secret in out + err]
        return said | {"codes": {d["code"] for d in said["findings"]}}

    return call


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder: when it was changed, and what it holds."""
    return {str(p.relative_to(folder)): (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in sorted(folder.rglob("*"))}


def plant_block(home: Path, name: str = "a.block") -> Path:
    folder = home.parent / "cache" / "sexpgpu" / "data"
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    writer = BlockWriter(folder / name)
    writer.add({"x": np.zeros(10, np.float32)})
    writer.finish({})
    return folder / name


def write(home: Path, *changes: tuple[str, str]) -> None:
    text = PROGRAM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (home / "p.lisp").write_text(text)


# --- a healthy machine


def test_a_healthy_machine_and_nothing_changes(home: Path, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check, the proofs too; the folder, the cache and the temporary folder are as before."""
    plant_block(home)
    (home / "runs").mkdir()
    temporary = home.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = tree(home.parent)
    said = found("p.lisp", "--numerics", "--resume", "--checkpoint-dir", "runs/{slug}", "--metrics", "jsonl:new/m.jsonl")
    assert said["codes"] == set() and said["works"], said["findings"]
    assert set(said["checks"]) == set(doctor.CHECKS)
    after = tree(home.parent)
    assert {k: v[1] for k, v in after.items()} == {k: v[1] for k, v in before.items()}
    files = {k for k in before if "." in k}
    assert {k: after[k] for k in files} == {k: before[k] for k in files}
    facts = {name: " ".join(text for _, text in check["facts"]) for name, check in said["checks"].items()}
    assert "agree with the interpreter" in facts["numerics"] and "evaluation valid" in str(said["checks"]["numerics"])
    assert "killed (kill -9)" in facts["resume"] and "the same bits" in facts["resume"]
    assert "40 records" in facts["data"] and "written, read back and removed" in facts["storage"]


def test_a_kernel_compiles_and_agrees_with_the_cpu(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(devices, "DRIVER", Path("/proc/version"))  # there
    said = found()
    assert said["codes"] == set() and ["cpu", "a kernel compiled; value and gradient agree with the CPU"] in said["checks"]["devices"]["facts"]


# --- faults that need no server


def test_settings(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEXPGPU_DEVISE", "x")
    said = found()
    assert said["codes"] == {"E-ENV-010"} and said["works"] and "SEXPGPU_DEVICE" in str(said["findings"])
    monkeypatch.setenv("SEXPGPU_EVAL_LIMIT", "1e3")
    said = found()
    assert said["codes"] == {"E-ENV-010", "E-ENV-001"} and not said["works"]


@pytest.mark.parametrize(("plant", "code"), [
    ("unused", "E-DATA-001"), ("label", "E-DATA-014"), ("folder", "E-DATA-001"), ("missing", "E-DATA-001"), ("binary", "E-DATA-008"), ("cut", "E-DATA-005"), ("program", "E-EVAL-001"),
])  # fmt: skip
def test_data(home: Path, found: Found, plant: str, code: str) -> None:
    data = home / "d.csv"
    more = ""
    if plant == "label":
        data.write_text(rows().replace(",4\n", ",5\n", 1))
    elif plant == "unused":
        more = '(defdata e (csv "e.csv" :fields ((x f32))))'
        write(home, ("(defknob", f"{more}\n(defknob"))
    elif plant == "folder":
        data.unlink()
        data.mkdir()
    elif plant == "missing":
        write(home, ("d.csv", "gone/d.csv"))
    elif plant == "binary":
        data.write_bytes(bytes(range(256)) * 20)
    elif plant == "cut":
        (home / "d.csv.gz").write_bytes(gzip.compress(rows(4000).encode())[:-20])
        write(home, ("d.csv", "d.csv.gz"))
    else:
        write(home, ("(tanh ", "(tahn "))
    said = found("p.lisp")
    assert said["codes"] == {code} and said["works"] is bool(more), said["findings"]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of a mebibyte; where none can be mounted, a folder that is said to have no more."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True).returncode == 0:
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
    else:
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: type(real(path))(1 << 20, 0, 1 << 20) if "small" in str(path) else real(path))
        yield place


def test_a_full_disk(home: Path, found: Found, small_disk: Path) -> None:
    write(home, ("hidden 8", "hidden 20000"))
    said = found("p.lisp", "--checkpoint-dir", str(small_disk / "{slug}"))
    assert said["codes"] == {"E-DATA-016", "E-ENV-021"} and not said["works"]
    assert list(small_disk.iterdir()) == []


def test_a_checkpoint_folder_that_cannot_be_written(home: Path, found: Found) -> None:
    """Below a file: what not even root may write."""
    said = found("p.lisp", "--checkpoint-dir", "d.csv/{slug}")
    assert said["codes"] == {"E-NET-024"} and not said["works"]
    if os.geteuid() != 0:
        (home / "locked").mkdir(mode=0o500)
        assert found("--checkpoint-dir", "locked/a")["codes"] == {"E-NET-024"}


def test_two_writers_and_a_taken_location(home: Path, found: Found) -> None:
    (home / "runs").mkdir()
    with (home / "runs" / ".lock").open("w") as held:
        assert found("--checkpoint-dir", "runs")["codes"] == set()  # a lock that a killed run left holds nobody off
        fcntl.flock(held, fcntl.LOCK_EX)
        said = found("--checkpoint-dir", "runs")
        assert said["codes"] == {"E-CKPT-011"} and not said["works"]
    with (home / "m.jsonl").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert found("--metrics", "jsonl:m.jsonl")["codes"] == {"E-RUN-014"}
    assert found("--metrics", "jsonl:d.csv/m.jsonl")["codes"] == {"E-RUN-013"}


def test_the_checkpoint_to_go_on_from(home: Path, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    assert perform(["run", "p.lisp", "--steps", "2", "--checkpoint-dir", "old"]) == 0
    monkeypatch.setenv("SEXPGPU_RESUME", "latest")
    before = tree(home)
    said = found("p.lisp", "--checkpoint-dir", "old")
    assert said["codes"] == set() and "goes on from step 2" in str(said["checks"]["disk"])
    assert {k: v[1] for k, v in tree(home).items()} == {k: v[1] for k, v in before.items()}
    monkeypatch.delenv("SEXPGPU_RESUME")
    assert found("p.lisp", "--checkpoint-dir", "old")["codes"] == {"E-CKPT-007"}  # a new run does not write there
    (state,) = (home / "old" / "step-2").glob("*.safetensors")
    state.write_bytes(state.read_bytes()[:-4])
    monkeypatch.setenv("SEXPGPU_RESUME", "old/step-2")
    assert found("p.lisp", "--checkpoint-dir", "old")["codes"] == {"E-CKPT-002"}


def test_caches(home: Path, found: Found) -> None:
    block = plant_block(home)
    assert found()["codes"] == set()
    whole = block.read_bytes()
    block.write_bytes(whole[:-8])
    assert found()["codes"] == {"E-ENV-022"}
    block.write_bytes(whole)
    left = block.with_name(".b.block.0123")
    left.write_bytes(b"x")
    assert found()["codes"] == set()  # a run may be writing it
    os.utime(left, (time.time() - 2 * 86400,) * 2)
    said = found()
    assert said["codes"] == {"E-ENV-022"} and said["works"] and left.exists()
    left.unlink()
    block.parent.chmod(0o777)
    assert found()["codes"] == {"E-DATA-015"}
    shutil.rmtree(block.parent)
    kernels = home.parent / "cache" / "flashcart"
    kernels.mkdir(mode=0o700)
    (kernels / "product_0.py").write_text("# sexpgpu 00\nx = 1\n")
    assert found()["codes"] == {"E-ENV-022"}
    kernels.chmod(0o777)
    assert found()["codes"] == {"E-DEV-007"}


def test_a_wrong_metrics_key(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    with Refusing(401, "Unauthorized") as server:
        monkeypatch.setenv("SYVAIN_METRICS_HOST", server.url)
        monkeypatch.setenv("SYVAIN_METRICS_API_KEY", "ak_org_wrong")
        said = found("--metrics", "syvain")
        assert said["codes"] == {"E-NET-041"} and not said["works"]
    assert found("--metrics", "syvain")["codes"] == {"E-NET-043"}  # nobody answers there any more


@pytest.mark.parametrize(("apart", "works"), [(-3600.0, False), (100.0, True), (5.0, None)])
def test_a_clock_that_is_wrong(found: Found, monkeypatch: pytest.MonkeyPatch, apart: float, works: bool | None) -> None:
    with Refusing(403, "AccessDenied", date=time.time() + apart) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        said = found()
        assert [line for line, _ in server.requests] == ["HEAD /"] and "Authorization" not in server.requests[0][1]
    assert said["codes"] == (set() if works is None else {"E-NET-033"}) and said["works"] is (works is not False)
    assert clocks.ahead(server.url) is None


WRONG = """import sys
from sexpgpu.backends.cuda import prelude
import numpy as np
prelude.tanh = prelude._numpy(lambda x: np.tanh(x) * 1.02)
from sexpgpu.doctor.kernels import main
sys.exit(main())
"""


def test_a_kernel_that_is_wrong(home: Path, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """tanh is 2% too large: found in the file's graphs, with its place, and on the device."""
    (home / "wrong.py").write_text(WRONG)
    monkeypatch.setattr(child, "KERNELS", [sys.executable, str(home / "wrong.py")])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(devices, "DRIVER", Path("/proc/version"))
    said = found("p.lisp", "--numerics")
    assert said["codes"] == {"E-DEV-010"} and not said["works"]
    assert said["checks"]["devices"]["findings"] == ["E-DEV-010"] and "E-DEV-010" in said["checks"]["numerics"]["findings"]
    messages = " ".join(d["message"] for d in said["findings"])
    assert "`tanh`" in messages and "p.lisp:4" in messages


def test_no_gpu_where_one_is_asked_for(found: Found) -> None:
    """This machine's torch decides which: built without CUDA, no GPU, or a GPU that is fine."""
    code = "E-DEV-001" if torch.version.cuda is None else "E-DEV-002"
    said = found("--device", "cuda")
    if torch.cuda.is_available():
        assert said["works"] and "agree with the CPU" in str(said["checks"]["devices"])
    else:
        assert said["codes"] == {code} and not said["works"]


def test_children_that_die_or_hang(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DRIVER", Path("/proc/version"))
    monkeypatch.setattr(child, "KERNELS", [sys.executable, "-c", "raise SystemExit('no such symbol')"])
    said = found()
    assert said["codes"] == {"E-DEV-011"} and "no such symbol" in str(said["findings"])
    monkeypatch.setattr(child, "KERNELS", [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(devices, "SECONDS", 10.5)
    assert found()["codes"] == {"E-ENV-020"}


SLOW = """import sys
from pathlib import Path
from sexpgpu.cli.main import main
from sexpgpu.doctor import child, devices
child.KERNELS = [sys.executable, "child.py"]
devices.DRIVER = Path("/proc/version")
main(["doctor"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(home: Path, number: int) -> None:
    """Neither the temporary folder nor a child process."""
    temporary = home.parent / "temporary"
    temporary.mkdir()
    (home / "child.py").write_text(f"import os, time\nopen({str(home / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    (home / "slow.py").write_text(SLOW)
    process = subprocess.Popen([sys.executable, "slow.py"], env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not ((home / "pid").exists() and (home / "pid").read_text()) and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.02)
    assert len(list(temporary.iterdir())) == 1
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((home / "pid").read_text()), 0)


def test_a_check_that_hangs_is_left(home: Path) -> None:
    def hangs(ask: doctor.Ask) -> Iterator[doctor.Fact]:
        yield "before", "seen"
        time.sleep(60)

    for severity in ("error", "warning"):
        report = doctor.perform(doctor.Check("slow", "slow", severity, 0.1, hangs), None)  # type: ignore[arg-type]
        assert [(d.code, d.severity) for d in report.findings] == [("E-ENV-020", severity)] and report.facts == [("before", "seen")]


def test_a_resume_that_is_another_run(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(until: float, ask: Any, name: str, folder: Path, steps: int, *more: str) -> None:
        place = folder / f"step-{steps}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "manifest.json").write_text(json.dumps({"digest": folder.name}))

    real = resume._end
    monkeypatch.setattr(resume, "_end", end)
    monkeypatch.setattr(resume, "_kill", lambda *a: True)
    said = found("p.lisp", "--resume")
    assert said["codes"] == {"E-CKPT-040"} and "other bits" in str(said["findings"])
    monkeypatch.setattr(resume, "_end", real)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(resume, "_words", lambda *a: [sys.executable, "-c", "raise SystemExit('it fell')"])
    said = found("p.lisp", "--resume")
    assert said["codes"] == {"E-CKPT-040"} and "ended with 1" in str(said["findings"])


def test_words_about_a_file_need_one(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert perform(["doctor", "--numerics"]) == 2
    assert "E-ENV-006" in capfd.readouterr().err
    assert numerics.CHECK.name == "numerics"


# --- faults of a bucket


def as_role(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    for role in ("data", "checkpoint"):
        for name, value in server.environ(role, f"SEXPGPU_{role.upper()}_").items():
            monkeypatch.setenv(name, value)


def test_buckets(home: Path, found: Found, monkeypatch: pytest.MonkeyPatch, server: Server, place: str) -> None:
    """Nothing where all is well; then the wrong bucket, a bucket that is not there, a writer that lives, a wrong key."""
    as_role(monkeypatch, server)
    server.storage("datasets/doctor").put("d.csv", rows().encode())
    write(home, ('"d.csv"', '"s3://datasets/doctor/d.csv"'))
    said = found("p.lisp", "--checkpoint-dir", f"s3://{place}")
    assert said["codes"] == set(), said["findings"]
    facts = str(said["checks"])
    for text in ("readable (", "listed", "written, read back and removed", "agrees with this machine", "40 records"):
        assert text in facts
    bucket, _, prefix = place.partition("/")
    left = server.storage(bucket).link.call("list_objects_v2", Prefix=prefix)
    assert left.get("KeyCount", 0) == 0  # names that begin with a dot too
    assert found("--checkpoint-dir", "s3://datasets/x")["codes"] == {"E-NET-018"}
    assert found("--checkpoint-dir", "s3://nowhere-at-all/x")["codes"] <= {"E-NET-013", "E-NET-018"}
    assert found("--probe-data", "s3://datasets/doctor/gone.csv")["codes"] == {"E-NET-019"}
    held = server.storage(place).hold({"run_id": "r", "slug": "other"})
    try:
        said = found("--checkpoint-dir", f"s3://{place}")
        assert said["codes"] == {"E-CKPT-011"} and "other" in str(said["findings"])
    finally:
        held.release()
    admin = server.environ("admin", "SEXPGPU_CHECKPOINT_")
    for name, value in admin.items():
        monkeypatch.setenv(name, value)
    assert found("--checkpoint-dir", "s3://nowhere-at-all/x")["codes"] == {"E-NET-013"}
    monkeypatch.setenv("SEXPGPU_CHECKPOINT_AWS_SECRET_ACCESS_KEY", "wrong-wrong-wrong")
    assert found("--checkpoint-dir", f"s3://{place}")["codes"] == {"E-NET-012"}
    monkeypatch.delenv("SEXPGPU_CHECKPOINT_AWS_REGION")
    assert "E-NET-010" in found("--checkpoint-dir", f"s3://{place}")["codes"]

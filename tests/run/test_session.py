"""Whole runs of the fake program: files left behind, resuming, refusals."""

import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_run import FakeProgram, make_plan, options
from safetensors.torch import load_file

from sexpgpu.diagnostics import SexpError
from sexpgpu.run.checkpoints.find import at_path
from sexpgpu.run.session import execute
from sexpgpu.run.signals import Signals
from sexpgpu.run.storage import grant
from sexpgpu.settings import read

CLOCK = ("step-seconds", "samples-per-second", "tokens-per-second")


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def points(path, beyond_logs=True):
    """{(name, step, metadata): value} of metrics that do not measure time; a point twice fails."""
    out = {}
    for r in records(path):
        if r["type"] == "metric" and r["name"] not in CLOCK:
            key = (r["name"], r["step"], tuple(sorted(r["metadata"].items())))
            assert key not in out, key
            out[key] = r["value"]
    return out


def weights(folder):
    return load_file(next(folder.glob("*.safetensors")))


def go(folder, steps=60, plan=None, **keys):
    keys = {"checkpoint_dir": "ck", "metrics": "jsonl:m.jsonl", "status": "s.json"} | keys
    return execute(options(folder, **keys), plan or make_plan(folder, steps=steps))


def refused(code, call, exit_code=2):
    with pytest.raises(SexpError) as error:
        call()
    d = error.value.diagnostic
    assert (d.code, d.exit_code) == (code, exit_code), d
    return d


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert go(folder) == 0
    return folder


def test_what_a_run_leaves(straight):
    assert sorted(p.name for p in (straight / "ck").glob("step-*")) == ["step-49", "step-56", "step-60"]
    manifest = at_path(straight / "ck" / "step-60").manifest
    raw = json.loads((straight / "ck/step-60/manifest.json").read_text())
    assert raw["format"] == 1 and raw["parent"] is None and raw["health"] == "healthy"
    assert raw["cursor"] == {"epoch": 480 // 46, "index": 480 % 46}
    assert raw["files"][0]["name"] == "part-00001-of-00001.safetensors"
    assert raw["knobs"]["scale"] == {"value": "1/16", "source": "set", "place": "--set"}
    assert raw["data"]["points"]["count"] == 57
    status = json.loads((straight / "s.json").read_text())
    assert status["state"] == "done" and status["step"] == status["steps"] == 60 and status["error"] is None
    assert status["checkpoint"] == {"location": str(straight / "ck"), "step": 60, "durable": True}
    seen = records(straight / "m.jsonl")
    assert [r["event"] for r in seen if r["type"] == "run"] == ["start", "done"]
    assert [r["seq"] for r in seen] == list(range(len(seen)))
    assert {r["run_id"] for r in seen} == {manifest.run_id}
    at_ten = {r["name"]: r for r in seen if r.get("step") == 10 and r["type"] == "metric"}
    assert set(at_ten) == {"loss", "learning-rate", "gradient-norm", "step-seconds", "samples-per-second", "error",
                           "linear/norm"}
    assert at_ten["linear/norm"]["metadata"] == {"split": "train", "path": "net/block/3/linear/norm"}
    assert [(r["step"], r["metadata"]) for r in seen if r.get("metadata", {}).get("eval")] == [
        (s, {"eval": "valid", "split": "valid"}) for s in (20, 40, 60)]


@pytest.mark.parametrize("k", [1, 6, 7, 13, 20, 31, 46, 59])
def test_resume_is_bit_identical(tmp_path, straight, k):
    assert go(tmp_path, steps=k) == 0
    assert go(tmp_path, resume="latest") == 0
    a, b = weights(straight / "ck/step-60"), weights(tmp_path / "ck/step-60")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    old = json.loads((straight / "ck/step-60/manifest.json").read_text())
    new = json.loads((tmp_path / "ck/step-60/manifest.json").read_text())
    assert old["digest"] == new["digest"]
    whole, cut = points(straight / "m.jsonl"), points(tmp_path / "m.jsonl")
    assert {key: value for key, value in cut.items() if key in whole} == whole
    assert {key[1] for key in cut.keys() - whole.keys()} <= {k}
    assert len({r["run_id"] for r in records(tmp_path / "m.jsonl")}) == 1


def test_nothing_left_to_do(tmp_path, straight):
    go(tmp_path, steps=10)
    assert go(tmp_path, steps=10, resume="latest") == 0
    assert go(tmp_path, steps=5, resume="ck/step-10") == 0


def test_latest_starts_a_first_run(tmp_path):
    assert go(tmp_path, steps=5, resume="latest") == 0
    assert (tmp_path / "ck/step-5").is_dir()
    assert go(tmp_path, steps=8, resume="latest", checkpoint_dir="new/{slug}") == 0
    assert go(tmp_path, steps=9, resume="latest", checkpoint_dir="new/{slug}") == 0
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_slug_location_takes_only_this_file_and_run(tmp_path):
    go(tmp_path, steps=5, checkpoint_dir="c/{slug}", slug_base="other")
    go(tmp_path, steps=6, checkpoint_dir="c/{slug}", resume="latest")
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_torn_and_flipped_fall_back(tmp_path, straight):
    go(tmp_path)
    ck = tmp_path / "ck"
    part = next((ck / "step-60").glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)
    (ck / "step-56/manifest.json").write_text('{"format": 1')
    refused("E-CKPT-002", lambda: go(tmp_path, resume="ck/step-60"))
    assert go(tmp_path, resume="latest") == 0
    a, b = weights(straight / "ck/step-60"), weights(ck / "step-60")
    assert all(torch.equal(a[name], b[name]) for name in a)
    points(tmp_path / "m.jsonl")


def test_only_torn_starts_at_zero_and_only_suspect_is_an_error(tmp_path):
    go(tmp_path, steps=5)
    manifest = tmp_path / "ck/step-5/manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"healthy"', '"suspect"'))
    refused("E-CKPT-006", lambda: go(tmp_path, steps=6, resume="latest"))
    manifest.unlink()
    said = io.StringIO()
    assert go(tmp_path, steps=6, resume="latest", stream=said) == 0
    assert "starting at step 0" in said.getvalue()


@pytest.mark.parametrize("change", [
    lambda raw: raw["files"][0].update(name="../part"), lambda raw: raw["files"][0].update(size=1),
    lambda raw: raw.update(step=6), lambda raw: raw.update(files=[]), lambda raw: raw.pop("knobs"),
    lambda raw: raw.update(threads="many"), lambda raw: raw["files"][0].update(sha256="0" * 64)])
def test_manifests_are_not_trusted(tmp_path, change):
    go(tmp_path, steps=5)
    path = tmp_path / "ck/step-5/manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    refused("E-CKPT-002", lambda: go(tmp_path, steps=6, resume="ck/step-5"))


def test_unknown_format(tmp_path):
    go(tmp_path, steps=5)
    path = tmp_path / "ck/step-5/manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    refused("E-CKPT-003", lambda: go(tmp_path, steps=6, resume="latest"))


def test_refusals_of_locations(tmp_path):
    grant(read({}))  # no S3, whatever other tests of this process had
    go(tmp_path, steps=20)
    refused("E-CKPT-007", lambda: go(tmp_path))
    refused("E-CKPT-009", lambda: go(tmp_path, resume="ck/step-14"))
    d = refused("E-CKPT-001", lambda: go(tmp_path, resume="ck"))
    assert "step-20" in " ".join(d.help) and "latest" in " ".join(d.help)
    refused("E-CKPT-001", lambda: go(tmp_path, resume="nowhere"))
    refused("E-CKPT-004", lambda: go(tmp_path, resume="latest", checkpoint_dir=None))
    refused("E-NET-010", lambda: go(tmp_path, checkpoint_dir="s3://bucket/x"))
    refused("E-NET-002", lambda: go(tmp_path, checkpoint_dir="fil://x"))
    (tmp_path / "file").write_text("")
    refused("E-CKPT-010", lambda: go(tmp_path, checkpoint_dir="file/x"))
    assert go(tmp_path, resume="ck/step-14", checkpoint_dir=None) == 0


def test_programs_that_differ(tmp_path):
    go(tmp_path, steps=10)
    wide = make_plan(tmp_path, width=3)
    wide = replace(wide, compile=lambda: FakeProgram(width=4))
    d = refused("E-CKPT-020", lambda: go(tmp_path, plan=wide, resume="latest"))
    assert len(d.notes) == 4 and "f32[3] in the checkpoint, f32[4] in the program" in d.notes[0]
    changed = make_plan(tmp_path, lr=0.01)
    d = refused("E-CKPT-021", lambda: go(tmp_path, plan=changed, resume="latest"))
    assert any("optimizer" in note for note in d.notes) and any("knob lr" in note for note in d.notes)
    before = (tmp_path / "m.jsonl").read_bytes()
    assert go(tmp_path, plan=changed, resume="latest", accept=True) == 0
    new = [json.loads(line) for line in (tmp_path / "m.jsonl").read_bytes()[len(before):].splitlines()]
    assert new[0]["event"] == "resume" and new[0]["supersedes_after"] == 10


def test_a_torn_metrics_line_is_cut_and_seq_goes_on(tmp_path):
    go(tmp_path, steps=20)
    path = tmp_path / "m.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"metric","na')
    go(tmp_path, resume="latest")
    assert path.read_bytes().startswith(whole)
    seen = records(path)
    assert [r["seq"] for r in seen] == list(range(len(seen)))


def test_another_run_appends(tmp_path):
    go(tmp_path, steps=5, checkpoint_dir=None)
    go(tmp_path, steps=5, checkpoint_dir=None)
    assert len({r["run_id"] for r in records(tmp_path / "m.jsonl")}) == 2


def test_not_finite_leaves_no_checkpoint_of_it(tmp_path):
    d = refused("E-RUN-001", lambda: go(tmp_path, plan=make_plan(tmp_path, nan_at=9)), exit_code=3)
    assert "step 9" in d.message
    assert [p.name for p in (tmp_path / "ck").glob("step-*")] == ["step-7"]
    status = json.loads((tmp_path / "s.json").read_text())
    assert status["state"] == "failed" and status["error"]["code"] == "E-RUN-001"
    last = records(tmp_path / "m.jsonl")[-1]
    assert last["event"] == "error"


def test_nothing_half_written_when_compile_fails(tmp_path):
    def compile_():
        raise MemoryError

    plan = make_plan(tmp_path)
    plan = replace(plan, compile=compile_)
    refused("E-MEM-001", lambda: go(tmp_path, plan=plan))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.csv", "s.json"]


def test_a_suspect_state_is_saved_as_such_and_healthy_ones_stay(tmp_path):
    class Turning(FakeProgram):
        def state(self):
            bad = {"opt/m/linear/weight": torch.full((3,), torch.inf)} if self.count > 7 else {}
            return super().state() | bad

    plan = make_plan(tmp_path, program=Turning(), keep=1, steps=30)
    go(tmp_path, plan=plan)
    assert sorted(p.name for p in (tmp_path / "ck").glob("step-*")) == ["step-30", "step-7"]
    said = io.StringIO()
    assert go(tmp_path, steps=30, resume="latest", stream=said) == 0
    assert "resuming" in said.getvalue() and "after step 7" in said.getvalue()


def test_max_time(tmp_path):
    refused("E-RUN-002", lambda: go(tmp_path, max_time="90"))
    start = time.monotonic()
    assert go(tmp_path, plan=make_plan(tmp_path, steps=10_000, delay=0.01), max_time="0.3s") == 4
    assert time.monotonic() - start < 90  # of the 100 s that its steps would take
    assert json.loads((tmp_path / "s.json").read_text())["state"] == "stopped"
    assert go(tmp_path, plan=make_plan(tmp_path, steps=10_000, delay=0.01), max_time="0.1s", checkpoint_dir=None) == 143


def test_summary_says_where_everything_lies(tmp_path):
    said = io.StringIO()
    go(tmp_path, steps=10, stream=said)
    text = said.getvalue()
    for part in ("done at step 10 of 10", "ck/step-10", "m.jsonl", "s.json", "eval valid"):
        assert part in text, text


def test_a_terminal_gets_a_bar_and_a_gone_reader_is_quiet(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    said = Terminal()
    assert go(tmp_path, steps=12, stream=said) == 0
    assert "done at step 12" in said.getvalue()
    assert go(tmp_path, steps=12, stream=Gone(), checkpoint_dir=None) == 0


def test_data_outside_the_folder_is_announced(tmp_path):
    (tmp_path / "inner").mkdir()
    plan = make_plan(tmp_path)
    source = replace(plan.run.data.source, location="../data.csv", folder=str(tmp_path / "inner"))
    run = replace(plan.run, data=replace(plan.run.data, source=source), evals=())
    said = io.StringIO()
    go(tmp_path, plan=replace(plan, run=run), stream=said)
    assert "outside the experiment's folder" in said.getvalue()


def test_changed_data_changes_the_trajectory(tmp_path):
    go(tmp_path, steps=10)
    path = tmp_path / "data.csv"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    d = refused("E-CKPT-021", lambda: go(tmp_path, resume="latest"))
    assert "data points" in d.notes[0]


def test_a_stop_before_the_first_step_leaves_step_0(tmp_path):
    signals = Signals()
    signals._on_stop(2, None)
    assert execute(options(tmp_path, checkpoint_dir="ck"), make_plan(tmp_path), signals) == 4
    assert [p.name for p in (tmp_path / "ck").glob("step-*")] == ["step-0"]
    signals = Signals()
    signals._on_stop(2, None)
    assert execute(options(tmp_path), make_plan(tmp_path), signals) == 130
    assert go(tmp_path, resume="latest") == 0


def test_torch_out_of_memory(tmp_path):
    class Large(FakeProgram):
        def step(self, batch, logged):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    refused("E-MEM-001", lambda: go(tmp_path, plan=make_plan(tmp_path, program=Large())), exit_code=3)


def test_parts_are_cut_in_name_order(tmp_path, monkeypatch):
    monkeypatch.setattr("sexpgpu.run.checkpoints.tensors.PART_BYTES", 24)
    go(tmp_path, steps=7)
    assert sorted(p.name for p in (tmp_path / "ck/step-7").iterdir()) == [
        "manifest.json", "part-00001-of-00002.safetensors", "part-00002-of-00002.safetensors"]
    assert go(tmp_path, steps=8, resume="latest") == 0


def test_finding_needs_no_torch(tmp_path):
    go(tmp_path, steps=5)
    code = ("import sys; from sexpgpu.run.checkpoints.find import Wanted, stored_threads;"
            f"wanted = Wanted('latest', 'ck', {str(tmp_path)!r}, ('fake',), 'train');"
            "print(stored_threads(wanted), 'torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["1", "False"], done.stderr

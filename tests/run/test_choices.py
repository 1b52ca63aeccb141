"""Which run and which checkpoint a resume takes when clocks, other processes and changes of mind are in the way."""

import shutil
import time
from types import SimpleNamespace

import pytest
from fake_run import make_plan
from small import points, run, write
from test_session import go, records, refused, weights

from sexpgpu.run import session, slug
from sexpgpu.run.metrics.read import read_runs
from sexpgpu.run.storage import link, storage_error
from sexpgpu.run.storage.file import FolderStorage


def at(seconds):
    """A clock for slugs that is wrong by so much."""
    return SimpleNamespace(strftime=time.strftime, strptime=time.strptime, gmtime=lambda now=None: time.gmtime(time.time() + seconds if now is None else now))


def test_a_clock_that_was_set_back(tmp_path, monkeypatch, capsys):
    """`latest` is the run that began last, whatever the clock said; only runs of this file count."""
    keys = {"checkpoint_dir": "c/{slug}", "metrics": None, "stream": None}
    monkeypatch.setattr(slug, "time", at(7 * 86400))
    assert go(tmp_path, steps=7, **keys) == 0
    first = next((tmp_path / "c").iterdir()).name
    (tmp_path / "c/other-20990101-000000-abcd").mkdir()
    (tmp_path / f"c/{first[:-20]}99999999-999999-abcd").mkdir()  # digits that are no time
    monkeypatch.setattr(slug, "time", at(0))
    assert go(tmp_path, steps=14, **keys) == 0
    assert "from now; is this machine's clock right?" in capsys.readouterr().err
    second = next(p.name for p in (tmp_path / "c").iterdir() if (p / "step-14").exists())
    assert slug.seconds_of(slug.stamp_of(second)) == slug.seconds_of(slug.stamp_of(first)) + 1
    assert go(tmp_path, steps=20, resume="latest", **keys) == 0
    assert (tmp_path / "c" / second / "step-20").exists() and not (tmp_path / "c" / first / "step-20").exists()


def _while_choosing(monkeypatch, what):
    """`what` happens after a checkpoint was chosen and before the location is held."""
    real = session.Store

    def store(*words):
        monkeypatch.setattr(session, "Store", real)
        what()
        return real(*words)

    monkeypatch.setattr(session, "Store", store)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_ends_while_another_one_chooses(tmp_path, monkeypatch, begun, capsys):
    """What was chosen is looked at again once the location is held: nothing that became durable is trained anew."""
    if begun:
        go(tmp_path, steps=10)
    _while_choosing(monkeypatch, lambda: go(tmp_path, steps=20, resume="latest"))
    assert go(tmp_path, resume="latest", stream=None) == 0
    said = capsys.readouterr().err
    assert "looking again" in said and "after step 20" in said
    assert len({r["run_id"] for r in records(tmp_path / "m.jsonl")}) == 1
    other = tmp_path / "other"
    other.mkdir()
    assert go(other) == 0
    assert all(w.equal(weights(other / "ck/step-60")[name]) for name, w in weights(tmp_path / "ck/step-60").items())


def test_the_same_with_a_checkpoint_by_name(tmp_path, monkeypatch):
    go(tmp_path, steps=10)
    _while_choosing(monkeypatch, lambda: go(tmp_path, steps=20, resume="latest"))
    refused("E-CKPT-009", lambda: go(tmp_path, resume="ck/step-10"))


def test_a_checkpoint_is_read_once(tmp_path, monkeypatch):
    """Threads, choice, comparison and state of a resume: one reading of each file."""
    write(tmp_path)
    assert run(tmp_path, "--steps", "10") == 0
    real, read = FolderStorage.stream, []

    def stream(self, name, *words):
        if name.startswith("part-"):  # a save reads back `step-N/part-…`
            read.append((self.url.rpartition("/")[2], words))
        return real(self, name, *words)

    monkeypatch.setattr(FolderStorage, "stream", stream)
    assert run(tmp_path, "--resume", "latest") == 0
    assert read == [("step-10", ())]


def test_a_server_that_is_not_there_is_waited_for_once(tmp_path, monkeypatch, capsys):
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:1"), ("REGION", "r"), ("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s")):
        monkeypatch.setenv(f"SEXPGPU_AWS_{name}", value)
    monkeypatch.setattr(link, "FIRST_PATIENCE", 0.5)
    real, given_up = link.Link.unreachable, []
    monkeypatch.setattr(link.Link, "unreachable", lambda self, why: given_up.append(why) or real(self, why))
    write(tmp_path)
    assert run(tmp_path, "--resume", "latest", location="s3://bucket/runs") == 2
    assert "E-NET-011" in capsys.readouterr().err and len(given_up) == 1


@pytest.mark.parametrize(("location", "look"), [("ck", "entries"), ("c/{slug}", "folders")])
def test_a_location_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch, location, look):
    go(tmp_path, steps=7, checkpoint_dir=location)

    def broken(self, *words):
        raise storage_error("E-NET-024", "it cannot be read: Input/output error", reason="Input/output error")

    monkeypatch.setattr(FolderStorage, look, broken)
    assert "Input/output error" in refused("E-CKPT-005", lambda: go(tmp_path, checkpoint_dir=location, resume="latest")).message


def _without(folder, *steps):
    for step in steps:
        shutil.rmtree(folder / f"ck/step-{step}")


def test_a_change_that_left_no_checkpoint_is_superseded(tmp_path):
    """A, then B by --accept, killed before its first checkpoint, then A again: the file's run is A throughout."""
    plans = [make_plan(tmp_path, steps=12, lr=lr, log_every=1) for lr in (0.05, 0.5)]
    assert go(tmp_path, plan=plans[0]) == 0
    of_a = [m for m in read_runs(tmp_path / "m.jsonl").popitem()[1].metrics if m["name"] == "loss"]
    _without(tmp_path, 12)
    assert go(tmp_path, plan=plans[1], resume="latest", accept=True) == 0
    of_b = [m["value"] for m in read_runs(tmp_path / "m.jsonl").popitem()[1].metrics if m["name"] == "loss"]
    _without(tmp_path, 12)
    assert go(tmp_path, plan=plans[0], resume="latest") == 0
    again = [m for m in read_runs(tmp_path / "m.jsonl").popitem()[1].metrics if m["name"] == "loss"]
    told = [(m["step"], m["metadata"]["split"], m["value"]) for m in again]
    assert sorted(told) == sorted((m["step"], m["metadata"]["split"], m["value"]) if "split" in m["metadata"] else None for m in of_a)
    assert of_b != [m["value"] for m in of_a]
    assert [r.get("supersedes_after") for r in records(tmp_path / "m.jsonl") if r.get("event") == "resume"] == [7, 7]


def test_another_spelling_of_a_value_supersedes_nothing(tmp_path):
    path = write(tmp_path, steps=10, keys=" :log-every 1", scale=" :scale 1/16")
    assert run(tmp_path) == 0
    _without(tmp_path, 10)
    path.write_text(path.read_text().replace("1/16", "0.0625"))
    assert run(tmp_path, "--resume", "latest") == 0
    assert {step for _, _, step in points(tmp_path)} == set(range(1, 11))  # `points` refuses a second value
    assert not any("supersedes_after" in r for r in records(tmp_path / "m.jsonl"))

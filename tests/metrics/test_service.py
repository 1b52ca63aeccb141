"""The target `syvain` in a run: refused at the start, completed at the end or by a push; the key shows up nowhere."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_service import CLOSE, FOLDER, FakeService, error, reply
from support_metrics import KEY, RUN, append, points, read, run_record, service, whole_run

from sexpgpu.cli.main import perform
from sexpgpu.diagnostics import SexpError, render
from sexpgpu.run.metrics import open_targets, parse_targets
from sexpgpu.run.metrics import service as module
from sexpgpu.run.metrics.push import push
from sexpgpu.run.metrics.service import connect
from sexpgpu.run.metrics.target import Service
from sexpgpu.run.options import RunOptions
from sexpgpu.run.session import execute
from sexpgpu.settings import Secret

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "run"))
from fake_run import make_plan  # noqa: E402


@pytest.fixture
def fake():
    with FakeService() as made:
        yield made


def refused(code, call):
    with pytest.raises(SexpError) as caught:
        call()
    diagnostic = caught.value.diagnostic
    assert diagnostic.code == code and diagnostic.exit_code == 2 and diagnostic.help
    return diagnostic


def run(folder: Path, url: str, *words: str, **keys) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(HERE / "metrics_run.py"), str(folder), url, *words], stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **keys)


def here(folder: Path, url: str, targets: str, *, key: str = KEY, strict: bool = False, accept: bool = False, **keys) -> tuple[int, str]:
    """A run within this process: its exit code, and what it said."""
    stream = io.StringIO()
    places = {name: keys.pop(name) for name in ("checkpoint_dir", "resume", "status") if name in keys}
    options = RunOptions(folder=str(folder), metrics=targets, service=Service(Secret(key), None, url, folder / "state"), stream=stream,
                         strict_metrics=strict, accept=accept, **places)
    try:
        code = execute(options, make_plan(folder, log_every=1, **keys))
    except SexpError as error:
        code = error.diagnostic.exit_code
        stream.write(render(error.diagnostic))
    return code, stream.getvalue()


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, err


def keyed(fake) -> list[tuple]:
    return [(p["metricName"], p["step"], tuple(sorted(p["meta"].items()))) for p in fake.points()]


def expected(file: Path) -> list[tuple]:
    return [(r["name"], r["step"], tuple(sorted(r["metadata"].items()))) for r in read(file) if r["type"] == "metric"]


# -- the start


@pytest.mark.parametrize(("status", "code", "word"), [(401, "E-NET-041", "SYVAIN_METRICS_API_KEY"), (403, "E-NET-041", "key"),
                                                      (404, "E-NET-045", "SYVAIN_METRICS_HOST"), (400, "E-NET-045", "SYVAIN_METRICS_HOST")])
def test_refused_at_once_with_the_mend(fake, tmp_path, status, code, word):
    fake.hooks.append(lambda a: error(status, f"no, {KEY}"))
    found = refused(code, lambda: connect(service(fake.url, tmp_path), None))
    assert len(fake.asked) <= 2  # asked again it would be, for as long as the budget lasts
    text = found.message + "".join(found.help)
    assert word in text and str(status) in text and KEY not in text


def test_keys_that_cannot_be(fake, tmp_path):
    for key in ("", " \n", "two words", "schlüssel", "a\nb"):
        refused("E-NET-040", lambda key=key: connect(service(fake.url, tmp_path, key), None))
    assert fake.asked == []
    refused("E-NET-040", lambda: connect(Service(None, None, fake.url, tmp_path), None))
    connect(service(fake.url, tmp_path, f"  {KEY}\n"), None).close()
    assert fake.asked[0].headers["authorization"] == f"Bearer {KEY}"


def test_folders(fake, tmp_path):
    for folder in ("runs", "", "019e0000-0000-7000-8000", "x" * 36):
        refused("E-NET-042", lambda folder=folder: connect(service(fake.url, tmp_path), folder))
    assert fake.asked == []
    connect(service(fake.url, tmp_path), FOLDER).close()
    connect(service(fake.url, tmp_path), FOLDER.upper()).close()
    other = FOLDER[:-1] + "1"
    assert other in refused("E-NET-042", lambda: connect(service(fake.url, tmp_path), other)).message


def test_the_older_path_of_the_key_check(fake, tmp_path):
    fake.auth_version = "v1"
    connect(service(fake.url, tmp_path), None).close()
    assert [a.path for a in fake.asked] == ["/api/v2/auth/status", "/api/v1/auth/status"]


def test_unreachable_and_slow_are_told_apart_and_bounded(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CONNECT_SECONDS", 1.0)
    begin = time.monotonic()
    refused("E-NET-043", lambda: connect(service("http://127.0.0.1:1", tmp_path), None, 3.0))
    assert time.monotonic() - begin < 30
    gate = threading.Event()
    fake.hooks.append(lambda a: gate.wait(60) and None)
    begin = time.monotonic()
    refused("E-NET-044", lambda: connect(service(fake.url, tmp_path), None, 1.0))
    assert 0.9 < time.monotonic() - begin < 40
    gate.set()
    fake.hooks[:] = [lambda a: error(503, "resting", retry_after="1")]
    begin = time.monotonic()
    assert "resting" in refused("E-NET-044", lambda: connect(service(fake.url, tmp_path), None, 2.5)).message
    assert 2 < time.monotonic() - begin < 40
    fake.hooks[:] = [lambda a: error(429, retry_after="1") if len(fake.asked) < 8 else None]
    fake.asked.clear()
    fake.hooks[:] = [lambda a: error(429, retry_after="1") if len(fake.asked) < 2 else None]
    connect(service(fake.url, tmp_path), None, 10.0).close()
    assert fake.asked[1].at - fake.asked[0].at >= 1
    assert (module.START_SECONDS, module.END_SECONDS) == (25.0, 15.0)


def test_nothing_is_kept_of_what_could_not_start(fake, tmp_path):
    fake.hooks.append(lambda a: error(401))
    specs = parse_targets(f"syvain,jsonl:{tmp_path}/m.jsonl")
    refused("E-NET-041", lambda: open_targets(specs, RUN, None, service=service(fake.url, tmp_path), slug="s"))
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_has_targets(fake, tmp_path):
    specs = parse_targets(f"syvain,stdout,jsonl:{tmp_path}/m.jsonl")
    assert open_targets(specs, RUN, None, service=service(fake.url, tmp_path), slug="s", rank=1) == []
    assert fake.asked == [] and list(tmp_path.iterdir()) == []


# -- whole runs


def test_a_run_with_a_file(fake, tmp_path):
    code, err = here(tmp_path, fake.url, f"jsonl:{tmp_path}/m.jsonl,syvain:{FOLDER}", steps=30)
    assert code == 0 and "warning" not in err, err
    assert keyed(fake) == expected(tmp_path / "m.jsonl") and len(keyed(fake)) > 150
    assert f"{fake.url}/app/experiments/{list(fake.experiments.values())[0]}" in err
    assert not (tmp_path / "state").exists()
    meta = fake.metas[0]
    assert meta["knobs"]["lr"] == {"value": 0.05, "source": "default", "place": "fake.lisp:1:1"}
    assert meta["device"] == "cpu fake" and "step-seconds" in meta["throughput"]["samples-per-second"]
    assert meta["ir_hash"] == "ab" * 32 and meta["versions"] == {"sexpgpu": "0"}


def test_a_run_with_a_spool_only(fake, tmp_path):
    seen = {}

    def look(asked):
        for path in (tmp_path / "state/sexpgpu/spool").glob("*.jsonl"):
            seen[path.name] = (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode))

    fake.hooks.append(look)
    code, err = here(tmp_path, fake.url, "syvain", steps=30)
    assert code == 0 and list(seen) == [f"{next(iter(fake.experiments))}.jsonl"] and set(seen.values()) == {(0o600, 0o700)}
    assert list((tmp_path / "state/sexpgpu/spool").iterdir()) == []
    assert fake.events()[:2] == ["annotate", "start"] and fake.events()[-2:] == ["done", "tokenRevoke"]


@pytest.mark.parametrize("strict", [False, True])
def test_what_did_not_arrive_is_named_and_pushed(fake, tmp_path, strict, monkeypatch, capsys):
    """Records that were not taken are still sent when the key and the host are given to a push."""
    fake.hooks.append(lambda a: error(422, "no series left") if "metric" in a.names else None)
    code, err = here(tmp_path, fake.url, "syvain", steps=30, strict=strict)
    assert code == (3 if strict else 0)
    spool = next((tmp_path / "state/sexpgpu/spool").glob("*.jsonl"))
    assert f"sexpgpu metrics push {spool}" in err and "no series left" in err
    wanted = expected(spool)
    monkeypatch.setenv("SYVAIN_METRICS_API_KEY", f"{KEY}\n")
    monkeypatch.setenv("SYVAIN_METRICS_HOST", fake.url)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert perform(["metrics", "push", str(spool)]) == 3 and "E-NET-046" in capsys.readouterr().err
    fake.hooks.clear()
    assert f"push {spool}" in here(tmp_path, fake.url, "syvain", steps=5)[1]  # the next run knows of it
    fake.arrived.clear()
    assert perform(["metrics", "push", str(spool)]) == 0
    assert keyed(fake) == wanted and not spool.exists() and list(spool.parent.iterdir()) == []


def test_killed_resumed_killed_pushed(fake, tmp_path, monkeypatch, capsys):
    """SIGKILL twice, the second time with the service away; the file and the service hold the same points, each once."""
    words = (f"metrics=jsonl:{tmp_path}/m.jsonl,syvain", f"checkpoint_dir={tmp_path}/ck", "resume=latest", "steps=120")
    file = tmp_path / "m.jsonl"

    def killed(at: int) -> None:
        process = run(tmp_path, fake.url, *words, "delay=0.01")
        until = time.monotonic() + 60
        while time.monotonic() < until and not (file.exists() and any(s[1] > at for s in expected_or_none(file))):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def expected_or_none(path: Path) -> list[tuple]:
        whole = path.read_text().rsplit("\n", 1)[0].splitlines()
        return [(r["name"], r["step"]) for r in map(json.loads, whole) if r["type"] == "metric"]

    killed(20)
    killed(60)
    assert fake.events().count("start") >= 2
    fake.hooks.append(lambda a: CLOSE if "metric" in a.names else None)
    killed(100)
    with file.open("ab") as torn:
        torn.write(b'{"type":"metric","na')
    fake.hooks.clear()
    monkeypatch.setenv("SYVAIN_METRICS_API_KEY", KEY)
    monkeypatch.setenv("SYVAIN_METRICS_HOST", fake.url)
    assert perform(["metrics", "push", str(file)]) == 0
    assert "shows it as running" in capsys.readouterr().out
    whole = [json.loads(line) for line in file.read_text().splitlines()[:-1]]
    wanted = [(r["name"], r["step"], tuple(sorted(r["metadata"].items()))) for r in whole if r["type"] == "metric"]
    assert len(set(wanted)) == len(wanted) and sorted(keyed(fake)) == sorted(wanted)
    code, err = ended(run(tmp_path, fake.url, *words))
    assert code == 0, err
    assert sorted(keyed(fake)) == sorted(expected(file)) and len(set(keyed(fake))) == len(keyed(fake))
    assert max(k[1] for k in keyed(fake)) == 120 and fake.events()[-2] == "done"
    assert perform(["metrics", "push", str(file)]) == 0
    assert "nothing was left to send" in capsys.readouterr().out


def test_notes_of_a_run_arrive(fake, tmp_path):
    keys = {"checkpoint_dir": f"{tmp_path}/ck", "resume": "latest"}
    targets = f"jsonl:{tmp_path}/m.jsonl,syvain"
    assert here(tmp_path, fake.url, targets, steps=10, **keys)[0] == 0
    code, err = here(tmp_path, fake.url, targets, steps=20, lr=0.04, accept=True, nan_at=16, **keys)
    assert code == 3, err
    texts = {e["data"]["meta"].get("kind"): e["data"] for e in fake.arrived if e["event"].endswith("annotate")}
    saved = texts["checkpoint"]
    assert saved["annotation"] == f"checkpoint step-{saved['meta']['step']}" and saved["meta"]["step"] in (7, 10, 14)
    assert texts["resume"]["annotation"] == "resumed after step 10"
    assert "optimizer" in texts["accept"]["annotation"] and texts["accept"]["annotation"].startswith("--accept")
    assert "nan" in texts["not-finite"]["annotation"]
    last = [e["data"]["error"] for e in fake.arrived if e["event"].endswith(".error")]
    assert len(last) == 1 and last[0].startswith("E-RUN-001: ")


def test_there_and_back_again_by_accept(fake, tmp_path):
    """A, from its step 7 B, from B's step 14 A again, each delivered and its spool removed: three values of step 20."""
    a, b = ({"lr": lr} for lr in (0.05, 0.5))
    place = {"checkpoint_dir": "ck", "accept": True}
    for more, last, gone in ((a, 20, (14, 20)), (b, 14, ()), (a, 20, ())):
        resume = {"resume": "latest"} if (tmp_path / "ck").exists() else {}
        assert here(tmp_path, fake.url, "syvain", steps=last, **more, **place, **resume)[0] == 0
        assert not list((tmp_path / "state/sexpgpu/spool").glob("*.jsonl"))
        for step in gone:
            shutil.rmtree(tmp_path / f"ck/step-{step}")
    got = [p for p in fake.points() if p["metricName"] == "loss" and p["step"] == 20 and p["meta"]["split"] == "train"]
    assert [p["meta"].get("accepted-after") for p in got] == [None, "14"]
    assert got[0]["metricValue"] != got[1]["metricValue"]
    assert json.loads((tmp_path / "ck/step-20/manifest.json").read_text())["accepted"] == [7, 14]


def test_a_stalled_service_costs_a_run_no_time(fake, tmp_path):
    gate = threading.Event()
    fake.hooks.append(lambda a: gate.wait(60) and None if "/experiments/" in a.path else None)
    process = run(tmp_path, fake.url, f"metrics=jsonl:{tmp_path}/m.jsonl,syvain", "steps=200", f"status={tmp_path}/s.json")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (tmp_path / "s.json").exists() and json.loads((tmp_path / "s.json").read_text())["state"] == "done":
            break
        time.sleep(0.02)
    records = [r for r in read(tmp_path / "m.jsonl") if r["type"] == "metric" and r["name"] == "loss"]
    slowest = max(b["time"] - a["time"] for a, b in zip(records, records[1:], strict=False))
    assert len([r for r in records if "eval" not in r["metadata"]]) == 200 and slowest < 20  # of the 60 s that a request hangs
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    ended(process)
    assert time.monotonic() - begin < 40
    gate.set()


def test_two_runs_into_one_spool_are_refused(fake, tmp_path):
    specs = parse_targets("syvain")
    first = open_targets(specs, RUN, None, service=service(fake.url, tmp_path), slug="s")
    refused("E-RUN-014", lambda: open_targets(specs, RUN, None, service=service(fake.url, tmp_path), slug="s"))
    first[0].write({**run_record("start"), "run_id": RUN, "time": 1.0})
    held = tmp_path / "state/sexpgpu/spool/s.jsonl"
    refused("E-RUN-014", lambda: push(held, service(fake.url, tmp_path), None, False, print))
    for target in first:
        target.close()
    assert not held.exists()


def test_a_file_that_is_deleted_while_the_run_goes_on(fake, tmp_path, monkeypatch):
    """What the thread had open still arrives; where it cannot, the run says so and ends as it would have."""
    for answer, word in ((None, ""), (error(503), "is gone")):
        monkeypatch.setattr(module, "END_SECONDS", 1.0)
        specs = parse_targets(f"syvain,jsonl:{tmp_path}/m.jsonl")
        targets = open_targets(specs, RUN, None, service=service(fake.url, tmp_path), slug="s")
        fake.hooks[:] = [lambda a, answer=answer: answer if "/experiments/" in a.path else None]
        for target in targets:
            target.write({**run_record("start"), "run_id": RUN, "time": 1.0})
        (tmp_path / "m.jsonl").unlink()
        for target in targets:
            target.close()
        assert word in targets[-1].trouble and bool(word) == bool(targets[-1].trouble)


def test_a_run_that_never_starts_leaves_nothing(fake, tmp_path):
    (target,) = open_targets(parse_targets("syvain"), RUN, None, service=service(fake.url, tmp_path), slug="s")
    target.close()
    assert fake.experiments == {} and list((tmp_path / "state/sexpgpu/spool").iterdir()) == [] and not target.trouble


# -- push


def test_push_chooses_runs(fake, tmp_path):
    file = tmp_path / "m.jsonl"
    for i, name in enumerate(("a" * 32, "b" * 32, "c" * 32)):
        append(file, [run_record("start", slug=f"run-{i}"), *points(3), run_record("done")], name)
    done = push(file, service(fake.url, tmp_path), None, False, print)
    assert [(p.slug, p.sent, p.left) for p in done] == [("run-2", 5, 0)] and list(fake.experiments) == ["run-2"]
    done = push(file, service(fake.url, tmp_path), FOLDER, True, print)
    assert [(p.slug, p.sent) for p in done] == [("run-0", 5), ("run-1", 5), ("run-2", 0)]
    assert len(fake.points()) == 9 and file.exists()


def test_push_gives_up_without_progress(fake, tmp_path):
    file = tmp_path / "m.jsonl"
    append(file, whole_run(3))
    fake.hooks.append(lambda a: reply([]) if "start" in a.names else None)
    begin = time.monotonic()
    done = push(file, service(fake.url, tmp_path), None, False, print, still=1.0)
    assert done[0].left == 6 and time.monotonic() - begin < 60 and "no reply" in done[0].lines[0]


def test_push_of_what_is_none(tmp_path, fake):
    (tmp_path / "notes.txt").write_text("dear diary\n")
    for name in ("notes.txt", "absent", "."):
        refused("E-RUN-015", lambda name=name: push(tmp_path / name, service(fake.url, tmp_path), None, False, print))


# -- the key


def test_the_key_appears_nowhere(fake, tmp_path, capfd):
    """In no file, no message, no request but its header; also where the service echoes it and a run fails."""
    secret = "ak_org_" + "s3cr3t" * 4
    fake.key = secret
    fake.hooks.append(lambda a: error(500, f"odd {a.headers.get('authorization')}") if len(fake.asked) in (2, 6) else None)
    fake.hooks.append(lambda a: error(422, f"no {a.headers.get('authorization')}") if "metric" in a.names else None)
    said = ""
    for i, keys in enumerate(({}, {"nan_at": 12}, {"strict": True})):
        said += here(tmp_path, fake.url, f"stdout,jsonl:{tmp_path}/m{i}.jsonl,syvain", status=f"{tmp_path}/s.json", key=secret, steps=30,
                     checkpoint_dir=f"{tmp_path}/ck{i}", **keys)[1]
    code, err = here(tmp_path, fake.url, "syvain", key=f"{secret}x")
    assert code == 2 and "E-NET-041" in err
    code, err = ended(run(tmp_path, fake.url, "metrics=syvain", f"key={secret}", "steps=5"))
    said += err + "".join(capfd.readouterr())
    assert "reach syvain" in said and "***" in said and secret not in said
    tokens = [t for t in fake.tokens]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret.encode() not in data and not any(t.encode() in data for t in tokens), path
    for asked in fake.asked:
        assert secret not in json.dumps(asked.body) and secret not in asked.path
        assert not any(secret in value for name, value in asked.headers.items() if name != "authorization")


def test_proxies_and_netrc_do_not_get_the_key(fake, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    connect(service(fake.url, tmp_path), None).close()
    assert fake.asked[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_redirect_is_not_followed(fake, tmp_path):
    with FakeService() as other:
        fake.hooks.append(lambda a: (302, {"location": f"{other.url}/api/v2/auth/status"}, b""))
        refused("E-NET-044", lambda: connect(service(fake.url, tmp_path), None, 1.0))
        assert other.asked == []

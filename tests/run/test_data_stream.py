"""Training while shards are read: what starts early, what waits, and how mistakes and signals end it."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sexpgpu.cli import main
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.run import storage
from sexpgpu.run.data.dataset import FieldBound
from sexpgpu.run.data.feed import eval_feed, train_feed
from sexpgpu.run.data.manifest import index, reader
from sexpgpu.run.data.manifest.build import build, parse_input
from sexpgpu.run.data.place import LocalPlace
from sexpgpu.run.events import Stopped
from sexpgpu.run.loop import Feeds, train
from sexpgpu.run.program import StepResult
from sexpgpu.run.signals import Halted, Interrupted, Signals
from sexpgpu.settings import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _large(tmp_path, monkeypatch):
    """Every manifest is one with much to read."""
    monkeypatch.setattr(storage, "_granted", load({"XDG_CACHE_HOME": str(tmp_path / "cache")}))
    for module in (index, reader):
        monkeypatch.setattr(module, "LARGE", 0)


def make(folder, count=40, records=10, name="train"):
    path = folder / "in.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(count)))
    build([parse_input(f"{name}={path}")], folder / "m", records, None)


def opened(folder, stopping=lambda: None, **options):
    source = DataSource("d", "manifest", "m/data-manifest-v1.json", str(folder), (Field("id", "i64"),), options)
    return source, reader.read(source, folder, stopping=stopping)


@pytest.fixture
def gate(monkeypatch):
    """Shards from part-00002 on are there only when the gate is opened."""
    opened, chunks = threading.Event(), LocalPlace.chunks

    def held(self):
        if "part-00002" in self.path.name:
            assert opened.wait(20)
        return chunks(self)

    monkeypatch.setattr(LocalPlace, "chunks", held)
    yield opened
    opened.set()


def test_without_a_shuffle_the_first_batches_do_not_wait(tmp_path, gate):
    make(tmp_path)
    source, data = opened(tmp_path)
    feed = train_feed(data, Batches(source, None, 5), 0)
    feed.ready(0)
    assert [feed.batch(step)["id"].tolist()[0] for step in range(4)] == [0, 5, 10, 15]
    assert data.index.left() > 0
    gate.set()
    assert [feed.batch(step)["id"].tolist()[0] for step in range(4, 9)] == [20, 25, 30, 35, 0]
    assert data.index.left() == 0
    data.close()


def test_a_shuffle_waits_for_all(tmp_path, gate):
    make(tmp_path)
    source, data = opened(tmp_path)
    feed, waited = train_feed(data, Batches(source, None, 5, shuffle=True), 0), threading.Event()
    threading.Thread(target=lambda: (feed.ready(0), waited.set()), daemon=True).start()
    assert not waited.wait(0.5)
    gate.set()
    assert waited.wait(20)
    data.close()


def test_streamed_batches_are_those_of_the_cache(tmp_path):
    make(tmp_path, 101, 7)
    source, data = opened(tmp_path)
    for shuffle in (False, True):
        first = train_feed(data, Batches(source, None, 8, shuffle=shuffle), 3)
        got = [first.batch(step)["id"].tolist() for step in range(30)]
        again = train_feed(opened(tmp_path)[1], Batches(source, None, 8, shuffle=shuffle), 3)
        assert [again.batch(step)["id"].tolist() for step in range(30)] == got


def test_a_mistake_in_a_later_shard_ends_it_whether_needed_or_not(tmp_path):
    make(tmp_path)
    shard = tmp_path / "m/shards/train/part-00003.jsonl.gz"
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(bytes(data))
    source, found = opened(tmp_path)
    feed = train_feed(found, Batches(source, None, 5), 0)
    with pytest.raises(SexpError) as error:
        for _ in range(1000):
            feed.batch(0)
            time.sleep(0.01)
    assert error.value.diagnostic.code == "E-DATA-025" and "part-00003" in error.value.diagnostic.message


def test_a_label_out_of_range_in_a_later_shard(tmp_path, gate):
    make(tmp_path)
    source, data = opened(tmp_path)
    feed = train_feed(data, Batches(source, None, 5), 0)
    feed.ready(0)
    data.expect(FieldBound("id", 0, 33))
    gate.set()
    with pytest.raises(SexpError) as error:
        data.index.wait(data.manifest.splits["train"].shards)
        data.index.wait(data.manifest.splits["train"].shards[:1])
    assert error.value.diagnostic.code == "E-DATA-014" and "record 5 of shard shards/train/part-00003" in error.value.diagnostic.message


def test_a_stop_ends_a_wait_and_nothing_half_made_is_left(tmp_path, gate):
    make(tmp_path)
    stop = []
    source, data = opened(tmp_path, stopping=lambda: stop[0] if stop else None)
    feed = train_feed(data, Batches(source, None, 5), 0)
    feed.batch(0)
    stop.append(15)
    with pytest.raises(Halted):
        feed.batch(5)
    evaluation = iter(eval_feed(data, Batches(source, None, 30)))
    with pytest.raises(Halted):
        next(evaluation)
    data.close()
    left = [path.name for path in (tmp_path / "cache/sexpgpu/data").iterdir()]
    assert left and all(name.endswith(".block") and not name.startswith(".") for name in left)


def test_a_cleared_cache_is_read_again(tmp_path):
    make(tmp_path)
    source, data = opened(tmp_path)
    data.index.ask(shards := data.manifest.splits["train"].shards)
    data.index.wait(shards)
    for path in (tmp_path / "cache/sexpgpu/data").iterdir():
        path.unlink()
    assert [len(batch["id"]) for batch in eval_feed(data, Batches(source, None, 25))] == [25, 15]


def test_the_loop_ends_between_steps_when_its_batch_is_not_there(tmp_path, gate):
    make(tmp_path)
    stop = []
    source, data = opened(tmp_path, stopping=lambda: stop[0] if stop else None)
    feed = train_feed(data, batches := Batches(source, None, 5), 0)

    class Program:
        def step(self, batch, logged):
            if batch["id"][0] == 15:
                stop.append(15)
            return StepResult(1.0, 1.0, {"": 1.0}, True, {}, {})

    class Controls:
        asked = 0

        def stopping(self):  # the signal falls while the loop waits: at its own look between two steps there was none
            self.asked += 1
            return stop[0] if stop and self.asked > 5 else None

        def take_save_request(self):
            return False

    run = SimpleNamespace(data=batches, evals=(), log_every=1, checkpoint_every=None, loss=SimpleNamespace(span=None))
    events = list(train(Program(), run, Feeds(feed), 0, 8, controls=Controls()))
    assert isinstance(events[-1], Stopped) and (events[-1].step, events[-1].signal) == (4, 15)
    data.close()


# signals


@pytest.mark.parametrize("before", [True, False])
def test_the_first_stop_ends_long_work_before_the_first_step(monkeypatch, before):
    monkeypatch.setattr("sexpgpu.run.signals.GRACE", 0.2)
    signals = Signals().install()
    try:
        if before:
            os.kill(os.getpid(), signal.SIGTERM)
        begin = time.monotonic()
        with pytest.raises(Interrupted) as stop, signals.at_once():
            if not before:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        assert stop.value.signum == signal.SIGTERM and 0.1 < time.monotonic() - begin < 40
        with signals.at_once():
            pass  # short work ends by itself
    finally:
        signals.restore()


def test_max_time_ends_long_work_before_the_first_step(monkeypatch):
    monkeypatch.setattr("sexpgpu.run.signals.GRACE", 0.1)
    signals = Signals(0.1).install()
    try:
        with pytest.raises(Interrupted) as stop, signals.at_once():
            time.sleep(20)
        assert stop.value.signum == signal.SIGTERM
    finally:
        signals.restore()


PROGRAM = """
(import "nn" "optim" "loss")
(defdata d (manifest "m/data-manifest-v1.json" :split train :fields ((id i32))))
(defun off (id) (+ (statistic d "easy/weight") (mean (* (param "w" [] :init (zeros)) (cast id 'f32)))))
(defrun main :data (batches d :batch 4) :loss off :optimizer (sgd :lr 1e-2) :steps 2 :seed 1 :log-every 1)
"""


def call(folder, *words):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SEXPGPU_", "AWS_"))}
    return subprocess.Popen([sys.executable, "-m", "sexpgpu", *map(str, words)], cwd=folder, stderr=subprocess.PIPE, text=True,
                            env=clean | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"})


def with_metadata(folder, **metadata):
    make(folder, name="train/easy")
    path = folder / "m/data-manifest-v1.json"
    found = json.loads(path.read_text())
    found["splits"]["train"]["curriculum"]["easy"]["metadata"] = metadata
    path.write_text(json.dumps(found))


def test_a_stages_metadata_is_a_number_of_the_program(tmp_path, monkeypatch, capfd):
    with_metadata(tmp_path, weight=2.5, family="sums")
    (tmp_path / "e.lisp").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main.perform(["run", "e.lisp", "--metrics", "jsonl:m.jsonl", "--checkpoint-dir", "ck"]) == 0
    losses = [r["value"] for r in map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines()) if r.get("name") == "loss"]
    assert losses[0] == 2.5
    kept = json.loads((tmp_path / "ck/step-2/manifest.json").read_text())["data"]["d"]["statistics"]
    assert kept["easy/weight"] == 2.5 and kept["easy/records"] == 40 and "easy/family" not in kept
    (tmp_path / "e.lisp").write_text(PROGRAM.replace("easy/weight", "easy/wieght"))
    assert main.perform(["run", "e.lisp"]) == 2
    said = capfd.readouterr().err
    assert "E-EVAL-107" in said and "easy/weight" in said
    (tmp_path / "e.lisp").write_text(PROGRAM.replace('"easy/weight"', "3"))
    assert main.perform(["run", "e.lisp"]) == 2
    assert "E-EVAL-104" in capfd.readouterr().err


def test_a_first_sigterm_acts_while_shards_are_read(tmp_path):
    with_metadata(tmp_path, weight=1)
    (tmp_path / "e.lisp").write_text(PROGRAM)
    many = b"".join(b'{"id": %d}\n' % (i % 7) for i in range(2_000_000))
    shard = tmp_path / "m/shards/train/curriculum/easy/part-00000.jsonl.gz"
    shard.write_bytes(gzip.compress(many, 1, mtime=0))
    path = tmp_path / "m/data-manifest-v1.json"
    found = json.loads(path.read_text())
    train = found["splits"]["train"]
    for part in (train, train["curriculum"]["easy"]):
        part["shards"][0] |= {"records": 2_000_000, "size_bytes": shard.stat().st_size, "etag": ""}
        part["records"] = sum(s["records"] for s in part["shards"])
    path.write_text(json.dumps(found))
    process = call(tmp_path, "run", "e.lisp", "--checkpoint-dir", "ck", "--status", "s.json")
    end = time.monotonic() + 100
    while not list((tmp_path / "cache").rglob(".*.block.*")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143, said
    assert "before the first step" in said and "Traceback" not in said
    assert json.loads((tmp_path / "s.json").read_text())["state"] == "stopped"

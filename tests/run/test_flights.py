"""Several steps in the air: what the loop tells, writes and keeps is what it is without them, bit for bit."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
import torch
from fake_run import FakeProgram, make_plan
from flying import FlyingProgram
from test_loop import Script, Writes, of
from test_session import go, points, records, weights
from test_signals import FILES, start, until

from sexpgpu.diagnostics import SexpError, fail
from sexpgpu.run.bind import bind
from sexpgpu.run.data.feed import fill
from sexpgpu.run.data.order import _whole_epoch, permute, round_keys
from sexpgpu.run.data.prefetch import Prefetched
from sexpgpu.run.events import EvalDone, Finished, NotFinite, Saved, StepDone, Stopped, Warned
from sexpgpu.run.flights import MOST, Flights, Loader, together
from sexpgpu.run.loop import Feeds, train
from sexpgpu.run.signals import Halted


class Troubled:
    """A feed whose batch of one step does not come."""

    def __init__(self, feed, at, error):
        self.feed, self.at, self.error = feed, at, error
        self.asked = []

    def batch(self, step):
        self.asked.append(step)
        if step == self.at:
            raise self.error
        return self.feed.batch(step)


def events(tmp_path, program, stop=60, start=0, script=None, saver=None, out=None, trouble=None, autopsy=None, clock=None, **keys):
    plan = make_plan(tmp_path, **keys)
    if start == 0:
        program.initialise()
    script, out = script or Script(), [] if out is None else out
    feeds = bind(plan.run).feeds
    if trouble is not None:
        feeds = Feeds(Troubled(feeds.train, *trouble), feeds.evals)
    more = {} if clock is None else {"clock": clock}
    for event in train(program, plan.run, feeds, start, stop, controls=script, saver=saver, autopsy=autopsy, **more):
        if isinstance(event, StepDone):
            script.step = event.step
        out.append(event)
    return out


def told(out):
    """What listeners hear, without times."""
    found = []
    for e in out:
        if isinstance(e, StepDone):
            found.append((e.step, e.logged, e.result, e.interval_steps, e.interval_samples))
        elif isinstance(e, EvalDone):
            found.append((e.step, e.name, e.metrics))
        elif isinstance(e, Saved | NotFinite | Finished | Stopped):
            found.append(e)
    return found


def sizes(program):
    return [len(logged) for logged, _ in program.launches]


CADENCES = (
    {},
    {"log_every": 1, "every": 0, "checkpoint_every": 0},
    {"log_every": 3, "every": 7, "checkpoint_every": 20},
    {"log_every": 0, "every": 12, "checkpoint_every": 8},
    {"log_every": 100, "every": 40, "checkpoint_every": None},
)


@pytest.mark.parametrize("keys", CADENCES)
@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 1.0])
def test_the_same_as_step_by_step(tmp_path, keys, seconds):
    plain, flying = FakeProgram(), FlyingProgram(seconds=seconds)
    one = events(tmp_path, plain, stop=173, saver=Writes(), **keys)
    two = events(tmp_path, flying, stop=173, saver=Writes(), **keys)
    assert told(one) == told(two)
    assert all(torch.equal(plain.tensors[n], flying.tensors[n]) for n in plain.tensors)
    assert sum(sizes(flying)) == 173 and flying.most == (1 if seconds == 1.0 else 2)
    for at, count in zip(np.cumsum([0, *sizes(flying)]), sizes(flying), strict=False):
        for cadence in (keys.get("every", 20), keys.get("checkpoint_every", 7)):
            assert not cadence or at // cadence == (at + count - 1) // cadence  # no launch has a boundary inside


def test_short_steps_go_together_from_memory_of_the_program(tmp_path):
    program = FlyingProgram(seconds=1e-4)
    events(tmp_path, program, stop=400, every=100, checkpoint_every=200)
    assert sizes(program)[:4] == [1, 1, 1, 1] and max(sizes(program)) == 10
    assert set(sizes(program)[12:]) == {10}  # from the first multiple on
    assert {logged for logged, _ in program.launches if len(logged) == 10} == {(False,) * 9 + (True,)}
    assert all(own == (len(logged) > 1) for logged, own in program.launches)


@pytest.mark.parametrize("apart", [False, True])
def test_which_kinds_of_launches_there_are(tmp_path, apart):
    program = FlyingProgram(seconds=1e-5)
    program.apart = apart
    events(tmp_path, program, stop=2000, every=0, checkpoint_every=0, log_every=30)
    assert max(sizes(program)) == (15 if apart else MOST)
    kinds = {logged for logged, _ in program.launches if len(logged) > 1}
    assert not apart or len(kinds) == 2


def test_without_room_steps_go_one_by_one(tmp_path):
    program = FlyingProgram(rooms=False)
    events(tmp_path, program)
    assert set(sizes(program)) == {1} and program.most == 2


@pytest.mark.parametrize(
    ("seconds", "cadences", "log_every", "left", "expected"),
    [
        (5e-3, set(), None, 10**6, 1),  # long enough alone
        (1e-4, set(), None, 10**6, 16),
        (1e-4, {200, 500}, None, 10**6, 10),
        (1e-4, {200, 500}, 10, 10**6, 10),
        (1e-4, {1000}, 7, 10**6, 14),
        (1e-3, {200}, 10, 10**6, 2),
        (1e-3, set(), 0, 10**6, 3),
        (1e-4, {7}, None, 10**6, 7),
        (1e-4, {1}, None, 10**6, 1),  # every step is a boundary
        (1e-4, set(), 1, 10**6, 16),
        (1e-4, set(), None, 49, 4),  # a short run captures little
        (1e-4, set(), None, 19, 1),
        (0.0, set(), None, 10**6, 16),
    ],
)
def test_how_many_go_together(seconds, cadences, log_every, left, expected):
    assert together(seconds, cadences, log_every, left) == expected


def test_ranks_choose_alike(tmp_path):
    plan = make_plan(tmp_path, every=0, checkpoint_every=0)
    asked = []

    def largest(number):
        asked.append(number)
        return 10**6  # another rank is slower: 1 ms

    program = FlyingProgram(seconds=1e-5)
    program.initialise()
    feeds = bind(plan.run).feeds
    list(train(program, plan.run, Feeds(feeds.train, feeds.evals, largest=largest), 0, 200))
    assert asked == [10**4] and max(sizes(program)) == 2


@pytest.mark.parametrize("at", [1, 2, 4, 5, 19, 20, 21, 50, 51, 57, 60, 61, 99])
def test_a_step_that_is_not_finite(tmp_path, at):
    plain, flying = FakeProgram(nan_at=at), FlyingProgram(nan_at=at)
    found = []
    for program in (plain, flying):
        out, seen = [], []

        def autopsy(step, result, program=program, seen=seen):
            seen.append((step, result.fell, {n: t.clone() for n, t in program.state().items()}))
            return ("why",)

        with pytest.raises(SexpError) as error:
            events(tmp_path, program, out=out, stop=200, saver=Writes(), autopsy=autopsy, checkpoint_every=50)
        found.append((told([e for e in out if not isinstance(e, NotFinite)]), seen, str(error.value), program.count))
        assert [(e.step, e.told) for e in of(NotFinite, out)] == [(at, ("why",))]
        assert f"step {at}:" in error.value.diagnostic.message and error.value.diagnostic.exit_code == 3
    (one, (died,), said, count), (two, (fell,), says, counted) = found
    assert (one, said, count) == (two, says, counted) and count == at - 1
    assert died[:2] == fell[:2] == (at, "loss") and all(torch.equal(t, fell[2][n]) for n, t in died[2].items())
    assert not flying.air and flying.alive  # all of it came back


@pytest.mark.parametrize("at", [3, 20, 57])
def test_an_index_out_of_range_is_named_from_its_own_batch(tmp_path, at):
    out, program = [], FlyingProgram(bad_at=at)
    with pytest.raises(SexpError) as error:
        events(tmp_path, program, out=out, stop=100, every=0, checkpoint_every=0)
    batch = bind(make_plan(tmp_path).run).feeds.train.batch(at - 1)
    assert error.value.diagnostic.code == "E-RUN-031" and f"{batch['y'][0]:.6f}" in error.value.diagnostic.message
    assert [e.step for e in of(StepDone, out)] == list(range(1, at)) and not of(NotFinite, out)


@pytest.mark.parametrize("at", [0, 1, 7, 33, 64])
def test_a_stop_collects_what_flies_and_saves_there(tmp_path, at):
    straight, program = FakeProgram(), FlyingProgram(seconds=5e-4)
    events(tmp_path, straight, stop=150, every=50, checkpoint_every=0)
    saver = Writes()
    out = events(tmp_path, program, stop=150, script=Script(stop=at), saver=saver, every=50, checkpoint_every=0)
    stopped = out[-1]
    assert stopped == Stopped(program.count, signal.SIGTERM, True) and not program.air
    assert at <= program.count <= at + 2 * max(sizes(program), default=0)
    assert of(Saved, out)[-1].step == program.count == len(of(StepDone, out))
    again = FlyingProgram(seconds=5e-4)
    again.load(program.state(), program.count)
    events(tmp_path, again, start=program.count, stop=150, every=50, checkpoint_every=0)
    assert all(torch.equal(straight.tensors[n], again.tensors[n]) for n in straight.tensors)


def test_a_save_that_is_asked_for_waits_for_what_flies(tmp_path):
    program, saver = FlyingProgram(), Writes()

    class Asks(Script):
        def take_save_request(self):
            asked, self.saves = self.step >= 40 and bool(self.saves), set() if self.step >= 40 else self.saves
            return asked

    out = events(tmp_path, program, stop=200, every=0, checkpoint_every=0, saver=saver, script=Asks(saves=[1]))
    asked, last = (step for step, _ in saver.begun)
    assert 40 <= asked <= 40 + 2 * max(sizes(program)) and last == 200 and out[-1] == Finished(200)
    out = events(tmp_path, FlyingProgram(), stop=200, every=0, script=Asks(saves=[1]))
    assert [w.diagnostic.code for w in of(Warned, out)] == ["E-RUN-003"]


def test_a_halt_while_a_batch_is_waited_for(tmp_path):
    for at in (0, 2, 5, 6, 40, 57):
        program, saver = FlyingProgram(), Writes()
        out = events(tmp_path, program, stop=100, saver=saver, trouble=(at, Halted()), every=0, checkpoint_every=0)
        whole = len(of(StepDone, out))
        assert whole == sum(sizes(program)) and whole <= at < whole + MOST  # its launch did not go
        assert out[-1] == Stopped(whole, signal.SIGTERM, True) and saver.begun == [(whole, ())] and not program.air


def test_bad_data_are_told_after_the_steps_before_them(tmp_path):
    try:
        fail("E-DATA-005", "row 7 is odd")
    except SexpError as error:
        bad = error
    out = []
    with pytest.raises(SexpError) as error:
        events(tmp_path, FlyingProgram(), out=out, stop=400, trouble=(57, bad), every=0, checkpoint_every=0)
    assert error.value is bad and len(of(StepDone, out)) == 50
    program, out = FlyingProgram(nan_at=49), []
    with pytest.raises(SexpError) as error:  # an earlier step fell: that is the mistake
        events(tmp_path, program, out=out, stop=100, trouble=(50, bad), every=0, checkpoint_every=0)
    assert error.value.diagnostic.code == "E-RUN-001" and program.count == 48


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failure_of_the_device_names_its_steps(tmp_path, where):
    class Fails(FlyingProgram):
        def launch(self, batches, logged):
            self._fail("launch", batches)
            return super().launch(batches, logged)

        def collect(self, flight):
            self._fail("collect", flight.results)
            return super().collect(flight)

        def _fail(self, at, steps):
            if at == where and self.count >= 50 and len(steps) == 10:
                fail("E-MEM-003", "the device has no memory left", exit_code=3)

    out, program = [], Fails(seconds=1e-4)
    with pytest.raises(SexpError) as error:
        events(tmp_path, program, out=out, stop=400, every=0, checkpoint_every=0)
    first = of(StepDone, out)[-1].step + 1
    assert error.value.diagnostic.code == "E-MEM-003" and first % 10 == 1
    assert error.value.diagnostic.notes == (f"steps {first} … {first + 9} of the run were under way; {first - 1} updates were made before",)


class Clock:
    """One second passes at each look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_times_are_of_the_wall_and_no_moment_counts_twice(tmp_path):
    clock = Clock()
    out = events(tmp_path, FlyingProgram(), stop=400, clock=clock, every=100, checkpoint_every=0)
    logged = [e for e in of(StepDone, out) if e.logged]
    assert sum(e.interval_steps for e in logged) == 400
    inside = sum(e.interval_seconds for e in logged) + sum(e.seconds for e in of(EvalDone, out))
    assert inside <= clock.now
    assert [e.interval_seconds for e in logged[12:19]] == pytest.approx([1.0] * 7)  # launches of ten, one back a look, nothing between


def test_a_loader_fills_the_room_with_the_same_batches(tmp_path):
    feed = bind(make_plan(tmp_path).run).feeds.train
    rooms = []

    def room(count):
        shapes = feed.batch(0)
        rooms.append([{n: np.zeros_like(a) for n, a in shapes.items()} for _ in range(count)])
        return rooms[-1]

    loader = Loader(feed, room)
    loader.ask(10, 3)
    found = [loader.take(10, 3), loader.take(40, 2)]
    loader.ask(90, 2)  # never taken
    found.append(loader.take(50, 2))
    for at, batches in zip((10, 40, 50), found, strict=True):
        for i, batch in enumerate(batches):
            assert all(np.array_equal(batch[n], a) for n, a in feed.batch(at + i).items())
    loader.close()
    assert not loader._thread.is_alive()


def test_a_loader_hands_on_what_went_wrong(tmp_path):
    feed = bind(make_plan(tmp_path).run).feeds.train
    loader = Loader(Troubled(feed, 11, ValueError("odd")), lambda count: [{n: np.zeros_like(a) for n, a in feed.batch(0).items()} for _ in range(count)])
    with pytest.raises(ValueError, match="odd"):
        loader.take(10, 2)
    assert len(loader.take(12, 2)) == 2
    loader.close()


def test_fill_is_batch(tmp_path):
    feed = bind(make_plan(tmp_path).run).feeds.train
    for step in (0, 3, 5, 11):  # within an epoch, and over its end
        batch = feed.batch(step)
        for kind in (np.float32, np.float64):
            out = {n: np.zeros(a.shape, kind) for n, a in batch.items()}
            fill(feed, step, out)
            assert all(np.array_equal(out[n], a) for n, a in batch.items())


def test_batches_made_ahead_and_in_place_are_the_same(tmp_path):
    feed = bind(make_plan(tmp_path).run).feeds.train
    ahead = Prefetched(feed)
    for step in (0, 1, 2, 7):
        assert all(np.array_equal(ahead.batch(step)[n], a) for n, a in feed.batch(step).items())
        out = {n: np.zeros_like(a) for n, a in feed.batch(0).items()}
        fill(ahead, step + 1, out)
        assert all(np.array_equal(out[n], a) for n, a in feed.batch(step + 1).items())
    assert not Prefetched(Troubled(feed, 9, ValueError())).fill(0, out)  # it has no such way
    ahead.close()


def test_a_program_that_only_steps_has_no_thread_and_no_choice(tmp_path):
    plan = make_plan(tmp_path)
    program = FakeProgram()
    program.initialise()
    flights = Flights(program, plan.run, bind(plan.run).feeds.train, 0, 20, True, Clock())
    for step in range(1, 8):
        flights.fill()
        assert flights.sent == step
        assert [made.step for made in flights.collect()] == [step] and not flights
    assert flights.together == 1 and flights._loader is None


def test_whole_runs_write_the_same(tmp_path):
    """Metrics, status, checkpoints: of `execute`, straight and not finite."""
    for name, program in (("a", FakeProgram()), ("b", FlyingProgram())):
        (tmp_path / name).mkdir()
        assert go(tmp_path / name, plan=make_plan(tmp_path / name, program=program, steps=200, checkpoint_every=50)) == 0
    one, two = (json.loads((tmp_path / name / "s.json").read_text()) for name in "ab")
    assert points(tmp_path / "a/m.jsonl") == points(tmp_path / "b/m.jsonl")
    assert [one[k] for k in ("state", "step", "loss")] == [two[k] for k in ("state", "step", "loss")]
    a, b = weights(tmp_path / "a/ck/step-200"), weights(tmp_path / "b/ck/step-200")
    assert all(torch.equal(a[n], b[n]) for n in a)
    cursors = [json.loads((tmp_path / name / "ck/step-150/manifest.json").read_text())["cursor"] for name in "ab"]
    assert cursors[0] == cursors[1]
    for name, program in (("c", FakeProgram(nan_at=137)), ("d", FlyingProgram(nan_at=137))):
        (tmp_path / name).mkdir()
        with pytest.raises(SexpError) as error:
            go(tmp_path / name, plan=make_plan(tmp_path / name, program=program, steps=200, checkpoint_every=50))
        assert "step 137" in error.value.diagnostic.message
    assert points(tmp_path / "c/m.jsonl") == points(tmp_path / "d/m.jsonl")
    facts = [json.loads((tmp_path / name / "s.json").read_text()) for name in "cd"]
    assert [f["step"] for f in facts] == [136, 136] and facts[0]["error"] == facts[1]["error"]
    assert sorted(p.name for p in (tmp_path / "d/ck").glob("step-*")) == sorted(p.name for p in (tmp_path / "c/ck").glob("step-*"))


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_while_steps_fly_goes_on_bit_for_bit(tmp_path, which):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert go(tmp_path / "a", steps=400) == 0
    process = start(tmp_path / "b", *FILES, "flying=1", "steps=400", "delay=0.002")
    until(tmp_path / "b", 40, process)
    process.send_signal(which)
    _, said = process.communicate(timeout=60)
    if which != signal.SIGKILL and process.returncode != 0:  # else it was at its end already
        assert process.returncode == 4, said
        assert records(tmp_path / "b/m.jsonl")[-1]["event"] == "stopped"
    assert go(tmp_path / "b", steps=400, resume="latest") == 0
    a, b = weights(tmp_path / "a/ck/step-400"), weights(tmp_path / "b/ck/step-400")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert points(tmp_path / "a/m.jsonl") == points(tmp_path / "b/m.jsonl")


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000, 5001])
def test_an_epoch_that_is_made_at_once_is_the_permutation(n):
    for epoch in range(3):
        assert np.array_equal(_whole_epoch(n, 5, epoch), permute(np.arange(n), n, round_keys(5, epoch)))

"""The loop alone: what it yields, in which order, at which steps."""

import signal

import numpy as np
import pytest
from fake_run import FakeProgram, make_plan

from sexpgpu.diagnostics import SexpError, problem
from sexpgpu.run.bind import bind
from sexpgpu.run.checkpoints.writer import Outcome
from sexpgpu.run.events import EvalDone, Finished, NotFinite, PhaseChanged, Saved, StepDone, Stopped, Warned
from sexpgpu.run.loop import train


class Writes:
    """A saver whose checkpoints end at once; `fails` at these steps."""

    def __init__(self, fails=()):
        self.fails, self.begun, self.waiting = set(fails), [], []

    def begin(self, step, owed=()):
        ended = self.finish()
        self.begun.append((step, tuple(owed)))
        error = problem("E-CKPT-012", "the disk is full", exit_code=3) if step in self.fails else None
        self.waiting = [Outcome(step, None if error else Saved(step, "here"), error)]
        return ended

    def finish(self):
        ended, self.waiting = self.waiting, []
        return ended

    poll = finish


class Script:
    """Asks to stop before step `stop + 1`, and for saves after the steps in `saves`."""

    def __init__(self, stop=None, saves=()):
        self.stop, self.saves, self.step = stop, set(saves), 0

    def stopping(self):
        return signal.SIGTERM if self.stop is not None and self.step >= self.stop else None

    def take_save_request(self):
        return self.step in self.saves


def events(tmp_path, start=0, stop=25, script=None, saver=None, program=None, owed=(), out=None, **keys):
    plan = make_plan(tmp_path, **keys)
    program = program or FakeProgram()
    program.initialise()
    script = script or Script()
    out = [] if out is None else out
    for event in train(program, plan.run, bind(plan.run).feeds, start, stop, controls=script, saver=saver, owed=owed):
        if isinstance(event, StepDone):
            script.step = event.step
        out.append(event)
    return out


def of(kind, out):
    return [event for event in out if isinstance(event, kind)]


def test_steps_logs_and_evals(tmp_path):
    out = events(tmp_path)
    assert [e.step for e in of(StepDone, out)] == list(range(1, 26))
    assert [e.step for e in of(StepDone, out) if e.logged] == [10, 20, 25]
    assert [e.step for e in of(EvalDone, out)] == [20, 25]
    assert out[-1] == Finished(25)
    assert [e.interval_steps for e in of(StepDone, out) if e.logged] == [10, 10, 5]


def test_evaluation_is_the_mean_over_samples(tmp_path):
    program = FakeProgram()
    out = events(tmp_path, program=program, stop=1)
    plan = make_plan(tmp_path)
    feed = bind(plan.run).feeds.evals["valid"]
    total, count = program.evaluate("valid", feed.samples.take(np.arange(len(feed.samples))))["loss"]
    assert of(EvalDone, out)[0].metrics["loss"] == pytest.approx(total / count, rel=1e-6)
    assert [len(batch["y"]) for batch in feed] == [5, 5, 1]


def test_every_zero_is_never(tmp_path):
    assert not of(EvalDone, events(tmp_path, every=0))


def test_saves_by_cadence_request_and_at_the_end(tmp_path):
    out = events(tmp_path, saver=Writes(), script=Script(saves=[3]))
    assert [e.step for e in of(Saved, out)] == [3, 7, 14, 21, 25]


def test_a_signal_saves_and_adds_no_eval(tmp_path):
    out = events(tmp_path, saver=Writes(), script=Script(stop=9))
    assert [e.step for e in of(Saved, out)] == [7, 9]
    assert not of(EvalDone, out)
    assert out[-1] == Stopped(9, signal.SIGTERM, True)


def test_a_signal_at_a_saved_step_saves_once(tmp_path):
    out = events(tmp_path, saver=Writes(), script=Script(stop=7))
    assert [e.step for e in of(Saved, out)] == [7]


def test_a_signal_in_the_last_step_finishes(tmp_path):
    out = events(tmp_path, script=Script(stop=25))
    assert out[-1] == Finished(25)
    assert [e.step for e in of(EvalDone, out)] == [20, 25]


def test_without_location(tmp_path):
    out = events(tmp_path, script=Script(stop=4, saves=[2]))
    assert out[-1] == Stopped(4, signal.SIGTERM, False)
    assert [w.diagnostic.code for w in of(Warned, out)] == ["E-RUN-003"]
    assert not [e for e in of(PhaseChanged, out) if e.state == "saving"]


def test_not_finite_stops(tmp_path):
    program, out = FakeProgram(nan_at=5), []
    with pytest.raises(SexpError) as error:
        events(tmp_path, program=program, out=out)
    assert error.value.diagnostic.code == "E-RUN-001"
    assert error.value.diagnostic.exit_code == 3
    assert "step 5" in error.value.diagnostic.message and "loss" in error.value.diagnostic.message
    assert program.count == 4
    assert [(e.step, np.isnan(e.result.loss)) for e in of(NotFinite, out)] == [(5, True)]
    assert 5 not in [e.step for e in of(StepDone, out)]


def test_a_failed_save_is_a_warning_but_not_the_last(tmp_path):
    seen = []
    with pytest.raises(SexpError) as error:
        events(tmp_path, stop=10, saver=Writes(fails=[7, 10]), out=seen)
    assert (error.value.diagnostic.code, error.value.diagnostic.exit_code) == ("E-CKPT-012", 3)
    assert [w.diagnostic.code for w in of(Warned, seen)] == ["E-CKPT-012"]
    out = events(tmp_path, stop=10, saver=Writes(fails=[7]))
    assert [e.step for e in of(Saved, out)] == [10] and out[-1] == Finished(10)


def test_a_signal_at_a_step_whose_save_failed_saves_again(tmp_path):
    saver = Writes(fails=[7])
    with pytest.raises(SexpError):  # in flight when the signal is seen: it must hold, and does not
        events(tmp_path, saver=saver, script=Script(stop=7))
    saver = Writes(fails=[7])
    events(tmp_path, saver=saver, script=Script(stop=8))
    assert [step for step, _ in saver.begun] == [7, 8]


def test_a_signal_cuts_an_evaluation_off_and_it_is_owed(tmp_path):
    saver = Writes()
    out = events(tmp_path, saver=saver, script=Script(stop=20))
    assert not of(EvalDone, out) and saver.begun[-1] == (20, ("valid",))
    assert out[-1] == Stopped(20, signal.SIGTERM, True)
    out = events(tmp_path, start=20, stop=25, saver=Writes(), owed=("valid",))
    assert [e.step for e in of(EvalDone, out)] == [20, 25]
    saver = Writes()
    out = events(tmp_path, saver=saver, script=Script(stop=25))  # also of the last step
    assert out[-1] == Stopped(25, signal.SIGTERM, True) and saver.begun[-1] == (25, ("valid",))
    out = events(tmp_path, start=25, stop=25, saver=Writes(), owed=("valid",))
    assert [e.step for e in of(EvalDone, out)] == [25] and out[-1] == Finished(25)

"""A run as a rank other than 0 sees it: the same steps, and nothing to tell or to write."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from sexpgpu.run.best import Best
from sexpgpu.run.bind import BoundData, bind
from sexpgpu.run.events import PhaseChanged, Started, Stopped
from sexpgpu.run.loop import train
from sexpgpu.run.options import RunPlan
from sexpgpu.run.program import Program, StepResult
from sexpgpu.run.ranks.agree import Silent
from sexpgpu.run.ranks.team import Team
from sexpgpu.run.signals import Halted, Signals


def data_facts(data: BoundData) -> dict[str, str]:
    """What every rank must have read alike."""
    return {f"the digest of data {name}": d.digest for name, d in data.datasets.items()}


def follow(plan: RunPlan, signals: Signals) -> int:
    """Runs this rank's part of `plan` to its end; the exit code, which is rank 0's too."""
    team: Team = plan.team
    place, member = team.place, team.member
    try:
        with signals.at_once():
            data = bind(plan.run, plan.bounds, stopping=signals.stopping, rank=place.rank, ranks=place.ranks)
    except Halted:
        return 128 + int(signals.stopping() or signal.SIGTERM)
    try:
        member.meet("data", data_facts(data))
        member.on(PhaseChanged("compiling", 0))
        program = plan.compile()
        try:
            return _train(team, plan, program, data, member.meet("state", {}), signals)
        finally:
            program.close()
    finally:
        data.close()


def _train(team: Team, plan: RunPlan, program: Program, data: BoundData, begin: Mapping[str, Any], signals: Signals) -> int:
    first, keeps = int(begin["_step"]), bool(begin["_keeps"])
    program.initialise()
    if begin["_shared"]:
        if begin["_gathers"]:
            program.state()  # rank 0 changes the initial state: it asks for it before, and to hand it on
            program.state()
        program.share(None, first)
    if keeps:
        program.state()  # rank 0 makes room for its copies
    best = Best(plan.run.keep_best, begin["_best"]) if keeps and plan.run.keep_best is not None else None
    controls = team.controls(signals)

    def autopsy(step: int, result: StepResult) -> tuple[str, ...]:
        program.state()
        team.not_finite(step, result)
        return ()

    team.member.on(Started(first, plan.run.steps))
    code = 0
    for event in train(program, plan.run, team.feeds(data.feeds, data.waits), first, plan.run.steps, controls=controls, saver=Silent(program) if keeps else None,
                       durable_step=begin["_durable"], best=team.best(best), owed=begin["_owed"], autopsy=autopsy):
        team.member.on(event)
        if isinstance(event, Stopped):
            code = 4 if event.durable else 128 + event.signal
    controls.settle()
    team.collectives.wait_for_all()
    team.member.close()
    return code

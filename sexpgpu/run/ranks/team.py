"""One rank of a run: its line to the supervisor, its collectives, and what the run's parts get to know of the others."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sexpgpu.experiment.model import Eval, SourceText
from sexpgpu.run.best import Best
from sexpgpu.run.data.feed import EvalFeed
from sexpgpu.run.loop import Controls, Feeds, Parts
from sexpgpu.run.options import RunPlan
from sexpgpu.run.plain import plain_knobs
from sexpgpu.run.program import StepResult
from sexpgpu.run.ranks.agree import AgreedBest, AgreedControls, AgreedFeed, Shares
from sexpgpu.run.ranks.collectives import Collectives, listen
from sexpgpu.run.ranks.layout import Place
from sexpgpu.run.ranks.member import Member


@dataclass(frozen=True)
class Team:
    """`collectives` is what a program is given; `threads`: rank 0's number, which every rank takes."""

    place: Place
    member: Member
    collectives: Collectives
    threads: int = 1

    def feeds(self, feeds: Feeds, waits: bool = False) -> Feeds:
        """A rank's feeds, its evaluations' batches dealt out. waits: a batch may wait for its data, and a signal end that."""
        def largest(number: int) -> int:
            return self.collectives.begin_largest([number])()[0]

        train = AgreedFeed(feeds.train, self.collectives.largest_beside) if waits else feeds.train
        evals = {name: Shares(feed, self.place.rank, self.place.ranks, largest if waits else None) for name, feed in feeds.evals.items() if isinstance(feed, EvalFeed)}

        def join(evaluation: Eval, parts: list[Parts]) -> list[Parts]:
            return evals[evaluation.name].joined(self.collectives, [m.name for m in evaluation.metrics], parts)

        return replace(feeds, train=train, evals=evals, join=join, largest=largest)

    def controls(self, own: Controls) -> AgreedControls:
        return AgreedControls(own, self.collectives)

    def best(self, own: Best | None) -> AgreedBest | None:
        return None if own is None else AgreedBest(own, self.collectives)

    def not_finite(self, step: int, result: StepResult) -> None:
        """After a step that fell: the ranks stay until rank 0 has said why."""
        self.member.phase("autopsy")
        self.collectives.wait_for_all()


def facts_of(plan: RunPlan, place: Place, device: str, wire: str) -> dict[str, str]:
    """What every rank must have alike, in words: a difference is shown by them."""
    facts = text_facts(plan.experiment.texts)
    facts |= {"the run": plan.run.name, "the IR hash": plan.ir_hash, "the device": device, "SEXPGPU_NODE_GRADIENTS": wire, "the number of steps": str(plan.run.steps)}
    facts |= {f"knob {name}": str(knob["value"]) for name, knob in plain_knobs(plan.experiment.knobs).items()}
    facts |= {f"the version of {name}": number for name, number in plan.versions.items()}
    return facts | {"the version of python": sys.version.split()[0], "the number of devices": str(place.each)}


def text_facts(texts: Iterable[SourceText]) -> dict[str, str]:
    return {f"the text of {t.name}": hashlib.sha256(t.text.encode()).hexdigest()[:16] for t in texts}


def join(place: Place, member: Member, facts: Mapping[str, str], device: str, wire: str, threads: int = 1) -> Team:
    """Meets the other ranks, and makes the collectives; ends the process where their facts differ from rank 0's."""
    said: dict[str, Any] = dict(facts)
    listening = None
    if place.rank == 0:
        listening = listen(place.address)
        said |= {"_store": list(listening.getsockname()[:2]), "_threads": threads}
    answer = member.meet("start", said)
    store = (str(answer["_store"][0]), int(answer["_store"][1]))
    return Team(place, member, Collectives(place, member, store, place.address, device, wire, listening), int(answer["_threads"]))

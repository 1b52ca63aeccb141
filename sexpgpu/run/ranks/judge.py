"""When a run of several ranks has failed, and what is to be said of it. Knows no sockets and no processes.

It hears each rank's heartbeats, and that of the supervisors which pass them on. A rank that is gone or says nothing ends
the run; so does one that the others wait for longer than its phase allows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sexpgpu.diagnostics import SexpError, fail, problem, suggestion
from sexpgpu.run.signals import parse_duration
from sexpgpu.run.status import spoken

#: seconds. `rendezvous`: until every node is there; `silent`: without a heartbeat; the others: in this phase without a
#: collective, a step or a batch done, while another rank waits for it
DEADLINES: Mapping[str, float] = {
    "rendezvous": 300.0, "silent": 15.0, "starting": 3600.0, "compiling": 3600.0, "running": 25.0, "evaluating": 600.0, "saving": 900.0,
    "autopsy": 900.0,
}

def deadlines(given: Sequence[str] = ()) -> dict[str, float]:
    """DEADLINES with those of `--deadline PHASE=TIME`; E-RUN-064 for what is none."""
    limits = dict(DEADLINES)
    for text in given:
        name, mark, value = text.partition("=")
        if not mark or name.strip() not in limits:
            fail("E-RUN-064", f"--deadline takes PHASE=TIME, here `{text}`", help=(*suggestion(name.strip(), limits, "phases"), "--deadline running=5m"))
        limits[name.strip()] = parse_duration(value)
    return limits


BREAKS = 3.0  # seconds beyond `silent` that a broken connection waits for its cause to show
COMMON = 3.0  # seconds in which rank 0 may find the same mistake in the file, and say it itself
STOPPED = (130, 143)  # exit codes
STRAGGLES = 1.25  # times the median step
SIGNALS = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV"}


@dataclass
class Rank:
    """What is known of one rank. `heard`, `moved`: when it last said anything, and anything new."""

    rank: int
    node: int
    host: str = ""
    phase: str = "starting"
    step: int = 0
    made: int = 0  # steps since the start
    done: int = -1
    collective: str = ""
    waiting: bool = False
    device: bool = False  # it waits for its own device, which may be at work
    seconds: float | None = None  # of its own a step, without waiting
    stack: Sequence[str] = ()
    heard: float = 0.0
    moved: float = 0.0
    broke: float | None = None
    broken: str = ""
    failed: Mapping[str, Any] | None = None
    code: int | None = None
    ended: float = 0.0

    @property
    def name(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host})"

    def facts(self) -> dict[str, Any]:
        """As the status file has it."""
        return {"rank": self.rank, "node": self.node, "host": self.host, "phase": self.phase, "step": self.step,
                "step_seconds": self.seconds, "collective": self.collective or None, "waiting": self.waiting}


@dataclass(frozen=True)
class Verdict:
    """Why the run ends; `told`: the rank that failed has said it on its own node's standard error."""

    code: str
    message: str
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()  # noqa: A003 - the diagnostic's word
    exit_code: int = 3
    rank: int | None = None
    told: bool = False

    def error(self) -> SexpError:
        return problem(self.code, self.message, notes=self.notes, help=self.help, exit_code=self.exit_code)

    def message_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "notes": list(self.notes), "help": list(self.help),
                "exit_code": self.exit_code, "rank": self.rank, "told": self.told}


def verdict_from(text: Mapping[str, Any]) -> Verdict:
    return Verdict(str(text["code"]), str(text["message"]), tuple(text["notes"]), tuple(text["help"]), int(text["exit_code"]),
                   text["rank"], bool(text["told"]))


@dataclass
class Judge:
    """`posts`: supervisors, each with `here` ranks; `began`: seconds, of the same clock as every `now`."""

    posts: int
    here: int
    nodes: int
    where: str
    limits: Mapping[str, float]
    began: float
    ranks: list[Rank] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)  # post -> host, of those that came
    spoke: dict[int, float] = field(default_factory=dict)
    met: dict[str, dict[int, Mapping[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each = self.posts * self.here // self.nodes
        self.ranks = [Rank(r, r // each) for r in range(self.posts * self.here)]

    # -- what it hears

    def came(self, post: int, host: str, now: float) -> None:
        self.hosts[post] = host
        self.spoke[post] = now
        for rank in self._of(post):
            rank.host, rank.heard, rank.moved = host, now, now

    def heard(self, post: int, now: float) -> None:
        self.spoke[post] = now

    def beat(self, number: int, facts: Mapping[str, Any], now: float) -> None:
        rank = self.ranks[number]
        rank.heard = now
        if facts["done"] != rank.done or facts["phase"] != rank.phase:
            rank.moved = now
        rank.phase, rank.step, rank.made, rank.done = facts["phase"], facts["step"], facts["made"], facts["done"]
        rank.collective, rank.waiting, rank.seconds, rank.stack = facts["collective"], facts["waiting"], facts["seconds"], facts["stack"]
        rank.device = facts["device"]

    def lost(self, number: int, why: str, now: float) -> None:
        rank = self.ranks[number]
        rank.broke, rank.broken, rank.heard = now, why, now

    def failed(self, number: int, facts: Mapping[str, Any]) -> None:
        self.ranks[number].failed = facts

    def exited(self, number: int, code: int, now: float) -> None:
        self.ranks[number].code, self.ranks[number].ended = code, now

    def meet(self, number: int, name: str, facts: Mapping[str, Any], now: float) -> dict[str, Any] | Verdict | None:
        """One rank came to a meeting. When all did: what rank 0 lets them know, or a verdict where their facts differ."""
        self.ranks[number].moved = self.ranks[number].heard = now
        there = self.met.setdefault(name, {})
        there[number] = facts
        if len(there) < len(self.ranks):
            return None
        differences = list(_differences(self.ranks, there))
        if differences:
            return Verdict("E-NET-031", "the ranks of this run would not train the same: " + differences[0].removeprefix("  "),
                           tuple(differences[1:]), ("bring the same files, settings and versions to every node",), 2)
        return {"name": name, "facts": {k: v for k, v in there[0].items() if k.startswith("_")}}

    def table(self) -> list[dict[str, Any]]:
        """Every rank for the status file, stragglers marked."""
        times = [r.seconds for r in self.ranks if r.seconds is not None]
        median = statistics.median(times) if len(times) > 1 else None
        return [r.facts() | {"straggler": bool(median and r.seconds and r.seconds > STRAGGLES * median and r.seconds - median > 0.005)}
                for r in self.ranks]

    # -- what it says

    def finished(self) -> bool:
        return all(rank.code is not None for rank in self.ranks)

    def stopped(self, now: float) -> int | None:
        """The exit code of a run that signals ended at once; rank 0's, if it is there soon."""
        codes = [(r.rank, r.ended, r.code) for r in self.ranks if r.code in STOPPED]
        if codes and (codes[0][0] == 0 or now - min(at for _, at, _ in codes) > COMMON):
            return codes[0][2]
        return None

    def left_over(self) -> list[int]:
        """Ranks that wait for a rank 0 which has ended well."""
        return [r.rank for r in self.ranks if r.code is None] if self.ranks[0].code in (0, 4) else []

    def tick(self, now: float) -> Verdict | None:
        """The verdict, once there is one."""
        absent = [p for p in range(self.posts) if p not in self.hosts]
        if absent and now - self.began > self.limits["rendezvous"]:
            return Verdict("E-NET-030", f"{self._posts(absent)} did not come to {self.where} within {spoken(self.limits['rendezvous'])}",
                           help=("start the run on every node, with the same SEXPGPU_RENDEZVOUS" if self.posts == self.nodes else
                                 "start every rank, with the same MASTER_ADDR and MASTER_PORT", "--deadline rendezvous=30m waits longer"), exit_code=2)
        for check in (self._ended, self._silent, self._stuck, self._broken):
            if (found := check(now)) is not None:
                return found
        return None

    def gone(self, post: int, why: str) -> Verdict:
        """A supervisor closed its connection before the end."""
        ranks = self._of(post)
        worst = ranks[0]
        return Verdict("E-RUN-060", f"the supervisor of {_listed(ranks)} on {self.hosts.get(post, '?')} is gone: {why}", self._notes(worst), rank=worst.rank)

    def _of(self, post: int) -> list[Rank]:
        return self.ranks[post * self.here : (post + 1) * self.here]

    def _posts(self, posts: Sequence[int]) -> str:
        names = [str(p) for p in posts]
        word = "node" if self.posts == self.nodes else "rank"
        return f"{word}{'s' * (len(names) > 1)} {', '.join(names)}"

    def _ended(self, now: float) -> Verdict | None:
        for rank in self.ranks:
            if rank.code in (None, 0, 4, *STOPPED):
                continue
            if rank.rank and self.ranks[0].code is None and rank.failed and now - rank.ended < COMMON:
                continue
            code: int = rank.code  # type: ignore[assignment]
            if rank.failed is not None:
                f = rank.failed
                return Verdict(f["code"], f"{rank.name}: {f['message']}", self._notes(rank), tuple(f["help"]), int(f["exit_code"]), rank.rank, True)
            how = f"was ended by {SIGNALS.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
            mend = ("SIGKILL is also how the system ends a process when memory runs out: `dmesg` says so",) if code == -9 else ()
            return Verdict("E-RUN-060", f"{rank.name} {how} while {_doing(rank)}", self._notes(rank), mend, 70 if code == 70 else 3, rank.rank)
        return None

    def _silent(self, now: float) -> Verdict | None:
        limit = self.limits["silent"]
        for post, at in self.spoke.items():
            if now - at > limit and any(r.code is None for r in self._of(post)):
                ranks = self._of(post)
                return Verdict("E-RUN-061", f"nothing was heard for {spoken(now - at)} from node {ranks[0].node} ({self.hosts[post]}, "
                               f"{_listed(ranks)}), last {_doing(ranks[0])}", self._notes(ranks[0]),
                               ("see whether that machine runs, and whether the link to it is up",), rank=ranks[0].rank)
        for rank in self.ranks:
            if rank.code is None and rank.host and now - rank.heard > limit:
                return Verdict("E-RUN-061", f"{rank.name} has been silent for {spoken(now - rank.heard)}, last {_doing(rank)}", self._notes(rank),
                               ("a paused process, or one that holds Python's lock: see its stack above",), rank=rank.rank)
        return None

    def _stuck(self, now: float) -> Verdict | None:
        """One that others wait for. While all compute, only the ten times longer limit of the phase counts."""
        there = [r for r in self.ranks if r.code is None and r.host and r.broke is None]
        waiting = [r for r in there if r.waiting]
        for rank in there:
            phase = "compiling" if rank.phase == "running" and not rank.made else rank.phase
            limit = self.limits.get(phase, self.limits["running"]) * (1 if waiting else 10)
            if not rank.waiting and now - rank.moved > limit:
                return Verdict("E-RUN-062", f"{rank.name} has done nothing new for {spoken(now - rank.moved)} while {_doing(rank)}"
                               + (f"; {len(waiting)} of {len(self.ranks)} ranks wait for it" if waiting else ""), self._notes(rank),
                               (f"--deadline {rank.phase}=10m gives it longer",), rank=rank.rank)
        limit = self.limits["running"] * (10 if any(r.device for r in waiting) else 1)  # a step of the devices may be a long one
        if waiting and len(waiting) == len(there) == len(self.ranks) and all(now - r.moved > limit for r in there):
            last = min(there, key=lambda r: r.done)
            return Verdict("E-RUN-063", f"every rank waits for the others for {spoken(limit)}; {last.name} is the one furthest behind, {_doing(last)}",
                           self._notes(last), ("the link between the machines may be down", "--deadline running=5m waits longer"), rank=last.rank)
        return None

    def _broken(self, now: float) -> Verdict | None:
        for rank in self.ranks:
            if rank.broke is not None and now - rank.broke > self.limits["silent"] + BREAKS:
                return Verdict("E-RUN-063", f"{rank.name} lost its connection to the others while {_doing(rank)}", (rank.broken, *self._notes(rank)),
                               ("the link between the machines may be down",), rank=rank.rank)
        return None

    def _notes(self, rank: Rank) -> tuple[str, ...]:
        """Where the rank was, and where the others were."""
        said = [f"rank {rank.rank}, host {rank.host}, phase {rank.phase}, step {rank.step}, last collective {rank.collective or 'none'}"]
        said += [f"  {line}" for line in rank.stack]
        others = [r for r in self.ranks if r is not rank]
        said += [f"{r.name}: {_doing(r)}" for r in others[:16]]
        return tuple(said)


def _listed(ranks: Sequence[Rank]) -> str:
    numbers = ", ".join(str(r.rank) for r in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"


def _doing(rank: Rank) -> str:
    if rank.waiting:
        return f"waiting in {rank.collective}, step {rank.step}"
    return f"{rank.phase}, step {rank.step}" + (f", after {rank.collective}" if rank.collective else "")


def _differences(ranks: Sequence[Rank], there: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """One line a fact that a rank of another node has otherwise than rank 0."""
    first = there[0]
    seen: set[tuple[int, str]] = set()
    for number in sorted(there):
        own, rank = there[number], ranks[number]
        for name in sorted({*first, *own}):
            if name.startswith("_") or own.get(name) == first.get(name) or (rank.node, name) in seen:
                continue
            seen.add((rank.node, name))
            yield f"  on node {rank.node} ({rank.host}) {name} is {_shown(own.get(name))}, on node 0 ({ranks[0].host}) it is {_shown(first.get(name))}"


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else text[:79] + "…"

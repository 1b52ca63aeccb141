"""Who takes part in a run: nodes, their devices, and ranks in order; from our variables, or from torchrun's.

A *post* is one supervisor with the ranks that it starts: a node's, or under torchrun, which starts a process a rank, that
of one rank. Post 0 is where the others report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.settings import Settings, address

#: what torchrun gives each of its processes
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: how a rank's process learns who it is; taken out of its environment at once
PLACE = "_SEXPGPU_PLACE"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Layout:
    """`devices`: ordinals of this post, one a rank. `meet`: host and port of post 0, port 0 for one that the system
    chooses; `agent`: torchrun keeps a store there, in which post 0 leaves its address."""

    posts: int
    post: int
    nodes: int
    node: int
    devices: tuple[int, ...]
    meet: tuple[str, int] = (LOOPBACK, 0)
    agent: bool = False
    by_torchrun: bool = False

    @property
    def here(self) -> int:
        return len(self.devices)

    @property
    def ranks(self) -> int:
        return self.posts * self.here

    @property
    def first(self) -> int:
        """The first rank of this post."""
        return self.post * self.here

    def place(self, local: int, channel: int, address: str) -> Place:
        each = self.ranks // self.nodes
        rank = self.first + local
        return Place(rank, self.ranks, self.node, self.nodes, rank % each, each, self.devices[local], channel, address)


@dataclass(frozen=True)
class Place:
    """What one rank's process is told. `local` of `each`: its number on its node; `channel`: the socket to its supervisor;
    `address`: at which the other nodes reach this one."""

    rank: int
    ranks: int
    node: int
    nodes: int
    local: int
    each: int
    device: int
    channel: int
    address: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def taken_place(environ: Any) -> Place | None:
    """This process's place if a supervisor started it; its children are not to take it for theirs."""
    text = environ.pop(PLACE, None)
    return None if text is None else Place(**json.loads(text))


def layout_of(settings: Settings, environ: Mapping[str, str] = os.environ) -> Layout | None:
    """The layout of a run; None for one process alone, which needs no supervisor."""
    if _is_torchrun(environ):
        return _by_torchrun(settings, environ)
    if settings.nodes == 1:
        if settings.devices is None or len(settings.devices) == 1:
            return None
        return Layout(1, 0, 1, 0, settings.devices)
    host, port = address(settings.rendezvous)
    return Layout(settings.nodes, settings.node_rank, settings.nodes, settings.node_rank, settings.devices or (0,), (host, port))


def _is_torchrun(environ: Mapping[str, str]) -> bool:
    """torchrun says so itself; other starters of its kind set these four."""
    return "TORCHELASTIC_RUN_ID" in environ or all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def refuse_both(settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
    """E-ENV-015 where our variables of several machines are set beside torchrun's; said before what ours lack."""
    if not _is_torchrun(environ):
        return
    for key in ("nodes", "node_rank", "rendezvous"):
        value = settings.of(key)
        if value.source != "default":
            fail("E-ENV-015", f"{value.via} is set, and so are torchrun's {', '.join(n for n in TORCHRUN if n in environ)}",
                 help=(f"unset {value.via}: torchrun says who takes part", "or call `sexpgpu run` itself on each machine, without torchrun"))


def _by_torchrun(settings: Settings, environ: Mapping[str, str]) -> Layout | None:
    refuse_both(settings, environ)
    rank, ranks, local, each = (_number(environ, name, default) for name, default in
                                (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    if rank >= ranks or local >= each or ranks % each:
        fail("E-ENV-015", f"torchrun's variables do not fit together: RANK {rank}, WORLD_SIZE {ranks}, LOCAL_RANK {local}, LOCAL_WORLD_SIZE {each}",
             help="every node has the same number of ranks, and ranks count from 0")
    devices = settings.devices
    if devices is not None and len(devices) != each:
        fail("E-ENV-015", f"SEXPGPU_DEVICES names {len(devices)} device{'s' * (len(devices) != 1)}, and torchrun's LOCAL_WORLD_SIZE is {each}",
             help="name as many devices as --nproc-per-node, or leave SEXPGPU_DEVICES out")
    if ranks == 1:
        return None
    host, port = address(f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Layout(ranks, rank, ranks // each, rank // each, (local if devices is None else devices[local],), (host, port), agent, True)


def _number(environ: Mapping[str, str], name: str, default: str | None) -> int:
    text = environ.get(name, default)
    if text is None or not text.isascii() or not text.isdigit():
        fail("E-ENV-015", f"torchrun's {name} is {'not set' if text is None else f'`{text}`'}; it is a whole number", help="start with torchrun, or unset its variables")
    return int(text)

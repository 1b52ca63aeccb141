"""The process of a node that starts its ranks, hears their heartbeats, and ends them all when one fails.

It takes no part in the collectives and does not import torch. Post 0's judges the whole run; the others pass on what
their ranks say. One loop over sockets, without threads.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sexpgpu.diagnostics import fail, printable, problem
from sexpgpu.run.children import python
from sexpgpu.run.ranks.judge import DEADLINES, Judge, Verdict, verdict_from
from sexpgpu.run.ranks.layout import PLACE, TORCHRUN, Layout
from sexpgpu.run.ranks.wire import Closed, Stranger, Wire
from sexpgpu.run.status import close_status, spoken
from sexpgpu.settings import child_environment

SPEAKS = 1  # of the words between supervisors
TICK = 0.2  # seconds
PING = 1.0
GRACE = 4.0  # seconds that a rank has to tell status and metrics of the end
LEFT_OVER = 15.0  # seconds that ranks may take after rank 0 has ended well
MAX_TEXT = 1 << 20  # of a rank's unfinished line
HELD = 200  # of its last lines


@dataclass
class Child:
    """A rank's process. `code`: of its exit, once its last words were read."""

    rank: int
    process: subprocess.Popen
    wire: Wire | None
    text: bytes = b""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=HELD))
    code: int | None = None


@dataclass(frozen=True)
class Job:
    """What every rank's process is to run. `arguments`: of `python -m sexpgpu`; `status`: rank 0's file, if any."""

    arguments: Sequence[str]
    status: str | None = None
    limits: Mapping[str, float] = field(default_factory=lambda: DEADLINES)


def supervise(layout: Layout, job: Job, say: Callable[[str], None]) -> int:
    """Runs `job` on every rank; its exit code. Raises the SexpError that says why the run failed."""
    return _Supervisor(layout, job, say).run()


class _Supervisor:
    def __init__(self, layout: Layout, job: Job, say: Callable[[str], None]):
        self.layout, self.job, self.say = layout, job, say
        self.selector = selectors.DefaultSelector()
        self.children: list[Child] = []
        self.posts: dict[int, Wire] = {}  # of post 0: the others that came
        self.hub: Wire | None = None  # of the others: post 0
        self.listener: socket.socket | None = None
        self.where = self.address = ""
        self.judge: Judge | None = None
        self.verdict: Verdict | None = None
        self.finish: int | None = None
        self.heard_hub = self.pinged = self.ended_well = 0.0
        self.signals: list[int] = []
        self.passed = 0  # signals that were looked at
        self.stops = 0  # of them, those that ask for the end
        self.hub_spoke = False  # a line of post 0 came, as a supervisor writes them
        self.asked = False  # another node was asked to end, so these ranks were
        self.began = False  # every rank has been at a meeting

    def run(self) -> int:
        olds = {number: signal.signal(number, lambda n, frame: self.signals.append(n))
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            self._meet()
            if self.signals:
                return 128 + self.signals[0]
            self._start()
            while self.finish is None and self.verdict is None:
                self._turn()
            return self._end()
        finally:
            self._kill()
            for wire in [*self.posts.values(), *([self.hub] if self.hub else [])]:
                wire.close()
            if self.listener is not None:
                self.listener.close()
            self.selector.close()
            for number, old in olds.items():
                signal.signal(number, old)

    # -- coming together

    def _meet(self) -> None:
        """Post 0 listens; the others reach it, and take the address by which they did for their own."""
        layout, limit = self.layout, self.job.limits["rendezvous"]
        host, port = layout.meet
        if layout.post == 0:
            self.listener = _listener(host, 0 if layout.agent else port)
            self.address, port = self.listener.getsockname()[:2]
            if layout.agent:
                _agent(layout, limit, f"{self.address} {port}")
            self.where = f"{host}:{port}"
            now = time.monotonic()
            self.judge = Judge(layout.posts, layout.here, layout.nodes, self.where, self.job.limits, now)
            self.judge.came(0, socket.gethostname(), now)
            self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
            return
        if layout.agent:
            host, text = _agent(layout, limit).split(" ")
            port = int(text)
        self.where = f"{host}:{port}"
        self.say(f"{'node' if layout.posts == layout.nodes else 'rank'} {layout.post}: going to {self.where}")
        sock = self._reach(host, port, limit)
        if sock is None:
            return
        self.address = sock.getsockname()[0]
        self.hub = Wire(sock)
        self.hub.send({"sexpgpu": SPEAKS, "post": layout.post, "posts": layout.posts, "nodes": layout.nodes, "here": layout.here,
                       "host": socket.gethostname()})
        self.heard_hub = time.monotonic()
        self.selector.register(self.hub, selectors.EVENT_READ, self._from_hub)

    def _reach(self, host: str, port: int, limit: float) -> socket.socket | None:
        begin, why = time.monotonic(), ""
        while not self.signals:
            left = limit - (time.monotonic() - begin)
            if left <= 0:
                raise problem("E-NET-030", f"node 0 was not reached at {self.where} within {spoken(limit)}: {why}",
                              help=("start the run on node 0 too, and see that its address and port can be reached from here",
                                    "--deadline rendezvous=30m waits longer"))
            try:
                sock = socket.create_connection((host, port), min(left, 5.0))
                if sock.getsockname() != sock.getpeername():  # a port of our own that met itself
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return sock
                sock.close()
            except socket.gaierror as error:
                why = f"the name {host} is not known ({error.strerror})"
            except OSError as error:
                why = error.strerror or str(error)
            time.sleep(min(0.3, max(0.0, left)))
        return None

    def _accept(self) -> None:
        assert self.listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = Wire(sock)
            self.selector.register(wire, selectors.EVENT_READ, lambda: self._greeted(wire))

    def _greeted(self, wire: Wire) -> None:
        """The first word of a connection; a stranger's is closed without another."""
        assert self.judge is not None
        try:
            for message in wire.receive():
                post = self._known(wire)
                if post is not None:
                    self._from_post(post, message)
                elif message.get("sexpgpu") != SPEAKS or not self._welcome(wire, message):
                    raise Closed("a stranger")
        except Closed as error:
            self.selector.unregister(wire)
            wire.close()
            post = self._known(wire)
            if post is not None:
                del self.posts[post]
                here = self.judge.ranks[post * self.layout.here : (post + 1) * self.layout.here]
                if self.verdict is None and any(r.code is None for r in here):
                    self.verdict = next((v for v in [self.judge.tick(time.monotonic())] if v), None) or self.judge.gone(post, str(error))

    def _known(self, wire: Wire) -> int | None:
        return next((post for post, known in self.posts.items() if known is wire), None)

    def _welcome(self, wire: Wire, hello: Mapping[str, Any]) -> bool:
        judge, layout, now = self.judge, self.layout, time.monotonic()
        assert judge is not None
        post, host = hello.get("post"), printable(str(hello.get("host")))[:100]
        word = "node" if layout.posts == layout.nodes else "rank"
        if type(post) is not int or not 0 < post:
            return False
        wrong = ""
        for key, own, what in (("posts", layout.posts, f"{word}s"), ("nodes", layout.nodes, "nodes"), ("here", layout.here, "devices a node")):
            if not wrong and hello.get(key) != own:
                what = what if hello.get(key) != 1 else what.replace("s", "", 1)
                wrong = f"{word} {post} ({host}) counts {hello.get(key)} {what}, {word} 0 ({judge.hosts[0]}) counts {own}"
        if not wrong and post in judge.hosts:
            wrong = f"two of them say that they are {word} {post}: {judge.hosts[post]} and {host}"
        if wrong:
            mend = "SEXPGPU_NODES and the length of SEXPGPU_DEVICES are the same on every node, SEXPGPU_NODE_RANK is another on each"
            self.verdict = Verdict("E-NET-031", f"the nodes do not fit together: {wrong}", (), (mend,), 2)
            with contextlib.suppress(Closed):
                wire.send({"end": self.verdict.message_dict()})
            return False
        self.posts[post] = wire
        judge.came(post, host, now)
        return True

    # -- the ranks

    def _start(self) -> None:
        for local in range(self.layout.here):
            ours, theirs = socket.socketpair()
            place = self.layout.place(local, theirs.fileno(), self.address)
            environ = dict(os.environ) if place.rank == 0 else child_environment(os.environ, ("data", "checkpoint"))
            if place.rank:
                for name in ("SEXPGPU_METRICS", "SEXPGPU_STATUS"):
                    environ.pop(name, None)
            for name in [n for n in environ if n in TORCHRUN or n.startswith("TORCHELASTIC_")]:
                del environ[name]
            environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without a name
            environ[PLACE] = place.to_text()
            process = subprocess.Popen(
                [*python(), "-m", "sexpgpu", *self.job.arguments], env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=None if place.rank == 0 else subprocess.DEVNULL, stderr=None if place.rank == 0 else subprocess.PIPE, start_new_session=True)
            theirs.close()
            child = Child(place.rank, process, Wire(ours))
            self.children.append(child)
            self.selector.register(child.wire, selectors.EVENT_READ, lambda c=child: self._from_rank(c))
            if process.stderr is not None:
                os.set_blocking(process.stderr.fileno(), False)
                self.selector.register(process.stderr, selectors.EVENT_READ, lambda c=child: self._from_stderr(c))

    def _turn(self) -> None:
        """One round: what came over the sockets, who ended, which signals, and what the judge makes of it."""
        for key, _ in self.selector.select(TICK):
            key.data()
        now = time.monotonic()
        self._reap()
        self._pass_signals()
        if now - self.pinged >= PING:
            self.pinged = now
            self._ping()
        if self.judge is not None:
            self._judge(self.judge, now)
        elif self.finish is None and self.verdict is None and now - self.heard_hub > self.job.limits["silent"]:
            self.verdict = Verdict("E-RUN-061", f"nothing was heard for {spoken(now - self.heard_hub)} from node 0 at {self.where}",
                                   help=("see whether that machine runs, and whether the link to it is up",))

    def _judge(self, judge: Judge, now: float) -> None:
        judge.heard(0, now)
        if self.verdict is None:
            self.verdict = judge.tick(now)
        if self.verdict is not None:
            return
        if judge.finished():
            self.finish = judge.ranks[0].code
        elif (stopped := judge.stopped(now)) is not None:
            self.finish = stopped
        elif judge.left_over():
            self.ended_well = self.ended_well or now
            if now - self.ended_well > LEFT_OVER or all(judge.ranks[r].collective.startswith("meeting") for r in judge.left_over()):
                self.finish = judge.ranks[0].code

    def _ping(self) -> None:
        table = self.judge.table() if self.judge is not None else None
        for child in self.children:
            self._tell(child, {"ping": 1} if table is None or child.rank else {"ranks": table})
        for wire in self.posts.values():
            with contextlib.suppress(Closed):
                wire.send({"ping": 1})
        self._to_hub({"ping": 1})

    def _tell(self, child: Child, message: Mapping[str, Any]) -> None:
        if child.wire is not None:
            with contextlib.suppress(Closed):
                child.wire.send(message)

    def _to_hub(self, message: Mapping[str, Any]) -> None:
        if self.hub is not None:
            with contextlib.suppress(Closed):
                self.hub.send(message)

    def _from_rank(self, child: Child) -> None:
        assert child.wire is not None
        try:
            for message in child.wire.receive():
                self._said(self.layout.post, child.rank, message)
        except Closed:
            self.selector.unregister(child.wire)
            child.wire.close()
            child.wire = None

    def _said(self, post: int, rank: int, message: Mapping[str, Any]) -> None:
        """A rank's word, at post 0; elsewhere it is passed on."""
        judge, now = self.judge, time.monotonic()
        if judge is None:
            self._to_hub({"rank": rank, "message": message})
        elif "beat" in message:
            judge.beat(rank, message["beat"], now)
        elif "meet" in message:
            answer = judge.meet(rank, str(message["meet"]), message["facts"], now)
            if isinstance(answer, Verdict):
                self.verdict = answer
            elif answer is not None:
                self._answer(answer)
                for wire in self.posts.values():
                    with contextlib.suppress(Closed):
                        wire.send({"answer": answer})
        elif "failed" in message:
            judge.failed(rank, message["failed"])
        elif "lost" in message:
            judge.lost(rank, str(message["lost"]), now)

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self.began = True
        for child in self.children:
            self._tell(child, {"answer": answer["name"], "facts": answer["facts"]})

    def _from_post(self, post: int, message: Mapping[str, Any]) -> None:
        """Raises Closed for what no supervisor says."""
        assert self.judge is not None
        self.judge.heard(post, time.monotonic())
        first = post * self.layout.here
        try:
            if "stop" in message:
                number = int(message["stop"])
                if number not in (signal.SIGINT, signal.SIGTERM):
                    raise Closed("it does not speak as we do")
                if not self.began:
                    self.finish = 128 + number
                self._asked(number, post)
            if "rank" in message or "exited" in message:
                rank = int(message["rank"] if "rank" in message else message["exited"][0])
                if not first <= rank < first + self.layout.here:
                    raise Closed("it speaks for ranks that are not its own")
                if "exited" in message:
                    self.judge.exited(rank, int(message["exited"][1]), time.monotonic())
                else:
                    self._said(post, rank, message["message"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Closed("it does not speak as we do") from None

    def _from_hub(self) -> None:
        assert self.hub is not None
        try:
            for message in self.hub.receive():
                self.heard_hub, self.hub_spoke = time.monotonic(), True
                if "answer" in message:
                    self._answer(message["answer"])
                elif "stop" in message:
                    self._asked(int(message["stop"]))
                elif "end" in message:
                    self.verdict = verdict_from(message["end"])
                elif "finish" in message:
                    self.finish = int(message["finish"])
        except Closed as error:
            self.selector.unregister(self.hub)
            if self.verdict is None and self.finish is None and not self.hub_spoke and isinstance(error, Stranger):
                self.verdict = Verdict("E-NET-030", f"what listens at {self.where} is no `sexpgpu` of node 0: {error}", exit_code=2,
                                       help=("see that the address is node 0's and the port is the run's own, and that nothing else listens there",))
            elif self.verdict is None and self.finish is None:
                self.verdict = Verdict("E-RUN-061", f"the supervisor of node 0 at {self.where} is gone: {error}")

    def _from_stderr(self, child: Child) -> None:
        """A rank's lines are held: they are shown if it is the one that fails, for the others say what rank 0 says too."""
        assert child.process.stderr is not None
        try:
            block = os.read(child.process.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not block:
            self.selector.unregister(child.process.stderr)
            child.process.stderr.close()
            block = b"\n" if child.text else b""
        *lines, child.text = (child.text + block).split(b"\n")
        if len(child.text) > MAX_TEXT:
            lines, child.text = [*lines, child.text], b""
        for line in lines:
            child.lines.append(line.decode("utf-8", "backslashreplace"))

    def _reap(self) -> None:
        """Exit codes; a process's last words are read first."""
        for child in self.children:
            if child.code is not None or child.process.poll() is None:
                continue
            if child.wire is not None:
                self._from_rank(child)
            child.code = child.process.returncode
            _kill_group(child.process.pid)  # what it started and left
            if self.judge is not None:
                self.judge.exited(child.rank, child.code, time.monotonic())
            self._to_hub({"exited": [child.rank, child.code]})

    def _pass_signals(self) -> None:
        """To this node's ranks, which agree with the others on the step. The first SIGINT or SIGTERM goes to every node, so that one
        whose ranks wait for data ends too; a second one here ends at once."""
        while self.passed < len(self.signals):
            number = self.signals[self.passed]
            self.passed += 1
            if number == signal.SIGUSR1:
                self._signal(number, 1)  # one asks for all: a second that heard of it a step later would have two made
                continue
            self.stops += 1
            if not self.began:  # nobody can agree on a step yet
                self.finish = 128 + number
            if self.stops > 1 or not self.asked:
                self._signal(number)
            if self.stops == 1:
                self._to_hub({"stop": number})
                self._to_posts({"stop": number})

    def _asked(self, number: int, by: int | None = None) -> None:
        """The end that another node was asked for; where this one was asked too, it is the same wish."""
        self._to_posts({"stop": number}, by)
        if not self.asked and not self.stops:
            self.asked = True
            self._signal(number)

    def _signal(self, number: int, most: int | None = None) -> None:
        """To the ranks that live, or the first so many of them."""
        for child in [child for child in self.children if child.code is None][:most]:
            with contextlib.suppress(OSError):
                child.process.send_signal(number)

    def _to_posts(self, message: Mapping[str, Any], but: int | None = None) -> None:
        for post, wire in self.posts.items():
            if post != but:
                with contextlib.suppress(Closed):
                    wire.send(message)

    # -- the end

    def _end(self) -> int:
        verdict = self.verdict
        if verdict is None:
            assert self.finish is not None
            for wire in self.posts.values():
                with contextlib.suppress(Closed):
                    wire.send({"finish": self.finish})
            if self.layout.post == 0 and self.job.status and not self.began:
                self._kill()
                close_status(self.job.status, "stopped", None, [])
            return self.finish
        for wire in self.posts.values():
            with contextlib.suppress(Closed):
                wire.send({"end": verdict.message_dict()})
        for child in self.children:
            self._tell(child, {"end": verdict.message_dict()})
        if self.judge is None:
            self._to_hub({"ping": 1})
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(c.process.poll() is None for c in self.children):
            for key, _ in self.selector.select(TICK):
                if key.fileobj in [thing for c in self.children for thing in (c.process.stderr, c.wire)]:
                    key.data()
            for child in self.children:  # a paused process does not hear it
                if child.process.poll() is None and _paused(child.process.pid):
                    _kill_group(child.process.pid)
        self._kill()
        if self.layout.post == 0 and self.job.status:
            table = self.judge.table() if self.judge is not None else []
            stacks = {r.rank: list(r.stack) for r in self.judge.ranks} if self.judge is not None else {}
            failed = {"code": verdict.code, "message": verdict.message, "place": None, "rank": verdict.rank, "notes": list(verdict.notes)}
            close_status(self.job.status, "failed", failed, [row | {"stack": stacks.get(row["rank"], [])} for row in table])
        here = verdict.rank is not None and any(c.rank == verdict.rank for c in self.children)
        for child in self.children:
            if child.rank == verdict.rank:
                for line in child.lines:
                    self.say(line if line.startswith("{") else f"[rank {child.rank}] {line}")
        if verdict.told and here:  # its rank has said it
            where = verdict.notes if verdict.exit_code == 3 and verdict.code != "E-RUN-001" else ()  # a mistake of the program is every rank's
            self.say("\n".join([f"the run ends: {verdict.message.partition(':')[0]} failed", *(f"  {line}" for line in where)]))
            return verdict.exit_code
        raise verdict.error()

    def _kill(self) -> None:
        for child in self.children:
            if child.code is None:
                _kill_group(child.process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.code = child.process.wait(10)
            if child.process.stderr is not None and not child.process.stderr.closed:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(child.process.stderr)
                child.process.stderr.close()
            if child.wire is not None:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(child.wire)
                child.wire.close()
                child.wire = None


def _listener(host: str, port: int) -> socket.socket:
    """A socket of this address alone. E-NET-030 where the address is not this machine's or the port is taken."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(256)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        fail("E-NET-030", f"node 0 cannot listen at {host}:{port}: {error.strerror or error}",
             help="the address is one of node 0's own, and the port is free")
    sock.setblocking(False)
    return sock


def _agent(layout: Layout, limit: float, own: str | None = None) -> str:
    """Through torchrun's store: post 0 leaves its address there, the others read it."""
    from torch.distributed import PrefixStore, TCPStore  # this way alone needs torch here

    key = "address " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = PrefixStore("sexpgpu", TCPStore(layout.meet[0], layout.meet[1], None, False, timedelta(seconds=limit), wait_for_workers=False))
        if own is not None:
            store.set(key, own)
            return own
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise problem("E-NET-030", f"torchrun's store at {layout.meet[0]}:{layout.meet[1]} did not answer: {str(error).splitlines()[0]}",
                      help="see that MASTER_ADDR and MASTER_PORT can be reached from here") from None


def _paused(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _kill_group(pid: int) -> None:
    """A rank is the leader of a session of its own: its helpers go with it."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)

"""The parts alone: who takes part, what the judge says, lines over sockets, and layers that mix samples."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from sexpgpu.compiler import mixes, train_graph
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.load import Selection, choose_run, load
from sexpgpu.run.ranks.agree import AgreedControls, AgreedFeed, Shares
from sexpgpu.run.ranks.collectives import interface_of, prepare, reach
from sexpgpu.run.ranks.judge import DEADLINES, Judge, Verdict, deadlines
from sexpgpu.run.ranks.layout import Layout, layout_of
from sexpgpu.run.ranks.member import Member
from sexpgpu.run.ranks.probe import Probe
from sexpgpu.run.ranks.wire import LONGEST, Closed, Wire
from sexpgpu.run.signals import Halted
from sexpgpu.settings import read

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip


# --- who takes part ---


def test_one_device_needs_no_supervisor():
    assert layout_of(read({}), {}) is None and layout_of(read({"SEXPGPU_DEVICES": "3"}), {}) is None


def test_ranks_go_in_the_order_of_devices_and_nodes():
    given = {"SEXPGPU_DEVICES": "2,0", "SEXPGPU_NODES": "2", "SEXPGPU_NODE_RANK": "1", "SEXPGPU_RENDEZVOUS": "[::1]:29500"}
    found = layout_of(read(given), given)
    assert found == Layout(2, 1, 2, 1, (2, 0), ("::1", 29500)) and found.ranks == 4
    places = [found.place(i, 7, "::1") for i in range(2)]
    assert [(p.rank, p.local, p.each, p.device, p.node) for p in places] == [(2, 0, 2, 2, 1), (3, 1, 2, 0, 1)]


def test_torchrun_is_recognised():
    found = layout_of(read({}), TORCHRUN)
    assert found == Layout(4, 3, 2, 1, (1,), ("10.0.0.1", 29500), True, True)
    place = found.place(0, 7, "10.0.0.2")
    assert (place.rank, place.ranks, place.node, place.local, place.each) == (3, 4, 1, 1, 2)
    assert layout_of(read({"SEXPGPU_DEVICES": "5,4"}), TORCHRUN).devices == (4,)
    assert layout_of(read({}), TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    "ours, theirs, words",
    [({"SEXPGPU_NODES": "2"}, {}, "SEXPGPU_NODES is set"), ({"SEXPGPU_RENDEZVOUS": "a:1"}, {}, "SEXPGPU_RENDEZVOUS is set"),
     ({"SEXPGPU_DEVICES": "0,1,2"}, {}, "SEXPGPU_DEVICES names 3 devices, and torchrun's LOCAL_WORLD_SIZE is 2"),
     ({}, {"RANK": "4"}, "do not fit together"), ({}, {"WORLD_SIZE": "five"}, "WORLD_SIZE is `five`"), ({}, {"WORLD_SIZE": "3", "RANK": "1"}, "do not fit")],
)  # fmt: skip
def test_torchrun_and_our_variables_conflict_by_name(ours, theirs, words):
    with pytest.raises(SexpError) as caught:
        layout_of(read(ours), TORCHRUN | theirs)
    assert caught.value.diagnostic.code == "E-ENV-015" and words in caught.value.diagnostic.message


# --- the judge ---


def beat(**facts: Any) -> dict[str, Any]:
    return {"phase": "running", "step": 5, "made": 5, "done": 10, "collective": "all-reduce 7", "waiting": False, "device": False, "seconds": 0.1, "stack": ["a.py:1 f"]} | facts


def judge(posts: int = 1, here: int = 2, **limits: float) -> Judge:
    found = Judge(posts, here, posts, "h:1", DEADLINES | limits, 0.0)
    for post in range(posts):
        found.came(post, f"host{post}", 0.0)
    for rank in range(posts * here):
        found.beat(rank, beat(), 0.0)
    return found


def hear(found: Judge, now: float) -> None:
    for post in range(found.posts):
        found.heard(post, now)


def test_a_run_that_goes_on_is_left_alone():
    found = judge()
    for second in range(100):
        hear(found, second)
        for rank in range(2):
            found.beat(rank, beat(done=second), second)
        assert found.tick(second) is None


def test_a_silent_rank_and_a_silent_node_are_named():
    found = judge(2, 1)
    for second in range(20):
        hear(found, second)
        found.beat(0, beat(done=second), second)
    verdict = found.tick(19)
    assert verdict.code == "E-RUN-061" and "rank 1 (node 1, host1)" in verdict.message and "  a.py:1 f" in verdict.notes
    found = judge(2, 1)
    found.heard(0, 20)
    verdict = found.tick(20)
    assert "from node 1 (host1, rank 1)" in verdict.message and verdict.rank == 1


@pytest.mark.parametrize("phase, waits, seconds, falls", [("running", True, 26, True), ("running", False, 26, False), ("running", False, 251, True),
                                                          ("saving", True, 26, False), ("saving", True, 901, True), ("compiling", True, 901, False)])
def test_a_rank_that_lets_the_others_wait_has_as_long_as_its_phase(phase, waits, seconds, falls):
    found = judge()
    found.beat(0, beat(phase=phase, done=11), 0)
    for second in range(seconds + 1):
        hear(found, second)
        found.beat(0, beat(phase=phase, done=11), second)
        found.beat(1, beat(waiting=waits, done=12 if waits else second), second)
    verdict = found.tick(seconds)
    assert (verdict is not None) == falls
    if falls:
        assert verdict.code == "E-RUN-062" and verdict.rank == 0 and phase in verdict.message


def test_a_graph_that_is_made_later_has_the_time_of_a_compilation_too():
    member = object.__new__(Member)  # without a supervisor
    member._phase, member._done = "running", 5
    with pytest.raises(ValueError, match="compiler"), member.within("compiling"):
        phase, done = member._phase, member._done
        raise ValueError("the compiler's")
    assert (phase, done) == ("compiling", 6) and (member._phase, member._done) == ("running", 7)


def test_the_first_step_has_the_time_of_a_compilation():
    found = judge()
    for second in range(60):
        hear(found, second)
        found.beat(0, beat(made=0), second)
        found.beat(1, beat(made=0, waiting=True), second)
    assert found.tick(59) is None


def test_ranks_that_all_wait_have_lost_each_other():
    found = judge()
    for second in range(27):
        hear(found, second)
        found.beat(0, beat(waiting=True, done=11), second)
        found.beat(1, beat(waiting=True, done=9), second)
    verdict = found.tick(26.5)
    assert verdict.code == "E-RUN-063" and verdict.rank == 1


def test_ranks_that_wait_for_their_devices_have_longer():
    found = judge()
    for second in range(252):
        hear(found, second)
        for rank in range(2):
            found.beat(rank, beat(waiting=True, device=True, done=11), second)
        assert (found.tick(second) is not None) == (second > 250)
    assert found.tick(251).code == "E-RUN-063"


def test_a_broken_connection_waits_for_its_cause():
    found = judge()
    found.lost(0, "reset by peer", 1.0)
    hear(found, 2)
    assert found.tick(2) is None
    found.exited(1, -9, 2.5)
    verdict = found.tick(2.6)
    assert verdict.code == "E-RUN-060" and verdict.rank == 1 and "SIGKILL" in verdict.message
    found = judge()
    for second in range(20):
        hear(found, second)
        found.beat(0, beat(done=second), second)
        found.beat(1, beat(done=second), second)
    found.lost(0, "reset by peer", 1.0)
    found.ranks[0].heard = 19.0
    verdict = found.tick(19.5)
    assert verdict.code == "E-RUN-063" and "reset by peer" in verdict.notes


def test_a_mistake_is_the_ranks_own_and_one_of_the_file_is_rank_0s():
    found = judge()
    mistake = {"code": "E-DATA-013", "message": "no part", "help": ["x"], "exit_code": 2}
    found.failed(1, mistake)
    found.exited(1, 2, 1.0)
    assert found.tick(1.5) is None  # rank 0 may be about to say it
    found.failed(0, mistake)
    found.exited(0, 2, 2.0)
    verdict = found.tick(2.1)
    assert verdict.rank == 0 and verdict.told and verdict.exit_code == 2 and verdict.code == "E-DATA-013"


def test_facts_that_differ_are_named_with_their_node():
    found = judge(2, 1)
    assert found.meet(0, "start", {"knob lr": "1", "_store": ["h", 1]}, 0) is None
    verdict = found.meet(1, "start", {"knob lr": "2"}, 0)
    assert isinstance(verdict, Verdict) and verdict.code == "E-NET-031" and verdict.exit_code == 2
    assert "on node 1 (host1) knob lr is 2, on node 0 (host0) it is 1" in verdict.message
    assert found.meet(0, "data", {"a": "1", "_x": 3}, 0) is None
    assert found.meet(1, "data", {"a": "1"}, 0) == {"name": "data", "facts": {"_x": 3}}


def test_stragglers_are_marked_and_signals_give_the_code():
    found = judge(1, 4)
    for rank in range(4):
        found.beat(rank, beat(seconds=0.2 if rank == 2 else 0.1), 0)
    assert [row["straggler"] for row in found.table()] == [False, False, True, False]
    found.exited(1, 143, 1.0)
    assert found.tick(1.5) is None and found.stopped(1.5) is None and found.stopped(5.0) == 143
    found.exited(0, 4, 2.0)
    assert found.left_over() == [2, 3]


def test_a_node_that_does_not_come_is_named():
    found = Judge(3, 1, 3, "h:1", DEADLINES, 0.0)
    found.came(0, "a", 0.0)
    found.heard(0, 301.0)
    verdict = found.tick(301.0)
    assert verdict.code == "E-NET-030" and "nodes 1, 2 did not come to h:1 within 5 min" in verdict.message


def test_under_torchrun_an_absent_rank_is_to_be_started_by_it():
    found = Judge(2, 1, 1, "h:1", DEADLINES, 0.0)
    found.came(0, "host0", 0.0)
    verdict = found.tick(DEADLINES["rendezvous"] + 1)
    assert verdict is not None and "rank 1 did not come" in verdict.message
    assert "MASTER_ADDR" in verdict.help[0] and "SEXPGPU_RENDEZVOUS" not in " ".join(verdict.help)


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr("sexpgpu.run.ranks.collectives.REACHED", 0.0)
    place = Layout(2, 1, 2, 1, (0,), ("127.0.0.1", 1)).place(0, 7, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = ("127.0.0.1", listener.getsockname()[1])
        reach(store, place)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes the port
        with bound, pytest.raises(SexpError) as caught:
            reach(("127.0.0.1", bound.getsockname()[1]), place)
    found = caught.value.diagnostic
    assert found.code == "E-NET-030" and "rank 1 does not reach rank 0 at 127.0.0.1:" in found.message and "every port" in found.help[0]


def test_deadlines_are_read():
    assert deadlines(["running=5m", "silent=1m30s"]) == DEADLINES | {"running": 300.0, "silent": 90.0}
    for text in ("running", "runing=5m", "5m"):
        with pytest.raises(SexpError) as caught:
            deadlines([text])
        assert caught.value.diagnostic.code == "E-RUN-064"


def test_clocks_apart_are_a_finding():
    found = Probe(3, 2, 1e-4, {65536: 1e9}, (0.0, 0.5, -7.25)).findings()
    assert [d.code for d in found] == ["E-NET-032"] and "rank 2 is 7.2 s" in found[0].message
    assert not Probe(2, 1, 1e-4, {65536: 1e9}, (0.0, 0.01)).findings()


# --- lines over sockets ---


def test_lines_arrive_whole_and_strangers_are_refused():
    left, right = socket.socketpair()
    a, b = Wire(left), Wire(right)
    a.send({"text": "x" * 300_000})
    got: list[dict[str, Any]] = []
    while not got:
        got += b.receive()
        a.flush()
    assert got == [{"text": "x" * 300_000}]
    left.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(Closed, match="does not speak"):
        list(b.receive())
    left.setblocking(True)
    c, d = socket.socketpair()
    wire = Wire(d)
    sent = 0
    with pytest.raises(Closed):
        while sent <= LONGEST + (1 << 20):
            sent += c.send(b"y" * 65536)
            list(wire.receive())
    for thing in (left, right, c, d):
        thing.close()


# --- layers that mix samples ---


@pytest.mark.parametrize("layer, mixing", [("(batch-norm x)", True), ("(layer-norm x)", False), ("(- x (mean x))", True), ("(- x (mean x :axis 1 :keep-dims true))", False)])
def test_what_takes_samples_together_is_said(tmp_path, layer, mixing):
    path = tmp_path / "m.lisp"
    path.write_text(f"""(import "nn" "optim")
(defdata pts (csv "d.csv" :fields ((x f32 [4]) (y f32))))
(deflayer net (x) (linear {layer} 1))
(defun fit (x y) (mean (square (- (squeeze (net x) :axis 1) y))))
(defrun train :data (batches pts :batch 8) :loss fit :optimizer (adamw :lr 0.1) :steps 3)
""")
    loaded = load(str(path), Selection())
    run = choose_run(loaded.experiment, None)
    traced = train_graph(loaded, run)
    assert not mixes(traced, run, 1)
    found = mixes(traced, run, 2)
    assert [d.code for d in found] == (["W-RUN-004"] if mixing else [])
    if mixing:
        assert "each micro-batch of 4 alone" in found[0].message


# --- decisions that ranks make alike ---


class Together:
    """The collectives of `count` ranks in threads of one process."""

    def __init__(self, count: int):
        self.barrier, self.slots, self.count = threading.Barrier(count), [[] for _ in range(count)], count

    def of(self, rank: int) -> Any:
        return Seat(self, rank)

    def gather(self, rank: int, values: list[Any]) -> list[list[Any]]:
        self.barrier.wait()
        self.slots[rank] = list(values)
        self.barrier.wait()
        return list(self.slots)


@dataclass
class Seat:
    table: Together
    rank: int

    def sum_floats(self, values: list[float]) -> list[float]:
        return [math.fsum(column) for column in zip(*self.table.gather(self.rank, values), strict=True)]

    def begin_largest(self, values: list[int]) -> Any:
        return lambda: [max(column) for column in zip(*self.table.gather(self.rank, values), strict=True)]


class Batches:
    """An evaluation of `count` batches, each its own number; that of `held` is not there."""

    def __init__(self, count: int, held: int | None = None):
        self.count, self.held = count, held

    def __len__(self) -> int:
        return self.count

    def batch(self, number: int) -> int:
        if number == self.held:
            raise Halted
        return number


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 7])
def test_batches_of_an_evaluation_are_joined_in_order_with_the_same_bits(batches):
    def value(number: int) -> dict[str, tuple[float, float]]:
        return {"a": (1 / (number + 3), 0.1 + number), "b": (math.nan if number == 5 else number * 1e-30, 1.0)}

    table = Together(3)

    def rank(number: int) -> tuple[int, list[dict[str, tuple[float, float]]]]:
        shares = Shares(Batches(batches), number, 3)
        rounds = list(shares)
        return len(rounds), shares.joined(table.of(number), ["a", "b"], [{} if n is None else value(n) for n in rounds])

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(rank, range(3)))
    wanted = [value(n) for n in range(batches)]
    for rounds, joined in found:
        assert rounds == -(-batches // 3) and repr(joined) == repr(wanted)


def test_a_signal_to_one_rank_stops_all_at_the_same_question():
    table = Together(2)

    def rank(number: int) -> int:
        signals = Fake()
        controls = AgreedControls(signals, table.of(number))
        for question in range(1, 20):
            if number == 1 and question == 7:
                signals.stop = 15
            if controls.stopping() is not None:
                return question
        return 0

    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(rank, range(2))) == {8}  # one question later: each answer was begun at the one before


class Shards:
    """A feed whose `held` batch does not come; a signal ends the wait for it."""

    def __init__(self, held: int | None):
        self.held = held

    def batch(self, step: int) -> int:
        if step == self.held:
            raise Halted
        return step


def test_ranks_leave_a_wait_for_data_together():
    table = Together(3)

    def rank(number: int) -> list[int]:
        feed, got = AgreedFeed(Shards(4 if number == 1 else None), lambda n: table.of(number).begin_largest([n])()[0]), []  # type: ignore[arg-type]
        with pytest.raises(Halted):
            for step in range(10):
                got.append(feed.batch(step))
        return got

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [[0, 1, 2, 3]] * 3


def test_ranks_leave_an_evaluation_together():
    table = Together(2)

    def rank(number: int) -> int:
        shares = Shares(Batches(7, held=5), number, 2, lambda n: table.of(number).begin_largest([n])()[0])
        got = []
        with pytest.raises(Halted):
            for batch in shares:
                got.append(batch)
        return len(got)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [2, 2]


def test_nccl_is_prepared_and_what_the_user_set_wins():
    environ = {"NCCL_RUNTIME_CONNECT": "1"}
    prepare(environ, "127.0.0.1")
    assert environ["NCCL_NVLS_ENABLE"] == "0" and environ["NCCL_GRAPH_REGISTER"] == "0" and environ["NCCL_RUNTIME_CONNECT"] == "1"
    assert environ["NCCL_SOCKET_IFNAME"] == "=lo" and interface_of("203.0.113.7") == ""
    assert environ["TORCH_NCCL_BLOCKING_WAIT"] == "1" and environ["NCCL_RAS_ENABLE"] == "0", "no thread and no port but the supervisors know of it"


def test_a_process_with_nccl_leaves_its_teardown_out():
    """In one of its own: what was asked for at the end is done, and what an object does when it is freed is not."""
    program = """
import atexit, sys
from sexpgpu.cli.main import main
from sexpgpu.run.ranks import collectives
class Group:
    def __del__(self):
        print("freed")
if sys.argv[1] == "nccl":
    collectives._groups.append(Group())
else:
    other = Group()
atexit.register(print, "at the end")
main(["explain", "E-NOT-A-CODE"])
"""
    for way, said in (("nccl", ["at the end"]), ("gloo", ["at the end", "freed"])):
        done = subprocess.run([sys.executable, "-c", program, way], capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stdout.splitlines()) == (2, said), done.stderr


class Fake:
    stop: int | None = None

    def stopping(self) -> int | None:
        return self.stop

    def take_save_request(self) -> bool:
        return False

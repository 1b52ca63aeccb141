"""Delivery to the service: order, batches, lifecycle, faults, outages, repetitions, the end."""

from __future__ import annotations

import json
import os
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest
from fake_service import CLOSE, FOLDER, FakeService, error, error_event, reply
from support_metrics import (
    RUN,
    ScaledClock,
    append,
    client,
    deliver,
    note,
    points,
    run_record,
    whole_run,
)

from sexpgpu.run.metrics.cursor import cursor_path, load_cursor
from sexpgpu.run.metrics.delivery import Delivery
from sexpgpu.run.metrics.syvain import MAX_BYTES


@pytest.fixture
def fake():
    with FakeService() as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.jsonl"


def steps(fake: FakeService) -> list[int]:
    return [p["step"] for p in fake.points()]


def first_time(action):
    """A hook that acts at the first request with metrics, and again whenever `action` says so by returning True."""
    state = {"left": 1}

    def hook(asked):
        if "metric" in asked.names and state["left"]:
            state["left"] -= 1
            return action(asked)
        return None

    return hook


def test_order_batches_and_lifecycle(fake, file):
    append(file, whole_run(2500))
    done = deliver(fake.url, file, folder=FOLDER)
    assert done.finished and not done.trouble and not done.dead and done.cursor.refused == 0
    assert [a.names for a in fake.asked if a.path == "/api/v2/events"] == [["open"], ["folderexperiment.move"]]
    batches = fake.batches()
    assert batches[:2] == [["annotate"], ["start"]] and batches[-2:] == [["done"], ["tokenRevoke"]]
    assert [len(b) for b in batches[2:-2]] == [1000, 1000, 501] and batches[-3][-1] == "annotate"
    assert steps(fake) == list(range(1, 2501))
    sent = [p for p in fake.points() if p["step"] == 4][0]
    assert sent == {"experimentId": sent["experimentId"], "metricName": "loss", "metricValue": 0.25, "step": 4,
                    "timestampMs": 1004000, "meta": {"split": "train"}}
    assert fake.metas[0]["knobs"]["lr"]["value"] == 0.1 and fake.metas[0]["run_id"] == RUN
    assert load_cursor(file, RUN, fake.url).seq == 2503
    for asked in fake.asked:
        assert asked.headers["x-syvain-client"] == "sexpgpu" and asked.headers["accept"] == "application/json"


def test_requests_stay_below_a_mebibyte(fake, file):
    append(file, [run_record("start"), *(note("ü" * 15_000, step=str(i)) for i in range(80)), run_record("done")])
    assert deliver(fake.url, file).finished
    assert max(a.size for a in fake.asked) <= MAX_BYTES and fake.events().count("annotate") == 81


def test_compression_where_it_is_offered(fake, file):
    fake.headers["Accept-Encoding"] = "gzip"
    append(file, whole_run(50))
    assert deliver(fake.url, file).finished and len(steps(fake)) == 50
    coded = {a.names[0]: a.headers.get("content-encoding") for a in fake.asked if a.names}
    assert coded["metric"] == "gzip" and coded["open"] is None


@pytest.mark.parametrize("wait", ["1", "date"])
def test_retry_after(fake, file, wait):
    append(file, whole_run(3))
    fake.hooks.append(first_time(
        lambda a: error(429 if wait == "1" else 503, "slower", retry_after="1" if wait == "1" else formatdate(time.time() + 2, usegmt=True))))
    assert deliver(fake.url, file).finished
    first, second = (a for a in fake.asked if "metric" in a.names)
    assert first.body == second.body and second.at - first.at >= 0.95
    assert steps(fake) == [1, 2, 3]


def test_an_event_that_asks_for_a_pause(fake, file):
    append(file, whole_run(3))
    fake.hooks.append(first_time(lambda a: reply(
        [fake.reply_to(e) if e["data"].get("step") != 2 else error_event(e, 503, retryAfterMs=900) for e in a.body])))
    assert deliver(fake.url, file).finished
    first, second = (a for a in fake.asked if "metric" in a.names)
    assert second.body == [e for e in first.body if e["data"].get("step") == 2] and second.at - first.at >= 0.9


@pytest.mark.parametrize("answer", [
    CLOSE, (204, {}, b""), (200, {}, b"<html>hello</html>"), (200, {}, b"{}"), (200, {}, b"[1]"), (302, {"location": "/"}, b""),
    (403, {}, b"error code: 1020"), (520, {}, b"odd"), (200, {"content-encoding": "gzip"}, b"no gzip")], ids=str)
def test_what_passes_is_sent_again_with_the_same_ids(fake, file, answer):
    append(file, whole_run(3))
    fake.hooks.append(first_time(lambda a: answer))
    assert deliver(fake.url, file).finished
    first, second = (a for a in fake.asked if "metric" in a.names)
    assert first.body == second.body and steps(fake) == [1, 2, 3]
    assert fake.events().count("tokenRevoke") == 1


def test_replies_in_any_order_extra_or_missing(fake, file):
    append(file, whole_run(4))
    fake.hooks.append(first_time(lambda a: reply(
        [{"event": "x"}, 3, *reversed([fake.reply_to(e) for e in a.body if e["data"].get("step") != 3])])))
    assert deliver(fake.url, file).finished
    first, second = (a for a in fake.asked if "metric" in a.names)
    assert [e["data"]["step"] for e in second.body] == [3]


def test_a_reply_that_comes_too_late(fake, file):
    append(file, whole_run(3))

    def late(asked):
        fake.arrived.extend(asked.body)  # it did arrive
        time.sleep(2.0)
        return reply([fake.reply_to(e) for e in asked.body])

    fake.hooks.append(first_time(late))
    assert deliver(fake.url, file, timeout=1.0).finished
    assert fake.events().count("metric") >= 6 and steps(fake) == [1, 2, 3]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_bad_record_costs_no_other(fake, file, status):
    append(file, [run_record("start"), *points(300), *points(1, 301, "bad"), *points(300, 302), run_record("done")])
    fake.hooks.append(lambda a: error(status, "bad value")
                      if any(e["data"].get("metricName") == "bad" for e in a.body or ()) else None)
    done = deliver(fake.url, file)
    assert done.finished and done.cursor.refused == 1 and "bad value" in done.refusal
    assert steps(fake) == [*range(1, 301), *range(302, 602)]
    assert fake.events()[-2:] == ["done", "tokenRevoke"]


def test_a_service_that_refuses_everything_is_left_alone(fake, file):
    append(file, whole_run(500))
    fake.hooks.append(lambda a: error(422, "no more series") if "metric" in a.names else None)
    done = deliver(fake.url, file)
    assert not done.finished and "no more series" in done.dead
    assert done.undelivered() == 502 and len(fake.asked) < 60
    fake.hooks.clear()
    assert deliver(fake.url, file).finished and steps(fake) == list(range(1, 501))


def test_an_event_refused_for_good(fake, file):
    append(file, whole_run(3))
    fake.hooks.append(first_time(lambda a: reply(
        [error_event(e, 422, retryable=True) if e["data"].get("step") == 2 else fake.reply_to(e) for e in a.body])))
    done = deliver(fake.url, file)
    assert done.finished and done.cursor.refused == 1 and len([a for a in fake.asked if "metric" in a.names]) == 1


def test_a_token_near_its_end_is_renewed(fake, file):
    fake.token_seconds = 290
    append(file, whole_run(3))
    assert deliver(fake.url, file).finished
    assert [a.names for a in fake.asked].count(["tokenRefresh"]) == 1


def test_a_token_that_is_refused(fake, file):
    append(file, whole_run(3))

    def forget(asked):
        fake.tokens.clear()
        return error(401, "expired")

    fake.hooks.append(first_time(forget))
    assert deliver(fake.url, file).finished and steps(fake) == [1, 2, 3]
    names = [n for a in fake.asked for n in a.names]
    assert names.count("tokenRefresh") == 1 and names.count("open") == 1


def test_a_refused_renewal_opens_again_once(fake, file):
    append(file, whole_run(3))
    fake.hooks.append(first_time(lambda a: (fake.tokens.clear(), error(401, "expired"))[1]))
    fake.hooks.append(lambda a: error(403, "no") if "tokenRefresh" in a.names else None)
    assert deliver(fake.url, file).finished and steps(fake) == [1, 2, 3]
    assert [n for a in fake.asked for n in a.names].count("open") == 2
    fake.hooks.append(lambda a: error(401, "never") if "start" in a.names else None)
    other = file.with_name("o.jsonl")
    append(other, whole_run(3), "b" * 32)
    done = deliver(fake.url, other, run_id="b" * 32)
    assert not done.finished and "401" in done.dead and done.undelivered() == 6


def test_an_outage_of_ten_minutes(fake, file):
    """On a clock 300 times faster: 2 s of outage, records go on, nobody waits for anything."""
    clock = ScaledClock(300)
    down = threading.Event()
    fake.hooks.append(lambda a: CLOSE if down.is_set() else None)
    append(file, [run_record("start")])
    delivery = Delivery(client(fake.url), file, RUN, clock=clock)
    delivery.start()
    begin = clock.now()
    while "start" not in fake.events():
        time.sleep(0.01)
    down.set()
    for step in range(1, 201):
        append(file, points(1, step))
        delivery.wake(urgent=step % 10 == 0)
        time.sleep(0.01)
    outage = clock.now() - begin
    assert outage >= 600 and steps(fake) == []
    tries = [b.at - a.at for a, b in zip(fake.asked[3:], fake.asked[4:], strict=False)]
    assert 5 < len(tries) < 2 * (outage / 10 + 5)  # 0.5, 1, 2, 4, 8 and then each 10 s
    down.clear()
    append(file, [run_record("done")])
    delivery.finish(15 * clock.factor)
    assert delivery.finished and steps(fake) == list(range(1, 201))
    assert fake.events().count("done") == 1


def test_writes_do_not_wait_and_the_end_is_bounded(fake, file):
    gate = threading.Event()

    def hang(asked):
        gate.wait(60)
        return CLOSE

    fake.hooks.append(hang)
    append(file, whole_run(3))
    delivery = Delivery(client(fake.url), file, RUN)
    delivery.start()
    time.sleep(0.2)
    slowest = 0.0
    for _ in range(2000):
        begin = time.monotonic()
        delivery.wake(urgent=False)
        slowest = max(slowest, time.monotonic() - begin)
    assert slowest < 20  # of the 60 s that a request hangs
    begin = time.monotonic()
    delivery.finish(1.0)
    assert time.monotonic() - begin < 40
    assert not delivery.finished and delivery.undelivered() == 6
    gate.set()


def test_a_body_that_drips(fake, file):
    """Bytes that come one by one keep a socket's timeout from ever passing; the whole answer has a time of its own."""
    import socket

    server = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        try:
            for _ in range(600):
                connection.sendall(b" ")
                time.sleep(0.1)
        except OSError:
            pass

    threading.Thread(target=drip, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(Exception, match="no answer within"):
        client(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.5).check_key()
    assert time.monotonic() - begin < 40  # of the 60 s that it drips
    server.close()


def test_each_point_once_over_crashes_and_resumes(fake, file):
    """Cut anywhere: after the service took a batch, before the cursor; with the cursor gone; with the file gone."""
    append(file, [run_record("start"), *points(10)])
    first = Delivery(client(fake.url), file, RUN)
    first.start()
    while len(fake.points()) < 10:
        time.sleep(0.01)
    first.finish(5)
    cursor_path(file).unlink()
    append(file, [run_record("resume", step=5), *points(5, 11), run_record("done")])
    assert deliver(fake.url, file).finished
    assert steps(fake) == list(range(1, 16)) and fake.events().count("metric") == 25
    file.unlink()
    again = points(15)
    for record in again[5:]:
        record["value"] += 1e-3  # a rate is never measured twice alike
    append(file, [run_record("resume", step=0), *again, run_record("done")])
    assert deliver(fake.url, file).finished
    assert steps(fake) == list(range(1, 16))


def test_a_cursor_of_another_file_or_host_is_not_believed(fake, file):
    append(file, whole_run(5))
    assert deliver(fake.url, file).finished
    assert load_cursor(file, RUN, fake.url).seq == 8
    assert load_cursor(file, RUN, "https://elsewhere").seq == 0
    for text in ("", "[]", "{", json.dumps({RUN: {"seq": 3}}), json.dumps({RUN: 5})):
        cursor_path(file).write_text(text)
        assert load_cursor(file, RUN, fake.url).seq == 0
    assert deliver(fake.url, file).finished
    file.write_text("")
    append(file, [{**record, "time": 5000.0} for record in whole_run(9)])
    assert load_cursor(file, RUN, fake.url).seq == 0


def test_a_changed_trajectory_is_new_points(fake, file):
    """A, then B from step 3, then A from B's step 4: three values of step 5 are three points, in three series."""
    append(file, [run_record("start"), *points(6), run_record("resume", step=3, supersedes_after=3, trajectory="t1", accepted=[3]), *points(3, 4),
                  run_record("resume", step=4, supersedes_after=4, trajectory="t0", accepted=[3, 4]), *points(2, 5), run_record("done")])
    assert deliver(fake.url, file).finished
    got = [(p["step"], p["meta"].get("accepted-after")) for p in fake.points()]
    assert got == [*((s, None) for s in range(1, 7)), (4, "3"), (5, "3"), (6, "3"), (5, "4"), (6, "4")]


def test_a_lineage_needs_no_file(fake, file):
    """The same where what came before is in no file: a spool that was delivered is removed."""
    for records in ([run_record("start"), *points(6)], [run_record("resume", step=3, supersedes_after=3, trajectory="t1", accepted=[3]), *points(3, 4)],
                    [run_record("resume", step=4, supersedes_after=4, trajectory="t0", accepted=[3, 4]), *points(2, 5)],
                    [run_record("resume", step=4, trajectory="t0", accepted=[3, 4]), *points(2, 5)]):
        file.unlink(missing_ok=True)
        cursor_path(file).unlink(missing_ok=True)
        append(file, records)
        assert deliver(fake.url, file).finished
    got = [(p["step"], p["meta"].get("accepted-after")) for p in fake.points()]
    assert got == [*((s, None) for s in range(1, 7)), (4, "3"), (5, "3"), (6, "3"), (5, "4"), (6, "4")]


def test_lifecycle_words(fake, file):
    append(file, [run_record("start"), run_record("stopped", step=4), run_record("resume", step=4),
                  run_record("error", step=5, error={"code": "E-RUN-001", "message": "the loss is nan"})])
    assert deliver(fake.url, file).finished
    errors = [e["data"] for e in fake.arrived if e["event"].endswith(".error")]
    assert [e["error"] for e in errors] == ["Stopped: after step 4", "E-RUN-001: the loss is nan"]
    assert errors[1]["meta"] == {"error_type": "E-RUN-001"}
    assert fake.events() == ["annotate", "start", "error", "start", "error", "tokenRevoke"]


def test_limits_of_the_service(fake, file):
    long = {"split": "train", "path": "a/" * 400, **{f"k{i:02}": "v" * 200 for i in range(40)}}
    append(file, [run_record("start"), {**points(1)[0], "metadata": long}, {**points(1)[0], "metadata": {**long, "path": "a/" * 401}},
                  note("x" * 40_000, kind="k" * 70_000), note(""), {**points(1)[0], "value": None, "nonfinite": "nan"},
                  run_record("error", error={"code": "", "message": "m" * 9000})])
    done = deliver(fake.url, file)
    assert done.finished and done.nonfinite == {"loss": 1} and len(fake.points()) == 2
    for p in fake.points():
        assert len(p["meta"]) <= 32 and all(len(k) <= 128 and len(v.encode()) <= 512 for k, v in p["meta"].items())
        assert sum(len(k) + len(v) + 6 for k, v in p["meta"].items()) <= 4096 + 64
    for event in fake.arrived:
        if event["event"].endswith("annotate"):
            assert 1 <= len(event["data"]["annotation"]) <= 16_000
        if event["event"].endswith("error"):
            assert len(event["data"]["error"]) <= 8_000


def test_a_forked_child_sends_nothing(fake, file):
    append(file, [run_record("start")])
    delivery = Delivery(client(fake.url), file, RUN)
    delivery.start()
    while "start" not in fake.events():
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        delivery.wake(urgent=True)
        delivery.finish(60)
        os._exit(0)
    begin = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0 and time.monotonic() - begin < 40
    append(file, [*points(2), run_record("done")])
    delivery.finish(10)
    assert delivery.finished and steps(fake) == [1, 2]

"""`doctor --distributed`, `explain --assume-ranks`, torchrun, and a step that is not finite, on several ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support_ranks import PROGRAM, Process, run, status, write

from sexpgpu.cli.main import perform
from sexpgpu.compiler import Selection, load, stages, train_graph
from sexpgpu.explain.memory import planned

ROOT = Path(__file__).resolve().parents[2]


def test_doctor_measures_the_links_and_compares_the_ranks(tmp_path):
    write(tmp_path)
    with Process(tmp_path, ["doctor", "--distributed", "r.lisp", "--json"], SEXPGPU_DEVICES="0,1") as process:
        assert process.wait() == 0, process.text()
    found = json.loads(process.text())
    assert found["ranks"] == 2 and 0 < found["latency_seconds"] < 1 and all(v > 0 for v in found["bytes_per_second"].values())
    assert len(found["clocks_seconds"]) == 2 and {"the text of r.lisp", "the digest of data pts"} <= set(found["same"])


def test_explain_plans_for_ranks(tmp_path, capsys):
    path = write(tmp_path, keys=" :shard optimizer")
    assert perform(["explain", str(path), "--assume-ranks", "4", "--json"]) == 0
    four = json.loads(capsys.readouterr().out)["runs"]["train"]
    assert perform(["explain", str(path), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)["runs"]["train"]
    values = 4 * one["values"]  # bytes
    assert "ranks" not in one and four["ranks"]["samples"] == 4 and four["hash"] == one["hash"]
    kept = [found["memory"]["kept"]["optimizer"] // 8 for found in (one, four)]  # floats of a slot, with the gaps that align parameters
    assert kept == [32 + 16 + 16 + 16, 128 // 4] and four["memory"]["batch"] * 4 == one["memory"]["batch"]
    assert four["ranks"]["sent"] == {f"{what}": round(0.75 * values) for what in ("gradients, reduce-scatter", "parameters, all-gather", "averages, all-gather")}
    path = write(tmp_path)
    assert perform(["explain", str(path), "--assume-ranks", "2"]) == 0
    assert "all-reduce 196 B" in capsys.readouterr().out


def test_explain_counts_divided_weights_as_the_program_does(tmp_path, capsys):
    """Beside the program's own plan, whose bytes are whole for each tensor."""
    pytest.importorskip("triton")
    from sexpgpu.backends.cuda.report import lowered

    path = tmp_path / "g.lisp"
    path.write_text((ROOT / "examples/gpt2.lisp").read_text("utf-8").replace(":clip-norm 1.0", ":clip-norm 1.0 :shard optimizer"), "utf-8")
    loaded = load(str(path), Selection(variant="tiny"))
    run = next(iter(loaded.experiment.runs.values()))
    exact = lowered(stages(loaded, run, "cuda", 2), 2).plan
    kept = planned(loaded, run, "cuda", 1, 2).kept
    tensors = len(train_graph(loaded, run).params)
    assert abs(kept["parameters"] + kept["bf16 copies"] - exact.parameters) <= 2 * tensors
    assert kept["optimizer"] == exact.optimizer and kept["parameters"] < planned(loaded, run, "cuda").kept["parameters"]
    assert perform(["explain", str(path), "--variant", "tiny", "--device", "cuda", "--assume-ranks", "2"]) == 0
    assert "optimizer state and f32 weights divided" in capsys.readouterr().out


def test_torchrun_starts_the_same_run_over_two_nodes(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SEXPGPU_")}
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "x",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "-m", "sexpgpu", "run", "r.lisp", "--status", "m.json", "--checkpoint-dir", "ck"]  # fmt: skip
    started = []
    for number in range(2):
        folder = tmp_path / str(number)
        write(folder, steps=5)
        started.append(subprocess.Popen(words, cwd=folder, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        for process in started:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    finally:
        for process in started:
            process.kill()
    found = [path.parent for path in tmp_path.glob("*/m.json") if status(path.parent).get("state") == "done"]
    assert len(found) == 1  # rank 0's node
    assert json.loads((found[0] / "ck/step-5/manifest.json").read_text())["ranks"] == 2


def test_a_dry_run_is_of_all_ranks_and_leaves_nothing(tmp_path):
    write(tmp_path, keys=" :shard optimizer")
    before = {path.name for path in tmp_path.iterdir()}
    with run(tmp_path, "--dry-run", "--checkpoint-dir", "ck") as process:
        assert process.wait() == 0, process.text()
    assert "dry run: the file compiles" in process.text() and "done at step 2 of 2" in process.text(), process.text()
    assert {path.name for path in tmp_path.iterdir()} - before == {process.log.name}


def test_a_step_that_is_not_finite_on_one_rank_stops_all_and_is_replayed_whole(tmp_path):
    write(tmp_path, program=PROGRAM.replace("(square (off x y))", "(/ (square (off x y)) (- n 1000))"))
    table = Path(tmp_path / "d.csv").read_text().splitlines()
    for row in range(20, 26):  # not all of them are in the evaluation's part
        table[row] = ",".join([*table[row].split(",")[:-1], "1000"])
    (tmp_path / "d.csv").write_text("\n".join(table) + "\n")
    with run(tmp_path) as process:
        assert process.wait() == 3, process.text()
    text = process.text()
    assert text.count("E-RUN-001") == 2 and "the loss is" in text and "replaying it op by op" in text and "E-RUN-06" not in text, text
    assert status(tmp_path)["error"]["code"] == "E-RUN-001"

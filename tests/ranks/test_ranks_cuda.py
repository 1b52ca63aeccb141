"""The device `cuda` on two ranks, its kernels under Triton's interpreter and its sums over Gloo: the command, and going on elsewhere."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support_ranks import PROGRAM, farthest, hurt, points, run, status, write

pytest.importorskip("triton")
PLAIN = PROGRAM.replace('(dropout (tanh (linear x 8 :name "in")) 0.2)', '(tanh (linear x 4 :name "in"))')
FULL = """
import torch
from sexpgpu.backends.cuda.program import CudaProgram
take, made = CudaProgram._take, []
def full(self, batches, turn, capacity):
    made.append(turn)
    if len(made) == 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    take(self, batches, turn, capacity)
CudaProgram._take = full
"""


def interpreted(folder: Path) -> dict[str, str]:
    return {"SEXPGPU_DEVICE": "cuda", "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def go(folder: Path, name: str, steps: int, ranks: int, device: str = "cuda", **environ: str) -> str:
    flags = ["--steps", str(steps), "--checkpoint-dir", name, *(["--resume", "latest"] if (folder / name).exists() else [])]
    more = interpreted(folder) | {"SEXPGPU_DEVICE": device} | environ
    with run(folder, *flags, ranks=ranks, name=name, **more) as process:
        assert process.wait(180) == 0, process.text()
        return process.text()


def test_two_ranks_then_one_then_the_cpu(tmp_path):
    write(tmp_path, steps=9, every=3, keys=" :shard optimizer", program=PLAIN)
    go(tmp_path, "whole", 9, 1, "cpu")
    go(tmp_path, "cut", 3, 2)
    assert status(tmp_path, "cut")["device"] == "cuda (interpreted)" and len(status(tmp_path, "cut")["ranks"]) == 2
    said = go(tmp_path, "cut", 6, 1)
    assert "not bit-exact: ranks was 2, is 1" in said, said
    said = go(tmp_path, "cut", 9, 1, "cpu")
    assert "device was cuda (interpreted), is cpu" in said, said
    a, b = points(tmp_path, "whole"), points(tmp_path, "cut")
    b = {k: v for k, v in b.items() if k in a}
    assert farthest(a, b)[0] < 1e-5, farthest(a, b)


def test_a_rank_whose_device_is_full_ends_the_run_by_name(tmp_path):
    write(tmp_path, steps=50, program=PLAIN)
    hurting = hurt(tmp_path, 1, FULL)
    with run(tmp_path, **interpreted(tmp_path), **hurting) as process:
        assert process.wait(180) == 3, process.text()
    text, error = process.text(), status(tmp_path)["error"]
    assert "[E-MEM-003]" in text and "plan: " in text and "the run ends: rank 1" in text and "Traceback" not in text, text
    assert error["code"] == "E-MEM-003" and error["rank"] == 1 and "rank 1 (node 0" in error["message"]


def test_gradients_rounded_between_nodes_train_nearly_the_same(tmp_path):
    """Two nodes of one rank each: the program's sums take the way in bf16, and its plan counts what that needs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = [tmp_path / name for name in ("one", "a", "b")]
    for folder in folders:
        write(folder, steps=5, every=5, program=PLAIN)
    with run(folders[0], ranks=1) as alone:
        assert alone.wait(180) == 0, alone.text()
    meeting = {"SEXPGPU_NODES": "2", "SEXPGPU_RENDEZVOUS": f"127.0.0.1:{port}", "SEXPGPU_NODE_GRADIENTS": "bf16", "SEXPGPU_EXPLAIN": "kernels"}
    first, second = (meeting | interpreted(tmp_path) | {"SEXPGPU_NODE_RANK": number} for number in "01")
    with run(folders[1], ranks=1, **first) as a, run(folders[2], ranks=1, **second) as b:
        assert a.wait(180) == 0, a.text()
        assert b.wait(180) == 0, b.text()
    far = farthest(points(folders[0]), points(folders[1]))[0]
    assert 1e-6 < far < 0.02, far
    assert "exchange" in next(line for line in a.text().splitlines() if line.startswith("plan: ")), a.text()

"""The table of a profile, from times that are given."""

from __future__ import annotations

import json

from sexpgpu.backends.cuda.profile import Ceilings, lines, make, plain_path
from sexpgpu.backends.cuda.report import Row

CEILINGS = Ceilings(4e12, {"f32": 5e13, "bf16": 8e14})


def row(number: int, kind: str, name: str, path: str, moved: int, flops: int = 0, phase: str = "forward") -> Row:
    return Row(number, kind, name, path, phase, "[8 8]", "1x1", moved, flops, 0, ())


TIMED = [
    (row(0, "kernel", "k_gelu", "gpt/block/0/up", 2_000_000), 1e-6),
    (row(1, "library", "matmul", "gpt/block/0/up", 1_000, 800_000_000), 2e-6),
    (row(2, "kernel", "k_gelu", "gpt/block/1/up", 2_000_000), 3e-6),
    (row(3, "library", "matmul", "gpt/block/0/up", 1_000, 800_000_000, "backward"), 4e-6),
]


def test_equal_layers_share_a_line() -> None:
    found = make("cuda X", 11e-6, TIMED, CEILINGS, "bf16")
    assert found.launches == 4 and abs(found.launch_seconds - 1e-5) < 1e-12
    assert [(x.name, x.path, x.phase, x.calls) for x in found.lines] == [
        ("k_gelu", "gpt/block/up", "forward", 2), ("matmul", "gpt/block/up", "backward", 1), ("matmul", "gpt/block/up", "forward", 1),
    ]  # fmt: skip
    gelu, backward, forward = found.lines
    assert abs(gelu.share - 0.4) < 1e-9 and abs(sum(x.share for x in found.lines) - 1) < 1e-9
    assert abs(gelu.bytes_per_second - 1e12) < 1e3 and abs(gelu.of_ceiling - 0.25) < 1e-9 and gelu.bound == "bytes"
    assert abs(forward.operations_per_second - 4e14) < 1e6 and abs(forward.of_ceiling - 0.5) < 1e-9 and forward.bound == "operations"
    assert abs(backward.of_ceiling - 0.25) < 1e-9


def test_the_table_and_the_document_say_the_same() -> None:
    found = make("cuda X", 11e-6, TIMED, CEILINGS, "bf16")
    document = json.loads(json.dumps(found.document()))
    assert document["step_seconds"] == 11e-6 and len(document["lines"]) == 3 and document["ceilings"]["operations"]["bf16"] == 8e14
    text = lines(found)
    assert "0.011 ms" in text[0] and "copy 4.00 TB/s" in text[1] and "bf16 800 TFLOP/s" in text[1]
    assert "40.0%" in text[3] and "1,000" in text[3] and "25% bytes" in text[3] and "k_gelu" in text[3]
    assert "library matmul" in text[4] and len(text) == 6
    assert lines(found, 1)[-1] == "  and 2 more, 60.0%"


def test_times_of_nothing_divide_by_nothing() -> None:
    found = make("cuda X", 0.0, [(row(0, "kernel", "k", "a", 10), 0.0)], Ceilings(0.0, {}), "f32")
    assert found.lines[0].share == 0 and found.lines[0].of_ceiling == 0
    assert make("cuda X", 0.0, [], CEILINGS, "f32").lines == ()


def test_paths_lose_their_call_numbers() -> None:
    assert plain_path("gpt/block/12/attention/0") == "gpt/block/attention" and plain_path("a/b2/c") == "a/b2/c"

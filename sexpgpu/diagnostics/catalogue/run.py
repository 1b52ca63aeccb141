"""Codes E-RUN-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.catalogue.forms import RUN
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-RUN-001": Entry(
        "not finite",
        """\
The loss or the norm of its gradient became infinite or NaN.

Why: The step is not applied, so the weights and the last checkpoint are still good.

Wrong:
    :optimizer (adamw :lr 10.0)

Right:
    :optimizer (adamw :lr 1e-3)   ; or :clip-norm 1.0
""",
    ),
    "E-RUN-002": Entry(
        "not a length of time",
        """\
`--max-time` takes hours, minutes and seconds with their letters.

Why: A bare number could mean any of them.

Wrong:
    --max-time 90

Right:
    --max-time 90m
""",
    ),
    "E-RUN-003": Entry(
        "no place for a checkpoint",
        """\
SIGUSR1 asks for a checkpoint, but the run has no location.

Why: The run goes on; nothing was saved.

Wrong:
    sexpgpu run digits.lisp &  kill -USR1 $!

Right:
    sexpgpu run digits.lisp --checkpoint-dir checkpoints
""",
    ),
    "E-RUN-011": Entry(
        "unknown metrics target",
        """\
`--metrics` or SEXPGPU_METRICS names something that is no target.

Why: Targets are jsonl:<path> and stdout, several by comma.

Wrong:
    --metrics json:m.jsonl

Right:
    --metrics jsonl:m.jsonl
""",
    ),
    "E-RUN-012": Entry(
        "metrics target named twice",
        """\
One target is given twice.

Why: Every record would be written twice.

Wrong:
    --metrics jsonl:m.jsonl,jsonl:m.jsonl

Right:
    --metrics jsonl:m.jsonl,stdout
""",
    ),
    "E-RUN-013": Entry(
        "metrics file not usable",
        """\
The file cannot be opened, or is there and holds something else than metrics.

Why: It is found before the first step, and nothing of the file is changed.

Wrong:
    --metrics jsonl:notes.txt

Right:
    --metrics jsonl:metrics.jsonl
""",
    ),
    "E-RUN-014": Entry(
        "metrics file in use",
        """\
A run that is still alive writes to this file.

Why: One file has one writer.

Wrong:
    two runs with jsonl:m.jsonl at once

Right:
    one file each
""",
    ),
    "E-RUN-020": Entry(
        "status file not writable",
        """\
The status file cannot be written.

Why: It is found before the first step.

Wrong:
    --status /no/such/folder/status.json

Right:
    --status status.json
""",
    ),
    "E-RUN-030": Entry(
        "out of memory",
        """\
The process could get no more memory.

Why: The batch or the model is too large for the machine.

Wrong:
    --set batch=1000000

Right:
    --set batch=64
""",
    ),
}

CODES |= RUN

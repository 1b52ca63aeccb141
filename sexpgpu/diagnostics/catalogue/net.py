"""Codes E-NET-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-NET-001": Entry(
        "buckets come later",
        """\
A location is an s3:// address.

Why: This version reads and writes local files only.

Wrong:
    --checkpoint-dir s3://bucket/run

Right:
    --checkpoint-dir checkpoints
""",
    ),
    "E-NET-002": Entry(
        "unknown storage scheme",
        """\
A location begins with a scheme that is not known.

Why: Local paths need none.

Wrong:
    --checkpoint-dir ftp://host/x

Right:
    --checkpoint-dir checkpoints
""",
    ),
    "E-NET-003": Entry(
        "target not available",
        """\
The metrics target exists, but not in this version.

Why: Metrics can go to a file and to standard output.

Wrong:
    --metrics syvain

Right:
    --metrics jsonl:metrics.jsonl
""",
    ),
}

"""Names of a run: the slug a person reads, and the run_id that files are matched by."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from calendar import timegm

MAX_SLUG = 120
_STAMP = "%Y%m%d-%H%M%S"
_TAIL = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}")
_TAIL_LENGTH = len("-20260101-000000-abcd")


def new_run_id() -> str:
    return uuid.uuid4().hex


def clean(text: str) -> str:
    """`text` with every character outside `[A-Za-z0-9._-]` as `-`; never empty, never a hidden or parent folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip(".") or "run"


def slug_head(base: str, run: str, several_runs: bool) -> str:
    """`<base>` or, where the file has several runs, `<base>-<run>`, cut so that a whole slug has at most 120."""
    head = f"{clean(base)}-{clean(run)}" if several_runs else clean(base)
    return head[: MAX_SLUG - _TAIL_LENGTH]


def new_slug(base: str, run: str, several_runs: bool, now: float | None = None, after: str = "") -> str:
    """`after`: a stamp; where the clock does not say a later one, the slug has the next second's."""
    stamp = time.strftime(_STAMP, time.gmtime(now))
    if after and stamp <= after:
        stamp = time.strftime(_STAMP, time.gmtime(seconds_of(after) + 1))
    return f"{slug_head(base, run, several_runs)}-{stamp}-{secrets.token_hex(2)}"


def head_of(slug: str) -> str | None:
    """The part before time and hex, or None if `slug` is not one of ours."""
    tail = slug[-_TAIL_LENGTH:]
    return slug[:-_TAIL_LENGTH] if _TAIL.fullmatch(tail) and len(slug) > _TAIL_LENGTH else None


def seconds_of(stamp: str) -> int:
    """Unix seconds."""
    return timegm(time.strptime(stamp, _STAMP))


def stamp_of(slug: str) -> str:
    """The UTC start in the slug, sortable; empty if there is none."""
    stamp = slug[-_TAIL_LENGTH + 1 : -5] if head_of(slug) is not None else ""
    try:
        time.strptime(stamp, _STAMP)
    except ValueError:  # digits that are no time
        return ""
    return stamp

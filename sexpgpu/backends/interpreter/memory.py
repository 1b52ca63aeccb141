"""Keeps freed memory in the process: a step frees and takes the same amounts again and again.

Else the C library gives large blocks back to the system after a step and gets them zeroed, page by page, in the next:
a fifth of a step's time of char_lm.lisp (docs/decisions/0010). Torch's memory on the CPU comes from there.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of <malloc.h>
MOST = 32 << 20  # bytes: the most that glibc takes as a threshold for blocks with a mapping of their own
KEPT = 2**31 - 1  # bytes free at the heap's end that are not given back


@cache
def keep_freed() -> bool:
    """Whether the C library was told so; it is glibc's own function, and other libraries go on as they do."""
    try:
        tell = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(tell(name, value) for name, value in ((_MMAP_THRESHOLD, MOST), (_TRIM_THRESHOLD, KEPT), (_TOP_PAD, MOST)))

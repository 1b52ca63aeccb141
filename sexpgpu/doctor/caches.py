"""Folders of what is made once: usable by this user alone, and without what no run can use."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from sexpgpu.diagnostics import Diagnostic, note_warning, printable
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.machine import existing
from sexpgpu.run.data.cache import home_folder, size

TORN = 86400.0  # seconds after which an unfinished entry belongs to nobody
MAGIC, MARK = b"SXBLOCK1", b"# sexpgpu "


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-DATA-015 and E-DEV-007 for folders that are not used, E-ENV-022 for entries that are."""
    home = home_folder()
    data = home / "sexpgpu" / "data"
    kernels = Path(ask.environ.get("TRITON_CACHE_DIR") or home / "sexpgpu" / "triton")
    sources = Path(ask.settings.flashcart_cache_dir or home / "flashcart").expanduser()
    for what, code, folder, fits in (("parsed data", "E-DATA-015", data, "*.block"), ("compiled kernels", "E-DEV-007", kernels, ""), ("generated kernels", "E-DEV-007", sources, "product_*.py")):
        why = trouble(folder)
        if why:
            yield note_warning(code, f"the cache of {what}, {printable(str(folder))}, is not used: {why}", help="export XDG_CACHE_HOME=<a folder of your own>")
        elif not folder.exists():
            yield what, f"no cache yet at {printable(str(folder))}"
        else:
            yield from entries(what, folder, fits)


def entries(what: str, folder: Path, fits: str) -> Iterator[Fact | Diagnostic]:
    """How much there is; entries that are cut or changed, and what killed processes left."""
    count, taken, bad = 0, 0, []
    for path in sorted(folder.iterdir()):
        try:
            facts = path.stat(follow_symlinks=False)
        except OSError:
            continue  # removed meanwhile
        count, taken = count + 1, taken + facts.st_size
        left = path.name.startswith(".") and time.time() - facts.st_mtime > TORN
        if left or (fits and path.match(fits) and not path.name.startswith(".") and not whole(path)):
            bad.append(path)
    yield what, f"{count} entries, {size(taken)}, at {printable(str(folder))}"
    if bad:
        yield note_warning("E-ENV-022", f"{len(bad)} of the {count} entries in {printable(str(folder))} are cut or left over, {printable(bad[0].name)} for one",
                           notes=("a run does not use them; it makes them anew",), help=f"rm -r {printable(str(folder))}")


def whole(path: Path) -> bool:
    """Whether an entry is what its beginning says: a block by its size, a source by its digest."""
    try:
        if path.suffix == ".block":
            with path.open("rb") as file:
                head = file.read(16)
                length = int.from_bytes(head[8:], "little")
                if head[:8] != MAGIC or not 0 < length <= 1 << 24:
                    return False
                said = json.loads(file.read(length))["bytes"]
                return os.fstat(file.fileno()).st_size == -(-(16 + length) // 64) * 64 + said
        first, _, rest = path.read_bytes().partition(b"\n")
        return first == MARK + sha256(rest).hexdigest().encode()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def trouble(folder: Path) -> str:
    """Why a folder may not hold what a run executes or trusts; empty if it may. Makes nothing."""
    there = existing(folder)
    try:
        facts = there.stat()
    except OSError as error:
        return error.strerror or type(error).__name__
    if not stat.S_ISDIR(facts.st_mode):
        return f"{printable(str(there))} is no folder"
    if there == folder and facts.st_uid != os.geteuid():
        return "it belongs to another user"
    if there == folder and facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return "others may write into it"
    if not os.access(there, os.W_OK | os.X_OK) or os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{printable(str(there))} cannot be written"
    return ""


CHECK = Check("caches", "caches", "warning", 30, run)

"""Drives mutated and generated programs through `sexpgpu check` in one process and says how the messages did.

    python tests/fuzz/drive.py --count 5000 [--seed 0] [--grammar] [--run] [--keep FOLDER]

Each program has 20 seconds of the processor and 1 GB. Fails (exit 1) on: an exception that is no coded mistake, a program out of time or
memory, a message without a place where one mutated form is to blame, a place in neither the mutated top-level form nor one
that uses what it defines. `--run` also makes a step of what has no errors. Prints how often the nearest place lies within one line of the mutation (no bar).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import grammar
import numpy as np
from mutate import TOKEN, Mutation, mutate

from sexpgpu.cli import main as main_module
from sexpgpu.compiler import Selection, check
from sexpgpu.diagnostics import Diagnostic, SexpError, document, render
from sexpgpu.lisp.modules import Loader
from sexpgpu.source import Source

SECONDS = 20  # of the processor, so that a machine full of other work blames no program
PATIENCE = 120  # of the clock, for one that waits for something
BYTES = 1 << 30
LIBRARY = Loader(Source("none", ""))
SEEDS = Path(__file__).parent / "seeds"


class OutOfTime(BaseException):
    """No Exception, so that nothing on the way takes it for one of its own."""


@dataclass
class Tally:
    """What came of the programs."""

    programs: int = 0
    clean: int = 0
    warned: int = 0
    errors: int = 0
    placed: int = 0
    near: int = 0
    slowest: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    ran: Counter[int] = field(default_factory=Counter)
    far: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def findings(path: Path, text: str) -> tuple[Diagnostic, ...]:
    """What `check` says of a text; a mistake raised outright counts as a finding."""
    path.write_text(text, "utf-8", newline="")
    try:
        return check(str(path), Selection()).findings
    except SexpError as mistake:
        return mistake.diagnostics


def timed(work: Callable[[], Any]) -> Any:
    """`work` within SECONDS of computing and PATIENCE of waiting; OutOfTime, MemoryError or a bug's exception come through."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def limit_memory() -> None:
    """One GB beyond what the process has now, for all programs together: they are to leave nothing behind."""
    now = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def data(folder: Path) -> None:
    """The files that seeds and grammar name, small."""
    rows = np.arange(40 * 64).reshape(40, 64) % 17
    header = ",".join([*(f"image_{i}" for i in range(64)), *(f"x_{i}" for i in range(4)), "y", "label"])
    lines = [",".join(map(str, [*rows[i], *rows[i][:4], rows[i][5], i % 10])) for i in range(40)]
    (folder / "d.csv").write_text("\n".join([header, *lines]), "utf-8")
    (folder / "c.txt").write_text("the quick brown fox " * 40, "utf-8")
    np.savez(folder / "p.npz", x=np.float32(rows[:, :2]), y=np.float32(rows[:, 3]))


def step(path: Path) -> int:
    """The exit code of a run of one step, its output dropped."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return main_module.perform(["run", str(path), "--steps", "1"])


def forms(text: str) -> list[tuple[int, int]]:
    """Top-level forms by their `(` in column 1: what a person sees, whatever the brackets say."""
    starts = [i for i, c in enumerate(text) if c == "(" and (i == 0 or text[i - 1] == "\n")]
    if not starts or starts[0]:
        starts.insert(0, 0)
    return list(zip(starts, [*starts[1:], len(text) + 1], strict=True))


def related(text: str, original: str, at: int, end: int) -> list[tuple[int, int]]:
    """The forms that hold the offsets and, in turn, every form that uses a name which one of them defines, before or after."""
    pieces = forms(text)
    words = [{word.lstrip(":") for word in TOKEN.findall(text[a:b])} for a, b in pieces]
    names = [_names(text[a:b]) for a, b in pieces]
    reached = {i for i, (a, b) in enumerate(pieces) if a <= end and at < b}
    # the text before the mutation is as it was, so the offset is that of the form as it was too
    old = [_names(original[a:b]) for a, b in forms(original) if a <= end and at < b]
    shift = set().union(*old)
    while True:
        defined = shift.union(*(names[i] for i in reached))
        grown = reached | {i for i, w in enumerate(words) if w & defined}
        if grown == reached:
            return [pieces[i] for i in sorted(reached)]
        reached = grown


def _names(piece: str) -> set[str]:
    """Names that a form defines: the second token of a `def…`; of an import, all of the library."""
    found = [m.group() for m in TOKEN.finditer(piece) if not m.group().startswith(";")]
    if found[1:2] == ["import"] or '"nn"' in found:
        return set(LIBRARY.library_names())
    return {found[2]} if len(found) > 2 and found[1].startswith("def") else set()


def places(d: Diagnostic, name: str) -> list[tuple[int, int]]:
    """Offset and line of the primary place and the related ones in the program's own text."""
    facts = document(d)
    found = [facts["place"], *(r["place"] for r in facts["related"])]
    return [(p["start"], p["line"]) for p in found if p is not None and p["file"] == name]


def judge(tally: Tally, mutation: Mutation, original: str, found: tuple[Diagnostic, ...], name: str) -> None:
    """Counts the errors of one mutated program and holds their places against the mutation."""
    allowed = related(mutation.text, original, mutation.start, mutation.end)
    errors = [d for d in found if d.severity == "error"]
    nearest = None
    for d in errors:
        at = places(d, name)
        if not at or not any(a <= start < b for start, _ in at for a, b in allowed):
            tally.far[d.code] += 1
            tally.bad.append(f"{mutation.kind} at line {mutation.line}: a place elsewhere\n{render(d)}")
        distance = min((abs(line - mutation.line) for _, line in at), default=None)
        nearest = distance if nearest is None or (distance is not None and distance < nearest) else nearest
    if errors:
        tally.errors += 1
        tally.near += nearest is not None and nearest <= 1


def one(tally: Tally, path: Path, mutation: Mutation, original: str, keep: Path | None, runs: bool) -> None:
    """One program; a failure is kept as text in `tally.bad`, and its program in `keep`."""
    tally.programs += 1
    begin, before = time.process_time(), len(tally.bad)
    try:
        found = timed(lambda: findings(path, mutation.text))
        for d in found:
            render(d)
            tally.codes[d.code] += 1
        tally.clean += not found
        tally.warned += bool(found) and all(d.severity == "warning" for d in found)
        if runs and not any(d.severity == "error" for d in found):
            code = timed(lambda: step(path))
            tally.ran[code] += 1
            if code not in (0, 2, 3):
                tally.bad.append(f"{mutation.kind} at line {mutation.line}: a run of it ended with {code}")
        if mutation.kind != "grammar":
            judge(tally, mutation, original, found, path.name)
    except OutOfTime:
        tally.bad.append(f"{mutation.kind} at line {mutation.line}: more than {SECONDS} s")
    except MemoryError:
        tally.bad.append(f"{mutation.kind} at line {mutation.line}: more than 1 GB")
    except Exception:
        tally.bad.append(f"{mutation.kind} at line {mutation.line}:\n{traceback.format_exc(limit=-6)}")
    tally.slowest = max(tally.slowest, time.process_time() - begin)
    if keep is not None and len(tally.bad) > before:
        (keep / f"bad-{tally.programs}.lisp").write_text(mutation.text, "utf-8", newline="")


def programs(count: int, seed: int, with_grammar: bool) -> Iterator[tuple[Mutation, str]]:
    """Mutations of the seeds in turn, or programs of the grammar, each a function of (seed, number)."""
    texts = [p.read_text("utf-8") for p in sorted(SEEDS.glob("*.lisp"))]
    for number in range(count):
        if with_grammar:
            text = grammar.program(seed * 1_000_000 + number)
            yield Mutation(text, "grammar", 0, 1), text
        else:
            original = texts[number % len(texts)]
            yield mutate(original, random.Random(f"{seed}/{number}")), original


def drive(count: int, seed: int = 0, with_grammar: bool = False, keep: Path | None = None, runs: bool = False) -> Tally:
    """All of it; memory is limited by the caller, who may have a process to lose."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        data(Path(folder))
        for mutation, original in programs(count, seed, with_grammar):
            one(tally, Path(folder) / "p.lisp", mutation, original, keep, runs)
    return tally


def report(tally: Tally) -> str:
    """The statistics, and every failure."""
    share = 100 * tally.near / max(1, tally.errors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return "\n".join([
        *tally.bad[:40],
        f"{tally.programs} programs: {tally.errors or sum(tally.codes.values()) and tally.programs - tally.clean - tally.warned} with errors, "
        f"{tally.warned} with warnings only, {tally.clean} clean",
        f"errors within one line of the mutation: {tally.near} of {tally.errors} ({share:.1f}%)",
        f"errors whose places all lie outside the mutated form and its users: {sum(tally.far.values())} {dict(tally.far)}",
        f"slowest program {tally.slowest:.2f} s, peak memory {peak} MiB",
        f"codes: {', '.join(f'{code} {n}' for code, n in tally.codes.most_common())}",
        f"exit codes of those that were run: {dict(tally.ran)}",
        f"failures: {len(tally.bad)}",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grammar", action="store_true", help="programs of the grammar instead of mutations")
    parser.add_argument("--run", action="store_true", help="make a step of each program without errors")
    parser.add_argument("--keep", type=Path, help="a folder for the programs that fail")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    findings(Path(tempfile.mkdtemp()) / "p.lisp", grammar.program(0))  # what is imported lazily is no program's memory
    if arguments.run:
        import_module("sexpgpu.run.session")
    limit_memory()
    tally = drive(arguments.count, arguments.seed, arguments.grammar, arguments.keep, arguments.run)
    print(report(tally))
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that need a process of their own: torch with another environment, Triton's interpreter, a run that is killed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sexpgpu.diagnostics import Diagnostic, SexpError, fail, problem
from sexpgpu.doctor import Ask, Fact
from sexpgpu.run.children import python
from sexpgpu.settings import child_environment, scrub

#: the program of the checks of kernels; reads a question as JSON, writes a JSON object a line
KERNELS = [*python(), "-m", "sexpgpu.doctor.kernels"]
#: what a run on `cuda` sets too (cli/device.py)
FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TRITON_DEFAULT_FP_FUSION": "1"}


#: children that live now, so that none outlives the command
_RUNNING: set[subprocess.Popen[Any]] = set()


@contextmanager
def started(words: Sequence[str], ask: Ask, environ: Mapping[str, str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """A child in the folder of the call; killed if it is still there at the end of the block."""
    child: subprocess.Popen[str] = subprocess.Popen(words, cwd=ask.folder, env=environ, text=True, **pipes)
    _RUNNING.add(child)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        _RUNNING.discard(child)


def end_all() -> None:
    """Kills the children of checks that were left behind, or of a command that was stopped."""
    for child in list(_RUNNING):
        child.kill()
        child.wait()


def finished(words: Sequence[str], ask: Ask, environ: Mapping[str, str], seconds: float, question: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a child. Raises TimeoutExpired."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started(words, ask, environ, **pipes) as child:
        out, err = child.communicate(question, timeout=seconds)
        return child.returncode, out, err


def environment(ask: Ask, **more: str) -> dict[str, str]:
    """The variables of a child: caches, state and temporary files lie in the scratch folder; no secrets but the data role's."""
    kept = child_environment(ask.environ, ("data",))
    for name in ("SEXPGPU_RESUME", "SEXPGPU_CHECKPOINT_DIR", "SEXPGPU_METRICS", "SEXPGPU_STATUS", "SEXPGPU_EXPLAIN"):
        kept.pop(name, None)
    places = {}
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR", "TRITON_CACHE_DIR", "FLASHCART_CACHE_DIR"):
        places[name] = str(ask.scratch / name.lower())
        os.makedirs(places[name], mode=0o700, exist_ok=True)
    return kept | places | more


def kernels(ask: Ask, question: Mapping[str, Any], seconds: float, **environ: str) -> Iterator[Fact | Diagnostic]:
    """What the child says: facts and findings. A child that dies is a finding: E-DEV-011."""
    try:
        code, out, err = finished(KERNELS, ask, environment(ask, **FIXED, **environ), seconds, json.dumps(question))
    except subprocess.TimeoutExpired as late:
        lines = list(_lines((late.output or b"").decode(errors="replace")))
        for said in lines:
            yield from _said(said)
        last = next((f"; what they had begun last: {said['doing']}" for said in reversed(lines) if "doing" in said), "")
        fail("E-ENV-020", f"the kernels were not through within {seconds:.0f} s{last}", help="smaller knobs, by --set, or a variant made for it")
    for said in _lines(out):
        yield from _said(said)
    if code:
        last = scrub((err.strip().splitlines() or ["no word"])[-1][:300], ask.environ)
        yield problem("E-DEV-011", f"the process that compiles and checks kernels ended with {code}: {last}",
                      help=("look at the driver, torch and Triton: do their versions fit together?", "--device cpu needs none of them")).diagnostic


def _lines(out: str) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines."""
    for line in out.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # what a library printed, or the half of a line
        if isinstance(said, dict):
            yield said


def _said(said: Mapping[str, Any]) -> Iterator[Fact | Diagnostic]:
    if "fact" in said:
        yield said["fact"], said["text"]
    elif "code" in said:
        try:
            fail(said["code"], said["message"], notes=said["notes"], help=said["help"])
        except SexpError as error:
            yield error.diagnostic

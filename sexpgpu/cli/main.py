"""The command `sexpgpu`: a lazy table of commands and the one place where an exception becomes an exit code."""

from __future__ import annotations

import errno
import gc
import os
import platform
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from sexpgpu import __version__
from sexpgpu.cli import output
from sexpgpu.diagnostics import (
    Diagnostic,
    InternalError,
    SexpError,
    nearest,
    out_of_memory,
    printable,
    problem,
    suggestion,
)
from sexpgpu.run import collector
from sexpgpu.settings import scrub

#: name of a command -> where it is; nothing is imported until it is used
COMMANDS = {
    "run": "sexpgpu.cli.run:command",
    "eval": "sexpgpu.cli.eval:command",
    "predict": "sexpgpu.cli.predict:command",
    "export": "sexpgpu.cli.export:command",
    "data": "sexpgpu.cli.data:command",
    "autopsy": "sexpgpu.cli.autopsy:command",
    "check": "sexpgpu.cli.check:command",
    "explain": "sexpgpu.cli.explain:command",
    "profile": "sexpgpu.cli.profile:command",
    "doctor": "sexpgpu.cli.doctor:command",
    "repl": "sexpgpu.cli.repl:command",
    "status": "sexpgpu.cli.status:command",
    "plot": "sexpgpu.cli.plot:command",
    "metrics": "sexpgpu.cli.metrics:command",
}
#: commands whose start ends with their first step (`run.collector`); that of the others, when they are imported
STEPS = frozenset({"run"})


class Commands(click.Group):
    """A group whose commands are imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name].split(":")
        command = getattr(import_module(module), attribute)
        if name not in STEPS:
            collector.settle()
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sexpgpu", message="%(prog)s %(version)s")
def cli() -> None:
    """Train the experiment that one Lisp file describes."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command, ends the process; `entry` is what comes before."""
    for name in ("stdout", "stderr"):  # closed by the caller (`>&-`): nobody listens
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the process's life
    code = perform(list(sys.argv[1:] if arguments is None else arguments))
    for number in (signal.SIGINT, signal.SIGTERM):  # the code is decided: a signal during Python's own end changes nothing
        signal.signal(number, signal.SIG_IGN)
    if (several := sys.modules.get("sexpgpu.run.ranks.collectives")) is not None:
        several.leave(code)
    sys.exit(code)


def perform(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code (contracts.md, "A run")."""
    if not collector.starting():  # not the process's own command
        gc.set_threshold(*collector.STEADY)
    output.as_json(arguments)
    try:
        result = cli.main(list(arguments), prog_name="sexpgpu", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        return _broken_pipe(arguments)
    except SystemExit as end:
        if end.code != 1:  # a signal's
            raise
        return _broken_pipe(arguments)  # click's own answer to a broken pipe, which would read as findings
    except Exception as error:
        return _guarded(error, arguments)
    except KeyboardInterrupt:
        output.say("stopped")
        return 130


def _guarded(error: Exception, arguments: Sequence[str]) -> int:
    try:
        return failed(error, arguments)
    except BrokenPipeError:
        _broken_pipe(arguments)
        return 70 if not isinstance(error, SexpError | click.ClickException) else 2


def failed(error: Exception, arguments: Sequence[str]) -> int:
    """Print what an exception means; its exit code."""
    if isinstance(error, SexpError):
        output.report(error.diagnostics)
        return max(d.exit_code for d in error.diagnostics)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        output.say(error.format_message())
        return 2
    if isinstance(error, click.Abort):  # click's answer to a KeyboardInterrupt; an end of file is no wish of the user's
        return bug(error.__cause__, arguments) if isinstance(error.__cause__, EOFError) else 130
    if isinstance(error, click.ClickException):
        output.report([usage(error)])
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        output.report([problem("E-ENV-012", "the output cannot be written: no space left on the device", help="free some space").diagnostic])
        return 2
    if (memory := out_of_memory(error, exit_code=3)) is not None:
        output.report(memory.diagnostics)
        return 3
    return bug(error, arguments)


def usage(error: click.ClickException) -> Diagnostic:
    """click's complaint about the command line, with the nearest name there is."""
    context = getattr(error, "ctx", None)
    message = re.split(r"[ (]*(?:Possible options|Did you mean)", error.format_message())[0].rstrip()
    guess: tuple[str, ...] = ()
    if isinstance(error, click.NoSuchOption) and context is not None:
        known = [name for p in context.command.get_params(context) for name in p.opts if name.startswith("--")]
        guess = suggestion(error.option_name, known, "options")
    elif context is not None and isinstance(context.command, click.Group):
        known = context.command.list_commands(context)
        words = message.split("'")[1::2]
        close = nearest(words[0], known) if words else []
        guess = (f"did you mean `{close[0]}`?",) if close else (f"commands: {', '.join(known)}",)
        if words and words[0] not in known and context.command is cli:
            guess = _meant(words[0]) or guess
    path = context.command_path if context is not None else "sexpgpu"
    return problem("E-ENV-006", message.rstrip("."), help=(*guess, f"{path} --help")).diagnostic


def _meant(word: str) -> tuple[str, ...]:
    """The command line for somebody who gave a file, a code or `help` where the command belongs."""
    if word == "help":
        return ("sexpgpu <command> --help says what a command takes",)
    if re.fullmatch(r"[EeWw]-[A-Za-z]+-[0-9]+", word):
        return (f"sexpgpu explain {word.upper()}",)
    return (f"sexpgpu run {shlex.quote(word)}",) if word.endswith(".lisp") else ()


def _broken_pipe(arguments: Sequence[str]) -> int:
    """The reader of our output went away: quiet. A report is done then; a run is not."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            pass
    return 3 if "run" in arguments[:1] and not {"-h", "--help"} & set(arguments) else 0


def bug(error: Exception, arguments: Sequence[str]) -> int:
    """A bug of ours: a short message; the traceback, the command line and the program's text in a file that reproduces it."""
    text = scrub("".join(traceback.format_exception(error)), os.environ)
    place = _save(
        f"sexpgpu {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"arguments: {scrub(repr(list(arguments)), os.environ)}\nvariables set: {_variables()}\n\n{text}\n{_program()}"
    )
    first = printable((scrub(str(error), os.environ).strip() or type(error).__name__).splitlines()[0][:300])
    kind = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
    output.say(f"error: this is a bug in SexpGPU, not in your file: {kind}{first}")
    output.say(f"  please report it with {place}" if place else text)
    return 70


def _variables() -> str:
    """The names of our variables that are set; never their values, some of which are secret."""
    return " ".join(sorted(n for n in os.environ if n.startswith(("SEXPGPU_", "FLASHCART_")))) or "none"


def _program() -> str:
    """The texts that were read by now, the library's left out: what someone else needs to see the bug."""
    modules = sys.modules.get("sexpgpu.lisp.modules")
    texts = [] if modules is None else [s for s, _ in modules._READ.values() if not s.name.startswith("lisp-stdlib/")]
    return "".join(f"\n--- {printable(s.name)} ({len(s.text)} characters)\n{s.text}\n" for s in texts)


def _save(text: str) -> Path | None:
    """Write a report into the user's state folder, or else a temporary one; None when neither can be written."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = f"bug-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.txt"
    for folder in (Path(home) / "sexpgpu" / "bugs", None):
        try:
            if folder is None:
                folder = Path(tempfile.mkdtemp(prefix="sexpgpu-bug-"))
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return folder / name
        except OSError:
            continue
    return None

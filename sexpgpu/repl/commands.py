"""The commands of the prompt, a function each: `,load FILE` and its kin. What they print goes through the session."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sexpgpu.compiler import choose_run, flops, graph_results, knob_notes, train_graph
from sexpgpu.diagnostics import fail, printable, suggestion
from sexpgpu.explain.pages import is_code, page
from sexpgpu.explain.report import report
from sexpgpu.explain.screen import lines
from sexpgpu.forms import Form, ListForm
from sexpgpu.ir import Node, postorder
from sexpgpu.ir.text import document, graph_text
from sexpgpu.lisp.macros import expand
from sexpgpu.lisp.tensors import signature
from sexpgpu.lisp.values import Macro, Tensor, show
from sexpgpu.ops import OpProblem, table
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.read.printer import print_form
from sexpgpu.repl.lazy import lazily
from sexpgpu.repl.session import FORM_COMMANDS, Session
from sexpgpu.source import Source, Span

SECONDS = 1.0  # that `,time` measures for
MOST_CALLS = 1_000


@dataclass(frozen=True)
class Command:
    """`usage` follows the name in `,help`."""

    name: str
    usage: str
    doc: str
    do: Callable[[Session, str, str], None]


def perform(session: Session, text: str, name: str) -> None:
    """One command line, which begins with a comma."""
    word, _, rest = text[1:].partition(" ")
    if "\n" in word:
        word, _, rest = text[1:].partition("\n")
    found = COMMANDS.get(word.strip())
    if found is None:
        fail("E-RUN-080", f"there is no command `,{word}`", _span(text, name), help=suggestion(word, COMMANDS, "commands") or ",help")
    session.line = Source(name, text)
    found.do(session, rest, name)


def _span(text: str, name: str) -> Span:
    return Span(Source(name, text), 0, max(1, len(text.split("\n")[0])))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        fail("E-RUN-080", f"this cannot be read: {error}", help="close the quote")


def _needs(command: str, forms: Sequence[Form], least: int = 1) -> None:
    if len(forms) < least:
        found = COMMANDS[command]
        fail("E-RUN-080", f"`,{command}` needs what it is about: ,{command} {found.usage}")


# --- files, knobs, runs ------------------------------------------------------------


def _load(session: Session, text: str, name: str) -> None:
    words = _words(text)
    if not words:
        fail("E-RUN-080", "`,load` needs a file: ,load FILE [variant] [knob=value …]")
    file, *rest = words
    sets = tuple(word for word in rest if "=" in word)
    variants = [word for word in rest if "=" not in word]
    if len(variants) > 1:
        fail("E-RUN-080", f"`,load` takes one variant, and got {', '.join(variants)}")
    session.begin(file, sets, variants[0] if variants else None)
    _loaded(session)


def _loaded(session: Session) -> None:
    experiment = session.loaded.experiment
    session.report(experiment.warnings)
    parts = [f"{len(experiment.knobs)} knobs", "runs " + (", ".join(experiment.runs) or "none")]
    session.show(f"{experiment.file}: {'; '.join(parts)}")


def _knob(session: Session, text: str, name: str) -> None:
    word, _, value = text.strip().partition(" ")
    if not word:
        if not session.knobs:
            session.show("no knobs")
        for knob in session.knobs.values():
            doc = f"  {knob.doc}" if knob.doc else ""
            session.show(printable(f"{knob.name}  {show(knob.value)}  ({knob.source}, {knob.place}){doc}"))
        return
    if word not in session.knobs:
        fail("E-KNOB-001", f"there is no knob `{word}`", help=suggestion(word, session.knobs, "knobs"))
    value = value.strip()
    form = session.knob_forms.get(word)
    if value and form is not None:
        session.set_knob(form, value)
    elif value:
        assert session.file is not None
        kept = tuple(s for s in session.sets if s.partition("=")[0] != word)
        session.begin(session.file, (*kept, f"{word}={value}"), session.variant)
    knob = session.knobs[word]
    session.show(printable(f"{knob.name}  {show(knob.value)}  ({knob.source}, {knob.place})"))


def _run(session: Session, text: str, name: str) -> None:
    words = text.split()
    if not words or not words[0].isdecimal() or int(words[0]) < 1 or len(words) > 2:
        fail("E-RUN-080", "`,run` takes a number of steps, and a run where the file has several: ,run 10 [RUN]")
    if session.file is None:
        fail("E-RUN-080", "there is no file to run", help=",load FILE")
    run = choose_run(session.loaded.experiment, words[1] if len(words) > 1 else None)
    if session.running is None or session.running.run.name != run.name:
        made = lazily("Running")(session.loaded, run, session.show)
        if session.running is not None:
            session.running.close()
        session.running = made
    session.running.steps(int(words[0]), session.show, session.report)


# --- forms -------------------------------------------------------------------------


def _ir(session: Session, text: str, name: str) -> None:
    if not text.strip():
        if session.file is None:
            fail("E-RUN-080", "`,ir` needs a form, or a loaded file: ,ir (exp [1 2])")
        for run in session.loaded.experiment.runs.values():
            traced = train_graph(session.loaded, run)
            session.show(document(graph_results(traced), traced.origins, knob_notes(session.loaded)).rstrip("\n"))
        return
    results = {str(i): session.tensor(form, ",ir") for i, form in enumerate(session.forms())}
    session.show(graph_text(results).rstrip("\n"))


def _grad(session: Session, text: str, name: str) -> None:
    forms = session.forms()
    _needs("grad", forms)
    scalar = session.tensor(forms[0], ",grad")
    registry = session.registry
    if len(forms) > 1:
        wanted = [(print_form(form), session.tensor(form, ",grad")) for form in forms[1:]]
        session.registry = registry  # the parameters of the scalar
    else:
        wanted = _leaves(session, scalar)
        if not wanted:
            fail("E-RUN-080", "nothing to differentiate by: no float literal and no parameter is in it", forms[0].span,
                 help="write literals with a point, such as [1.0 2.0], or (array [1 2] :dtype f32)")
    try:
        found = grad(scalar, [node for _, node in wanted], session.origins)
    except OpProblem as p:
        fail(p.code, p.message, forms[0].span, help=p.help or ())
    shown = lazily("shown")
    values = session.values().compute(found, session.origins)
    for (label, node), value in zip(wanted, values, strict=True):
        session.show(f"by {label}")
        session.show(shown(value, str(node.type)))


def _leaves(session: Session, node: Node) -> list[tuple[str, Node]]:
    """The float literals and parameters below a node, with names for them."""
    names = {v.node: n for n, v in session.ev.main.env.vars.items() if isinstance(v, Tensor) and n != "_"}
    found = []
    for leaf in postorder([node]):
        if leaf.op == "param":
            found.append((leaf.attrs["path"], leaf))
        elif leaf.op == "input" and leaf.type.is_float:
            numbers = session.literals.arrays[leaf.attrs["name"]][2] if leaf.attrs["name"] in session.literals.arrays else ()
            found.append((names.get(leaf, "literal " + show(numbers, 40)), leaf))
    return found


def _time(session: Session, text: str, name: str) -> None:
    forms = session.forms()
    _needs("time", forms)
    begin = time.perf_counter()
    node = session.tensor(forms[0], ",time")
    call = session.values().prepared([node], session.origins)
    made = time.perf_counter() - begin
    call()
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(seconds) < 5 or (len(seconds) < MOST_CALLS and time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    session.show(f"{_seconds(statistics.median(seconds))} (the median of {len(seconds)} calls, the fastest {_seconds(min(seconds))}); evaluated and compiled in {_seconds(made)}")


def _seconds(s: float) -> str:
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} us"


def _expand(session: Session, text: str, name: str) -> None:
    forms = session.forms()
    _needs("expand", forms)
    for form in forms:
        session.show(print_form(expanded(session, form)))


def expanded(session: Session, form: Form) -> Form:
    """The form with its outermost macro calls replaced until its head is no macro."""
    ev = session.ev
    while isinstance(form, ListForm) and form.head() is not None:
        head: Any = form.items[0]
        home = getattr(head, "home", None)
        value = (home.lookup(head.name) if home is not None else None) or ev.main.lookup(form.head())
        if not isinstance(value, Macro):
            break
        ev.spend(100, form)
        form = expand(ev, value, form)
    return form


def _shape(session: Session, text: str, name: str) -> None:
    forms = session.forms()
    _needs("shape", forms)
    for form in forms:
        session.show(str(session.tensor(form, ",shape").type))


def _explain(session: Session, text: str, name: str) -> None:
    word = text.strip()
    if is_code(word):
        session.show(page(word.upper()))
        return
    if not word:
        if session.file is None:
            fail("E-RUN-080", "`,explain` needs a form or a code, or a loaded file: ,explain (matmul [[1.0]] [[2.0]])")
        found = report(session.loaded)
        for traced in found.runs:
            session.report(traced.warnings)
        session.show("\n".join(lines(found)))
        return
    node = session.tensor(session.forms()[0], ",explain")
    results = expand_gradients({"value": node}, session.origins)
    order, ops = postorder(results.values()), table()
    moved = sum(ops[n.op].cost(n)[1] for n in order)
    session.show(f"{node.type}: {len(order)} nodes, {flops(results):,} FLOPs, {moved:,} bytes moved")
    for path, spec in session.registry.specs.items():
        session.show(f"  {spec.kind} {path}  {spec.node.type}  {spec.init}")


# --- help --------------------------------------------------------------------------


def _help(session: Session, text: str, name: str) -> None:
    word = text.strip()
    if not word:
        width = max(len(f",{c.name} {c.usage}") for c in COMMANDS.values())
        session.show("\n".join(f"{f',{c.name} {c.usage}':<{width}}  {c.doc}" for c in COMMANDS.values()))
        return
    command = COMMANDS.get(word.removeprefix(","))
    if word.startswith(",") and command is not None:
        session.show(f",{command.name} {command.usage}\n{command.doc}")
        return
    session.show(documentation(session, word))


def documentation(session: Session, word: str) -> str:
    """What a name is, how it is called, and its docstring."""
    ev = session.ev
    value = ev.main.lookup(word)
    if value is None:
        if word in ev.reserved or word in ev.specials:
            return f"{word}: a form of the language; docs/lisp.md describes it"
        fail("E-EVAL-001", f"nothing is called `{word}`", help=ev.suggest_name(word, ev.main.names()))
    if isinstance(value, Macro):
        value = value.closure
    if not hasattr(value, "call"):
        if word in session.knobs:
            knob = session.knobs[word]
            return printable(f"{word}: a knob, {show(knob.value)} ({knob.source}, {knob.place})\n{knob.doc}").rstrip()
        return f"{word}: {show(value)}"
    op = getattr(getattr(value, "inner", value), "op", None)
    if op is not None:
        call = signature(op)
    else:
        call = f"({word} {str(getattr(value, 'signature', '')).strip('()')})".replace(" )", ")")
    place = f"\n{value.span.place}" if getattr(value, "span", None) is not None else ""
    return printable(call) + "\n" + (printable(" ".join(value.doc.split())) if value.doc else "no docstring") + place


def _quit(session: Session, text: str, name: str) -> None:
    session.done = True


_ALL = (
    Command("load", "FILE [VARIANT] [KNOB=VALUE …]", "Read a program; its definitions and knobs are there from now on.", _load),
    Command("knob", "[NAME [VALUE]]", "Show the knobs, or one, or give it a value, which reads the file again.", _knob),
    Command("run", "N [RUN]", "Make N steps of the loaded run; the next `,run` goes on, and layers have its weights.", _run),
    Command("ir", "[FORM]", "The graph of a form, or of the loaded runs.", _ir),
    Command("grad", "FORM [BY …]", "The gradient of a scalar by tensors, or by all its float literals and parameters.", _grad),
    Command("explain", "[FORM | CODE]", "What a form costs, a page of an error code, or the loaded file's explanation.", _explain),
    Command("time", "FORM", "How long a form's graph takes on the interpreter.", _time),
    Command("expand", "FORM", "A form with its macro calls replaced.", _expand),
    Command("shape", "FORM", "Shape and dtype of a form, without computing it.", _shape),
    Command("help", "[NAME]", "The commands, or how a name is called and its docstring.", _help),
    Command("quit", "", "End the session, as Ctrl-D does.", _quit),
)
COMMANDS: dict[str, Command] = {command.name: command for command in _ALL}
assert set(COMMANDS) >= FORM_COMMANDS

__all__ = ["COMMANDS", "Command", "documentation", "expanded", "perform"]

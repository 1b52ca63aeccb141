"""One session at the prompt: what has been defined, and the evaluation of one input after the other.

Everything a person types goes through `Session.enter`, which prints by the functions it was given and never raises: a
mistake is a diagnostic, Ctrl-C stops the input, and the session goes on.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

from sexpgpu.diagnostics import Diagnostic, SexpError, out_of_memory, problem
from sexpgpu.experiment.knobs import collect, resolve
from sexpgpu.experiment.load import Loaded, Selection, load
from sexpgpu.experiment.model import Knob
from sexpgpu.experiment.trace import Registry, Trace
from sexpgpu.forms import Form, ListForm
from sexpgpu.ir import Node, Origins
from sexpgpu.lisp.values import Tensor, show, with_knobs
from sexpgpu.read.reader import read
from sexpgpu.repl.lazy import lazily
from sexpgpu.repl.literals import Literals, with_literals
from sexpgpu.source import Source

#: codes of a text that more text may mend
UNFINISHED = {"E-READ-001", "E-READ-004", "E-READ-005", "E-READ-009", "E-READ-011"}
#: commands that take a form, which may go on over lines
FORM_COMMANDS = {"ir", "grad", "time", "expand", "shape", "explain"}
WIDEST = 4_000  # characters of a printed value


def unfinished(text: str) -> bool:
    """Whether a text only lacks its end: a bracket, a string, a comment, or the form after a quote."""
    try:
        read(Source("input", form_text(text)))
    except SexpError as mistake:
        return {d.code for d in mistake.diagnostics} <= UNFINISHED
    return False


def form_text(text: str) -> str:
    """The forms of an input: of a command, what follows its name; nothing where it takes words."""
    if not text.lstrip().startswith(","):
        return text
    name, _, rest = text.lstrip()[1:].partition(" ")
    return rest if name.strip() in FORM_COMMANDS else ""


class Session:
    """What is defined, the file that is loaded, and the run that steps.

    show: prints what was asked for; report: prints mistakes; limit: evaluation units of one input.
    """

    def __init__(self, show: Callable[[str], None], report: Callable[[Iterable[Diagnostic | str]], None], limit: int = 10_000_000):
        self.show, self.report, self.limit = show, report, limit
        self.count = 0
        self.done = False
        self.running: Any = None  # the run of `,run`
        self.line = Source("repl", "")  # the present command
        self.begin(None, (), None)

    # -- the program

    def begin(self, file: str | None, sets: tuple[str, ...], variant: str | None) -> None:
        """A new program: an empty one, or that of a file. What was defined before is gone, if this one loads."""
        selection = Selection(variant=variant, sets=sets, limit=self.limit)
        loaded = load(Source("repl", "") if file is None else file, selection)
        literals = Literals()
        ev: Any = loaded.ev
        ev.builtins.update(with_literals(ev.builtins, literals))
        ev.specials |= {"defknob": self._defknob, "defvariant": self._defvariant, "defrun": self._in_a_file, "defeval": self._in_a_file}
        if self.running is not None:
            self.running.close()
        self.loaded: Loaded = loaded
        self.literals, self.running = literals, None
        self.file, self.sets, self.variant = file, sets, variant
        self.knobs: dict[str, Knob] = dict(loaded.experiment.knobs)
        self.knob_forms: dict[str, ListForm] = {}  # of knobs that were defined at the prompt
        self.origins: Origins = ev.provenance.origins
        self.registry = Registry()

    @property
    def ev(self) -> Any:
        return self.loaded.ev

    def _defknob(self, ev: Any, form: ListForm, env: Any) -> Any:
        return self.set_knob(form, None)

    def set_knob(self, form: ListForm, text: str | None) -> Any:
        """Define a knob at the prompt; `text`: a value instead of its default, as `--set` gives it."""
        ev = self.ev
        declared, _ = collect(ev, [[form]])
        sets = {name: text for name in declared} if text is not None else {}
        for name, knob in resolve(ev, declared, {}, None, sets, ev.main.env).items():
            self.knobs[name] = knob
            self.knob_forms[name] = form
            ev.main.env.define(name, with_knobs(knob.value, frozenset([name])), form.span)
            return knob.value
        return ()

    def _defvariant(self, ev: Any, form: ListForm, env: Any) -> Any:
        raise self._misplaced(form)

    def _in_a_file(self, ev: Any, form: ListForm, env: Any) -> Any:
        raise self._misplaced(form)

    def _misplaced(self, form: ListForm) -> SexpError:
        return self.ev.error("E-EVAL-105", f"`{form.head()}` is read from a file, and not from the prompt", form, help="write it into a file, then ,load FILE")

    # -- one input

    def enter(self, text: str) -> bool:
        """Evaluate one input and print what comes of it; whether it went well. Never raises."""
        if not text.strip():
            return True
        self.count += 1
        source = Source(f"input-{self.count}", text)
        try:
            if text.lstrip().startswith(","):
                lazily("perform")(self, text.strip(), source.name)
            else:
                for form in read(source):
                    self.show_value(self.evaluate(form))
            return True
        except SexpError as mistake:
            self.report(mistake.diagnostics)
        except KeyboardInterrupt:
            self.report(["stopped; the session goes on"])
        except RecursionError:
            self.report(problem("E-EVAL-042", "this nests too deeply").diagnostics)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
                raise  # nobody reads the output, or its disk is full: that ends a session
            memory = out_of_memory(error)
            self.report(memory.diagnostics if memory is not None else [bug(error)])
        finally:
            self._unwind()
        return False

    def _unwind(self) -> None:
        """The evaluator as it was before an input, wherever the input was stopped."""
        ev = self.ev
        ev.stack.clear()
        ev.tail = ev.trace = None
        ev.loader.loading.clear()
        ev.budget.left = self.limit
        ev.budget.natives.clear()
        for cell in ev.budget.cells:
            cell[0] = 0

    def forms(self) -> list[Form]:
        """The forms of the present command; read with its name (`,grad` is a form too), so that a caret stands under what was typed."""
        return read(self.line)[1:]

    def evaluate(self, form: Form) -> Any:
        """The value of one form; its layers' parameters lie in `self.registry`."""
        if isinstance(form, ListForm) and form.head() == "progn":
            value: Any = ()
            for item in form.items[1:]:  # so that a `defmacro` inside is seen by what follows it
                value = self.evaluate(item)
            return value
        with self.tracing():
            return self.ev.eval(form, self.ev.main.env)

    @contextmanager
    def tracing(self) -> Any:
        """Layers may be called: paths begin anew for each form, and parameters of a path that is known are those."""
        known = self.running.traced.registry if self.running is not None else Registry()
        self.registry = Registry(dict(known.specs), set(known.lone))
        before = self.ev.trace
        self.ev.trace = Trace("input", self.registry, training=False, decides=True)
        try:
            yield
        finally:
            self.ev.trace = before

    def values(self) -> Any:
        """What leaves are bound to now."""
        running = self.running
        trained = running.value if running is not None else lambda path: None
        return lazily("Values")(self.literals, self.registry, trained, running.run.seed if running else 0, running.step if running else 0)

    def show_value(self, value: Any) -> None:
        """Print a value; tensors are computed, those of a list together. It is `_` from now on."""
        nodes = tensors_in(value)
        if nodes:
            text = lazily("shown")
            computed = dict(zip(nodes, self.values().compute(nodes, self.origins), strict=True))
            parts = value if isinstance(value, tuple) else (value,)
            for part in parts:
                node = part.node if isinstance(part, Tensor) else None
                self.show(text(computed[node], str(node.type)) if node is not None else show(part, WIDEST))
        else:
            self.show(show(value, WIDEST))
        self.ev.main.env.define("_", value)

    def tensor(self, form: Form, what: str) -> Node:
        """The node of a form that must be a tensor; a list of numbers is one."""
        value = self.evaluate(form)
        if not isinstance(value, Tensor):
            value = self.literals.tensor(value, None, form.span) if isinstance(value, tuple | int | float) else value
        if not isinstance(value, Tensor):
            raise problem("E-EVAL-114", f"{what} needs a tensor, and got {show(value, 40)}", form.span)
        return value.node


def tensors_in(value: Any) -> list[Node]:
    """The nodes of a tensor, or of a list's tensors, each once."""
    parts = value if isinstance(value, tuple) else (value,)
    return list(dict.fromkeys(part.node for part in parts if isinstance(part, Tensor)))


def bug(error: Exception) -> str:
    """A fault of ours, in a line: the session goes on."""
    return f"this is a bug in SexpGPU, not in your input: {type(error).__name__}: {str(error)[:300]}"

"""The evaluator: holds one program's modules, budget, call stack and hooks, and turns mistakes into diagnostics."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable as PyCallable
from dataclasses import replace
from typing import Any, NoReturn

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, SexpErrors, nearest, one_or_all, problem, suggestion
from sexpgpu.forms import Form, ListForm, Symbol
from sexpgpu.lisp.budget import Budget
from sexpgpu.lisp.builtins import BUILTINS
from sexpgpu.lisp.compile import TAIL, Code, Compiler, Template
from sexpgpu.lisp.elsewhere import written_here
from sexpgpu.lisp.modules import File, Loader
from sexpgpu.lisp.parameters import bind_arguments, check_count, parse_parameters
from sexpgpu.lisp.scope import Env, Module, Scope
from sexpgpu.lisp.special import TABLE
from sexpgpu.lisp.values import NIL, Callable, Closure, KnobBool, Native, Tensor, kind_of, knobs_of, show, truthy
from sexpgpu.source import Span

MOST_ERRORS = 20  # of one file, reported together
MAX_CALLS = 1_000  # calls within calls; a tail call is not within anything
HOST_FRAMES = 60_000  # Python's frames for them: a deep expression in each of a thousand calls

SpecialFunction = PyCallable[["Evaluator", ListForm, Env], Any]


class Evaluator:
    """Evaluates one program. `specials` and `natives` add to the language; natives win over builtins of the name."""

    def __init__(self, loader: Loader, limit: int = 10_000_000, specials: dict[str, SpecialFunction] | None = None,
                 natives: dict[str, Callable] | None = None):
        self.loader = loader
        self.budget = Budget(limit)
        self.specials = dict(specials or {})
        self.builtins: dict[str, Any] = {**BUILTINS, **(natives or {})}
        self.natives = self.builtins
        self.reserved = frozenset(TABLE)
        self.compiler = Compiler(self, TABLE)
        self.stack: list[tuple[Callable, Form | Span | None]] = []
        self.tail: tuple[Any, list, dict[str, Any], Form] | None = None
        self.trace: Any = None
        self.on_decide: PyCallable[[Any, Any], None] | None = None
        self.tensor_op: PyCallable[[str, list, dict[str, Any], Span | None], Any] | None = None
        self.expansions: dict[Form, Form] | None = None  # macro call -> what it became, where somebody asked for it
        self.gensyms = 0
        self.lost: set[str] = set()  # names whose definition failed: what else fails for want of them is no news
        self.lost_all = False  # an import failed, so that any name may be lost
        self.top = self.budget.cell("top level", None)
        self.main = self._module(loader.main, True)
        self._codes: dict[tuple[int, int], tuple[Form, Scope, Code, int]] = {}
        # Lisp frames are Python frames, which Python 3.11 keeps off the C stack; the guard is MAX_CALLS, not this
        sys.setrecursionlimit(max(sys.getrecursionlimit(), HOST_FRAMES))

    # ---------------------------------------------------------------- entry points

    def _module(self, file: File, main: bool) -> Module:
        module = Module(file.name, file.source, self.builtins, self.reserved, main=main, library=file.library)
        module.specials = self.specials
        return module

    def load_main(self) -> Env:
        """Evaluate the main file's forms in order; raises the mistakes of all its top-level forms together."""
        errors: list[Diagnostic] = []
        for form in self.loader.main.forms:
            try:
                self._run(self.main, [form])
            except SexpError as mistake:
                errors += self.news(mistake)
                self.lose(form)
                if mistake.diagnostic.code == "E-EVAL-041" or len(errors) >= MOST_ERRORS:
                    break
        if errors:
            raise one_or_all(errors)
        return self.main.env

    def lose(self, form: Form) -> None:
        """Remember what a form that failed would have defined."""
        heads, todo = [], [form]
        while todo:
            one = todo.pop()
            if isinstance(one, ListForm) and one.head() == "progn":
                todo += one.items[1:]
            elif isinstance(one, ListForm):
                heads.append(one)
        for one in heads:
            self.lost_all |= one.head() == "import"
            if len(one.items) > 1 and isinstance(one.items[1], Symbol):
                self.lost.add(one.items[1].name)

    def news(self, mistake: SexpError) -> list[Diagnostic]:
        """The diagnostics that do not merely follow from a definition that failed before."""
        if self.lost_all:
            return [d for d in mistake.diagnostics if not d.about]
        return [d for d in mistake.diagnostics if not d.about or d.about not in self.lost]

    def load_file(self, file: File) -> Module:
        """Evaluate one imported file in a module of its own."""
        module = self._module(file, False)
        self._run(module, file.forms)
        return module

    def _run(self, module: Module, forms: list[Form]) -> None:
        todo = list(reversed(forms))
        while todo:
            form = todo.pop()
            if isinstance(form, ListForm) and form.head() == "progn":
                todo += reversed(form.items[1:])  # so that a `defmacro` inside is seen by what follows it
                continue
            code, cost = self.compiler.compile(form, module.env.scope, self.top)
            self._pay(cost, form)
            self._guarded(code, module.env, form)

    def eval(self, form: Form, env: Env) -> Any:
        """The value of a form in a scope. Compiled once for each form and scope."""
        key = (id(form), id(env.scope))
        known = self._codes.get(key)
        if known is None or known[0] is not form or known[1] is not env.scope:
            code, cost = self.compiler.compile(form, env.scope, self.top)
            known = self._codes[key] = (form, env.scope, code, cost)
        self._pay(known[3], form)
        return self._guarded(known[2], env, form)

    def _guarded(self, code: Code, env: Env, form: Form) -> Any:
        height = len(self.stack)
        try:
            return code(env)
        except RecursionError:
            raise self._too_deep(form) from None
        finally:
            del self.stack[height:]

    def call(self, function: Any, args: list, kwargs: dict[str, Any] | None = None,
             span: Form | Span | None = None) -> Any:
        """Call any function value; `span` (or the calling form) is what messages point at."""
        if type(function) is Closure:
            return self.call_closure(function, args, kwargs or {}, span)
        return self.call_other(function, args, kwargs or {}, span)

    def call_other(self, function: Any, args: list, kwargs: dict[str, Any], form: Form | Span | None) -> Any:
        """A call of what is no closure: natives, layers, and mistakes."""
        if not isinstance(function, Callable):
            raise self.error("E-EVAL-002", f"{_called(form)}{kind_of(function)}, which cannot be called: "
                             f"{show(function, 40)}", form)
        try:
            return function.call(self, args, kwargs, _span(form))
        except SexpError as mistake:
            raise self.locate(mistake, form) from None

    def call_closure(self, function: Closure, args: list, kwargs: dict[str, Any], form: Form | Span | None) -> Any:
        """Bind and run; goes on with the tail calls of the body instead of nesting them."""
        stack, budget = self.stack, self.budget
        if len(stack) >= MAX_CALLS:
            raise self._too_deep(form)
        stack.append((function, form))
        try:
            while True:
                template = function.template
                if template.code is None:
                    template.prepare(self)
                if template.simple and not kwargs:
                    names = template.parameters.required
                    if len(args) != len(names):
                        self._mismatch(function, args, form)
                    env = Env(dict(zip(names, args)), function.env, template.scope)  # noqa: B905 - lengths are checked
                else:
                    env = self._bind(function, template, args, kwargs, form)
                budget.left -= template.cost
                template.cell[0] += template.cost
                if budget.left < 0:
                    self.over(form)
                value = template.code(env)
                if value is not TAIL:
                    return value
                function, args, kwargs, form = self.tail  # type: ignore[misc]
                stack[-1] = (function, form)
        except RecursionError:
            raise self._too_deep(form) from None
        finally:
            stack.pop()

    def _mismatch(self, function: Closure, args: list, form: Form | Span | None) -> NoReturn:
        count = len(function.template.parameters.required)
        self.stack.pop()
        try:
            check_count(function, len(args), count, count)
        except SexpError as mistake:
            raise self.locate(mistake, form) from None
        finally:
            self.stack.append((function, form))
        raise AssertionError("unreachable")

    def _bind(self, function: Closure, template: Template, args: list, kwargs: dict[str, Any], form: Any) -> Env:
        try:
            bound = bind_arguments(function, template.parameters, args, kwargs)
        except SexpError as mistake:
            raise self.locate(mistake, form) from None
        if template.parameters.rest:
            self.spend(4 * len(bound[template.parameters.rest]), form)
        env = Env(bound, function.env, template.scope)
        for name, code, cost in template.defaults:
            if name not in bound:
                self._pay(cost, form)
                bound[name] = code(env)
        return env

    def make_closure(self, name: str, params_form: Form, body_forms: tuple[Form, ...], env: Env,
                     span: Span | None = None) -> Closure:
        """A function from its parts, as `defun` makes one; for forms that are registered from outside."""
        return Closure(Template(self, name, parse_parameters(params_form), tuple(body_forms), env.scope, span), env)

    # ---------------------------------------------------------------- decisions

    def test(self, value: Any, form: Form) -> bool:
        """Whether a value counts as true in `if` and its kin; a tensor has no value to ask for."""
        if isinstance(value, Tensor):
            raise self.error("E-EVAL-009", f"`{_head(form)}` decides while the program is built, and a tensor has its "
                             "value only when the program runs", form,
                             help="choose element by element with `(where condition then else)`")
        if value is not True and value is not False:
            self.decide(value, form)
        return truthy(value)

    def decide(self, value: Any, form: Any) -> None:
        """Report that the structure of the program depends on a value that came from knobs."""
        # a list decides by being empty or not, which no element's knob is about; and it may be long
        if self.on_decide is not None and not isinstance(value, tuple) and knobs_of(value):
            self.on_decide(value, form)

    # ---------------------------------------------------------------- budget

    def _pay(self, units: int, form: Any) -> None:
        self.budget.left -= units
        self.top[0] += units
        if self.budget.left < 0:
            self.over(form)

    def spend(self, units: int, form: Any = None) -> None:
        """Take units; `form` is the form, span or name of the builtin that spends them."""
        budget = self.budget
        units = min(units, 1 << 62)  # an estimate may be a huge integer itself
        budget.left -= units
        budget.natives[form if isinstance(form, str) else _head(form)] += units
        if budget.left < 0:
            self.over(None if isinstance(form, str) else form)

    def over(self, form: Any) -> NoReturn:
        """The budget is used up: the form, the calls that led to it and who spent most."""
        spenders = [f"spent most: `{name}`{f' ({place})' if place else ''}: {units:,} units"
                    for units, name, place in self.budget.largest()]
        raise self.error("E-EVAL-041", f"evaluation needs more than {self.budget.limit:,} units", form,
                         notes=spenders,
                         help="look for a loop or list that grows without end; a program that needs more sets "
                              "SEXPGPU_EVAL_LIMIT")

    def _callers(self, d: Diagnostic) -> list[Related]:
        """The user's calls that are open, innermost first: equal ones once, and of many the first and the last four."""
        shown = {d.span, *(r.span for r in d.related)}
        times: Counter[tuple[str, Span]] = Counter()
        macros = {f.name for f, _ in self.stack if type(f) is Closure and f.template.macro}
        for function, form in reversed(self.stack):
            span = _span(form)
            if span is not None and span not in shown and not self.loader.is_library(span.source):
                times[function.name, span] += 1
        calls = [Related(span, f"while the macro `{name}` was expanded here" if name in macros else
                         f"in `{name}`, called {f'{count:,} times ' if count > 1 else ''}here", quoted=name in macros)
                 for (name, span), count in times.items()]
        return calls if len(calls) <= 8 else calls[:4] + calls[-4:]

    def _too_deep(self, form: Any) -> SexpError:
        return self.error("E-EVAL-042", f"calls nest deeper than {MAX_CALLS:,}", form,
                          help=("give the recursion an end: (if … result (the call))",
                                "if it has one: make the recursive call the last thing the function does, or use `dotimes`, "
                                "`mapcar` or `reduce`"))

    # ---------------------------------------------------------------- mistakes

    def suggest_name(self, name: str, known: set[str]) -> tuple[str, ...]:
        """A guess for an unknown name, or where to look; never a list of everything."""
        home = self.loader.library_home(name)
        if home is not None:
            return (f'the library has it: (import "{home}")',)
        here = written_here(name)
        if here is not None:
            return (here,)
        helps = suggestion(name, known)
        if helps and helps[0].startswith("did you mean"):
            return helps
        close = nearest(name, self.loader.library_names())
        if close:
            return (f'did you mean `{close[0]}` of the library? It needs (import "{self.loader.library_home(close[0])}")',)
        return ("define it, import the module that has it, or check its spelling",)

    def error(self, code: str, message: str, form_or_span: Form | Span | None = None, **facts: Any) -> SexpError:
        """A mistake at a form: with its macro trail, and with the user's own call first if the form is the library's."""
        return self.locate(problem(code, message, _span(form_or_span), **facts), form_or_span)

    def locate(self, mistake: SexpError, form: Form | Span | None) -> SexpError:
        """Give a mistake the place and trail of the form it happened in, once."""
        if getattr(mistake, "located", False) or isinstance(mistake, SexpErrors):
            return mistake
        d = mistake.diagnostic
        span = d.span or _span(form)
        related = list(d.related)
        for expansion in getattr(form, "trail", ()) if isinstance(form, Form) else ():
            related.append(Related(expansion.span, f"expanded from macro `{expansion.macro}` here"))
        first = self._users_call_first(replace(d, span=span, related=tuple(related)))
        made = SexpError(replace(first, related=(*first.related, *self._callers(first))))
        if made.diagnostic.span is not None:
            made.located = True  # type: ignore[attr-defined]
        return made

    def in_macro(self, mistake: SexpError, macro: Any, form: ListForm) -> SexpError:
        """Name the macro whose body failed and the call that was being expanded, innermost first."""
        made = self.locate(mistake, form)
        call = Related(form.span, f"while the macro `{macro.name}` was expanded here")
        d = made.diagnostic
        if isinstance(made, SexpErrors) or d.span == form.span or any(r.span == form.span for r in d.related):
            return made
        again = SexpError(replace(d, related=(*d.related, call)))
        again.located = True  # type: ignore[attr-defined]
        return again

    def users_place(self, span: Span | None) -> Span | None:
        """The place of the user's own text that led to `span` of the library: the innermost call of theirs."""
        if span is None or not self.loader.is_library(span.source):
            return span
        for _function, form in reversed(self.stack):
            at = _span(form)
            if at is not None and not self.loader.is_library(at.source):
                return at
        return span

    def open_calls(self) -> tuple[Span, ...]:
        """The places of the calls that are open, outermost first."""
        return tuple(span for _, form in self.stack if (span := _span(form)) is not None)

    def _users_call_first(self, d: Diagnostic) -> Diagnostic:
        if d.span is None or not self.loader.is_library(d.span.source):
            return d
        for function, form in reversed(self.stack):
            span = _span(form)
            if span is not None and not self.loader.is_library(span.source):
                inside = Related(d.span, f"in the library, inside `{function.name}`")
                return replace(d, span=span, label=f"in this call of `{function.name}`", related=(inside, *d.related))
        return d


def _span(form: Any) -> Span | None:
    return form if isinstance(form, Span) else getattr(form, "span", None)


def _head(form: Any) -> str:
    if isinstance(form, ListForm):
        return form.head() or "list"
    return form.name if isinstance(form, Symbol) else "other"


def _called(form: Any) -> str:
    head = form.items[0] if isinstance(form, ListForm) and form.items else None
    return f"`{head.name}` is " if isinstance(head, Symbol) else "this is "


__all__ = ["NIL", "Evaluator", "KnobBool", "Native"]

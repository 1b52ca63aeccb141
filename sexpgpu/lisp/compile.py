"""Forms to Python closures, once: evaluating a form again costs no look at its shape.

`compile` gives `(code, cost)`: `code(env)` is the value, `cost` the nodes that are evaluated whenever it runs. Who runs
the code pays the cost, so a straight line of nodes is paid in one subtraction. In a tail position a call of a closure
returns `TAIL` instead of calling; `Evaluator.call_closure` goes on from there, so tail calls are a loop.
"""

from __future__ import annotations

from collections.abc import Callable as PyCallable
from typing import Any

from sexpgpu.diagnostics import SexpError, one_or_all
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.lisp.budget import EXPANSION, FRAME
from sexpgpu.lisp.macros import HomeSymbol, expand
from sexpgpu.lisp.parameters import Parameters
from sexpgpu.lisp.scope import Env, Module, Scope
from sexpgpu.lisp.values import NIL, Closure, Macro, Native, form_value
from sexpgpu.source import Span

Code = PyCallable[[Env], Any]
Compiled = tuple[Code, int]

#: what a tail call returns; the call itself is `ev.tail`
TAIL = object()
MOST_TOGETHER = 4  # names that nothing has, said beside the first of their function
MAX_COMPILE_DEPTH = 1_500  # forms within forms, macro results included


class Template:
    """One function of the text, compiled when first called: its parameters, body and the scope around it."""

    __slots__ = (
        "name", "parameters", "body", "outer", "scope", "span", "doc", "cell", "code", "cost", "defaults", "simple",
        "macro",
    )

    def __init__(self, ev: Any, name: str, parameters: Parameters, body: tuple[Form, ...], outer: Scope,
                 span: Span | None):
        self.name = name
        self.parameters = parameters
        self.doc = ""
        if len(body) > 1 and isinstance(body[0], Literal) and isinstance(body[0].value, str):
            self.doc, body = body[0].value, body[1:]
        self.body = body
        self.outer = outer
        self.scope = Scope(set(parameters.names), outer, outer.module)
        self.span = span
        self.cell = ev.budget.cell(name, span)
        self.code: Code | None = None
        self.cost = 0
        self.defaults: list[tuple[str, Code, int]] = []
        self.simple = parameters.simple
        self.macro = False

    def prepare(self, ev: Any) -> None:
        """Compile defaults and body. Each default sees the parameters; those after it have no value yet."""
        compiler = ev.compiler
        for name, default in self.parameters.optional + self.parameters.keys:
            code, cost = (lambda env: NIL, 1) if default is None else compiler.compile(default, self.scope, self.cell)
            self.defaults.append((name, code, cost))
        self.code, cost = compiler.body(self.body, self.scope, self.cell, True)
        self.cost = cost + FRAME


class Compiler:
    """Turns forms into code for one evaluator. `core` is the table of special forms of the language."""

    def __init__(self, ev: Any, core: dict[str, PyCallable[..., Compiled]]):
        self.ev = ev
        self.core = core
        self.depth = 0
        #: for each function's cell, the symbols of the user's text in it that no scope within the file binds
        self.read: dict[int, tuple[list, list[Symbol]]] = {}

    def compile(self, form: Form, scope: Scope, cell: list, tail: bool = False) -> Compiled:
        if isinstance(form, Symbol):
            return self.symbol(form, scope, cell), 1
        if not isinstance(form, ListForm):
            value = form_value(form)
            return (lambda env: value), 1
        if self.depth > MAX_COMPILE_DEPTH:
            raise self.ev.error("E-EVAL-042", f"forms nest deeper than {MAX_COMPILE_DEPTH:,} once macros are expanded",
                                form, help="does a macro expand to a call of itself?")
        self.depth += 1
        try:
            return self._list(form, scope, cell, tail)
        finally:
            self.depth -= 1

    def _list(self, form: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
        if form.trail:  # a macro may share one form in 2^n places, and each is compiled
            self.ev.spend(4, form)
        if form.bracket:
            return self.bracket(form, scope, cell)
        while True:
            if not form.items:
                return (lambda env: NIL), 1
            head = form.items[0]
            if not isinstance(head, Symbol) or scope.depth(head.name) is not None:
                return self.call(form, scope, cell, tail)
            special = self.core.get(head.name)
            if special is not None:
                try:
                    return special(self, form, scope, cell, tail)
                except SexpError as mistake:
                    raise self.ev.locate(mistake, form) from None
            value = self.global_value(head, scope, form)
            if type(value) is not Macro:
                break
            self.ev.spend(EXPANSION, form)
            expanded = expand(self.ev, value, form)
            if not isinstance(expanded, ListForm) or expanded.bracket:
                return self.compile(expanded, scope, cell, tail)
            form = expanded
        if value is None and head.name in self.ev.specials:
            return self.outside(self.ev.specials[head.name], form), 1
        return self.call(form, scope, cell, tail)

    def global_value(self, symbol: Symbol, scope: Scope, form: Form) -> Any:
        try:
            if type(symbol) is HomeSymbol:
                value = symbol.home.lookup(symbol.name)
                if value is not None:
                    return value
            return scope.module.lookup(symbol.name)
        except SexpError as mistake:  # a name from two imports
            raise self.ev.locate(mistake, symbol) from None

    def outside(self, fn: PyCallable[..., Any], form: ListForm) -> Code:
        """A special form registered from outside: it gets the form and evaluates what it wants."""
        ev = self.ev

        def special(env: Env) -> Any:
            try:
                value = fn(ev, form, env)
            except SexpError as mistake:
                raise ev.locate(mistake, form) from None
            return NIL if value is None else value

        return special

    # ---------------------------------------------------------------- names

    def symbol(self, form: Symbol, scope: Scope, cell: list) -> Code:
        name, depth = form.name, scope.depth(form.name)
        if depth is None:
            return self.global_symbol(form, scope, cell)
        missing = self.missing

        if depth == 0:
            def local(env: Env) -> Any:
                value = env.vars.get(name)
                return value if value is not None else missing(form, env)
        elif depth == 1:
            def local(env: Env) -> Any:
                value = env.parent.vars.get(name)
                return value if value is not None else missing(form, env)
        elif depth == 2:
            def local(env: Env) -> Any:
                value = env.parent.parent.vars.get(name)
                return value if value is not None else missing(form, env)
        else:
            def local(env: Env) -> Any:
                up = env
                for _ in range(depth):
                    up = up.parent
                value = up.vars.get(name)
                return value if value is not None else missing(form, env)
        return local

    def missing(self, form: Symbol, env: Env) -> Any:
        """A local name read before its own `let*` binding ran: it still means the outer one."""
        value = env.lookup(form.name)
        if value is None:
            raise self.unknown(form, env.scope)
        return value

    def macro_value(self, form: Symbol, called: bool) -> SexpError:
        if called:
            return self.ev.error("E-EVAL-019", f"the macro `{form.name}` was defined after this call was prepared", form,
                                 help="put its `defmacro` at the top level, before the form that uses it")
        return self.ev.error("E-EVAL-019", f"`{form.name}` is a macro, which has no value", form,
                             help=f"call it: `({form.name} …)`, or wrap it: `(lambda (x) ({form.name} x))`")

    def global_symbol(self, form: Symbol, scope: Scope, cell: list, called: bool = False) -> Code:
        name, module, own, ev = form.name, scope.module, scope.module.env.vars, self.ev
        home: Module | None = form.home if type(form) is HomeSymbol and form.home is not module else None
        read = self.read.setdefault(id(cell), (cell, []))[1]
        if home is None and form.span is not None and not ev.loader.is_library(form.span.source):
            read.append(form)

        def value_of(env: Env) -> Any:
            value = None
            if home is not None:
                value = home.lookup(name)
            if value is None:
                value = own.get(name)
            if value is None:
                try:
                    value = module.lookup(name)
                except SexpError as mistake:
                    raise ev.locate(mistake, form) from None
                if value is None:
                    raise self.unknown_together(form, scope, read)
            if type(value) is Macro:
                raise self.macro_value(form, called)
            return value

        return value_of

    def unknown(self, form: Symbol, scope: Scope) -> SexpError:
        ev, name = self.ev, form.name
        if name in self.core or name in ev.specials:
            return ev.error("E-EVAL-019", f"`{name}` is a form of the language and has no value", form,
                            help=f"write it first in a list: `({name} …)`")
        return ev.error("E-EVAL-001", f"nothing is named `{name}`", form, about=name,
                        help=ev.suggest_name(name, scope.module.names() | scope.local_names()))

    def unknown_together(self, form: Symbol, scope: Scope, read: list[Symbol]) -> SexpError:
        """The mistake, with those of the other names in the same function that nothing in the file has or will define."""
        first, defined = self.unknown(form, scope), {form.name, *self.core, *self.ev.specials, *self.ev.loader.defined()}
        others: dict[str, Symbol] = {}
        for other in read:
            try:
                known = other.name in defined or scope.module.lookup(other.name) is not None
            except SexpError:  # a name from two imports has a mistake of its own
                known = True
            if not known and len(others) < MOST_TOGETHER:
                others.setdefault(other.name, other)
        return one_or_all([*first.diagnostics, *(d for other in others.values() for d in self.unknown(other, scope).diagnostics)])

    # ---------------------------------------------------------------- calls

    def bracket(self, form: ListForm, scope: Scope, cell: list) -> Compiled:
        compiled = [self.compile(item, scope, cell) for item in form.items]
        codes = [code for code, _ in compiled]
        cost = 1 + 4 * len(codes) + sum(cost for _, cost in compiled)
        return (lambda env: tuple([code(env) for code in codes])), cost

    def call(self, form: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
        if isinstance(form.items[0], Keyword | Literal):
            raise self.ev.error("E-EVAL-002", "a list is a call, and this one does not begin with a function",
                                form.items[0],
                                help="write a list of values as `[a b c]` or `(list a b c)`, data as `'(a b c)`")
        first = form.items[0]
        if isinstance(first, Symbol) and scope.depth(first.name) is None:
            head, cost = self.global_symbol(first, scope, cell, called=True), 2
        else:
            head, cost = self.compile(first, scope, cell)
            cost += 1
        steps: list[tuple[str | None, Code]] = []
        items, index, named = form.items, 1, set()
        while index < len(items):
            item, key = items[index], None
            if isinstance(item, Keyword) and len(items) > 2:
                key = item.name
                if index + 1 == len(items):
                    raise self.ev.error("E-EVAL-004", f"`:{key}` has no value", item,
                                        help=f"write a value after `:{key}`")
                if key in named:
                    raise self.ev.error("E-EVAL-004", f"`:{key}` is given twice", item,
                                        help="remove one of them")
                named.add(key)
                index, cost = index + 1, cost + 1
            code, more = self.compile(items[index], scope, cell)
            steps.append((key, code))
            cost, index = cost + more, index + 1
        if named:
            return self._keyword_call(form, head, steps, tail), cost
        return self._plain_call(form, head, [code for _, code in steps], tail), cost

    def _plain_call(self, form: ListForm, head: Code, codes: list[Code], tail: bool) -> Code:
        finish = self._tail_finish(form) if tail else self._finish(form)
        if len(codes) == 0:
            return lambda env: finish(head(env), [], {})
        if len(codes) == 1:
            (first,) = codes
            return lambda env: finish(head(env), [first(env)], {})
        if len(codes) == 2:
            first, second = codes
            return lambda env: finish(head(env), [first(env), second(env)], {})
        return lambda env: finish(head(env), [code(env) for code in codes], {})

    def _keyword_call(self, form: ListForm, head: Code, steps: list[tuple[str | None, Code]], tail: bool) -> Code:
        finish = self._tail_finish(form) if tail else self._finish(form)

        def call(env: Env) -> Any:
            function, args, kwargs = head(env), [], {}
            for key, code in steps:  # in the order written: calls number paths
                if key is None:
                    args.append(code(env))
                else:
                    kwargs[key] = code(env)
            return finish(function, args, kwargs)

        return call

    def _finish(self, form: ListForm) -> PyCallable[..., Any]:
        ev, call_closure, span = self.ev, self.ev.call_closure, form.span
        call_other = ev.call_other

        def finish(function: Any, args: list, kwargs: dict[str, Any]) -> Any:
            if type(function) is Closure:
                return call_closure(function, args, kwargs, form)
            if type(function) is Native:
                try:
                    return function.fn(ev, args, kwargs, span)
                except SexpError as mistake:
                    raise ev.locate(mistake, form) from None
            return call_other(function, args, kwargs, form)

        return finish

    def _tail_finish(self, form: ListForm) -> PyCallable[..., Any]:
        ev, finish = self.ev, self._finish(form)

        def tail_finish(function: Any, args: list, kwargs: dict[str, Any]) -> Any:
            if type(function) is Closure:
                ev.tail = (function, args, kwargs, form)
                return TAIL
            return finish(function, args, kwargs)

        return tail_finish

    # ---------------------------------------------------------------- bodies

    def body(self, forms: tuple[Form, ...], scope: Scope, cell: list, tail: bool) -> Compiled:
        """Several forms in order, the last one's value; nil for none."""
        if not forms:
            return (lambda env: NIL), 0
        if len(forms) == 1:
            return self.compile(forms[0], scope, cell, tail)
        compiled = [self.compile(f, scope, cell) for f in forms[:-1]]
        last, cost = self.compile(forms[-1], scope, cell, tail)
        codes = [code for code, _ in compiled]

        def sequence(env: Env) -> Any:
            for code in codes:
                code(env)
            return last(env)

        return sequence, cost + sum(c for _, c in compiled)

    def branch(self, forms: tuple[Form, ...], scope: Scope, cell: list, tail: bool, form: Form) -> Code:
        """A body that runs only sometimes and therefore pays for itself."""
        code, cost = self.body(forms, scope, cell, tail)
        return self.paid(code, cost, cell, form)

    def paid(self, code: Code, cost: int, cell: list, form: Form) -> Code:
        budget, ev = self.ev.budget, self.ev

        def run(env: Env) -> Any:
            budget.left -= cost
            cell[0] += cost
            if budget.left < 0:
                ev.over(form)
            return code(env)

        return run if cost else code

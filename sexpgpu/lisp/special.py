"""The special forms of the language: each compiles one form. Those of experiments are registered from outside."""

from __future__ import annotations

from collections.abc import Callable as PyCallable
from typing import Any

from sexpgpu.diagnostics import SexpError, fail
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.lisp.budget import FRAME
from sexpgpu.lisp.compile import Code, Compiled, Compiler, Template
from sexpgpu.lisp.macros import BRACKET
from sexpgpu.lisp.parameters import parse_parameters
from sexpgpu.lisp.scope import Env, Scope
from sexpgpu.lisp.values import NIL, Closure, Macro, form_value, kind_of, plain
from sexpgpu.read.printer import print_form

#: name -> (function, how the form is written); filled by `form`
TABLE: dict[str, PyCallable[..., Compiled]] = {}
USAGE: dict[str, str] = {}


def form(name: str, usage: str, least: int, most: int | None = None) -> PyCallable:
    """Register a special form that takes `least` to `most` parts after its name."""

    def register(fn: PyCallable[..., Compiled]) -> PyCallable[..., Compiled]:
        def checked(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
            count = len(f.items) - 1
            if count < least or (most is not None and count > most):
                wrong(f, f"`{name}` has {count} part{'s' * (count != 1)} here")
            return fn(c, f, scope, cell, tail)

        TABLE[name], USAGE[name] = checked, usage
        return fn

    return register


def wrong(f: ListForm, message: str, at: Form | None = None) -> None:
    """Fail because a form is not written as it should be; shows how it is written."""
    fail("E-EVAL-005", message, (at or f).span, help=f"write `{USAGE[f.head() or '']}`")


def name_of(f: ListForm, item: Form) -> str:
    if not isinstance(item, Symbol):
        wrong(f, f"`{print_form(item)[:40]}` stands where a name is expected", item)
    return item.name


@form("quote", "'x", 1, 1)
def _quote(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    value = form_value(f.items[1])
    return (lambda env: value), 1


@form("if", "(if test then else)", 2, 3)
def _if(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    test, cost = c.compile(f.items[1], scope, cell)
    yes = c.branch(f.items[2:3], scope, cell, tail, f)
    no = c.branch(f.items[3:], scope, cell, tail, f)
    decide = c.ev.test

    def run(env: Env) -> Any:
        value = test(env)
        if value is True or (value is not False and decide(value, f)):
            return yes(env)
        return no(env)

    return run, cost + 1


@form("cond", "(cond (test value …) … (else value …))", 0)
def _cond(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    clauses: list[tuple[Code, Code | None]] = []
    first = 0
    for index, clause in enumerate(f.items[1:]):
        if not isinstance(clause, ListForm) or not clause.items:
            wrong(f, "a clause of `cond` is a list", clause)
        head = clause.items[0]
        if isinstance(head, Symbol) and head.name == "else" and scope.depth("else") is None:
            test, cost = (lambda env: True), 0
        else:
            test, cost = c.compile(head, scope, cell)
        if index == 0:
            first = cost
        elif cost:
            test = c.paid(test, cost, cell, f)
        clauses.append((test, c.branch(clause.items[1:], scope, cell, tail, f) if len(clause.items) > 1 else None))
    decide = c.ev.test

    def run(env: Env) -> Any:
        for test, body in clauses:
            value = test(env)
            if value is True or (value is not False and decide(value, f)):
                return value if body is None else body(env)
        return NIL

    return run, first + 1


def _conditional(wanted: bool) -> PyCallable[..., Compiled]:
    def compile_(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
        test, cost = c.compile(f.items[1], scope, cell)
        body, decide = c.branch(f.items[2:], scope, cell, tail, f), c.ev.test
        return (lambda env: body(env) if decide(test(env), f) is wanted else NIL), cost + 1

    return compile_


form("when", "(when test body …)", 1)(_conditional(True))
form("unless", "(unless test body …)", 1)(_conditional(False))


def _junction(stop: bool) -> PyCallable[..., Compiled]:
    def compile_(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
        if len(f.items) == 1:
            return (lambda env: not stop), 1
        first, cost = c.compile(f.items[1], scope, cell, tail and len(f.items) == 2)
        if len(f.items) == 2:
            return first, cost + 1
        codes = [first] + [c.branch((item,), scope, cell, False, f) for item in f.items[2:-1]]
        last, decide = c.branch(f.items[-1:], scope, cell, tail, f), c.ev.test

        def run(env: Env) -> Any:
            for code in codes:
                value = code(env)
                if decide(value, f) is stop:
                    return value
            return last(env)

        return run, cost + 1

    return compile_


form("and", "(and a b …)", 0)(_junction(False))
form("or", "(or a b …)", 0)(_junction(True))


@form("progn", "(progn body …)", 0)
def _progn(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    code, cost = c.body(f.items[1:], scope, cell, tail)
    return code, cost + 1


def _same(a: Any, b: Any) -> bool:
    a, b = plain(a), plain(b)
    return a is b or (type(a) is type(b) and a == b) or (isinstance(a, Symbol | Keyword) and a == b)


@form("case", "(case value (key body …) ((key key) body …) (else body …))", 1)
def _case(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    subject, cost = c.compile(f.items[1], scope, cell)
    clauses: list[tuple[tuple | None, Code]] = []
    for clause in f.items[2:]:
        if not isinstance(clause, ListForm) or not clause.items:
            wrong(f, "a clause of `case` is a list", clause)
        head = clause.items[0]
        if isinstance(head, Symbol) and head.name in ("else", "otherwise"):
            keys = None
        else:
            items = head.items if isinstance(head, ListForm) else (head,)
            keys = tuple(form_value(i) for i in items)
        clauses.append((keys, c.branch(clause.items[1:], scope, cell, tail, f)))
    ev = c.ev

    def run(env: Env) -> Any:
        value = subject(env)
        ev.decide(value, f)
        for keys, body in clauses:
            if keys is None or any(_same(value, key) for key in keys):
                return body(env)
        return NIL

    return run, cost + 1


# -------------------------------------------------------------------- bindings


def _bindings(f: ListForm, item: Form) -> list[tuple[str, Form | None]]:
    if not isinstance(item, ListForm) or item.bracket:
        wrong(f, "the bindings are a list of `(name value)`", item)
    pairs: list[tuple[str, Form | None]] = []
    for pair in item.items:
        if isinstance(pair, Symbol):
            pairs.append((pair.name, None))
        elif isinstance(pair, ListForm) and 1 <= len(pair.items) <= 2 and not pair.bracket:
            pairs.append((name_of(f, pair.items[0]), pair.items[1] if len(pair.items) == 2 else None))
        else:
            wrong(f, f"`{print_form(pair)[:40]}` is no binding", pair)
    return pairs


def _nil(env: Env) -> Any:
    return NIL


@form("let", "(let ((name value) …) body …)", 1)
def _let(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    pairs, cost, inits = _bindings(f, f.items[1]), 1, []
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            wrong(f, f"`let` binds `{name}` twice; `let*` would do it in order", f.items[1])
    for name, value in pairs:
        code, more = (_nil, 1) if value is None else c.compile(value, scope, cell)
        inits.append((name, code))
        cost += more
    inner = Scope(set(names), scope, scope.module)
    body, more = c.body(f.items[2:], inner, cell, tail)
    return (lambda env: body(Env({name: code(env) for name, code in inits}, env, inner))), cost + more


@form("let*", "(let* ((name value) …) body …)", 1)
def _let_star(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    pairs, cost = _bindings(f, f.items[1]), 1
    # One frame holds all names, but a name that is visible already gets a frame of its own: functions made before it
    # keep the older one.
    inner = Scope(set(), scope, scope.module)
    steps: list[tuple[str, Code, Scope | None]] = []
    for name, value in pairs:
        code, more = (_nil, 1) if value is None else c.compile(value, inner, cell)
        fresh = None
        if inner.depth(name) is not None:
            inner = fresh = Scope(set(), inner, scope.module)
        inner.names.add(name)
        steps.append((name, code, fresh))
        cost += more
    body, more = c.body(f.items[2:], inner, cell, tail)
    outermost = inner
    for _ in range(sum(1 for *_, fresh in steps if fresh is not None)):
        outermost = outermost.parent

    def run(env: Env) -> Any:
        env = Env({}, env, outermost)
        for name, code, fresh in steps:
            value = code(env)
            if fresh is not None:
                env = Env({}, env, fresh)
            env.vars[name] = value
        return body(env)

    return run, cost + more


@form("setq", "(setq name value …)", 2)
def _setq(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    if len(f.items) % 2 == 0:
        wrong(f, "`setq` takes pairs of a name and a value")
    steps, cost, ev = [], 1, c.ev
    for index in range(1, len(f.items), 2):
        name_of(f, f.items[index])
        code, more = c.compile(f.items[index + 1], scope, cell)
        steps.append((f.items[index], code))
        cost += more + 1

    def run(env: Env) -> Any:
        value: Any = NIL
        for symbol, code in steps:
            value = code(env)
            if not env.set(symbol.name, value):
                known = scope.module.names() | scope.local_names()
                foreign = scope.module.lookup(symbol.name) is not None
                own = f"define one of your own: `(defparameter {symbol.name} …)`"
                raise ev.error("E-EVAL-018", f"`setq` changes a name of this file, and `{symbol.name}` is none", symbol,
                               help=own if foreign else ev.suggest_name(symbol.name, known))
        return value

    return run, cost


Step = PyCallable[[Any, dict[str, Any]], None]


def _pattern(f: ListForm, item: Form, names: list[str], ev: Any) -> Step:
    """What takes a value apart into names, by a nested list of names with `&optional` and `&rest`."""
    if isinstance(item, Symbol):
        names.append(item.name)
        return lambda value, out: out.__setitem__(item.name, value)
    if not isinstance(item, ListForm):
        wrong(f, f"`{print_form(item)[:40]}` stands where a name or a list of names is expected", item)
    fixed: list[Step] = []
    least, rest, mode = 0, None, ""
    for part in item.items:
        if isinstance(part, Symbol) and part.name in ("&rest", "&body", "&optional"):
            mode = part.name
        elif mode in ("&rest", "&body"):
            rest = _pattern(f, part, names, ev)
        else:
            fixed.append(_pattern(f, part, names, ev))
            least += mode == ""

    def take(value: Any, out: dict[str, Any]) -> None:
        if not isinstance(value, tuple):
            raise ev.error("E-EVAL-016", f"expected a list to take apart, found {kind_of(value)}", item,
                           help="for the sizes of a tensor, take apart `(shape x)`")
        if len(value) < least or (rest is None and len(value) > len(fixed)):
            raise ev.error("E-EVAL-016", f"`{print_form(item)[:60]}` names {len(fixed)} "
                           f"element{'s' * (len(fixed) != 1)}, the list has {len(value)}", item)
        for index, step in enumerate(fixed):
            step(value[index] if index < len(value) else NIL, out)
        if rest is not None:
            left = tuple(value[len(fixed):])
            ev.spend(4 * len(left), item)
            rest(left, out)

    return take


@form("destructuring-bind", "(destructuring-bind (a b) list body …)", 2)
def _destructuring_bind(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    names: list[str] = []
    take = _pattern(f, f.items[1], names, c.ev)
    value, cost = c.compile(f.items[2], scope, cell)
    inner = Scope(set(names), scope, scope.module)
    body, more = c.body(f.items[3:], inner, cell, tail)

    def run(env: Env) -> Any:
        found: dict[str, Any] = {}
        take(value(env), found)
        return body(Env(found, env, inner))

    return run, cost + more + len(names) + 1


# -------------------------------------------------------------------- loops


def _loop(f: ListForm) -> tuple[str, Form, tuple[Form, ...]]:
    head = f.items[1]
    if not isinstance(head, ListForm) or not 2 <= len(head.items) <= 3:
        wrong(f, f"`{f.head()}` begins with a name and what it goes over", head)
    return name_of(f, head.items[0]), head.items[1], head.items[2:]


def _repeat(c: Compiler, f: ListForm, scope: Scope, cell: list, items: PyCallable[[Any], Any]) -> Compiled:
    name, over, result = _loop(f)
    source, cost = c.compile(over, scope, cell)
    inner = Scope({name}, scope, scope.module)
    body, each = c.body(f.items[2:], inner, cell, False)
    final, more = c.body(result, inner, cell, False)
    each += FRAME
    budget, ev = c.ev.budget, c.ev

    def run(env: Env) -> Any:
        for value in items(source(env)):
            budget.left -= each
            cell[0] += each
            if budget.left < 0:
                ev.over(f)
            body(Env({name: value}, env, inner))
        return final(Env({name: NIL}, env, inner))

    return run, cost + more + 1


@form("dotimes", "(dotimes (i count) body …)", 1)
def _dotimes(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    ev = c.ev

    def count(value: Any) -> range:
        ev.decide(value, f)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ev.error("E-EVAL-006", f"`dotimes` counts to an integer, not {kind_of(value)}", f)
        # a count past every budget needs no exact end; range() itself takes any size but iterating needs an index
        return range(min(int(value), 1 << 60))

    return _repeat(c, f, scope, cell, count)


@form("dolist", "(dolist (x list) body …)", 1)
def _dolist(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    ev = c.ev

    def elements(value: Any) -> tuple:
        if not isinstance(value, tuple):
            raise ev.error("E-EVAL-006", f"`dolist` goes over a list, not {kind_of(value)}", f)
        return value

    return _repeat(c, f, scope, cell, elements)


# -------------------------------------------------------------------- functions and definitions


def _template(c: Compiler, f: ListForm, name: str, params: Form, body: tuple[Form, ...], scope: Scope) -> Template:
    return Template(c.ev, name, parse_parameters(params), body, scope, f.span)


@form("lambda", "(lambda (a b) body …)", 1)
def _lambda(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    template = _template(c, f, "lambda", f.items[1], f.items[2:], scope)
    template.prepare(c.ev)
    return (lambda env: Closure(template, env)), 8  # a closure holds its frame: charged like two list elements


@form("defun", "(defun name (a b) \"doc\" body …)", 2)
def _defun(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    name = name_of(f, f.items[1])
    template = _template(c, f, name, f.items[2], f.items[3:], scope)

    def run(env: Env) -> Any:
        closure = Closure(template, env)
        _define(c.ev, scope, name, closure, f)
        return closure

    return run, 1


@form("defmacro", "(defmacro name (a b) \"doc\" body …)", 2)
def _defmacro(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    name = name_of(f, f.items[1])
    template = _template(c, f, name, f.items[2], f.items[3:], scope)
    template.macro = True

    def run(env: Env) -> Any:
        _define(c.ev, scope, name, Macro(Closure(template, env), scope.module), f)
        return f.items[1]

    return run, 1


def _define(ev: Any, scope: Scope, name: str, value: Any, f: ListForm) -> None:
    try:
        scope.module.define(name, value, f.items[1].span)
    except SexpError as mistake:
        raise ev.locate(mistake, f) from None


def _variable(again: bool) -> PyCallable[..., Compiled]:
    def compile_(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
        name = name_of(f, f.items[1])
        if len(f.items) == 4 and not (isinstance(f.items[3], Literal) and isinstance(f.items[3].value, str)):
            wrong(f, "the third part is a doc string", f.items[3])
        value, cost = c.compile(f.items[2], scope, cell)

        def run(env: Env) -> Any:
            if again or scope.module.own(name) is None:
                _define(c.ev, scope, name, value(env), f)
            return f.items[1]

        return run, cost + 1

    return compile_


form("defparameter", "(defparameter name value \"doc\")", 2, 3)(_variable(True))
form("defvar", "(defvar name value \"doc\")", 2, 3)(_variable(False))


@form("import", "(import \"module\" …), (import \"module\" :as name)", 1)
def _import(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    alias, items = None, list(f.items[1:])
    if len(items) == 3 and isinstance(items[1], Keyword) and items[1].name == "as":
        alias = name_of(f, items[2])
        items = items[:1]
    for item in items:
        if not (isinstance(item, Literal) and isinstance(item.value, str)):
            wrong(f, "`import` takes names of modules as strings", item)

    def run(env: Env) -> Any:
        for item in items:
            c.ev.loader.import_into(c.ev, scope.module, item, alias)
        return NIL

    return run, 1


# -------------------------------------------------------------------- quasiquotation


@form("quasiquote", "`(a ,b ,@c)", 1, 1)
def _quasiquote(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    return _template_value(c, f.items[1], 1, scope, cell)


def _template_value(c: Compiler, item: Form, level: int, scope: Scope, cell: list) -> Compiled:
    if not isinstance(item, ListForm):
        value = form_value(item)
        return (lambda env: value), 1
    head = item.head()
    if head == "unquote" and len(item.items) == 2 and level == 1:
        return c.compile(item.items[1], scope, cell)
    if head == "unquote-splicing" and level == 1:
        fail("E-EVAL-017", "`,@` inserts elements into a list, and there is no list around it", item.span)
    level += {"quasiquote": 1, "unquote": -1, "unquote-splicing": -1}.get(head or "", 0)
    parts: list[tuple[bool, Code, Form]] = [(False, lambda env: BRACKET, item)] if item.bracket else []
    cost = 1
    for part in item.items:
        splice = level == 1 and isinstance(part, ListForm) and part.head() == "unquote-splicing" and len(part.items) == 2
        inner = part.items[1] if splice else part
        code, more = c.compile(inner, scope, cell) if splice else _template_value(c, inner, level, scope, cell)
        parts.append((splice, code, part))
        cost += more + 4
    ev = c.ev

    def build(env: Env) -> Any:
        out: list[Any] = []
        for splice, code, part in parts:
            value = code(env)
            if not splice:
                out.append(value)
            elif isinstance(value, tuple):
                ev.spend(4 * len(value), part)
                out += value
            else:
                raise ev.error("E-EVAL-017", f"`,@` inserts the elements of a list, not {kind_of(value)}", part,
                               help="insert one value with `,`")
        return tuple(out)

    return build, cost


def _stray(c: Compiler, f: ListForm, scope: Scope, cell: list, tail: bool) -> Compiled:
    mark = "," if f.head() == "unquote" else ",@"
    fail("E-EVAL-017", f"`{mark}` stands outside a template", f.span, help="put a ` before the list that it belongs to")


form("unquote", "`(a ,b)", 0)(_stray)
form("unquote-splicing", "`(a ,@b)", 0)(_stray)

"""Where names live: `Scope` is the static shape the compiler resolves against, `Env` its frame at run time."""

from __future__ import annotations

from typing import Any

from sexpgpu.diagnostics import Related, fail
from sexpgpu.source import Source, Span


class Scope:
    """The names of one frame and of those around it. `module` is the file the text stands in."""

    __slots__ = ("names", "parent", "module", "children")

    def __init__(self, names: set[str], parent: Scope | None, module: Module):
        self.names = names
        self.parent = parent
        self.module = module
        self.children: dict[tuple[str, ...], Scope] = {}

    def depth(self, name: str) -> int | None:
        """How many frames up a local name is, or None for a name of the file or of nobody."""
        scope, up = self, 0
        while scope.parent is not None:
            if name in scope.names:
                return up
            scope, up = scope.parent, up + 1
        return None

    def local_names(self) -> set[str]:
        scope, names = self, set()
        while scope.parent is not None:
            names |= scope.names
            scope = scope.parent
        return names


class Env:
    """One frame. The frame without a parent is a module's global one."""

    __slots__ = ("vars", "parent", "scope")

    def __init__(self, vars: dict[str, Any], parent: Env | None, scope: Scope):  # noqa: A002 - the field's word
        self.vars = vars
        self.parent = parent
        self.scope = scope

    @property
    def module(self) -> Module:
        return self.scope.module

    def lookup(self, name: str) -> Any:
        """The value of a name, innermost first, then the file's, imports and builtins; None if nobody has it."""
        env = self
        while env.parent is not None:
            value = env.vars.get(name)
            if value is not None:
                return value
            env = env.parent
        return self.scope.module.lookup(name)

    def define(self, name: str, value: Any, span: Span | None = None) -> None:
        """Give a name a value in this frame; a file's own frame checks what it may shadow."""
        if self.parent is None:
            self.scope.module.define(name, value, span)
        else:
            self.scope.names.add(name)
            self.vars[name] = value

    def set(self, name: str, value: Any, span: Span | None = None) -> bool:
        """Change the innermost binding of a name; false if this file has none."""
        env = self
        while env.parent is not None:
            if name in env.vars:
                env.vars[name] = value
                return True
            env = env.parent
        own = self.scope.module.env.vars
        if name in own:
            own[name] = value
            return True
        return False

    def child(self, names: dict[str, Any]) -> Env:
        """A frame inside this one with these names."""
        key = tuple(names)
        scope = self.scope.children.get(key)
        if scope is None:
            scope = self.scope.children[key] = Scope(set(names), self.scope, self.scope.module)
        return Env(dict(names), self, scope)


class Module:
    """One file: its own names, what it imports, and the builtins that all share."""

    def __init__(self, name: str, source: Source, builtins: dict[str, Any], reserved: frozenset[str], *,
                 main: bool = False, library: bool = False):
        self.name = name
        self.source = source
        self.builtins = builtins
        self.reserved = reserved  # special forms of the language itself: nobody may redefine them
        self.main = main
        self.library = library
        self.env = Env({}, None, Scope(set(), None, self))
        self.places: dict[str, Span | None] = {}
        self.imports: list[tuple[Module, Span | None]] = []
        self.aliases: dict[str, Module] = {}
        self.specials: dict[str, Any] = {}
        self._found: dict[str, dict[str, Any]] = {}  # a name from elsewhere -> the table that holds it

    def own(self, name: str) -> Any:
        return self.env.vars.get(name)

    def lookup(self, name: str) -> Any:
        """The value of a name of the file, its imports or the builtins; None if nobody has it."""
        value = self.env.vars.get(name)
        if value is not None:
            return value
        table = self._found.get(name)
        if table is None:
            table = self._search(name)
            if table is None:
                return None
            self._found[name] = table
        return table.get(name if name in table else name.partition("/")[2])

    def add_import(self, module: Module, alias: str | None, span: Span | None) -> None:
        if alias is None:
            self.imports.append((module, span))
        else:
            self.aliases[alias] = module
        self._found.clear()

    def _search(self, name: str) -> dict[str, Any] | None:
        found: list[tuple[Module, Span | None]] = []
        for module, span in self.imports:
            if name in module.env.vars and all(module is not m for m, _ in found):
                found.append((module, span))
        if len(found) > 1:
            self._ambiguous(name, [m for m, _ in found])
        if found:
            return found[0][0].env.vars
        alias, _, rest = name.partition("/")
        if alias in self.aliases and rest in self.aliases[alias].env.vars:
            return self.aliases[alias].env.vars
        return self.builtins if name in self.builtins else None

    def _ambiguous(self, name: str, modules: list[Module]) -> None:
        fail("E-EVAL-010", f"`{name}` comes from {' and from '.join(f'`{m.name}`' for m in modules)}",
             related=[Related(m.places.get(name), f"defined in `{m.name}` here") for m in modules],
             help=f'import one of them by a name of its own: `(import "{modules[-1].name}" :as m)`, then `m/{name}`')

    def define(self, name: str, value: Any, span: Span | None = None) -> None:
        if name in self.reserved:
            fail("E-EVAL-014", f"`{name}` is a form of the language and cannot be defined", span,
                 help="choose another name")
        if not self.main and (name in self.builtins or name in self.specials):
            fail("E-EVAL-014", f"the module `{self.name}` defines `{name}`, which is a builtin", span,
                 notes=["only the main file may shadow a builtin: elsewhere it would change what importers mean"],
                 help="choose another name")
        self.env.vars[name] = value
        self.places[name] = span

    def names(self) -> set[str]:
        """All names that can be used in this file."""
        known = set(self.env.vars) | set(self.builtins) | set(self.specials) | set(self.reserved)
        for module, _ in self.imports:
            known |= set(module.env.vars)
        for alias, module in self.aliases.items():
            known |= {f"{alias}/{name}" for name in module.env.vars}
        return known

"""Files: the main one, the library's, and those beside the main one. Reads text only; nothing is evaluated here.

A library module is named (`"nn"`), a file of the user's is a path below the main file's folder (`"parts/model"`); no
absolute path, no `..` and no link that leads out, so that a stranger's file cannot read what it should not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sexpgpu.diagnostics import Related, fail, nearest, problem
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.lisp.scope import Module
from sexpgpu.read.reader import read
from sexpgpu.source import Source, Span

MAX_BYTES = 4_000_000  # of one file of a program

#: what a top-level definition of a library module looks like
_DEFINED = re.compile(r"^\((?:defun|deflayer|defmacro|defoptimizer|defparameter|defvar) ([^\s()]+)", re.M)

#: forms by the name and text of their source: reading the standard library costs a second, and text does not change
_READ: dict[tuple[str, str], tuple[Source, list[Form]]] = {}


def read_cached(source: Source) -> tuple[Source, list[Form]]:
    """The forms of a text and the source that their spans name."""
    key = (source.name, source.text)
    if key not in _READ:
        if len(_READ) > 256:
            _READ.clear()
        _READ[key] = (source, read(source))
    return _READ[key]


def find_stdlib() -> Path:
    """The standard library: in the installed package, else the sibling folder of a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_stdlib"
    return installed if installed.is_dir() else package.parent / "lisp-stdlib"


@dataclass(frozen=True, eq=False)
class File:
    """One file of the program, read but not evaluated."""

    name: str
    source: Source
    forms: list[Form]
    library: bool


class Loader:
    """Finds and reads the files of one program. `base` is the folder imports of the user's own files start from."""

    def __init__(self, main: Path | str | Source, stdlib_dir: Path | None = None, base: Path | None = None):
        self.stdlib = Path(stdlib_dir) if stdlib_dir is not None else find_stdlib()
        if isinstance(main, Source):
            self.base = Path(base) if base is not None else Path.cwd()
            source = main
        else:
            path = Path(main)
            self.base = Path(base) if base is not None else path.parent
            source = Source(path.name, _read_text(path, str(path), None))
        self.texts: list[tuple[str, str]] = [(source.name, source.text)]
        self.files: dict[str, File] = {}
        self.modules: dict[str, Module] = {}
        self.loading: list[tuple[str, Span | None]] = []
        self._library_sources: set[int] = set()
        self._index: dict[str, str] | None = None
        source, forms = read_cached(source)
        self.main = File(source.name, source, forms, False)

    def is_library(self, source: Source) -> bool:
        return id(source) in self._library_sources

    def file(self, name: str, span: Span | None) -> File:
        """The file an import names: the library first, then the main file's folder."""
        if name in self.files:
            return self.files[name]
        pure = PurePosixPath(name)
        odd = "\\" in name or ":" in name or not name.isprintable()
        if not name or pure.is_absolute() or ".." in pure.parts or odd:
            fail("E-EVAL-013", f"`{name[:60]}` is no path below the main file's folder", span,
                 help="name a module of the library, or a path like `parts/model`, with no `..` and no `/` in front")
        relative = pure if pure.suffix == ".lisp" else PurePosixPath(f"{name}.lisp")
        library = self.stdlib / relative
        if len(relative.parts) == 1 and library.is_file():
            made = self._open(name, library, f"lisp-stdlib/{relative}", True, span)
        else:
            made = self._own_file(name, relative, span)
        self.files[name] = made
        return made

    def _own_file(self, name: str, relative: PurePosixPath, span: Span | None) -> File:
        path = self.base / relative
        if not path.is_file():
            known = self._known()
            close = nearest(name, known)
            fail("E-EVAL-011", f"there is no module `{name}`", span,
                 notes=[f"looked for it in the library and for `{relative}` beside the main file"],
                 help=f"did you mean `{close[0]}`?" if close else f"modules of the library: {', '.join(known[:20])}")
        if not path.resolve().is_relative_to(self.base.resolve()):
            fail("E-EVAL-013", f"`{name}` is a link that leads out of the main file's folder", span,
                 help="copy the file into the folder")
        if path.resolve() == (self.base / self.main.name).resolve():
            return self.main
        return self._open(name, path, str(relative), False, span)

    def _open(self, name: str, path: Path, shown: str, library: bool, span: Span | None) -> File:
        source, forms = read_cached(Source(shown, _read_text(path, shown, span)))
        if all(shown != known for known, _ in self.texts):
            self.texts.append((shown, source.text))
        if library:
            self._library_sources.add(id(source))
        return File(name, source, forms, library)

    def _known(self) -> list[str]:
        return sorted(p.stem for p in self.stdlib.glob("*.lisp")) if self.stdlib.is_dir() else []

    def library_home(self, name: str) -> str | None:
        """The module of the library that defines a name, whether it is imported or not."""
        return self._library_index().get(name)

    def library_names(self) -> list[str]:
        return list(self._library_index())

    def _library_index(self) -> dict[str, str]:
        """Name -> module, by a look at the texts; made when a message first needs it."""
        if self._index is None:
            self._index = {}
            for module in self._known():
                try:
                    text = (self.stdlib / f"{module}.lisp").read_text("utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                for name in _DEFINED.findall(text):
                    self._index.setdefault(name, module)
        return self._index

    def defined(self) -> set[str]:
        """Names that a top-level form of the user's own files defines, sooner or later: the second of each."""
        todo = [form for file in [self.main, *self.files.values()] if not file.library for form in file.forms]
        names = set()
        while todo:
            form = todo.pop()
            if isinstance(form, ListForm) and form.head() == "progn":
                todo += form.items[1:]
            elif isinstance(form, ListForm) and len(form.items) > 1 and isinstance(form.items[1], Symbol):
                names.add(form.items[1].name)
        return names

    def all_files(self) -> list[File]:
        """Every file that top-level imports reach, main first, each once; for passes that look before evaluation."""
        found, seen, index = [self.main], {self.main.source.name}, 0
        while index < len(found):
            for form in found[index].forms:
                for item in _imported(form):
                    made = self.file(item.value, item.span)
                    if made.source.name not in seen:
                        seen.add(made.source.name)
                        found.append(made)
            index += 1
        return found

    def import_into(self, ev: Any, module: Module, item: Literal, alias: str | None) -> None:
        """Evaluate the named module, unless done, and give its names to `module`."""
        span = item.span
        file = self.file(str(item.value), span)
        names = [name for name, _ in self.loading]
        if file is self.main or file.source.name in names:
            at = 0 if file is self.main else names.index(file.source.name)
            cycle = [*([self.main.name] if file is self.main else []), *names[at:], file.source.name]
            raise problem("E-EVAL-012", f"imports go in a circle: {' -> '.join(cycle)}", span,
                          related=[Related(s, "imported here") for _, s in self.loading[at:] if s is not None],
                          help="move what both need into a third file")
        made = self.modules.get(file.source.name)
        if made is None:
            self.loading.append((file.source.name, span))
            try:
                made = self.modules[file.source.name] = ev.load_file(file)
            finally:
                self.loading.pop()
        module.add_import(made, alias, span)


def _imported(form: Form) -> list[Literal]:
    if not isinstance(form, ListForm) or form.head() != "import":
        return []
    items = form.items[1:]
    if len(items) == 3 and isinstance(items[1], Keyword):
        items = items[:1]
    return [i for i in items if isinstance(i, Literal) and isinstance(i.value, str)]


def _siblings(path: Path) -> list[str]:
    try:
        return [p.name for p in path.parent.glob("*.lisp")]
    except OSError:
        return []


def _read_text(path: Path, shown: str, span: Span | None) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            fail("E-READ-014", f"`{shown}` is not a plain file", span, help="give the path of a program's text")
        if path.stat().st_size > MAX_BYTES:
            fail("E-READ-014", f"`{shown}` is larger than {MAX_BYTES:,} bytes", span, help="keep data in data files")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as mistake:
        fail("E-READ-014", f"`{shown}` is not UTF-8 text (byte {mistake.start})", span, help="save it as UTF-8")
    except OSError as mistake:
        close = nearest(path.name, _siblings(path)) if isinstance(mistake, FileNotFoundError) else []
        fail("E-READ-014", f"`{shown}` cannot be read: {mistake.strerror or mistake}", span,
             help=f"did you mean `{path.parent / close[0]}`?" if close else "check the name and its permissions")
    except ValueError:
        fail("E-READ-014", f"`{shown[:80]}` is no name of a file", span, help="give the path of a program's text")


__all__ = ["File", "Loader", "find_stdlib", "read_cached"]

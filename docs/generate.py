"""Writes what the docs take from the code: docs/errors.md, docs/ops.md, docs/functions.md, docs/stdlib.md, docs/cli.md, the table of
docs/environment.md; and from docs/pages.toml: llms.txt, docs/index.md, and the navigation of zensical.toml.

`python docs/generate.py` writes; `python docs/generate.py --check` exits 1 and names what is not current.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import click

from sexpgpu.cli.main import COMMANDS, cli
from sexpgpu.diagnostics.core import CATALOGUE
from sexpgpu.experiment import layers
from sexpgpu.forms import ListForm, Literal
from sexpgpu.lisp.builtins import BUILTINS
from sexpgpu.lisp.tensors import Query, natives, signature
from sexpgpu.ops.definition import FAMILIES as OP_FAMILIES
from sexpgpu.read.printer import print_form
from sexpgpu.read.reader import read
from sexpgpu.settings import VARIABLES
from sexpgpu.source import Source

DOCS = Path(__file__).resolve().parent
BEGIN, END = "<!-- variables:begin (docs/generate.py) -->", "<!-- variables:end -->"
FAMILIES = {
    "READ": "Reading",
    "EVAL": "Evaluation",
    "SHAPE": "Shapes and types",
    "KNOB": "Knobs",
    "ENV": "Environment and command line",
    "DATA": "Data",
    "MEM": "Memory",
    "DEV": "Devices",
    "CKPT": "Checkpoints",
    "NET": "Network",
    "RUN": "Runs",
}


def errors() -> str:
    """The page of all codes."""
    out = [
        "# Errors",
        "",
        "Written by `docs/generate.py` from `sexpgpu/diagnostics/catalogue/`; change it there.",
        "`sexpgpu explain E-ENV-001` prints the page of one code.",
    ]
    for family, module in CATALOGUE.items():
        codes = import_module(module).CODES
        if not codes:
            continue
        out += ["", f"## {FAMILIES[family]}"]
        for code in sorted(codes):
            out += ["", f"### {code}", "", f"**{codes[code].title}.**", "", codes[code].page.strip()]
    return "\n".join([*out, "", "Related: [contributing](contributing.md), [explain](explain.md).", ""])


def ops() -> str:
    """The reference of ops, by family."""
    out = ["# Ops", "", "Written by `docs/generate.py` from `sexpgpu/ops/`; change it there.", ""]
    out += ["`[key]` may follow the operands without its keyword. A number among the operands takes the tensors' dtype. An op whose", ""]
    out[-2] += " name is also a compile-time function (`+`, `exp`, `max` …) works on both."
    for family in OP_FAMILIES:
        rows = [op for op in import_module(family).OPS if op.lisp]
        if not rows:
            continue
        out += [f"## {family.rpartition('.')[2]}", "", "| call | meaning | gradient | example |", "| --- | --- | --- | --- |"]
        for op in rows:
            gradient = "yes" if op.vjp is not None else "no"
            out.append(f"| `{signature(op)}` | {_cell(op.doc)} | {gradient} | `{_cell(op.example)}` |")
        out.append("")
    return "\n".join([*out, "Related: [functions](functions.md), [lisp](lisp.md).", ""])


def functions() -> str:
    """The reference of functions that are no ops: compile time, and the model path."""
    out = ["# Functions", "", "Written by `docs/generate.py` from the docstrings; change them there.", ""]
    named = {name: f for name, f in BUILTINS.items() if getattr(f, "doc", "")}
    model = layers.natives(natives()) | {n: f for n, f in natives().items() if isinstance(f, Query)}
    for title, group in (("Model path, initial values, draws", model), ("Compile time", named)):
        out += [f"## {title}", "", "| name | meaning |", "| --- | --- |"]
        for name in sorted(group):
            call = getattr(group[name], "signature", "")
            shown = f"({name} {call.strip('()')})" if call.strip("()") else name
            out.append(f"| `{_cell(shown)}` | {_cell(group[name].doc)} |")
        out.append("")
    return "\n".join([*out, "Related: [ops](ops.md), [lisp](lisp.md).", ""])


def stdlib() -> str:
    """The reference of the library, a section a module, from the docstrings."""
    out = ["# Library", "", "Written by `docs/generate.py` from the docstrings in `lisp-stdlib/`; change them there.", ""]
    out += ['`(import "nn" "optim")` brings modules; `(import "nn" :as nn)` names theirs `nn/linear` and so on. A call of a layer also', ""]
    out[-1] = "takes `:name` and `:share`. An optimizer is called with its settings alone: `(adamw :lr 1e-3)`."
    for path in sorted((DOCS.parent / "lisp-stdlib").glob("*.lisp")):
        text = path.read_text("utf-8")
        out += ["", f"## {path.stem}", "", _cell(" ".join(_header(text))), "", "| call | kind | meaning |", "| --- | --- | --- |"]
        for kind, call, doc in definitions(text, path.name):
            out.append(f"| `{_cell(call)}` | {kind} | {_cell(doc)} |")
    return "\n".join([*out, "", "Related: [ops](ops.md), [functions](functions.md), [lisp](lisp.md).", ""])


#: form -> its word in the reference
KINDS = {"defun": "function", "deflayer": "layer", "defoptimizer": "optimizer", "defmacro": "macro", "defparameter": "value"}


def _header(text: str) -> list[str]:
    """The comment that a file begins with."""
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith(";;;"))
    return [line.lstrip("; ") for line in lines[:end]]


def definitions(text: str, name: str) -> list[tuple[str, str, str]]:
    """(kind, call, docstring) of each definition of a library file, in its order."""
    found = []
    for form in read(Source(name, text)):
        head = form.head() if isinstance(form, ListForm) else None
        if head not in KINDS:
            continue
        strings = [item.value for item in form.items[2:] if isinstance(item, Literal) and isinstance(item.value, str)]
        parameters = form.items[2].items if head != "defparameter" else ()
        slots = ""
        if head == "defoptimizer":  # the first two are the run's to give
            parameters = parameters[2:]
            kept = [print_form(slot.items[0]) for slot in form.items[4].items]
            slots = f" Slots: {', '.join(kept)}."
        call = " ".join([form.items[1].name, *map(print_form, parameters)]).replace("()", "nil")
        found.append((KINDS[head], call if head == "defparameter" else f"({call})", strings[0] + slots))
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def variables() -> str:
    """The table of variables."""
    rows = ["| variable | flag | default | what it says |", "| --- | --- | --- | --- |"]
    for v in VARIABLES:
        rows.append(f"| `{v.name}` | {f'`{v.flag}`' if v.flag else ''} | {v.shown_default} | {v.doc} |")
    return "\n".join(rows)


def environment(text: str) -> str:
    """The page with its table renewed."""
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{variables()}\n{END}{tail}"


def commands() -> str:
    """The reference of the command line, from the commands themselves."""
    out = ["# Commands", "", "Written by `docs/generate.py` from `sexpgpu/cli/`; change it there. `sexpgpu COMMAND --help` prints the same.", ""]
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        out += _command(f"sexpgpu {name}", command)
    return "\n".join([*out, "Related: [run](run.md), [environment](environment.md), [use](use.md).", ""])


def _command(path: str, command: click.Command) -> list[str]:
    """The section of a command, and those of the commands below it."""
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    out = [f"## {path.removeprefix('sexpgpu ')}", "", f"`{usage}`", "", _paragraphs(command.help or ""), ""]
    rows = [row for p in command.params if isinstance(p, click.Option) and (row := p.get_help_record(context))]
    if rows:
        out += ["| option | meaning |", "| --- | --- |", *(f"| `{_cell(flag)}` | {_cell(text)} |" for flag, text in rows), ""]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            out += _command(f"{path} {name}", inner)
    return out


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")).replace("<", "&lt;")


# --- the index -----------------------------------------------------------------------

SUMMARY = "A Lisp in which one file is a whole training experiment, and the compiler and run loop that train it."
NAV_BEGIN, NAV_END = "# nav:begin (docs/generate.py)", "# nav:end"


def index() -> dict[str, dict[str, tuple[str, str]]]:
    """Section -> path -> (title, what it says), every page of docs/ in one of them."""
    listed = tomllib.loads((DOCS / "pages.toml").read_text("utf-8"))
    sections = {name: {path: _titled(path, text) for path, text in rows.items()} for name, rows in listed.items()}
    known = {path for rows in sections.values() for path in rows}
    last = list(sections)[-1]
    for page in sorted(DOCS.glob("**/*.md")):
        path = page.relative_to(DOCS.parent).as_posix()
        if path not in known:
            sections[last][path] = _own_words(page)
    return sections


def _titled(path: str, text: str) -> tuple[str, str]:
    title, colon, says = text.partition(": ")
    if not colon:
        raise SystemExit(f"docs/pages.toml: {path}: its text is no `title: what it says`")
    return title, says


def _own_words(page: Path) -> tuple[str, str]:
    """A page's heading and first sentence; of a decision, its number and heading."""
    text = page.read_text("utf-8")
    heading = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")), page.stem)
    decision = re.match(r"(\d{4})-", page.name)
    if decision is not None:
        said = re.sub(r"^(?:Decision )?\d+[.:] *", "", heading)
        return f"Decision {int(decision[1])}", said[:1].lower() + said[1:]
    body = re.sub(r"^#.*$", "", re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S), flags=re.M)
    sentence = re.split(r"(?<=[.:])\s", " ".join(body.split()), maxsplit=1)[0]
    return heading, sentence.rstrip(".:")


def llms() -> str:
    """The index for a reader that is a program."""
    out = ["# SexpGPU", "", f"> {SUMMARY}"]
    for section, rows in index().items():
        out += ["", f"## {section}", "", *(f"- [{title}]({path}): {says}" for path, (title, says) in rows.items())]
    return "\n".join([*out, ""])


def home() -> str:
    """The site's first page: the same index, with links within docs/."""
    out = ["# SexpGPU", "", SUMMARY, "", "Written by `docs/generate.py` from `docs/pages.toml`."]
    for section, rows in index().items():
        inside = {path: row for path, row in rows.items() if path.startswith("docs/") and path != "docs/index.md"}
        if inside:
            out += ["", f"## {section}", "", *(f"- [{t}]({path.removeprefix('docs/')}): {says}" for path, (t, says) in inside.items())]
    return "\n".join([*out, ""])


def navigation(text: str) -> str:
    """zensical.toml with its navigation renewed."""
    lines = ['nav = [', '  {"Home" = "index.md"},']
    for section, rows in index().items():
        inside = [f"    {{{json.dumps(title)} = {json.dumps(path.removeprefix('docs/'))}}}," for path, (title, _) in rows.items() if path.startswith("docs/") and path != "docs/index.md"]
        if inside:
            lines += [f"  {{{json.dumps(section)} = [", *inside, "  ]},"]
    head, rest = text.split(NAV_BEGIN)
    return f"{head}{NAV_BEGIN}\n" + "\n".join([*lines, "]"]) + f"\n{NAV_END}{rest.split(NAV_END)[1]}"


def pages() -> dict[Path, str]:
    """Each generated page and what it should hold."""
    page, site = DOCS / "environment.md", DOCS.parent / "zensical.toml"
    index_pages = {DOCS.parent / "llms.txt": llms(), DOCS / "index.md": home(), site: navigation(site.read_text("utf-8"))}
    return index_pages | {DOCS / "cli.md": commands(), DOCS / "errors.md": errors(), DOCS / "ops.md": ops(), DOCS / "functions.md": functions(), DOCS / "stdlib.md": stdlib(), page: environment(page.read_text("utf-8"))}


def main(check: bool) -> int:
    """Write, or compare."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is not current: run `python docs/generate.py`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

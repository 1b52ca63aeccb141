"""Writes what the docs take from the code: docs/errors.md, docs/ops.md, docs/functions.md, docs/stdlib.md, the table of
docs/environment.md.

`python docs/generate.py` writes; `python docs/generate.py --check` exits 1 and names what is not current.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

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


def pages() -> dict[Path, str]:
    """Each generated page and what it should hold."""
    page = DOCS / "environment.md"
    return {DOCS / "errors.md": errors(), DOCS / "ops.md": ops(), DOCS / "functions.md": functions(), DOCS / "stdlib.md": stdlib(), page: environment(page.read_text("utf-8"))}


def main(check: bool) -> int:
    """Write, or compare."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    if check:
        for path in stale:
            print(f"docs/{path.name} is not current: run `python docs/generate.py`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

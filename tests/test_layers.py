"""Imports go down the layers of pyproject.toml, at the top of a module, where import-linter sees them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sexpgpu"

#: module prefix (path below sexpgpu/) -> libraries it may import inside a function
OPTIONAL = {
    "run": {"boto3", "botocore", "rich", "requests", "fcntl", "torch", "pyarrow", "tokenizers"},
    "backends": {"torch", "triton"},
    "flashcart": {"torch", "triton"},
    "cli": {"rich", "torch"},
    "plot": {"matplotlib"},
}


def hidden_imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import statement inside a function."""
    found: list[tuple[int, str]] = []
    for outer in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(outer):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append((node.lineno, "." * node.level + (node.module or "")))
    return sorted(set(found))


def test_no_import_hides_in_a_function() -> None:
    bad = []
    for path in sorted(PACKAGE.rglob("*.py")):
        below = path.relative_to(PACKAGE)
        allowed = OPTIONAL.get(below.parts[0], set())
        bad += [
            f"sexpgpu/{below.as_posix()}:{line}: import of {module} inside a function"
            for line, module in hidden_imports(path)
            if module.split(".")[0] not in allowed
        ]
    assert not bad, "\n".join(["move these to the top, or use a lazy table of names:", *bad])


def test_layers_hold() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

"""How the page of a code is laid out: what happened and why, a wrong example, a right one."""

from __future__ import annotations


def page(text: str, wrong: str, right: str, why: str = "") -> str:
    """The page; examples may have several lines."""
    reason = f"Why: {why}\n\n" if why else ""
    return f"{text.strip()}\n\n{reason}Wrong:\n{_block(wrong)}\n\nRight:\n{_block(right)}\n"


def _block(example: str) -> str:
    return "\n".join(f"    {line}" for line in example.split("\n"))

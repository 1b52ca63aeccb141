"""Mutations of program texts: one change of one place, so that a message can be held against it.

`mutate(text, rng)` gives a `Mutation`; the same seed gives the same one everywhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|;[^\n]*|,@|[()\[\]\'`,]|[^\s()\[\]"\';`,]+', re.S)
NUMBER = re.compile(r"[+-]?[0-9][0-9./e+-]*\Z")
#: values of another kind, and values that no shape, axis or setting should take
ODD = ["-1", "0", "1", "7", "1.5", "-0.5", "1/3", "+nan", "+inf", "nil", "true", '"text"', '"../x"', ":key", "(list)", "[1 2 3]",
       "99999999999", "(expt 10 400)", "(lambda (x) x)", "'name", "f32", "i32", '"a\\nb"', "linear", "(range 3)"]
NAMES = ["relu", "matmul", "shape", "dim", "reshape", "mean", "sum", "transpose", "range", "mapcar", "param", "tap", "grad", "cast", "if",
         "let", "defun", "deflayer", "defrun", "list", "+", "/", "concat", "softmax", "argmax", "where", "quote", "import"]
HOSTILE = ["\x00", "\r", "\u202e", "\ufeff", "\x1b[31m", "\u2028", "é", "#", "\\", "|#", "#|", "#;", "…", "\t"]


@dataclass(frozen=True)
class Token:
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutation:
    """The new text, what was done, and where in the new text (offsets)."""

    text: str
    kind: str
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.start) + 1


def tokens(text: str) -> list[Token]:
    """What a mutation may touch: no comments and no blanks."""
    return [Token(m.start(), m.end(), m.group()) for m in TOKEN.finditer(text) if not m.group().startswith(";")]


def closing(found: list[Token], index: int) -> int:
    """The index of the bracket that closes the one at `index`."""
    depth = 0
    for at in range(index, len(found)):
        depth += (found[at].text in "([") - (found[at].text in ")]") if len(found[at].text) == 1 else 0
        if depth == 0:
            return at
    return index


def replaced(text: str, start: int, end: int, new: str, kind: str) -> Mutation:
    return Mutation(text[:start] + new + text[end:], kind, start, start + max(1, len(new)))



def drop(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice(found)
    return replaced(text, t.start, t.end, "", "drop")


def duplicate(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice(found)
    return replaced(text, t.start, t.end, f"{t.text} {t.text}", "duplicate")


def swap(text: str, found: list[Token], rng: random.Random) -> Mutation:
    at = rng.randrange(len(found) - 1)
    a, b = found[at], found[at + 1]
    between = text[a.end : b.start] or " "
    return replaced(text, a.start, b.end, b.text + between + a.text, "swap")


def wrong_type(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice([t for t in found if t.text not in "()[]'`,@"])
    return replaced(text, t.start, t.end, rng.choice(ODD), "wrong type")


def wrong_number(text: str, found: list[Token], rng: random.Random) -> Mutation:
    numbers = [t for t in found if NUMBER.match(t.text)]
    if not numbers:
        return drop(text, found, rng)
    t = rng.choice(numbers)
    new = rng.choice([f"{t.text}0", "-1", "0", "3", "5", "1000000", f"{t.text}.5", "1/7"])
    return replaced(text, t.start, t.end, new, "wrong number")


def wrong_name(text: str, found: list[Token], rng: random.Random) -> Mutation:
    names = [t for t in found if re.match(r"[a-zA-Z:]", t.text)]
    t = rng.choice(names)
    new = rng.choice([rng.choice(names).text, rng.choice(NAMES)])
    return replaced(text, t.start, t.end, new, "wrong name")


def misspell(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice([t for t in found if len(t.text) > 2 and re.match(r"[a-zA-Z:]", t.text)])
    at = rng.randrange(1, len(t.text) - 1)
    new = rng.choice([t.text[:at] + t.text[at + 1 :], t.text[:at] + t.text[at + 1] + t.text[at] + t.text[at + 2 :], t.text + "s"])
    return replaced(text, t.start, t.end, new, "misspell")


def wrap(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice([t for t in found if t.text not in "()[]'`,@"])
    return replaced(text, t.start, t.end, rng.choice(["({})", "[{}]", "'{}", ",{}", "`{}"]).format(t.text), "wrap")


def unwrap(text: str, found: list[Token], rng: random.Random) -> Mutation:
    at = rng.choice([i for i, t in enumerate(found) if t.text in "(["])
    end = found[closing(found, at)]
    return replaced(text, found[at].start, end.end, text[found[at].end : end.start], "unwrap")


def drop_list(text: str, found: list[Token], rng: random.Random) -> Mutation:
    at = rng.choice([i for i, t in enumerate(found) if t.text in "(["])
    new = rng.choice(["", "nil", "x", "3"])
    return replaced(text, found[at].start, found[closing(found, at)].end, new, "drop list")


def move_bracket(text: str, found: list[Token], rng: random.Random) -> Mutation:
    """A closing bracket one token earlier: nesting changes and brackets still pair, if no other is skipped."""
    at = rng.choice([i for i, t in enumerate(found) if t.text in ")]" and i > 1])
    before, bracket = found[at - 1], found[at]
    return replaced(text, before.start, bracket.end, f"{bracket.text} {before.text}", "move bracket")


def insert_bracket(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice(found)
    return replaced(text, t.start, t.start, rng.choice("()[]\"'`,"), "insert bracket")


def hostile(text: str, found: list[Token], rng: random.Random) -> Mutation:
    t = rng.choice(found)
    at = rng.randrange(t.start, t.end + 1)
    return replaced(text, at, at, rng.choice(HOSTILE), "hostile character")


MUTATIONS: list[Callable[[str, list[Token], random.Random], Mutation]] = [
    drop, duplicate, swap, wrong_type, wrong_type, wrong_number, wrong_number, wrong_name, wrong_name, misspell, wrap, unwrap, drop_list,
    move_bracket, insert_bracket, hostile,
]


def mutate(text: str, rng: random.Random) -> Mutation:
    """One mutation of a text that reads."""
    return rng.choice(MUTATIONS)(text, tokens(text), rng)

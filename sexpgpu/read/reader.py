"""Text to forms: a linear pre-scan that names bracket, string and comment mistakes, then one LALR parse.

Nothing here recurses over the text: the pre-scan is one regular expression with a stack of open brackets, and the
parser builds forms as it reduces.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, fail, one_or_all
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.source import Source, Span

MAX_NESTING = 1_000  # lists within lists; what a person writes stays below 50
MAX_DIGITS = 4_000  # of one integer; Python's own limit for text is 4,300

QUOTES = {"'": "quote", "`": "quasiquote", ",": "unquote", ",@": "unquote-splicing"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "\n": ""}
WORDS = {"true": True, "false": False, "+inf": float("inf"), "-inf": float("-inf"), "+nan": float("nan")}

_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|"|;[^\n]*|(?<![^\s()\[\]"\'`,])\#;|\#\||\|\#|[()\[\]]', re.S)
_COMMENT_MARKS = re.compile(r"#\||\|#")
_LINE_HEAD = re.compile(r"^[^\S\n]*(?=\S)", re.M)
_TOP_LEVEL = re.compile(r"^\(", re.M)
_NOT_NEWLINE = re.compile(r"[^\n]")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_RATIO = re.compile(r"([+-]?[0-9]+)/([0-9]+)")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NUMBER_LIKE = re.compile(r"[+-]?\.?[0-9]")
_ESCAPE = re.compile(r"\\(u\{[0-9a-fA-F]{1,6}\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.S)
_CLOSES = {"(": ")", "[": "]"}


def _prescan(source: Source) -> str:
    """`_pair_up`; where it fails, the mistakes of all top-level forms, as far as their first lines show where they begin."""
    try:
        return _pair_up(source)
    except SexpError as first:
        raise one_or_all(diagnose(source) or first.diagnostics) from None


def _pair_up(source: Source) -> str:
    """The text with block comments blank (offsets kept); fails on brackets, strings and comments that do not pair."""
    text, pieces, copied, position = source.text, [], 0, 0
    if text.startswith("\ufeff"):
        pieces, copied, position = [" "], 1, 1
    stack: list[tuple[str, int]] = []
    while mark := _MARKS.search(text, position):
        start, position, what = mark.start(), mark.end(), mark.group()
        if what in ("(", "["):
            stack.append((what, start))
            if len(stack) > MAX_NESTING:
                fail("E-READ-007", f"lists nest deeper than {MAX_NESTING:,}", Span(source, start, position))
        elif what in (")", "]"):
            _close(source, stack, what, start)
        elif what == '"':
            fail("E-READ-004", "this string has no end", Span(source, start, start + 1), label="begins here",
                 help='close it with `"`; write a quote inside a string as `\\"`')
        elif what == "#|":
            end = _comment_end(source, start)
            pieces += [text[copied:start], _NOT_NEWLINE.sub(" ", text[start:end])]
            copied = position = end
        elif what == "|#":
            fail("E-READ-009", "`|#` ends a comment that was not begun", Span(source, start, position),
                 help="remove it, or begin the comment with `#|`")
    if stack:
        _unclosed(source, stack)
    pieces.append(text[copied:])
    return "".join(pieces)


MOST_ERRORS = 20  # of one text, reported together


def _close(source: Source, stack: list[tuple[str, int]], what: str, start: int) -> None:
    here = Span(source, start, start + 1)
    if not stack:
        fail("E-READ-002", f"`{what}` closes nothing", here, help="remove it, or add the opening bracket it belongs to")
    opened, place = stack.pop()
    if _CLOSES[opened] != what:
        fail("E-READ-003", f"`{opened}` is closed by `{what}`", here,
             related=[Related(Span(source, place, place + 1), f"`{opened}` opened here")],
             help=f"write `{_CLOSES[opened]}` here, or close the inner bracket first")


def diagnose(source: Source) -> list[Diagnostic]:
    """The bracket and string mistakes of a text that does not pair, form by form.

    A `(` in column 1 is taken for the beginning of a top-level form, whatever is open there; a line that begins left of the
    bracket it stands in says where the bracket should have ended. A text of one long line gives nothing better than `_pair_up`.
    """
    found: list[Diagnostic] = []
    for start, end in _top_level(source.text):
        piece = Source(source.name, _blanked(source.text, start, end))
        try:
            _pair_up(piece)
        except SexpError as mistake:
            found.append(_moved(mistake.diagnostic, source))
            if len(found) == MOST_ERRORS:
                break
    return found


def _top_level(text: str) -> list[tuple[int, int]]:
    """Where top-level forms begin and end, by their `(` in column 1; block comments belong to what stands before them."""
    starts = [m.start() for m in _TOP_LEVEL.finditer(text)]
    if not starts or starts[0] > 0:
        starts.insert(0, 0)
    return list(zip(starts, [*starts[1:], len(text)], strict=True))


def _blanked(text: str, start: int, end: int) -> str:
    """One piece at its own offsets; what is before it is blank, and nothing is after it."""
    return _NOT_NEWLINE.sub(" ", text[:start]) + text[start:end]


def _moved(d: Diagnostic, source: Source) -> Diagnostic:
    """The same places in the whole text."""

    def move(span: Span | None) -> Span | None:
        return None if span is None else Span(source, span.start, span.end)

    return replace(d, span=move(d.span), related=tuple(Related(move(r.span), r.label) for r in d.related))


def _outdented(source: Source) -> tuple[int, int] | None:
    """The first bracket that a later line begins left of while it is open, and where that line begins."""
    text, stack, position = source.text, [], 0
    lines = [m.end() for m in _LINE_HEAD.finditer(text)]
    at = 0
    for mark in _MARKS.finditer(text):
        while at < len(lines) and lines[at] <= mark.start():
            head, at = lines[at], at + 1
            if stack and head >= position and text[head] not in ";)]":  # `position`: lines within strings say nothing
                column = source.line_column(stack[-1])[1]
                if source.line_column(head)[1] <= column and text.rfind("\n", 0, head) > stack[-1]:
                    return stack[-1], head
        position = mark.end()
        if mark.group() in ("(", "["):
            stack.append(mark.start())
        elif mark.group() in (")", "]") and stack:
            stack.pop()
    return None


def _unclosed(source: Source, stack: list[tuple[str, int]]) -> None:
    """Points at the innermost open bracket and, if another form begins a line later, says where it may belong."""
    opened, place = stack[-1]
    related = [Related(Span(source, p, p + 1), f"`{o}` is open too") for o, p in stack[:-1][-2:]]
    odd = _outdented(source)
    if odd is not None:
        place, line = odd
        opened, related = source.text[place], [Related(Span(source, line, line + 1), "this line begins left of it, so it may have to end before")]
    what = f"`{opened}` is never closed" if odd is None else f"a list is never closed, probably this `{opened}`"
    fail("E-READ-001", what, Span(source, place, place + 1), label="opened here",
         related=related, help=f"add {len(stack)} closing bracket{'s' * (len(stack) > 1)}: "
         f"`{''.join(_CLOSES[o] for o, _ in reversed(stack[-40:]))}`")


def _comment_end(source: Source, start: int) -> int:
    depth, position = 0, start
    while mark := _COMMENT_MARKS.search(source.text, position):
        position = mark.end()
        depth += 1 if mark.group() == "#|" else -1
        if depth == 0:
            return position
    fail("E-READ-009", "this comment has no end", Span(source, start, start + 2), label="begins here",
         help="end it with `|#`; each `#|` inside needs a `|#` of its own")


class _Build(Transformer):
    """Makes forms while the parser reduces; `source` is the text being read."""

    def __init__(self, source: Source):
        super().__init__()
        self.source = source
        self.errors: list[Diagnostic] = []

    def wrong(self, mistake: SexpError, span: Span) -> Form:
        """Keep a mistake in an atom, which hides no other, and go on with a stand-in."""
        self.errors += mistake.diagnostics
        if len(self.errors) >= MOST_ERRORS:
            raise one_or_all(self.errors)
        return Literal(False, span=span)

    def start(self, children: list) -> list[Form]:
        return [c for c in children if c is not None]

    def discarded(self, children: list) -> None:
        return None

    def _list(self, children: list, bracket: bool) -> Form:
        span = Span(self.source, children[0].start_pos, children[-1].end_pos)
        return ListForm(tuple(c for c in children[1:-1] if c is not None), bracket, span=span)

    def round(self, children: list) -> Form:
        return self._list(children, False)

    def square(self, children: list) -> Form:
        return self._list(children, True)

    def quoted(self, children: list) -> Form:
        mark, datum = children[0], children[-1]
        at = Span(self.source, mark.start_pos, mark.end_pos)
        return ListForm((Symbol(QUOTES[str(mark)], span=at), datum), span=at.to(datum.span))

    def string(self, children: list) -> Form:
        token = children[0]
        span = Span(self.source, token.start_pos, token.end_pos)

        def unescape(m: re.Match) -> str:
            body = m.group(1)
            if len(body) > 1:
                number = int(body[1:].strip("{}"), 16)
                if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF:
                    return chr(number)
            elif body in ESCAPES:
                return ESCAPES[body]
            start = token.start_pos + 1 + m.start()
            span = Span(self.source, start, start + len(m.group()))
            fail("E-READ-008", f"a string has no escape `{m.group()[:12]}`", span,
                 help='write one of `\\n` `\\t` `\\r` `\\\\` `\\"` `\\0` `\\xHH` `\\uHHHH` `\\u{H…}`')

        body = str(token)[1:-1]
        try:
            return Literal(_ESCAPE.sub(unescape, body) if "\\" in body else body, span=span)
        except SexpError as mistake:
            return self.wrong(mistake, span)

    def atom(self, children: list) -> Form:
        token = children[0]
        span = Span(self.source, token.start_pos, token.end_pos)
        try:
            return atom(str(token), span)
        except SexpError as mistake:
            return self.wrong(mistake, span)


def atom(text: str, span: Span) -> Form:
    """A number, word, keyword or symbol from the text of one token."""
    if text in WORDS:
        return Literal(WORDS[text], span=span)
    if text == "nil":
        return ListForm((), span=span)
    if _NUMBER_LIKE.match(text) and text not in ("1+", "1-"):
        return Literal(_number(text, span), span=span)
    if text[0] == ":":
        if len(text) == 1 or text[1] == ":":
            fail("E-READ-010", f"`{text[:40]}` is no keyword", span, help="a keyword is `:` and a name, like `:axis`")
        return Keyword(text[1:], span=span)
    if text[0] == "#" or not text.isprintable() or len(text) > 1000:
        lisp = {"#t": "true", "#f": "false", "#nil": "nil"}.get(text)
        fail("E-READ-010", f"`{text[:40]}` is no name", span,
             help=f"write `{lisp}`" if lisp else "a name is made of printable characters and does not begin with `#`; comments are `;`, `#| |#`, `#;`")
    return Symbol(text, span=span)


def _number(text: str, span: Span) -> int | float | Fraction:
    if _INTEGER.fullmatch(text):
        return _integer(text, span)
    if ratio := _RATIO.fullmatch(text):
        below = _integer(ratio.group(2), span)
        if below == 0:
            fail("E-READ-006", "a ratio with 0 below the line is no number", span)
        value = Fraction(_integer(ratio.group(1), span), below)
        return value.numerator if value.denominator == 1 else value
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            fail("E-READ-006", "this number is too large for a 64-bit float", span,
                 help="write `+inf` or `-inf` for infinity")
        return value
    fail("E-READ-006", f"`{text[:40]}` is no number", span,
         help="numbers are like `12`, `-0.5`, `1e-3`, `1/16`; a name does not begin with a digit")


def _integer(text: str, span: Span) -> int:
    if len(text.lstrip("+-")) > MAX_DIGITS:
        fail("E-READ-013", f"an integer has at most {MAX_DIGITS:,} digits here", span,
             help="compute it: `(expt 10 5000)`")
    return int(text)


# A Lark costs 50 ms and holds its transformer: both are made once, and `read` tells the transformer its source.
_SHARED = _Build(Source("", ""))
_PARSER = Lark((Path(__file__).parent / "grammar.lark").read_text("utf-8"), parser="lalr", lexer="basic",
               transformer=_SHARED, maybe_placeholders=False)


def read(source: Source) -> list[Form]:
    """All forms of a text, each with its span; raises E-READ errors, several where they are independent."""
    text = _prescan(source)
    _SHARED.source, _SHARED.errors = source, []
    try:
        forms = _PARSER.parse(text)
        if _SHARED.errors:
            raise one_or_all(_SHARED.errors)
        return forms
    except UnexpectedInput as unexpected:
        _explain(source, text, unexpected)
    finally:
        _SHARED.source, _SHARED.errors = Source("", ""), []


def _explain(source: Source, text: str, unexpected: UnexpectedInput) -> None:
    """Brackets and strings pair by now, so what is left is a mark with nothing after it."""
    end = unexpected.pos_in_stream
    token = getattr(unexpected, "token", None)
    if end is None or (isinstance(token, Token) and token.type == "$END"):
        end = len(text)
    before = [t for t in _PARSER.lex(text[:end])]
    while before and before[-1].type not in ("QUOTE", "QUASI", "UNQUOTE", "SPLICE", "DISCARD"):
        before.pop()
    if not before:
        fail("E-READ-010", "this character cannot stand here", Span(source, end, end + 1))
    mark = before[-1]
    span = Span(source, mark.start_pos, mark.end_pos)
    if mark.type == "DISCARD":
        fail("E-READ-011", "`#;` leaves out the next form, and none follows", span, help="remove the `#;`")
    fail("E-READ-005", f"nothing follows `{mark}`", span, help=f"write a form after `{mark}`, or remove it")


def read_datum(text: str, name: str) -> Form:
    """The one form of a text, as for `--set name=value`."""
    source = Source(name, text)
    forms = read(source)
    if len(forms) != 1:
        what = "no form" if not forms else f"{len(forms)} forms"
        fail("E-READ-012", f"expected one value for `{name}`, found {what}", Span(source, 0, len(text)),
             help="write one number, name, string or list; quote the whole for the shell")
    return forms[0]

"""Colours of the language, for the prompt and for documents: a pygments lexer, `sexpgpu` by name."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text

#: forms that define or bind; everything else at the head of a list is a function
FORMS = (
    "defun", "deflayer", "defmacro", "defknob", "defvariant", "defdata", "defrun", "defeval", "defoptimizer", "defparameter", "defvar",
    "import", "let", "let*", "lambda", "if", "when", "unless", "cond", "case", "progn", "quote", "setq", "dotimes", "dolist", "flet",
    "destructuring-bind", "and", "or", "function",
)  # fmt: skip
_END = r"(?=[\s()\[\]\"'`,;]|\Z)"
_NAME = r"[^\s()\[\]\"'`,;]+"


class SexpLexer(RegexLexer):
    """SexpGPU's Lisp."""

    name = "SexpGPU"
    aliases: ClassVar[list[str]] = ["sexpgpu"]
    filenames: ClassVar[list[str]] = []
    url = ""
    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"\A\s*,[a-z]+", Keyword.Pseudo),  # a command of the prompt
            (r"\s+", Text),
            (r";.*?$", Comment.Single),
            (r"#\|", Comment.Multiline, "comment"),
            (r"#;", Comment.Special),
            (r'"(?:[^"\\]|\\.)*"?', String),
            (r"[+-]?(?:\d+/\d+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)" + _END, Number),
            (r"(?:true|false|nil|[+-]inf|\+nan)" + _END, Keyword.Constant),
            (rf":{_NAME}", Name.Attribute),
            (r"(\()(" + "|".join(f.replace("*", r"\*") for f in sorted(FORMS, key=len, reverse=True)) + ")" + _END, bygroups(Punctuation, Keyword)),
            (rf"(\()({_NAME})", bygroups(Punctuation, Name.Function)),
            (r"[()\[\]]", Punctuation),
            (r"['`]|,@?", Operator),
            (rf"{_NAME}", Name),
        ],
        "comment": [
            (r"#\|", Comment.Multiline, "#push"),
            (r"\|#", Comment.Multiline, "#pop"),
            (r"[^|#]+|[|#]", Comment.Multiline),
        ],
    }

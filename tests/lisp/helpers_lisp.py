"""Evaluates texts for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from sexpgpu.diagnostics import Diagnostic, SexpError
from sexpgpu.lisp.evaluator import Evaluator
from sexpgpu.lisp.modules import Loader
from sexpgpu.source import Source


def evaluator(text: str, **more: Any) -> Evaluator:
    return Evaluator(Loader(Source("main.lisp", text)), **more)


def value(text: str, **more: Any) -> Any:
    """The value of the last form of a text."""
    ev = evaluator(text, **more)
    env, result = ev.main.env, None
    for form in ev.loader.main.forms:
        result = ev.eval(form, env)
    return result


def mistake(text: str, code: str, **more: Any) -> Diagnostic:
    """The diagnostic of a text that must fail with a code."""
    with pytest.raises(SexpError) as caught:
        evaluator(text, **more).load_main()
    d = caught.value.diagnostic
    assert d.code == code, d
    return d

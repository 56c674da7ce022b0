"""Docstrings are read in a terminal, so they are written as Markdown: `code`, $mathematics$."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from public import target_of
from sphinx.application import Sphinx

INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)", re.DOTALL)
FORMULA = re.compile(r"(?<!\$)\$(?!\$)([^$]+)\$(?!\$)", re.DOTALL)
PAGE = re.compile(r"\bdocs/([\w/]+)\.md\b")
DISPLAY = re.compile(r"^( *)\$\$(.+?)\$\$", re.DOTALL | re.MULTILINE)


def setup(app: Sphinx) -> dict[str, Any]:
    """Before napoleon, which reads the sections."""
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True}


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replaces the lines of a docstring; its doctests stay as they are."""
    blocks = re.split(r"((?:^ *(?:>>>|\.\.\.) .*(?:\n(?! *$).*)*))", "\n".join(lines), flags=re.M)
    blocks[::2] = [to_rst(block, name) for block in blocks[::2]]
    lines[:] = "".join(blocks).splitlines()


def to_rst(text: str, place: str) -> str:
    """Markdown's code and formulas as roles; the public names among the code are links."""
    text = DISPLAY.sub(_display, text)
    text = FORMULA.sub(lambda found: f":math:`{_one_line(found[1])}`", text)
    text = INLINE.sub(partial(_code, place=place), text)
    return PAGE.sub(r":doc:`/\1`", text)


def _display(found: re.Match[str]) -> str:
    return f"{found[1]}.. math:: {_one_line(found[2])}\n"


def _code(found: re.Match[str], place: str) -> str:
    if found.string[: found.start()].endswith(":math:"):
        return found[0]
    code = _one_line(found[1])
    target = target_of(code, place)
    return f":py:obj:`{code} <{target}>`" if target else f"``{code}``"


def _one_line(text: str) -> str:
    return " ".join(text.split())

r"""Numbers of equations are links: "(13)" in a page of the mathematics leads to its \tag{13}."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

PAGES = re.compile(r"^(math$|explanation/)")
TAG = re.compile(r"\\tag\{(\d+[a-z]?)\}")
CITED = re.compile(r"\((\d+[a-z]?)\)")
logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Anchors are made while pages are read, links once all are known."""
    app.connect("doctree-read", anchor)
    app.connect("doctree-resolved", link)
    app.connect("env-purge-doc", forget)
    return {"parallel_read_safe": False}


def known(env: BuildEnvironment) -> dict[str, str]:
    """From the number of an equation to its page."""
    if not hasattr(env, "tagged_equations"):
        env.tagged_equations = {}  # type: ignore[attr-defined]
    return env.tagged_equations  # type: ignore[attr-defined,no-any-return]


def forget(app: Sphinx, env: BuildEnvironment, page: str) -> None:
    """A page is read anew."""
    for number in [n for n, where in known(env).items() if where == page]:
        del known(env)[number]


def anchor(app: Sphinx, doctree: nodes.document) -> None:
    """Gives every tagged equation an anchor."""
    page = app.env.docname
    for node in list(doctree.findall(nodes.math_block)) if PAGES.match(page) else []:
        for number in TAG.findall(node.astext()):
            if number in known(app.env):
                logger.warning("Equation (%s) is also in %s.", number, known(app.env)[number])
            known(app.env)[number] = page
            node.replace_self([nodes.target("", "", ids=[f"equation-{number}"]), node])


def link(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Makes links of the numbers in the text."""
    if not PAGES.match(page):
        return
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, (nodes.math, nodes.math_block, nodes.literal, nodes.title)):
            continue
        parts = CITED.split(text.astext())
        if len(parts) == 1 or _inside_link(text):
            continue
        new: list[nodes.Node] = []
        for place, part in enumerate(parts):
            target = known(app.env).get(part) if place % 2 else None
            if target:
                number = nodes.inline("", f"({part})", classes=["equation-number"])
                new.append(make_refnode(app.builder, page, target, f"equation-{part}", number))
            elif place % 2:
                new.append(nodes.Text(f"({part})"))
            elif part:
                new.append(nodes.Text(part))
        text.parent.replace(text, new)


def _inside_link(node: nodes.Node) -> bool:
    while node := node.parent:
        if isinstance(node, nodes.reference):
            return True
    return False

"""The directive `public`: the public names of a module, which are those of its `__all__`.

The content names those that are wanted, all by default. A module that can't be found has none.
Names that no page shows are warned of at the end.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

MODULES = [
    "factormax",
    "factormax.nn",
    "factormax.plot",
    "factormax.jax",
    "factormax.jax.nn",
    "factormax.io",
    "factormax.testing",
    "factormax.cuda",
]
WITH_MEMBERS = ("FactorGraph", "Variable", "Solution", "Factor")
logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive, and the check that nothing was left out."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-signature", no_signature)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True}


@cache
def public_names(module: str) -> list[str]:
    """What is in `__all__`, modules aside."""
    if find_spec(module) is None:
        return []
    found = import_module(module)
    return [n for n in found.__all__ if not inspect.ismodule(getattr(found, n))]


@cache
def target_of(code: str, place: str = "factormax") -> str:
    """The full name of what `code` names in the docstring of `place`; "" if it is nothing public.

    `code` is a name as one would write it, such as `fm.Xor`, `DepTree` or, in its class, `solve`.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*", code):
        return ""
    bare = code.removeprefix("fm.").removeprefix("factormax.")
    module = max([m for m in MODULES if place.startswith(m)], key=len)
    owner = place.removeprefix(module + ".").split(".")[0]
    places = [f"{module}.{owner}", module, "factormax"]
    for name in [f"{p}.{bare}" for p in (places if bare == code else places[-1:])]:
        if _is_shown(name):
            return name
    return ""


def _is_shown(full: str) -> bool:
    """Whether it is a public name, or a member of a class whose members are shown."""
    module = max([m for m in MODULES if full.startswith(m)], key=len)
    name, *member = full.removeprefix(module + ".").split(".")
    if name not in public_names(module) or len(member) > 1:
        return False
    if not member:
        return True
    if name not in WITH_MEMBERS and module not in ("factormax.nn", "factormax.io"):
        return False
    found = getattr(getattr(import_module(module), name), "__dict__", {}).get(member[0])
    kinds = (property, classmethod, staticmethod, FunctionType)
    return member[0][0] != "_" and isinstance(found, kinds) and bool(found.__doc__)


class Public(SphinxDirective):
    """Documents names of a module, with their own members if asked to, or with inherited ones."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "members": directives.flag,
        "undoc-members": directives.flag,
        "exclude-members": directives.unchanged,
        "inherited-members": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Hands each name to autodoc."""
        (module,) = self.arguments
        names = " ".join(self.content).split() or public_names(module)
        lines = []
        for name in names:
            item = getattr(import_module(module), name)
            kind = "class" if inspect.isclass(item) else "function" if callable(item) else "data"
            lines += ["```{eval-rst}", f".. auto{kind}:: {module}.{name}"]
            if kind == "class":
                lines += [f"   :{option}: {value or ''}" for option, value in self.options.items()]
            lines += ["```", ""]
            self.env.metadata[self.env.docname].setdefault("public", set()).add(f"{module}.{name}")
        return self.parse_text_to_nodes("\n".join(lines))


def no_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """What a user never makes has no signature."""
    hidden = ("factormax.Solution", "factormax.Variable", "factormax.Status")
    return ("", "") if name in hidden else None


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that no page has."""
    shown: set[str] = set()
    for page in env.metadata.values():
        shown |= page.get("public", set())
    for module in MODULES:
        for name in public_names(module):
            if f"{module}.{name}" not in shown:
                logger.warning("%s.%s is public, but on no page of the reference.", module, name)

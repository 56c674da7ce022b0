"""Calls from XLA to the core without Python in between.

They are available if the core was compiled with the headers of a jaxlib that is compatible with the
one in use; otherwise XLA calls back to Python.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

import jax

from factormax import _core
from factormax._fronts.jax import host
from factormax._fronts.jax.plan import Plan
from factormax._fronts.jax.written import read, written
from factormax._model import Remembered

__all__ = ["TARGETS", "lowering", "register", "unavailable"]

#: The names by which XLA knows the handlers.
TARGETS = {
    name: f"factormax_{name}" for name in ("solve", "apply_jacobian", "pull_back", "features")
}
_OLD = (0, 7, 2)  # handlers compiled with headers up to these run with any jaxlib

_plans: Remembered[Plan] = Remembered(256)


def unavailable() -> str:
    """Why such calls are not available; "" if they are."""
    built = _core.ffi_version()
    if not built:
        return "factormax was built without jaxlib headers"
    running = import_module("jaxlib").__version__
    if _number(built) > _OLD and _number(running) < _number(built):
        return f"factormax was built with the headers of jaxlib {built}, and this is {running}"
    return ""


def _number(version: str) -> tuple[int, ...]:
    return tuple([int(n) for n in re.findall(r"\d+", version)[:3]])


@lru_cache(maxsize=1)
def register() -> Any:
    """Registers the handlers with XLA, once; returns what lowers calls to them, or None."""
    if unavailable():
        return None
    module = import_module("jax.ffi" if hasattr(jax, "ffi") else "jax.extend.ffi")
    _core.ffi_set_python(_call)
    for name, handler in _core.ffi_handlers().items():
        module.register_ffi_target(TARGETS[name], handler, platform="cpu")
    return module


def lowering(name: str, plan: Plan) -> Any:
    """What lowers a primitive with this name to such a call; None if that is not possible."""
    module = register()
    if module is None:
        return None
    text = written(plan)
    if text is None:
        return None
    _keep(text, plan)
    lower = module.ffi_lowering(TARGETS[name])
    return lambda ctx, *operands: lower(ctx, *operands, plan=text)


def _keep(text: str, plan: Plan) -> None:
    """Remembers a plan, and lets the core solve it without Python if it can.

    The first plan of a text stays: solutions are remembered by it, and a function may be running.
    """
    if _plans.get(text) is None:
        _plans.keep(text, plan)
    if plan.native is not None:
        _core.ffi_keep(text, plan.native)


def _call(name: str, text: str, arrays: list[Any], places: list[Any]) -> None:
    """What the core calls where it can't answer without Python."""
    plan = _plans.get(text) or read(text)  # if the function was exported
    _keep(text, plan)  # the core forgets all plans when there are many
    host.write(getattr(host, name), plan, arrays, places)

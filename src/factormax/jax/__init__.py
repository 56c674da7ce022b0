"""For JAX only: layers as functions (`factormax.jax.nn`), and exported functions.

Graphs take JAX arrays without this module. A process that runs an exported function must import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from factormax._fronts.jax import ffi
from factormax.errors import FactormaxError

__all__ = ["export_checks", "ffi_unavailable", "nn"]

ffi.register()


def ffi_unavailable() -> str:
    """Why XLA calls the core through Python rather than directly; "" if it calls it directly.

    Example:
        >>> import factormax.jax
        >>> reason = factormax.jax.ffi_unavailable()
    """
    return ffi.unavailable()


def export_checks() -> list[Any]:
    """The `disabled_checks` with which `jax.export.export` can export a solve.

    Raises:
        FactormaxError: if XLA can't call the core directly, since calls to Python can't be
            exported.

    Example:
        >>> import jax, jax.numpy as jnp, factormax as fm, factormax.jax
        >>> from jax import export
        >>> @jax.jit
        ... def sparsemax(scores):
        ...     fg = fm.FactorGraph()
        ...     u = fg.variable_from(scores)
        ...     fg.add(fm.Xor(u))
        ...     fg.solve()
        ...     return u.value
        >>> if not factormax.jax.ffi_unavailable():
        ...     checks = factormax.jax.export_checks()
        ...     exported = export.export(sparsemax, disabled_checks=checks)(jnp.zeros(3))
        ...     # exported.serialize() returns the bytes to store in a file
    """
    reason = ffi.unavailable()
    if reason:
        raise FactormaxError(f"A solve can't be exported: {reason}.")
    check = import_module("jax.export").DisabledSafetyCheck
    return [check.custom_call(target) for target in ffi.TARGETS.values()]


def __getattr__(name: str) -> Any:
    """Imports the layers on first use."""
    if name == "nn":
        return import_module("factormax.jax.nn")
    raise AttributeError(f"module 'factormax.jax' has no attribute {name!r}")

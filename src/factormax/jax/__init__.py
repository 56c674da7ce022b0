"""What is only for JAX: layers as functions (`factormax.jax.nn`), and exported functions.

Graphs take JAX arrays without it. A process that runs an exported function must import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from factormax._fronts.jax import ffi
from factormax.errors import FactormaxError

__all__ = ["export_checks", "ffi_unavailable", "nn"]

ffi.register()


def ffi_unavailable() -> str:
    """Why XLA does not call the core directly, but by way of Python; "" if it does.

    Example:
        >>> import factormax.jax
        >>> reason = factormax.jax.ffi_unavailable()
    """
    return ffi.unavailable()


def export_checks() -> list[Any]:
    """What `jax.export.export` takes as `disabled_checks`, for it to let a solve be exported.

    Raises:
        FactormaxError: if XLA can't call the core directly: a call of Python can't be exported.

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
        ...     # exported.serialize() is what a file takes
    """
    reason = ffi.unavailable()
    if reason:
        raise FactormaxError(f"A solve can't be exported: {reason}.")
    check = import_module("jax.export").DisabledSafetyCheck
    return [check.custom_call(target) for target in ffi.TARGETS.values()]


def __getattr__(name: str) -> Any:
    """The layers are imported when they are first asked for."""
    if name == "nn":
        return import_module("factormax.jax.nn")
    raise AttributeError(f"module 'factormax.jax' has no attribute {name!r}")

"""The JAX functions for layouts, and the dtypes and devices of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from factormax.arrays import is_jax

__all__ = ["JaxSpace", "compute_dtype", "cooled", "like", "value_dtype"]


class JaxSpace:
    """The `Space` of JAX."""

    zeros = staticmethod(jnp.zeros)
    spread = staticmethod(jnp.broadcast_to)

    @staticmethod
    def ones(shape: tuple[int, ...]) -> jax.Array:
        """A boolean array, all True."""
        return jnp.ones(shape, bool)

    @staticmethod
    def joined(columns: list[Any]) -> jax.Array:
        """Matrices side by side."""
        return jnp.concatenate(columns, axis=1)

    @staticmethod
    def total(array: Any, axes: tuple[int, ...], keep: bool) -> jax.Array:
        """Summed over some axes."""
        return jnp.sum(array, axis=axes, keepdims=keep)


def compute_dtype(given: Iterable[Any]) -> Any:
    """float64 if any scores are, else float32; whole numbers count as JAX's default."""
    wide = [s for s in given if is_jax(s) and value_dtype(s) == jnp.float64]
    return jnp.float64 if wide else jnp.float32


def value_dtype(scores: Any) -> Any:
    """The dtype of the marginals of these scores."""
    return scores.dtype if jnp.issubdtype(scores.dtype, jnp.floating) else jnp.result_type(float)


def like(value: Any, scores: Any) -> jax.Array:
    """A NumPy array as a JAX array, in the dtype of the marginals and where the scores are."""
    array: jax.Array = jnp.asarray(value, value_dtype(scores))
    if getattr(scores, "committed", False):
        if scores.shape == array.shape or len(scores.devices()) == 1:
            array = jax.device_put(array, scores.sharding)
    return array


def cooled(scores: jax.Array, temperature: jax.Array) -> jax.Array:
    """Scores divided by a temperature that may require a gradient; −inf stays −inf."""
    quotient = jax.lax.stop_gradient(scores / temperature)
    finite = jnp.isfinite(quotient)
    # Infinite scores must not reach the gradient of the temperature: 0 times inf is NaN.
    return jnp.where(finite, jnp.where(finite, scores, 0) / temperature, quotient)

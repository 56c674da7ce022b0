"""Temperatures, which divide the scores: one for all instances, or one per instance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from factormax._columns import Columns
from factormax.arrays import (
    ArrayLike,
    FloatArray,
    is_hidden,
    is_jax,
    is_real,
    is_tensor,
    to_numpy,
)
from factormax.errors import GraphError, ShapeError

__all__ = [
    "checked_temperature",
    "cooled",
    "cooled_columns",
    "spread_temperature",
    "sum_to_temperature",
]


def checked_temperature(temperature: ArrayLike, batch: tuple[int, ...], name: str = "solve") -> Any:
    """The temperature as an array or a tensor, if it is positive and fits the batch.

    Raises:
        ShapeError: if it is not broadcastable to the batch.
        GraphError: if it holds anything but positive numbers.
    """
    kept = is_tensor(temperature) or is_jax(temperature)
    given: Any = temperature if kept else np.asarray(temperature)
    shape = tuple(given.shape)
    fits = len(shape) <= len(batch) and all(
        s in (1, b) for s, b in zip(shape[::-1], batch[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{name}: temperature must be a number, or broadcastable to the batch, {batch}, got "
            f"shape {shape}."
        )
    if is_hidden(given) and (not is_jax(given) or is_real(given.dtype)):
        return given
    numbers = to_numpy(given)
    if not is_real(numbers.dtype) or numbers.dtype.kind == "b":
        raise GraphError(f"{name}: temperature must be a number, got dtype {numbers.dtype}.")
    bad = ~(np.isfinite(numbers) & (numbers > 0))
    if bad.any():
        raise GraphError(
            f"{name}: temperature must be positive and finite, got {numbers[bad].ravel()[0]}."
        )
    return given


def spread_temperature(temperature: Any, batch: tuple[int, ...]) -> FloatArray:
    """One temperature per instance, `(B, 1)`, in float64."""
    numbers = np.broadcast_to(np.asarray(temperature, dtype=np.float64), batch)
    return numbers.reshape(-1, 1)


def sum_to_temperature(
    grad: FloatArray, shape: tuple[int, ...], batch: tuple[int, ...]
) -> FloatArray:
    """Sums a gradient per instance, `(B,)`, to the shape of the temperature."""
    full = grad.reshape(batch)
    full = full.sum(axis=tuple(range(len(batch) - len(shape))))
    ones = tuple([i for i, s in enumerate(shape) if s == 1 and full.shape[i] != 1])
    return np.asarray(full.sum(axis=ones, keepdims=True))


def cooled(scores: FloatArray, temperature: FloatArray) -> FloatArray:
    """Scores `(B, n)` divided by the temperatures `(B, 1)`; −inf stays −inf."""
    with np.errstate(over="ignore"):
        return np.asarray(scores / temperature, dtype=scores.dtype)


def cooled_columns(scores: Columns, temperature: FloatArray) -> Columns:
    """The same for scores that the instances share in part; what they share is not repeated."""
    return replace(scores, own=cooled(scores.own, temperature), heat=temperature)

"""A factor's own scores: shared by all instances, or per instance, `(*batch, ...)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from factormax.arrays import ArrayLike, is_jax, is_real, is_tensor, is_tracing
from factormax.errors import GraphError, ShapeError

if TYPE_CHECKING:
    from factormax.factors.base import BaseFactor

__all__ = ["Scores", "take_scores"]


@dataclass(eq=False)
class Scores:
    """Scores of a factor, as they were given.

    They hold no reference to the factor, because the graph's record keeps them with their values.

    Attributes:
        label: what messages call them.
        given: a NumPy, torch or JAX array.
        shape: what the factor needs, without batch dimensions.
        own_shape: what was given, without batch dimensions; broadcastable to `shape`.
        allow_minus_inf: whether −inf forbids something.
    """

    label: str
    given: Any
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    allow_minus_inf: bool = False

    @property
    def count(self) -> int:
        """How many numbers there are per instance."""
        return math.prod(self.shape)


def as_scores(factor: BaseFactor, label: str, given: ArrayLike) -> Any:
    """The scores as an array or a tensor of real numbers."""
    array: Any = given if is_tensor(given) or is_jax(given) else np.asarray(given)
    if is_tracing():
        return array
    real = not array.is_complex() if is_tensor(array) else is_real(array.dtype)
    if not real:
        raise GraphError(f"{factor.name}: {label} must be real numbers, got dtype {array.dtype}.")
    return array


def take_scores(
    factor: BaseFactor,
    label: str,
    given: ArrayLike,
    shape: tuple[int, ...],
    allow_minus_inf: bool = False,
) -> Scores:
    """The scores, if they fit.

    Scores with at most `len(shape)` dimensions are shared by the instances of a batch; with the
    batch dimensions in front they are per instance. Sizes of 1 are broadcast.

    Raises:
        ShapeError: if they fit neither way.
    """
    array = as_scores(factor, label, given)
    found = tuple(array.shape)
    batch = factor._record.batch_shape
    shared = len(found) <= len(shape)
    target = shape if shared else (*(batch or ()), *shape)
    fits = len(found) <= len(target) and all(
        s in (1, t) for s, t in zip(found[::-1], target[::-1], strict=False)
    )
    if not fits or (not shared and len(found) != len(target)):
        wanted = f"{shape} (shared)" if not batch else f"{shape} (shared) or {(*batch, *shape)}"
        raise ShapeError(f"{factor.name}: {label} must have shape {wanted}, got {found}.")
    own = found if shared else found[factor._record.batch_dims :]
    return Scores(label, array, shape, own, allow_minus_inf)

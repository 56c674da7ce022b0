"""Parameters of factors: shared by all instances, or one for each, `(*batch, ...)`."""

from __future__ import annotations

import numpy as np

from factormax.arrays import ArrayLike, FloatArray, is_tensor, is_tracing, to_numpy
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor

__all__ = ["take_param"]


def take_param(
    factor: BaseFactor, word: str, value: ArrayLike, shape: tuple[int, ...]
) -> FloatArray:
    """The parameter as `(1 | B, prod(shape))`.

    A parameter with at most `len(shape)` dimensions is shared by the instances of a batch;
    one with the batch dimensions in front is per instance.

    Raises:
        ShapeError: if it fits neither way, or holds no numbers.
    """
    if is_tensor(value) and value.requires_grad:  # type: ignore[union-attr]
        raise GraphError(
            f"{factor.name}: {word} takes no gradient, but the tensor requires one. Pass "
            f"{word}.detach()."
        )
    array = to_numpy(value)
    if (
        not is_tracing()
        and array.dtype == object
        and array.ndim == 0
        and isinstance(array.item(), int)
    ):
        array = np.asarray(float(array.item()))  # beyond 64 bits
    if not is_tracing() and array.dtype.kind not in "fiub":
        raise ShapeError(f"{factor.name}: {word} must be numbers, got dtype {array.dtype}.")
    batch = factor.graph.batch_shape
    size = 1
    for s in shape:
        size *= s
    try:
        if array.ndim <= len(shape):
            return np.broadcast_to(array, shape).reshape(1, size).astype(np.float64)
        if batch is not None and array.ndim == len(batch) + len(shape):
            count = 1
            for s in batch:
                count *= s
            full = np.broadcast_to(array, (*batch, *shape))
            return full.reshape(count, size).astype(np.float64)
    except ValueError:
        pass
    wanted = f"{shape} (shared)" if not batch else f"{shape} (shared) or {(*batch, *shape)}"
    raise ShapeError(f"{factor.name}: {word} must have shape {wanted}, got {array.shape}.")

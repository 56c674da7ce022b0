"""Parameters of factors: shared by all instances, or per instance, `(*batch, ...)`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax.arrays import (
    ArrayLike,
    FloatArray,
    is_hidden,
    is_jax,
    is_real,
    is_tensor,
    is_tracing,
    to_numpy,
)
from factormax.checks import shown
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor, Param
from factormax.scope import View

__all__ = ["take_literal_param", "take_param"]


def take_param(factor: BaseFactor, word: str, value: ArrayLike, shape: tuple[int, ...]) -> Param:
    """The parameter as `(1 | B, prod(shape))`, or as a float if it is one number for all.

    A parameter with at most `len(shape)` dimensions is shared by the instances of a batch;
    one with the batch dimensions in front is per instance.

    Raises:
        ShapeError: if its shape fits neither way, or it does not hold numbers.
    """
    plain = _plain_number(value)
    if plain is not None:
        return plain
    if is_tensor(value) and value.requires_grad:  # type: ignore[union-attr]
        raise GraphError(
            f"{factor.name}: {word} takes no gradient, but the tensor requires one. Pass "
            f"{word}.detach()."
        )
    array: Any = _numbers(factor, word, value)
    batch = factor._record.batch_shape
    size = math.prod(shape)
    try:
        if array.ndim <= len(shape):
            return _contiguous(_spread(array, shape).reshape(1, size))
        if batch is not None and array.ndim == len(batch) + len(shape):
            count = math.prod(batch)
            full = _spread(array, (*batch, *shape))
            return _contiguous(full.reshape(count, size))
    except (ValueError, RuntimeError):
        pass
    wanted = f"{shape} (shared)" if not batch else f"{shape} (shared) or {(*batch, *shape)}"
    raise ShapeError(f"{factor.name}: {word} must have shape {wanted}, got {array.shape}.")


def take_literal_param(
    factor: BaseFactor, word: str, value: ArrayLike, axis: int | tuple[int, ...] | None
) -> Param:
    """A parameter with one number per variable, in their shape, as `(1 | B, k * d)`."""
    given = factor._given
    if axis is None:
        shape = (factor._size,) if factor._listed else given[0].shape
        return take_param(factor, word, value, shape)
    if len(given) > 1:  # one number per variable of the rows that `axis` makes
        return take_param(factor, word, value, (factor._count, factor._size))
    (u,) = given
    numbers = take_param(factor, word, value, u.shape)
    if isinstance(numbers, float):
        return numbers
    # Each number follows its variable to the rows that `axis` makes.
    order = View.whole(0, u.shape).part(False, factor._last_axes(u, axis)).places()
    return _contiguous(numbers[:, order.reshape(-1)])


def _spread(array: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast to a shape."""
    if is_tensor(array):
        return array.expand(shape)
    if is_jax(array):
        import jax.numpy as jnp

        return jnp.broadcast_to(array, shape)
    return np.broadcast_to(array, shape)


def _contiguous(array: Any) -> FloatArray:
    """The array as the core takes it; a traced array is laid out at run time."""
    if is_tensor(array):
        return array.double()  # type: ignore[no-any-return]
    if is_jax(array):
        return array  # type: ignore[no-any-return]
    if is_tracing():
        return array.astype(np.float64)  # type: ignore[no-any-return]
    return np.ascontiguousarray(array, dtype=np.float64)


def _plain_number(value: Any) -> float | None:
    """A Python number (the usual case) as a float; None for anything else."""
    if type(value) is not int and type(value) is not float:
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _numbers(factor: BaseFactor, word: str, value: ArrayLike) -> npt.NDArray[Any]:
    if is_tensor(value) and is_hidden(value):  # stays a tensor until the graph is solved
        return value.detach()  # type: ignore[union-attr,return-value]
    if is_jax(value) and is_hidden(value):
        if not is_real(value.dtype):  # type: ignore[union-attr]
            raise ShapeError(f"{factor.name}: {word} must be numbers, got {shown(value)}.")
        return value  # type: ignore[return-value]
    if is_tracing():
        return to_numpy(value)
    try:
        array = to_numpy(value)
        if array.dtype == object:  # integers beyond 64 bits; not strings, which NumPy would parse
            kinds = {type(v) for v in array.flat}
            array = array.astype(np.float64) if kinds <= {int, float} else array
    except OverflowError:
        raise GraphError(
            f"{factor.name}: {word} is beyond the range of floating-point numbers, got "
            f"{shown(value)}."
        ) from None
    except ValueError:  # lists of different lengths
        raise ShapeError(
            f"{factor.name}: {word} must be an array of numbers, got {shown(value)}."
        ) from None
    if array.dtype.kind not in "fiub":
        raise ShapeError(
            f"{factor.name}: {word} must be numbers, got {shown(value)} (dtype {array.dtype})."
        )
    return array

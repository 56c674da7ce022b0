"""Checks of arguments and scores, shared by all fronts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax.arrays import FloatArray

__all__ = [
    "Layout",
    "check_scores",
    "finite_number",
    "one_of",
    "positive_number",
    "shown",
    "whole_number",
]

Layout = Sequence[tuple[str, tuple[int, ...]]]


def positive_number(name: str, value: Any, error: type[ValueError] = ValueError) -> float:
    """The number, if it is positive and finite.

    Raises:
        ValueError: if it is not; the message names it.
    """
    if type(value) is float and 0 < value < math.inf:  # the usual case, checked at every query
        return value
    number = _number(value)
    if number is None or not 0 < number < math.inf:
        raise error(f"{name} must be a positive number, got {shown(value)}.")
    return number


def finite_number(name: str, value: Any, error: type[ValueError] = ValueError) -> float:
    """The number, if it is finite.

    Raises:
        ValueError: if it is not; the message names it.
    """
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise error(f"{name} must be a finite number, got {shown(value)}.")
    return number


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """The number, if it is whole and from `least` to `most`.

    Raises:
        ValueError: if it is not; the message names it.
    """
    if type(value) is int and least <= value <= most:
        return value
    number = _number(value)
    if number is None or not least <= number <= most or number != math.floor(number):
        raise ValueError(
            f"{name} must be a whole number from {least} to {most}, got {shown(value)}."
        )
    return int(number)


def one_of(name: str, value: Any, choices: Collection[str | None]) -> Any:
    """The value, if it is one of the choices.

    Raises:
        ValueError: if it is not; the message names the choices.
    """
    if (value is None or isinstance(value, str)) and value in choices:
        return value
    raise ValueError(f"{name} must be one of {list(choices)}, got {shown(value)}.")


def _number(value: Any) -> float | None:
    """A Python, NumPy or torch number as a float, NaN if it is too large; None for others."""
    if isinstance(value, (str, bytes, bool)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan
    except (TypeError, ValueError, RuntimeError):
        return None


def shown(value: Any) -> str:
    """How a message shows an invalid value, in a few words."""
    try:
        text = repr(value)
    except ValueError:  # an integer with too many digits
        return f"a {type(value).__name__} that is too large"
    return text if len(text) <= 60 else text[:56] + " ..."


def check_scores(
    scores: FloatArray,
    mask: npt.NDArray[np.bool_] | None,
    layout: Layout,
    batch_shape: Sequence[int],
    allow_minus_inf: bool | Sequence[bool] = True,
) -> None:
    """Raises for the first NaN or +inf where the mask is set.

    Args:
        scores: `(B, n)`.
        mask: `(B, n)`, or None.
        layout: names and shapes of what is laid out along the second axis.
        batch_shape: the shape of the first axis.
        allow_minus_inf: whether −inf is legal: for everything, or for each entry of the layout.

    Raises:
        ValueError: the message names the object and the first index.
    """
    bad = np.isnan(scores) | (scores == np.inf)
    sizes = [math.prod(shape) for _, shape in layout]
    if isinstance(allow_minus_inf, bool):
        allow_minus_inf = [allow_minus_inf] * len(sizes)
    bad |= (scores == -np.inf) & ~np.repeat(np.array(allow_minus_inf, dtype=bool), sizes)
    if mask is not None:
        bad &= mask
    if not bad.any():
        return
    instance, column = np.argwhere(bad)[0]
    number = scores[instance, column]
    offset = int(column)
    for (name, shape), size, allowed in zip(layout, sizes, allow_minus_inf, strict=True):
        if offset < size:
            index = list(np.unravel_index(offset, shape)) if shape else []
            if batch_shape:
                index = [*np.unravel_index(int(instance), tuple(batch_shape)), *index]
            elif len(scores) > 1:  # the batch dimensions are unknown here
                index = [instance, *index]
            what = "NaN" if np.isnan(number) else f"{number:+}"
            legal = "finite numbers or -inf" if allowed else "finite numbers"
            raise ValueError(
                f"{name}: scores must be {legal}, got {what} at index {tuple(map(int, index))} "
                f"(batch dimensions first)."
            )
        offset -= size

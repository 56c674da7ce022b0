"""Padding: masks, lengths, and counts that depend on the length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from factormax.arrays import is_hidden, is_tensor
from factormax.checks import shown
from factormax.errors import GraphError, ShapeError

__all__ = [
    "Count",
    "Lengths",
    "Mask",
    "at_most",
    "check_count",
    "count_of_call",
    "is_out_of_sight",
    "number_of",
    "presence",
]

#: One per side: a tensor for a square or flat layer, else a tuple, each of which may be None.
Lengths: TypeAlias = "Tensor | Sequence[Any] | int | None"
Mask: TypeAlias = "Tensor | Sequence[Tensor | None] | None"
#: A whole number, or a fraction of the length.
Count: TypeAlias = "int | float"


def presence(
    name: str, scores: Tensor, axes: tuple[str, ...], mask: Mask, lengths: Lengths
) -> Tensor | None:
    """Which variables are present, boolean, in the shape of the scores; None for all of them.

    A score of −inf removes a variable, as a mask does.

    Args:
        name: what messages call the layer.
        scores: `(*batch, *axes)`.
        axes: what the axes count; axes with the same name (the words of a tree) share padding.
        mask: with as many dimensions as the scores; or per side, `(*batch, size of the side)`.
            Sizes of 1 and missing leading dimensions are broadcast.
        lengths: per side, `(*batch,)`, broadcast likewise.

    Raises:
        ShapeError: if they do not fit the scores.
        GraphError: if a mask is not boolean, or a length is not a whole number in range.
    """
    found: list[Tensor] = []
    if mask is not None or lengths is not None:
        found = _given(name, scores, axes, mask, lengths)
    if is_out_of_sight(scores) or _least(scores) == -math.inf:
        found.append(~torch.isneginf(scores))
    if not found:
        return None
    present = found[0]
    for other in found[1:]:
        present = present & other
    return present.expand(scores.shape)


def _least(scores: Tensor) -> float:
    """The smallest score: finding it is quicker than testing each for −inf."""
    return scores.detach().amin().item() if scores.numel() else 0.0


def _given(
    name: str, scores: Tensor, axes: tuple[str, ...], mask: Mask, lengths: Lengths
) -> list[Tensor]:
    """What masks and lengths say is present, each broadcastable to the scores."""
    batch = tuple(scores.shape[: scores.ndim - len(axes)])
    sides = dict(zip(axes, scores.shape[len(batch) :], strict=True))
    found = [
        spread
        for (side, size), given in zip(sides.items(), _by_side(name, lengths, sides), strict=True)
        if given is not None
        for spread in _along(side, axes, _from_lengths(name, given, batch, side, size))
    ]
    if mask is not None and not isinstance(mask, (tuple, list)):
        mask = as_tensor(name, "mask", mask)
        if mask.ndim == scores.ndim:
            found.append(_checked_mask(name, mask, tuple(scores.shape)))
            mask = None
    found += [
        spread
        for (side, size), given in zip(sides.items(), _by_side(name, mask, sides), strict=True)
        if given is not None
        for spread in _along(side, axes, _checked_mask(name, given, (*batch, size)))
    ]
    return [part.to(scores.device) for part in found]


def is_out_of_sight(tensor: Tensor) -> bool:
    """Whether its numbers can't be read: in a transform, or while a CUDA graph is recorded."""
    return is_hidden(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def as_tensor(name: str, word: str, given: Any) -> Tensor:
    """The argument `word` of a layer as a tensor.

    Raises:
        GraphError: if it does not hold numbers; the message names it.
    """
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise GraphError(f"{name}: {word} must hold numbers, got {shown(given)}.") from None


def check_count(name: str, word: str, count: Count) -> Count:
    """The count, if it is a whole number, or a fraction of the length.

    Raises:
        GraphError: if it is neither.
    """
    if isinstance(count, (int, np.integer)) and not isinstance(count, bool) and 0 <= count < 2**31:
        return int(count)
    if isinstance(count, float) and 0 < count <= 1:
        return float(count)
    raise GraphError(
        f"{name}: {word} must be a non-negative whole number (int), or a fraction of the length (a "
        f"float above 0 and at most 1), got {shown(count)}."
    )


def count_of_call(
    name: str, word: str, count: Count | Tensor, batch: tuple[int, ...]
) -> Count | Tensor:
    """The count given to a call: a number, as for the layer, or one whole number per instance.

    A float tensor can't hold fractions of the length: its numbers must be whole, and readable.

    Raises:
        GraphError: if it is neither.
        ShapeError: if it is not broadcastable to the batch.
    """
    if not isinstance(count, Tensor):
        return check_count(name, word, count)
    if count.is_floating_point() and not (count.requires_grad or is_out_of_sight(count)):
        wrong = (count.frac() != 0) | (count.abs() >= 2**31)  # frac of inf or NaN is NaN
        if wrong.any():
            raise GraphError(
                f"{name}: {word} as a tensor must hold whole numbers, got "
                f"{count[wrong][0].item():g}."
            )
        count = count.long()
    _check_whole(name, word, count, batch)
    return count.expand(batch)


def number_of(count: Count | Tensor, there: Tensor | int) -> Any:
    """The number that a count means if `there` are present, `(*batch,)` or a number.

    A fraction is rounded up (0.1 of 30 is 3, although the product of the floats is above 3).
    """
    if isinstance(count, (int, Tensor)):
        return count
    if isinstance(there, int):
        return math.ceil(count * there - 1e-9)
    return torch.ceil(count * there.double() - 1e-9).long()


def at_most(number: Tensor | int, there: Tensor | int) -> Tensor | int:
    """The smaller of the two, per instance if either of them is."""
    if isinstance(number, Tensor) and isinstance(there, Tensor):
        return number.to(there.device).minimum(there)
    if isinstance(number, Tensor):
        return number.clamp(max=there)
    return there.clamp(max=number) if isinstance(there, Tensor) else min(number, there)


def _by_side(name: str, given: Any, sides: Mapping[str, int]) -> list[Any]:
    """What is given for each side: the argument itself if there is one side, else a tuple."""
    if given is None:
        return [None] * len(sides)
    if len(sides) == 1:
        return [given]
    if not isinstance(given, (tuple, list)) or len(given) != len(sides):
        what = f"a tensor of shape {tuple(given.shape)}" if is_tensor(given) else repr(given)
        raise ShapeError(
            f"{name}: give lengths and masks as a tuple of {len(sides)}, for ({', '.join(sides)}), "
            f"each of which may be None; a mask may also have the shape of the scores. Got {what}."
        )
    return list(given)


def _along(side: str, axes: tuple[str, ...], present: Tensor) -> list[Tensor]:
    """A mask of one side, `(*batch, size)`, spread along each axis with that name."""
    batch, size = present.shape[:-1], present.shape[-1]
    places = [i for i, axis in enumerate(axes) if axis == side]
    return [
        present.reshape(*batch, *[size if i == place else 1 for i in range(len(axes))])
        for place in places
    ]


def _check_whole(name: str, word: str, given: Tensor, batch: tuple[int, ...]) -> None:
    """Raises unless it holds whole numbers and is broadcastable to the batch."""
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise GraphError(f"{name}: {word} must be whole numbers, got dtype {given.dtype}.")
    shape = tuple(given.shape)
    if not _fits(shape, batch):
        raise ShapeError(
            f"{name}: {word} must be broadcastable to the batch shape, {batch}, got {shape}."
        )


def _from_lengths(name: str, given: Any, batch: tuple[int, ...], side: str, size: int) -> Tensor:
    """The mask that lengths stand for, `(*batch, size)`."""
    lengths = as_tensor(name, "lengths", given)
    _check_whole(name, "lengths", lengths, batch)
    if not is_out_of_sight(lengths):
        bad = (lengths < 0) | (lengths > size)
        if bad.any():
            raise GraphError(
                f"{name}: lengths must be between 0 and {size}, the size of the scores along "
                f"{side}, got {int(lengths[bad][0])}."
            )
    return torch.arange(size, device=lengths.device) < lengths[..., None]


def _checked_mask(name: str, given: Any, shape: tuple[int, ...]) -> Tensor:
    mask = as_tensor(name, "mask", given)
    if mask.dtype != torch.bool:
        raise GraphError(
            f"{name}: a mask must be boolean, True for what is present, got dtype {mask.dtype}."
        )
    if not _fits(tuple(mask.shape), shape):
        raise ShapeError(
            f"{name}: the mask must be broadcastable to {shape}, got {tuple(mask.shape)}."
        )
    return mask


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of shape `found` is broadcastable to `shape`."""
    return len(found) <= len(shape) and all(
        f in (1, s) for f, s in zip(found[::-1], shape[::-1], strict=False)
    )

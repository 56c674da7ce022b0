"""What messages call single variables and groups of variables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from factormax.arrays import IndexArray

if TYPE_CHECKING:
    from factormax.record import Record


def scalar_name(record: Record, index: int) -> str:
    """The name of a single variable, for example `u[2, 3]`."""
    tensor = next(t for t in reversed(record.tensors) if t.start <= index)
    place = np.unravel_index(index - tensor.start, tensor.shape)
    return f"{tensor.name}[{', '.join(str(int(i)) for i in place)}]"


def literals_name(
    record: Record, index: IndexArray, negated: npt.NDArray[np.bool_] | None = None
) -> str:
    """The name of some variables, for example `u[3, :]` or `a[0], ~b[2]`."""
    flags = np.zeros(len(index), dtype=bool) if negated is None else negated
    starts = np.array([t.start for t in record.tensors])
    owner = np.searchsorted(starts, index, side="right") - 1
    # One name for each run of variables of one tensor, negated or not.
    new = np.flatnonzero((np.diff(owner) != 0) | (np.diff(flags.astype(int)) != 0)) + 1
    names: list[str] = []
    for run in np.split(np.arange(len(index)), new):
        sign = "~" if flags[run[0]] else ""
        tensor = record.tensors[owner[run[0]]]
        text = _slice_text(index[run] - tensor.start, tensor.shape)
        texts = (
            [scalar_name(record, int(j)) for j in index[run[:5]]]
            if text is None
            else [tensor.name + text]
        )
        names += [sign + t for t in texts]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _slice_text(places: IndexArray, shape: tuple[int, ...]) -> str | None:
    """The slice of an array of this shape with these flat places, in order; None if there is none.

    Along each axis it takes one entry, all, or a run of neighbours.
    """
    texts, ranges = [], []
    for own, size in zip(np.unravel_index(places, shape), shape, strict=True):
        first, last = int(own.min()), int(own.max())
        ranges.append(np.arange(first, last + 1))
        whole = first == 0 and last == size - 1 and size > 1
        one = str(first) if first == last else f"{first}:{last + 1}"
        texts.append(":" if whole else one)
    if len(places) != math.prod([len(r) for r in ranges]):
        return None
    grid = np.ravel_multi_index(np.meshgrid(*ranges, indexing="ij"), shape) if shape else places
    if not np.array_equal(np.ravel(grid), places):
        return None
    return f"[{', '.join(texts)}]" if any(t != ":" for t in texts) else ""

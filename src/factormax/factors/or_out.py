"""The last is the disjunction of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from factormax.arrays import IndexArray
from factormax.factors.base import EQUALITY, INEQUALITY, OR_OUT, BaseFactor, Group, RowBlocks
from factormax.variable import Variable

__all__ = ["OrOut"]


class OrOut(BaseFactor):
    r"""The last is on exactly if one of the others is: $\mu_i \le \mu_d \le \sum_{i<d} \mu_i$.

    Args:
        variables: a variable, a slice, or a list of them; the last one is the output.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `OrOut(a, b)`. The list `OrOut([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    block_kind = OR_OUT

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        *others: Variable | int | tuple[int, ...],
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        self._take_side_by_side(variables, others, axis)

    @classmethod
    def row_lengths(cls, d: int) -> list[int]:
        """One row for each other, and one for their sum; a single other needs only that."""
        return [2] * (d - 1) + [d] if d != 2 else [2]

    @classmethod
    def row_kinds(cls, d: int) -> list[int]:
        """With a single input the output equals it."""
        return [INEQUALITY] * d if d != 2 else [EQUALITY]

    @classmethod
    def columns(cls, index: IndexArray) -> IndexArray:
        """Entries (i, out) of the first d - 1 rows, then all."""
        k, d = index.shape
        if d == 2:
            return index
        implications = np.stack(np.broadcast_arrays(index[:, :-1], index[:, -1:]), axis=-1)
        return np.concatenate([implications.reshape(k, 2 * (d - 1)), index], axis=1)

    @classmethod
    def lower(cls, group: Group) -> RowBlocks:
        """Rows `l_i - l_out <= 0` for the d - 1 others, then `l_out - sum l_i <= 0`."""
        k, d = group.negated.shape
        sign = np.where(group.negated, -1.0, 1.0)
        offset = group.negated.astype(np.float64)
        coef = np.concatenate([-sign[:, :-1], sign[:, -1:]], axis=1)
        rhs = offset[:, :-1].sum(axis=1, keepdims=True) - offset[:, -1:]
        if d != 2:
            ends = np.stack(np.broadcast_arrays(sign[:, :-1], -sign[:, -1:]), axis=-1)
            coef = np.concatenate([ends.reshape(k, 2 * (d - 1)), coef], axis=1)
            rhs = np.concatenate([offset[:, -1:] - offset[:, :-1], rhs], axis=1)
        return RowBlocks(coef[None], rhs[None])

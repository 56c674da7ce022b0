"""The last is the disjunction of the others."""

from __future__ import annotations

from factormax._core import BlockKind
from factormax.factors.base import Row, RowFactor

__all__ = ["OrOut"]


class OrOut(RowFactor):
    r"""The last is on if and only if any other is: $\mu_i \le \mu_d \le \sum_{i<d} \mu_i$.

    Args:
        variables: a variable, a slice, or a list of them; the last one is the output.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `OrOut(a, b)`. The list `OrOut([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    _block_kind = BlockKind.or_out

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """No other exceeds the last, nor the last their sum; with one other, they are equal."""
        last = Row([-1.0] * (d - 1) + [1.0], 0.0, equality=d == 2)
        if d == 2:
            return [last]
        return [Row([1.0, -1.0], 0.0, literals=[i, d - 1]) for i in range(d - 1)] + [last]

    @classmethod
    def _num_rows(cls, d: int) -> int:
        """One row per variable, or a single equation."""
        return d if d != 2 else 1

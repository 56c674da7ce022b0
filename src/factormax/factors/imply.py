"""All but the last imply the last."""

from __future__ import annotations

from factormax.factors.base import Row, RowFactor

__all__ = ["Imply"]


class Imply(RowFactor):
    r"""If all the others are on, so is the last: $\sum_{i<d} \mu_i - \mu_d \le d - 2$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Imply(a, b)`. The list `Imply([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    _fixed_rows = 1

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """The sum of the d − 1 premises, minus the last, is at most d − 2."""
        return [Row([1.0] * (d - 1) + [-1.0], d - 2.0)]

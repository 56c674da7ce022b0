"""At most one is on."""

from __future__ import annotations

from factormax.factors.base import Row, RowFactor

__all__ = ["AtMostOne"]


class AtMostOne(RowFactor):
    r"""At most one of the variables is on: $\sum_i \mu_i \le 1$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `AtMostOne(a, b)`. The list `AtMostOne([a, b])` is one factor over
            all.
        axis: one factor along this axis; by default one factor over everything.
    """

    _fixed_rows = 1

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """Their sum is at most 1."""
        return [Row([1.0] * d, 1.0)]

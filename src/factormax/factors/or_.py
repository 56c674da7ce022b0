"""At least one is on."""

from __future__ import annotations

from factormax.factors.base import Row, RowFactor

__all__ = ["Or"]


class Or(RowFactor):
    r"""At least one of the variables is on: $\sum_i \mu_i \ge 1$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Or(a, b)`. The list `Or([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    _fixed_rows = 1

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """Their sum is at least 1."""
        return [Row([-1.0] * d, -1.0)]

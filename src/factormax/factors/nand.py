"""Not all are on."""

from __future__ import annotations

from factormax.factors.base import Row, RowFactor

__all__ = ["Nand"]


class Nand(RowFactor):
    r"""Not all of the d variables are on: $\sum_i \mu_i \le d - 1$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Nand(a, b)`. The list `Nand([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    _fixed_rows = 1

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """Their sum is at most d − 1."""
        return [Row([1.0] * d, d - 1.0)]

"""The last says whether one of the others is on; no two of them are."""

from __future__ import annotations

from factormax.factors.base import Row, RowFactor

__all__ = ["XorOut"]


class XorOut(RowFactor):
    r"""At most one of the others is on, and the last is on if and only if one is.

    $$\sum_{i<d} \mu_i = \mu_d$$

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `XorOut(a, b)`. The list `XorOut([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    _fixed_rows = 1

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """The sum of the others minus the last is 0."""
        return [Row([1.0] * (d - 1) + [-1.0], 0.0, equality=True)]

"""The last is the conjunction of the others."""

from __future__ import annotations

from factormax.factors.base import Row
from factormax.factors.or_out import OrOut

__all__ = ["AndOut"]


class AndOut(OrOut):
    r"""The last variable is on if and only if all the others are.

    $$\sum_{i<d} \mu_i - d + 2 \le \mu_d \le \mu_i$$

    By De Morgan, it is `OrOut` with every variable negated.

    Args:
        variables: a variable, a slice, or a list of them; the last one is the output.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `AndOut(a, b)`. The list `AndOut([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """The rows of `OrOut` over the negated literals."""
        last = Row([1.0] * (d - 1) + [-1.0], d - 2.0, equality=d == 2)
        if d == 2:
            return [last]
        return [Row([-1.0, 1.0], 0.0, literals=[i, d - 1]) for i in range(d - 1)] + [last]

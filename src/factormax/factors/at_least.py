"""At least a given number is on."""

from __future__ import annotations

from factormax.factors.base import Row
from factormax.factors.counting import CountingFactor

__all__ = ["AtLeast"]


class AtLeast(CountingFactor):
    r"""At least `count` of the variables are on: $\sum_i \mu_i \ge c$.

    Args:
        variables: a variable, a slice, or a list of them.
        count: a whole number for all factors; or one per factor, in the shape that `axis` leaves;
            or also one per instance, with the batch dimensions in front, `(*batch, ...)`.
        axis: one factor along this axis; by default one factor over everything.

    Raises:
        GraphError: if the count is negative or not whole.
        InfeasibleError: if it is above the number of variables.
    """

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """Their sum is at least the count."""
        return [Row([-1.0] * d, -1.0, bound_param=0)]

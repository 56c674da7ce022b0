"""At least a given number is on."""

from __future__ import annotations

import numpy as np

from factormax.arrays import FloatArray
from factormax.factors.base import Group
from factormax.factors.counting import CountingFactor

__all__ = ["AtLeast"]


class AtLeast(CountingFactor):
    r"""At least `count` of the variables are on: $\sum_i \mu_i \ge c$.

    Args:
        variables: a variable, a slice, or a list of them.
        count: a whole number for all factors; of the shape that `axis` leaves, for one each;
            with the batch dimensions in front, `(*batch, ...)`, for one for each instance.
        axis: one factor along this axis; by default one factor over everything.

    Raises:
        GraphError: if the count is negative or not whole.
        InfeasibleError: if it is above the number of variables.
    """

    @classmethod
    def coefficients(cls, group: Group) -> FloatArray:
        """A lower bound, as an upper bound of the negative."""
        return np.full((1, 1, 1), -1.0)

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """The negative of the count."""
        return -super().bound(group)

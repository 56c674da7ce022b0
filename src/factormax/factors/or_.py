"""At least one is on."""

from __future__ import annotations

import numpy as np

from factormax.arrays import FloatArray
from factormax.factors.base import Group, LinearFactor

__all__ = ["Or"]


class Or(LinearFactor):
    r"""At least one of the variables is on: $\sum_i \mu_i \ge 1$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Or(a, b)`. The list `Or([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    @classmethod
    def coefficients(cls, group: Group) -> FloatArray:
        """A lower bound, as an upper bound of the negative."""
        return np.full((1, 1, 1), -1.0)

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """At least 1."""
        return np.full((1, 1), -1.0)

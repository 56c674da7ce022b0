"""All but the last imply the last."""

from __future__ import annotations

import numpy as np

from factormax.arrays import FloatArray
from factormax.factors.base import Group, LinearFactor, last_negative

__all__ = ["Imply"]


class Imply(LinearFactor):
    r"""If all but the last are on, the last is: $\sum_{i<d} \mu_i - \mu_d \le d - 2$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Imply(a, b)`. The list `Imply([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    @classmethod
    def coefficients(cls, group: Group) -> FloatArray:
        """1, and -1 for the last."""
        return last_negative(group)

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """One less than the number of premises."""
        return np.full((1, 1), group.negated.shape[1] - 2.0)

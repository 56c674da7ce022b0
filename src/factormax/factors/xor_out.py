"""The last says whether exactly one of the others is on."""

from __future__ import annotations

import numpy as np

from factormax.arrays import FloatArray
from factormax.factors.base import Group, LinearFactor, last_negative

__all__ = ["XorOut"]


class XorOut(LinearFactor):
    r"""The last is on exactly if one of the others is, and of those at most one is.

    $$\sum_{i<d} \mu_i = \mu_d$$

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `XorOut(a, b)`. The list `XorOut([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    equality = True

    @classmethod
    def coefficients(cls, group: Group) -> FloatArray:
        """1, and -1 for the last."""
        return last_negative(group)

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """The others minus the last: 0."""
        return np.zeros((1, 1))

"""Not all are on."""

from __future__ import annotations

import numpy as np

from factormax.arrays import FloatArray
from factormax.factors.base import Group, LinearFactor

__all__ = ["Nand"]


class Nand(LinearFactor):
    r"""Not all of the d variables are on: $\sum_i \mu_i \le d - 1$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Nand(a, b)`. The list `Nand([a, b])` is one factor over all.
        axis: one factor along this axis; by default one factor over everything.
    """

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """All but one."""
        return np.full((1, 1), group.negated.shape[1] - 1.0)

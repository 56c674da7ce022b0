"""At most one is on."""

from __future__ import annotations

from factormax.arrays import FloatArray
from factormax.factors.base import ONE, Group, LinearFactor

__all__ = ["AtMostOne"]


class AtMostOne(LinearFactor):
    r"""At most one of the variables is on: $\sum_i \mu_i \le 1$.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `AtMostOne(a, b)`. The list `AtMostOne([a, b])` is one factor over
            all.
        axis: one factor along this axis; by default one factor over everything.
    """

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """At most 1."""
        return ONE

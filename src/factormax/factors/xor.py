"""Exactly one is on."""

from __future__ import annotations

from factormax.factors.base import Row, RowFactor

__all__ = ["Xor"]


class Xor(RowFactor):
    r"""Exactly one of the variables is on: $\sum_i \mu_i = 1$. Alone, it is sparsemax.

    Args:
        variables: a variable, a slice, or a list of them.
        *others: more variables of equal or broadcastable shapes, side by side: one factor for
            each position, as in `Xor(a, b)`. The list `Xor([a, b])` is one factor over all.
        axis: one factor along this axis, which a sum would reduce; None: one over everything.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([[1.0, 0.5, -1.0], [0.0, 3.0, 0.0]]))
        >>> _ = fg.add(fm.Xor(u, axis=1))
        >>> _ = fg.solve()
        >>> u.value.tolist()
        [[0.75, 0.25, 0.0], [0.0, 1.0, 0.0]]
    """

    _fixed_rows = 1

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """Their sum is 1."""
        return [Row([1.0] * d, 1.0, equality=True)]

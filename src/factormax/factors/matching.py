"""Matchings."""

from __future__ import annotations

from typing import ClassVar

from factormax.errors import InfeasibleError
from factormax.factors.structured import MATCHING, StructuredFactor
from factormax.variable import Variable

__all__ = ["Matching"]


class Matching(StructuredFactor):
    """Every row is matched to exactly one column, every column to at most one row.

    The same constraint as `Xor(u, axis=1)` with `AtMostOne(u, axis=0)`, but as one factor: its
    solution comes as a few matchings with probabilities.

    Args:
        u: `(m, n)`, m ≤ n. A row that is all masked is absent; a single masked entry is forbidden.

    Raises:
        InfeasibleError: if there are more rows than columns.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([[1.0, 0.9], [0.8, 0.1]]))
        >>> matching = fg.add(fm.Matching(u))
        >>> _ = fg.solve()
        >>> matching.probs.round(2), matching.structures[0]
        (array([0.65, 0.35]), array([[0., 1.],
               [1., 0.]]))
    """

    axes: ClassVar[tuple[str, ...]] = ("m", "n")

    def __init__(self, u: Variable) -> None:
        self._take_structured(u)
        rows, cols = self.variable_shape
        if rows > cols:
            raise InfeasibleError(
                f"{self.name}: {rows} rows can't be matched to {cols} columns. u must be (m, n) "
                f"with m ≤ n: transpose it, or use Xor and AtMostOne."
            )
        self.oracle = MATCHING
        self.oracle_shape = (rows, cols)
        self.slots = rows

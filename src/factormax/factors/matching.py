"""Matchings."""

from __future__ import annotations

from typing import ClassVar

from factormax._core import OracleKind
from factormax.factors.structured import StructuredFactor
from factormax.variable import Variable

__all__ = ["Matching"]


class Matching(StructuredFactor):
    """Every row is matched to exactly one column, and every column to at most one row.

    With more rows than columns it is the other way round: every column is matched to exactly one
    row, and every row to at most one column. So the shorter side of `u` is matched completely.

    This is the same constraint as `Xor(u, axis=1)` with `AtMostOne(u, axis=0)`, but as one factor:
    its solution comes as a few matchings with probabilities.

    Args:
        u: `(m, n)`. A row or a column that is all masked is absent; a single masked entry is
            forbidden.

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

    _axes: ClassVar[tuple[str, ...]] = ("m", "n")

    def __init__(self, u: Variable) -> None:
        self._take_structured(u)
        rows, cols = self.variable_shape
        if rows > cols:
            self._transposed = True
            self._scope = (u.T.part((0, 1)),)
            rows, cols = cols, rows
        self._oracle = OracleKind.matching
        self._oracle_shape = (rows, cols)
        self._slots = rows

"""A score for every joint state of a few multi-valued variables."""

from __future__ import annotations

from collections.abc import Sequence

from factormax.arrays import ArrayLike
from factormax.errors import GraphError, ShapeError
from factormax.factors.scores import as_scores, take_scores
from factormax.factors.structured import TABLE, StructuredFactor
from factormax.variable import Variable

__all__ = ["Table"]


class Table(StructuredFactor):
    """One-hot groups of sizes K1 … Km, exactly one state of each, and a score for the joint state.

    After a query, `value` holds the joint marginals, in the shape of the scores.

    Args:
        variables: a list of m groups; or one variable of shape `(m, K)`, a group a row. A masked
            state is forbidden. A group that is all masked is absent: the others then still have
            exactly one state each, but no joint score.
        scores: `(K1, …, Km)`; `(*batch, K1, …, Km)` for each instance its own. −inf forbids.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([0.3, 0.0]))
        >>> v = fg.variable_from(np.array([0.0, 0.2, 0.0]))
        >>> table = fg.add(fm.Table([u, v], np.array([[0.5, 0.0, 0.0], [0.0, 0.5, 0.0]])))
        >>> _ = fg.solve()
        >>> table.value.round(3)
        array([[0.514, 0.   , 0.014],
               [0.   , 0.471, 0.   ]])
    """

    def __init__(self, variables: Variable | Sequence[Variable], scores: ArrayLike) -> None:
        groups = variables
        if isinstance(variables, Variable):
            groups = list(variables) if variables.ndim == 2 else [variables]
        self._take_structured(groups)
        if any(u.size == 0 for u in self._given):
            raise GraphError(f"{self.name}: a group has no states.")
        sizes = tuple(u.size for u in self._given)
        given = as_scores(self.name, "scores", scores)
        found, batch = tuple(given.shape), self.graph.batch_shape or ()
        if found not in (sizes, (*batch, *sizes)):
            wanted = f"{sizes} (shared)" + (f" or {(*batch, *sizes)}" if batch else "")
            raise ShapeError(
                f"{self.name}: scores must have shape {wanted}, one axis a group, got {found}."
            )
        self.score_parts = (take_scores(self, "scores", given, sizes, allow_minus_inf=True),)
        self.oracle = TABLE
        self.oracle_shape = sizes
        self.slots = len(sizes)

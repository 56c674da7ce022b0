"""A score for every joint state of a few multi-valued variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from factormax._core import OracleKind
from factormax.arrays import ArrayLike
from factormax.errors import GraphError, ShapeError
from factormax.factors.scores import as_scores, take_scores
from factormax.factors.structured import StructuredFactor
from factormax.variable import Variable

__all__ = ["Table"]


class Table(StructuredFactor):
    """One-hot groups of sizes K1 … Km: exactly one state of each is on; each joint state scores.

    After a query, `value` holds the joint marginals, in the shape of the scores.

    A list of groups of shape `(N, K1)`, …, `(N, Km)` makes N tables in one call, one per row: with
    index arrays i and j, `Table([u[i], u[j]], scores)` makes one table for each edge of a graph
    over the rows of u. Then `structures` is `(*batch, N, K, …)`, and `probs` `(*batch, N, K)`.

    Args:
        variables: a list of m groups; or one variable of shape `(m, K)`, one group per row. A
            masked state is forbidden. A group that is all masked is absent: the others then still
            have exactly one state each, but no joint score.
        scores: `(K1, …, Km)`; `(*batch, K1, …, Km)` if they are per instance. −inf forbids. For N
            tables, `(N, K1, …, Km)`; `(K1, …, Km)` or an N of 1 is shared by all of them.

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
        several = self._is_several(groups)
        self._take_structured(groups, 1 if several else None)
        sizes = tuple([u.shape[1] if several else u.size for u in self._given])
        if any(size == 0 for size in sizes):
            raise GraphError(f"{self.name}: a group has no states.")
        given = as_scores(self, "scores", scores)
        self._check_scores(tuple(given.shape), sizes)
        shape = (*self._group_shape, *sizes)
        self._score_parts = (take_scores(self, "scores", given, shape, allow_minus_inf=True),)
        self._oracle = OracleKind.table
        self._oracle_shape = sizes
        self._slots = len(sizes)

    def _is_several(self, groups: Any) -> bool:
        """Whether the groups have two dimensions, of which the first counts tables."""
        given = list(groups) if isinstance(groups, (list, tuple)) else []
        shapes = [u.shape for u in given if isinstance(u, Variable)]
        if all(len(shape) < 2 for shape in shapes):
            return False
        if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
            raise ShapeError(
                f"{self.kind} over {', '.join([u.name for u in given[:4]])}: the groups of a table "
                f"have shapes (K1,), …, (Km,), and those of N tables (N, K1), …, (N, Km), "
                f"got {shapes}."
            )
        return True

    def _check_scores(self, found: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        batch = self._record.batch_shape or ()
        full = (*self._group_shape, *sizes)
        fits = [full, (*batch, *full)]
        if self._group_shape:  # or the same for all the tables
            fits += [sizes, (1, *sizes), (*batch, 1, *sizes)]
        if found not in fits:
            wanted = f"{full} (shared)" + (f" or {(*batch, *full)}" if batch else "")
            raise ShapeError(
                f"{self.name}: scores must have shape {wanted}, one axis per group, got {found}."
            )

"""A score for two variables being on together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from factormax import _core
from factormax.arrays import ArrayLike
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor
from factormax.factors.scores import as_scores, take_scores
from factormax.scope import AnyPart, ListedPart, Scope
from factormax.variable import Variable

__all__ = ["Pair"]


class Pair(BaseFactor):
    r"""Adds `scores` where both variables are on: $s\,\mu_{12}$ over the local polytope.

    $$\max(0, \mu_1 + \mu_2 - 1) \le \mu_{12} \le \min(\mu_1, \mu_2).$$

    One call pairs each entry of `u` with the corresponding entry of `v`, so thousands of pairs cost
    no more to build than one. After a query, `value` holds $\mu_{12}$, in the shape of the scores
    as they were given.

    Args:
        u: the first variables, or a list of them (then flat, one after the other).
        v: the second variables, of the same shape.
        scores: in that shape, or broadcastable to it, `(1,)` included; `(*batch, ...)` if they are
            per instance.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([0.5, -0.25]))
        >>> pair = fg.add(fm.Pair(u[0], u[1], 1.0))
        >>> _ = fg.solve()
        >>> u.value, pair.value
        (array([0.625, 0.625]), array(0.625))
    """

    def __init__(
        self,
        u: Variable | Sequence[Variable],
        v: Variable | Sequence[Variable],
        scores: ArrayLike,
    ) -> None:
        first, second = self._end(u), self._end(v)
        self._given = [*first, *second]
        shapes = [
            end[0].shape if len(end) == 1 else (sum(w.size for w in end),)
            for end in (first, second)
        ]
        if shapes[0] != shapes[1]:
            raise ShapeError(
                f"{self.name}: both must have the same shape, got {shapes[0]} and {shapes[1]}."
            )
        parts = [_flat(end) for end in (first, second)]
        apart = not {w.position for w in first} & {w.position for w in second}
        self._keep(Scope.of(parts, shapes[0]), apart)
        given = as_scores(self, "scores", scores)
        shape = self._group_shape
        if shape == () and tuple(given.shape) == (1,) and self._record.batch_dims != 1:
            shape = (1,)  # with one batch dimension, the 1 is that dimension instead
        self._score_parts = (take_scores(self, "scores", given, shape),)

    @property
    def _complete(self) -> bool:
        return bool(self._score_parts)

    @property
    def _key(self) -> tuple[Any, ...]:
        return "Pair", self._scope

    def _group(self) -> _core.Group:
        return _core.Group.pairs([p.core() for p in self._scope])

    @property
    def scores(self) -> Any:
        """The scores as they were given."""
        return self._score_parts[0].given

    @staticmethod
    def _end(given: Variable | Sequence[Variable]) -> list[Variable]:
        ends: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
        for end in ends:
            if not isinstance(end, Variable):
                raise GraphError(
                    f"Pair takes two variables (or lists of them) and their scores, "
                    f"got {type(end).__name__}. Make variables with fg.variable_from(scores)."
                )
        if not ends:
            raise GraphError("Pair: the list of variables is empty.")
        return ends


def _flat(end: list[Variable]) -> AnyPart:
    """The variables of one end of k pairs."""
    if len(end) == 1:
        return end[0].part(())
    literals = [2 * w.index.reshape(-1, 1) + int(w.negated) for w in end]
    return ListedPart(np.concatenate(literals))

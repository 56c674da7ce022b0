"""Binary sequences with a budget."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from factormax._core import OracleKind
from factormax.arrays import ArrayLike, is_hidden
from factormax.errors import ShapeError
from factormax.factors.base import Param, check_whole
from factormax.factors.params import take_param
from factormax.factors.scores import as_scores, take_scores
from factormax.factors.structured import StructuredFactor
from factormax.variable import Variable

__all__ = ["SequenceBudget"]


class SequenceBudget(StructuredFactor):
    r"""A binary sequence with at most `budget` ones, and a score where two neighbours are both on.

    $$\sum_t \eta_t x_t + \sum_t T_t x_t x_{t+1}, \qquad \sum_t x_t \le B.$$

    With a positive score it selects a few contiguous spans, like the mask of a rationale extractor.
    After a query, `value` holds how far neighbours are on together, in the shape of `transitions`.

    Args:
        u: `(length,)`. A masked variable is off, and separates its neighbours, as padding does.
        transitions: a number, or `(length − 1,)`; `(*batch, ...)` if they are per instance.
        budget: how many may be on: one number, or `(*batch,)`.

    Raises:
        GraphError: if the budget is negative or not whole.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([0.4, 0.5, -0.2, 0.6]))
        >>> rationale = fg.add(fm.SequenceBudget(u, 0.5, budget=2))
        >>> _ = fg.solve()
        >>> u.value.round(3)
        array([0.6, 0.6, 0.3, 0.4])
    """

    _axes: ClassVar[tuple[str, ...]] = ("length",)
    _param_shapes: ClassVar[dict[str, str]] = {"budget": "factor"}

    def __init__(self, u: Variable, transitions: ArrayLike, budget: ArrayLike) -> None:
        self._take_structured(u)
        (length,) = self.variable_shape
        given = as_scores(self, "transitions", transitions)
        shape = self._transition_shape(tuple(given.shape), length)
        self._score_parts = (take_scores(self, "transitions", given, shape),)
        self._set_params(take_param(self, "budget", budget, ()))
        self._oracle = OracleKind.sequence_budget
        most = length
        if not is_hidden(
            *self._params
        ):  # the oracle's memory grows with it; few distinct sizes mean few compiled graphs
            largest = int(min(np.max(self._params[0], initial=0), length))
            most = min(length, 1 << largest.bit_length())
        self._oracle_shape = (length, int(len(shape) == 1), most)
        self._slots = length

    def _transition_shape(self, found: tuple[int, ...], length: int) -> tuple[int, ...]:
        batch = self._record.batch_shape or ()
        each = (length - 1,)
        if batch and found == each == batch:
            raise ShapeError(
                f"{self.name}: transitions of shape {found} may be one per pair of neighbours or "
                f"one per instance. Give them as {(*batch, *each)}, or as {(*batch, 1)} for one "
                f"per instance."
            )
        if found == () or (batch and found == batch):
            return ()
        if found == each or (batch and found in ((*batch, *each), (*batch, 1))):
            return each
        wanted = f"() or {each}"
        if batch:
            wanted += f", with {batch} in front if they are per instance"
        raise ShapeError(f"{self.name}: transitions must have shape {wanted}, got {found}.")

    @classmethod
    def _check_params(cls, params: tuple[Param, ...], d: int, name: str) -> None:
        """Raises unless the budget is whole and not negative."""
        check_whole(name, "budget", params[0])

"""A budget on the sum of costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from factormax.arrays import ArrayLike
from factormax.errors import GraphError
from factormax.factors.base import Param, Row, RowFactor
from factormax.factors.params import take_literal_param, take_param
from factormax.variable import Variable

__all__ = ["Knapsack"]


class Knapsack(RowFactor):
    r"""The costs of what is on stay within the budget: $\sum_i c_i \mu_i \le B$.

    The feasible set is the box cut by the half-space. It is larger than the hull of the 0/1 points
    in it: with costs (2, 2) and a budget of 3, both variables may be 3/4.

    Args:
        variables: a variable, a slice, or a list of them.
        costs: non-negative numbers in the shape of the variables (of a whole list, flat), or
            `(*batch, ...)` if they are per instance.
        budget: a non-negative number, or one for each factor along `axis`; `(*batch, ...)` if it
            is per instance.
        axis: one factor along this axis; by default one factor over everything.

    Raises:
        GraphError: if a cost or the budget is negative or not finite.
    """

    _param_shapes: ClassVar[dict[str, str]] = {"costs": "literal", "budget": "factor"}
    _fixed_rows = 1

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        costs: ArrayLike,
        budget: ArrayLike,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        self._take(variables, axis)
        self._set_params(
            take_literal_param(self, "costs", costs, axis),
            take_param(self, "budget", budget, self._group_shape),
        )

    @classmethod
    def _check_params(cls, params: tuple[Param, ...], d: int, name: str) -> None:
        """Raises unless costs and budget are finite and not negative."""
        for word, given in zip(cls._param_shapes, params, strict=True):
            value = np.asarray(given)
            bad = ~(np.isfinite(value) & (value >= 0))
            if bad.any():
                raise GraphError(
                    f"{name}: {word} must be finite and at least 0, got {value[bad].ravel()[0]}."
                )

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """The sum of the costs of what is on is at most the budget."""
        return [Row([1.0] * d, 1.0, coef_param=0, bound_param=1)]

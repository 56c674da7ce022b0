"""At most a given number is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from factormax.arrays import ArrayLike
from factormax.factors.base import Row
from factormax.factors.counting import CountingFactor
from factormax.variable import Variable

__all__ = ["Budget"]


class Budget(CountingFactor):
    r"""At most `budget` of the variables are on: $\sum_i \mu_i \le B$.

    Args:
        variables: a variable, a slice, or a list of them.
        budget: a whole number for all factors; or one per factor, in the shape that `axis` leaves;
            or also one per instance, with the batch dimensions in front, `(*batch, ...)`.
        axis: one factor along this axis; by default one factor over everything.

    Raises:
        GraphError: if the budget is negative or not whole.
    """

    _param_shapes: ClassVar[dict[str, str]] = {"budget": "factor"}
    _needs_that_many = False

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        budget: ArrayLike,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(variables, budget, axis=axis)

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """Their sum is at most the budget."""
        return [Row([1.0] * d, 1.0, bound_param=0)]

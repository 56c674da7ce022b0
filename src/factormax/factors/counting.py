"""What `Budget`, `AtLeast` and `Exactly` share: a whole number of variables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from factormax.arrays import ArrayLike, FloatArray
from factormax.errors import InfeasibleError
from factormax.factors.base import Group, LinearFactor, check_whole
from factormax.factors.params import take_param
from factormax.variable import Variable

__all__ = ["CountingFactor"]


class CountingFactor(LinearFactor):
    """A bound on the number of variables that are on, one number a factor."""

    param_shapes = ("factor",)
    word = "count"
    needs_that_many = True

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        count: ArrayLike,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(variables, axis=axis)
        self._set_params(take_param(self, self.word, count, self.group_shape))

    @classmethod
    def check_params(cls, params: tuple[FloatArray, ...], d: int, name: str) -> None:
        """Raises unless the counts are whole, not negative, and can be met."""
        (count,) = params
        check_whole(name, cls.word, count)
        if cls.needs_that_many and (count > d).any():
            raise InfeasibleError(
                f"{name}: {cls.word} is {int(count.max())}, but there are only {d} variables."
            )

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """The count itself."""
        return np.asarray(group.params[0])

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
        *,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(variables, axis=axis)
        self.params = (take_param(self, self.word, count, self.group_shape),)
        self.check()

    def check(self) -> None:
        """Raises unless the counts are whole, not negative, and can be met."""
        (count,) = self.params
        check_whole(self, self.word, count)
        size = self.index.shape[1]
        if self.needs_that_many and (count > size).any():
            raise InfeasibleError(
                f"{self.name}: {self.word} is {int(count.max())}, "
                f"but there are only {size} variables."
            )

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """The count itself."""
        return np.asarray(group.params[0])

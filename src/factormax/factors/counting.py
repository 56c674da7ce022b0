"""What `Budget`, `AtLeast` and `Exactly` share: each bounds how many variables are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from factormax.arrays import ArrayLike
from factormax.errors import InfeasibleError
from factormax.factors.base import Param, RowFactor, check_whole
from factormax.factors.params import take_param
from factormax.variable import Variable

__all__ = ["CountingFactor"]


class CountingFactor(RowFactor):
    """A bound on the number of variables that are on, one number per factor."""

    _param_shapes: ClassVar[dict[str, str]] = {"count": "factor"}
    _fixed_rows = 1
    _needs_that_many = True

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        count: ArrayLike,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        self._take(variables, axis)
        (word,) = self._param_shapes
        self._set_params(take_param(self, word, count, self._group_shape))

    @classmethod
    def _check_params(cls, params: tuple[Param, ...], d: int, name: str) -> None:
        """Raises unless the counts are whole, not negative, and can be met."""
        (given,) = params
        if type(given) is float and 0 <= given <= d and given.is_integer():  # the usual case
            return
        (word,) = cls._param_shapes
        check_whole(name, word, given, instead="Linear")
        most = np.max(given, initial=0)
        if cls._needs_that_many and most > d:
            raise InfeasibleError(
                f"{name}: {word} is {int(most)}, but there are only {d} variables."
            )

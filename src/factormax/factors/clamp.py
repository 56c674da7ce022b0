"""A variable held at 0 or 1, as a row: what branching and partial targets are made of."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from factormax.arrays import FloatArray, IndexArray
from factormax.factors.base import Group, LinearFactor

__all__ = ["FREE", "Clamp", "clamp_params"]

FREE = -1  # neither 0 nor 1

IntArray = npt.NDArray[np.int8]


class Clamp(LinearFactor):
    """`s · mu <= c` for one variable: (1, 0) holds it at 0, (−1, −1) at 1, (1, 1) not at all."""

    param_shapes: ClassVar[tuple[str, ...]] = ("factor", "factor")

    @classmethod
    def coefficients(cls, group: Group) -> FloatArray:
        """The sign."""
        return np.asarray(group.params[0][..., None])

    @classmethod
    def bound(cls, group: Group) -> FloatArray:
        """The bound."""
        return group.params[1]


def clamp_params(held: IntArray) -> FloatArray:
    """The parameters, flat, that hold variables `(B, n)` at 0 or 1, or leave them `FREE`."""
    sign = np.where(held == 1, -1.0, 1.0)
    bound = np.select([held == 0, held == 1], [0.0, -1.0], 1.0)
    return np.concatenate([sign.reshape(-1), bound.reshape(-1)])


def clamp_spec(variables: IndexArray) -> tuple[str, IndexArray]:
    """What a wiring says of clamps on these variables, one set for each instance."""
    return f"{Clamp.registered},{len(variables)},1,bb", 2 * variables

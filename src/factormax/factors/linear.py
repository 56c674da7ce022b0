"""Bounds on a weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from factormax._core import BlockKind
from factormax.arrays import ArrayLike, FloatArray
from factormax.errors import GraphError, InfeasibleError
from factormax.factors.base import BoolArray, Param, Row, RowFactor
from factormax.factors.params import take_literal_param, take_param
from factormax.variable import Variable

__all__ = ["Linear"]


class Linear(RowFactor):
    r"""A weighted sum stays within bounds: $L \le \sum_i a_i \mu_i \le U$.

    The feasible set is the box cut by the half-spaces. As with `Knapsack`, it can be larger than
    the hull of the 0/1 points in it.

    Args:
        variables: a variable, a slice, or a list of them.
        coefs: numbers of any sign, in the shape of the variables (of a whole list, flat), or
            `(*batch, ...)` if they are per instance.
        lower: a number, or one for each factor along `axis`; `(*batch, ...)` if it is per instance.
            None or −inf: no lower bound.
        upper: likewise; None or +inf: no upper bound. Where both bounds are equal, it is an
            equation.
        axis: one factor along this axis; by default one factor over everything.

    Raises:
        GraphError: if there is no bound at all, or a number is not valid.
        InfeasibleError: if a lower bound is above the upper one, or out of reach.

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([1.0, 0.2, 0.4]))
        >>> _ = fg.add(fm.Linear(u, [2.0, -1.0, -1.0], upper=0.0))  # 2 u[0] ≤ u[1] + u[2]
        >>> _ = fg.solve()
        >>> u.value.round(3)
        array([0.533, 0.433, 0.633])
    """

    _param_shapes: ClassVar[dict[str, str]] = {
        "coefs": "literal",
        "lower": "factor",
        "upper": "factor",
    }
    _block_kind = BlockKind.band
    _fixed_rows = 2

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        coefs: ArrayLike,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        self._take(variables, axis)
        if lower is None and upper is None:
            raise GraphError(
                f"{self.name}: give lower, upper, or both; otherwise nothing is bounded."
            )
        self._set_params(
            take_literal_param(self, "coefs", coefs, axis),
            take_param(self, "lower", -np.inf if lower is None else lower, self._group_shape),
            take_param(self, "upper", np.inf if upper is None else upper, self._group_shape),
        )

    @classmethod
    def _check_params(cls, params: tuple[Param, ...], d: int, name: str) -> None:
        """Raises unless the numbers are valid and the bounds can be met."""
        coefs, lower, upper = (np.atleast_2d(p) for p in params)
        if not np.isfinite(coefs).all():
            worst = coefs[~np.isfinite(coefs)].ravel()[0]
            raise GraphError(f"{name}: coefs must be finite, got {worst}.")
        for word, bound, never in (("lower", lower, np.inf), ("upper", upper, -np.inf)):
            bad = np.isnan(bound) | (bound == never)
            if bad.any():
                raise GraphError(
                    f"{name}: {word} must be a number, or {-never} for none, "
                    f"got {bound[bad].ravel()[0]}."
                )
        for low, high in _pairs_of(lower > upper, lower, upper):
            raise InfeasibleError(f"{name}: lower is {low}, above upper, which is {high}.")
        rows = coefs.reshape(len(coefs), -1, d) if coefs.size > 1 else np.full((1, 1, d), coefs)
        least, most = np.minimum(rows, 0).sum(axis=-1), np.maximum(rows, 0).sum(axis=-1)
        slack = 1e-6 * (most - least)  # coefficients in float32 may miss their own sum
        for low, high in _pairs_of(lower > most + slack, lower, most):
            raise InfeasibleError(f"{name}: lower is {low}, but the sum is at most {high}.")
        for high, low in _pairs_of(upper < least - slack, upper, least):
            raise InfeasibleError(f"{name}: upper is {high}, but the sum is at least {low}.")

    @classmethod
    def rows(cls, d: int) -> list[Row]:
        """One row per bound; where the bounds are equal, the core merges them into an equation."""
        return [
            Row([-1.0] * d, -1.0, coef_param=0, bound_param=1),
            Row([1.0] * d, 1.0, coef_param=0, bound_param=2),
        ]


def _pairs_of(bad: BoolArray, a: FloatArray, b: FloatArray) -> list[tuple[float, float]]:
    """The numbers of `a` and `b` at the first bad place; empty if there is none."""
    if not bad.any():
        return []
    a, b = np.broadcast_arrays(a, b)
    return [(float(a[np.nonzero(bad)][0]), float(b[np.nonzero(bad)][0]))]

"""The last is the disjunction of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from factormax.factors.base import (
    ABSENT,
    EQUALITY,
    INEQUALITY,
    OR_OUT,
    BaseFactor,
    Group,
    RowBlocks,
)
from factormax.variable import Variable

__all__ = ["OrOut"]


class OrOut(BaseFactor):
    r"""The last is on exactly if one of the others is: $\mu_i \le \mu_d \le \sum_{i<d} \mu_i$.

    Args:
        variables: a variable, a slice, or a list of them; the last one is the output.
        axis: one factor along this axis; by default one factor over everything.
    """

    block_kind = OR_OUT

    def __init__(
        self,
        variables: Variable | Sequence[Variable],
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        self._take(variables, axis)

    @classmethod
    def row_lengths(cls, d: int) -> list[int]:
        """One row for each other, and one for their sum."""
        return [2] * (d - 1) + [d]

    @classmethod
    def lower(cls, group: Group) -> RowBlocks:
        """Rows `l_i - l_out <= 0` for the d - 1 others, then `l_out - sum l_i <= 0`.

        The output is the last variable present, which may differ between instances.
        """
        k, d = group.index.shape
        lead = group.present.shape[0]
        position = np.arange(d)
        out = group.last[..., None]  # (1 | B, k, 1)
        is_out = position == out
        index = np.broadcast_to(group.index, (lead, k, d))
        sign = np.broadcast_to(np.where(group.negated, -1.0, 1.0), (lead, k, d))
        out_index = np.take_along_axis(index, out, axis=-1)
        out_sign = np.take_along_axis(sign, out, axis=-1)
        out_negated = out_sign < 0

        # (lead, k, d - 1, 2): entries (i, out) of the first d - 1 rows. Row i is absent where
        # variable i is, or where i is the output itself.
        inputs = slice(0, d - 1)
        pair_col = np.stack(np.broadcast_arrays(index[..., inputs], out_index), axis=-1)
        pair_coef = np.stack(np.broadcast_arrays(sign[..., inputs], -out_sign), axis=-1)
        pair_rhs = out_negated * 1.0 - group.negated[:, inputs]
        pair_here = group.present[..., inputs] & ~is_out[..., inputs]

        sum_coef = np.where(is_out, sign, -sign) * group.present
        negated_inputs = group.negated & group.present & ~is_out
        sum_rhs = negated_inputs.sum(axis=-1, keepdims=True) - out_negated * 1.0
        sum_here = group.count[..., None] > 0

        # With a single input the output equals it: one equality instead of two inequalities.
        single = group.count[..., None] == 2
        sum_kind = np.where(single, EQUALITY, np.where(sum_here, INEQUALITY, ABSENT))
        pair_kind = np.where(pair_here & ~single, INEQUALITY, ABSENT)

        rhs = np.concatenate([np.broadcast_to(pair_rhs, pair_here.shape), sum_rhs], axis=-1)
        return RowBlocks(
            col=np.concatenate([pair_col.reshape(lead, k, 2 * (d - 1)), index], axis=-1),
            coef=np.concatenate([pair_coef.reshape(lead, k, 2 * (d - 1)), sum_coef], axis=-1),
            rhs=rhs,
            kind=np.concatenate([pair_kind, sum_kind], axis=-1).astype(np.int8),
        )

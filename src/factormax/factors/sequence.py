"""Sequences of states."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from factormax._core import OracleKind
from factormax.arrays import ArrayLike
from factormax.errors import ShapeError
from factormax.factors.base import BoolArray
from factormax.factors.scores import as_scores, take_scores
from factormax.factors.structured import StructuredFactor, check_rows_last
from factormax.variable import Variable

__all__ = ["Sequence"]


class Sequence(StructuredFactor):
    r"""One state per step, with a score for every transition: a linear chain.

    $$\sum_t \eta_{t, s_t} + \sum_t T_{t, s_t, s_{t+1}} + a_{s_1} + b_{s_L}.$$

    After a query, `value` holds the expected transitions, in the shape of `transitions`. If several
    mixtures of sequences with the same marginals are equally good, `value` and its gradient are
    those of one of them.

    Args:
        u: `(length, states)`. A step that is all masked is absent, and such steps must come last; a
            single masked entry is a forbidden state.
        transitions: `(states, states)`, or `(length − 1, states, states)`, indexed
            [step, from, to]; `(*batch, ...)` if they are per instance. −inf forbids a transition.
        initial: `(states,)`, added for the first state.
        final: `(states,)`, added for the last state (of the last step that is present).

    Example:
        >>> import numpy as np, factormax as fm
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([[1.0, 0.0], [0.2, 0.3], [0.0, 0.6]]))
        >>> sequence = fg.add(fm.Sequence(u, np.array([[0.5, 0.0], [0.0, 0.5]])))
        >>> _ = fg.solve()
        >>> u.value.round(2)
        array([[0.75, 0.25],
               [0.45, 0.55],
               [0.45, 0.55]])
        >>> sequence.value.round(2)
        array([[0.9, 0.3],
               [0. , 0.8]])
    """

    _axes: ClassVar[tuple[str, ...]] = ("length", "states")

    def __init__(
        self,
        u: Variable,
        transitions: ArrayLike,
        initial: ArrayLike | None = None,
        final: ArrayLike | None = None,
    ) -> None:
        self._take_structured(u)
        length, states = self.variable_shape
        given = as_scores(self, "transitions", transitions)
        shape = self._transition_shape(tuple(given.shape), length, states)
        parts = [take_scores(self, "transitions", given, shape, allow_minus_inf=True)]
        for label, scores in (("initial", initial), ("final", final)):
            if scores is not None:
                parts.append(take_scores(self, label, scores, (states,), allow_minus_inf=True))
        self._score_parts = tuple(parts)
        self._oracle = OracleKind.sequence
        per_step = int(len(shape) == 3)
        ends = (int(initial is not None), int(final is not None))
        self._oracle_shape = (length, states, per_step, *ends)
        self._slots = length

    def _transition_shape(
        self, found: tuple[int, ...], length: int, states: int
    ) -> tuple[int, ...]:
        """Whether transitions are shared by the steps or per step, judging by their shape."""
        shared, each = (states, states), (length - 1, states, states)
        batch = self._record.batch_shape or ()
        if batch and found == each == (*batch, *shared):
            raise ShapeError(
                f"{self.name}: transitions of shape {found} may be one per step or one per "
                f"instance. Give them as {(*batch, *each)}, or as {(*batch, 1, *shared)} for one "
                f"per instance."
            )
        if found in (shared, (*batch, *shared)):
            return shared
        if found in (each, (*batch, *each), (*batch, 1, *shared)):
            return each
        wanted = f"{shared} or {each}"
        if batch:
            wanted += f", with {batch} in front if they are per instance"
        raise ShapeError(f"{self.name}: transitions must have shape {wanted}, got {found}.")

    @classmethod
    def _check_mask(cls, present: BoolArray, shape: tuple[int, ...]) -> None:
        """Raises unless absent steps come last."""
        length, states = shape[:2]
        steps = np.asarray(present.reshape(-1, length, states).any(axis=2))
        check_rows_last("Sequence", "step", steps)

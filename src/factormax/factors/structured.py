"""Factors that are solved from a MAP oracle: the best structure for given scores.

The core knows the oracles by number (`OracleKind`) and by a short list of whole numbers, the shape.
After a query such a factor has `structures` and `probs`: the sparse set of structures that make up
the solution, and their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from factormax.arrays import Array
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor, BoolArray
from factormax.variable import Variable

__all__ = [
    "CALLBACK",
    "MATCHING",
    "PROJECTIVE_TREE",
    "SEQUENCE",
    "SEQUENCE_BUDGET",
    "TABLE",
    "TREE",
    "StructuredFactor",
]

# OracleKind of the core
TREE, PROJECTIVE_TREE, MATCHING, SEQUENCE, SEQUENCE_BUDGET, TABLE, CALLBACK = range(7)


class StructuredFactor(BaseFactor):
    """Base class of the factors with a MAP oracle.

    Attributes:
        oracle: which oracle of the core it is.
        oracle_shape: what the oracle needs to know of its size.
        slots: a structure has at most so many variables on.
        variable_shape: the shape of the variables as given, `(d,)` for a list.
    """

    structured = True
    oracle: int
    oracle_shape: tuple[int, ...]
    slots: int
    variable_shape: tuple[int, ...]
    #: What the axes of `u` are called in messages, if the factor needs a certain number of them.
    axes: ClassVar[tuple[str, ...]] = ()

    def _take_structured(self, variables: Variable | Sequence[Variable]) -> None:
        self._take(variables, None)
        if any(u.negated for u in self._given):
            raise GraphError(
                f"{self.name}: a structured factor takes no negated variables. Negate in the logic "
                f"and counting factors beside it."
            )
        whole = len(self._given) == 1 and not self._listed
        self.variable_shape = self._given[0].shape if whole else (self.index.size,)
        if self.axes and len(self.variable_shape) != len(self.axes):
            raise ShapeError(
                f"{self.name}: u must have shape ({', '.join(self.axes)}), batch dimensions aside, "
                f"got {self.variable_shape}."
            )

    @property
    def num_scores(self) -> int:
        """How many scores of its own an instance has."""
        return sum(part.count for part in self.score_parts)

    def tensors_used(self) -> set[int]:
        """The variable tensors of the graph that it has variables of."""
        return {u.position for u in self._given}

    def structured_spec(self, linked: bool) -> str:
        """What a `Wiring` says of the factor. `linked`: it shares variables with an earlier one."""
        numbers = (self.oracle, int(linked), self.num_scores, self.slots, *self.oracle_shape)
        return f"{self.spec},{'.'.join([str(n) for n in numbers])}"

    @classmethod
    def check_mask(cls, present: BoolArray, shape: tuple[int, ...]) -> None:
        """Raises unless the variables that are present, `(B, d)`, make sense."""

    @property
    def structures(self) -> Array:
        """The structures that make up the solution, `(*batch, K, *shape of u)`, of 0 and 1.

        The most probable come first. K is the most that an instance of the batch has; instances
        with fewer are padded with zeros, and `num_structures` counts them.

        Raises:
            GraphError: before any query, and inside `torch.compile`.
        """
        return self.graph.answer_of(self).structures()  # type: ignore[no-any-return]

    @property
    def probs(self) -> Array:
        """Their probabilities, `(*batch, K)`, differentiable; they sum to 1.

        The structures held are affinely independent, so the probabilities are determined by them;
        where a solution can be made up of other structures too, which ones are held is not defined,
        and the gradient is the one for those that are.
        """
        return self.graph.answer_of(self).probs  # type: ignore[no-any-return]

    @property
    def num_structures(self) -> Array:
        """How many structures each instance has, `(*batch,)`."""
        return self.graph.answer_of(self).num_structures()  # type: ignore[no-any-return]


def check_rows_last(name: str, word: str, rows: BoolArray) -> None:
    """Raises unless the rows that are absent, `(B, rows)`, come last."""
    bad = np.any(rows[:, 1:] & ~rows[:, :-1], axis=1)
    if bad.any():
        raise GraphError(
            f"{name}: absent {word}s (all variables masked) must come last, but in instance "
            f"{int(np.argmax(bad))} of the batch one comes before a {word} that is present."
        )

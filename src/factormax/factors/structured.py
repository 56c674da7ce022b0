"""Factors that are solved from a MAP oracle: the best structure for given scores.

The core knows the oracles by number (`OracleKind`) and by a short list of whole numbers, the shape.
After a query such a factor has `structures` and `probs`: the sparse set of structures that make up
the solution, and their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, Final

import numpy as np

from factormax._core import best_structures
from factormax.arrays import Array, ArrayLike, to_numpy
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor, BoolArray
from factormax.variable import Variable

__all__ = [
    "CALLBACK",
    "MATCHING",
    "NO_STRUCTURE",
    "PROJECTIVE_TREE",
    "SEQUENCE",
    "SEQUENCE_BUDGET",
    "TABLE",
    "TREE",
    "StructuredFactor",
]


class NoStructure(Enum):
    """The type of `NO_STRUCTURE`."""

    NO_STRUCTURE = "NO_STRUCTURE"

    def __repr__(self) -> str:
        return "factormax.NO_STRUCTURE"


#: What `map` returns if there is no structure. (None would hide a forgotten `return`.)
NO_STRUCTURE: Final = NoStructure.NO_STRUCTURE

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
    def complete(self) -> bool:
        """Whether it was built without an error."""
        return super().complete and hasattr(self, "slots")

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

    def map(self, eta_u: ArrayLike, eta_v: ArrayLike = ()) -> Any:
        """The best structure for these scores, by the factor's oracle.

        Args:
            eta_u: scores of the variables, in their shape. −inf (a masked variable) stays off.
            eta_v: scores of the factor's own (transitions, then initial, then final), flat or in
                their shape.

        Returns:
            `(m, n)`: the 0/1 assignment, and how often each score counts (in the shape of `eta_v`);
            `NO_STRUCTURE` if there is none. Among structures of the same score, which one is fixed
            but not defined.
        """
        scores = np.asarray(to_numpy(eta_u), dtype=np.float64).reshape(1, -1)
        own = np.asarray(to_numpy(eta_v), dtype=np.float64)
        if scores.size != self.index.size or own.size != self.num_scores:
            raise ShapeError(
                f"{self.name}: map takes {self.index.size} scores of variables, in the shape "
                f"{self.variable_shape}, and {self.num_scores} of its own, got {scores.size} and "
                f"{own.size}."
            )
        number = self.params[0][0] if self.params else np.zeros(1)
        on, features, found = best_structures(
            self.oracle,
            np.array(self.oracle_shape, dtype=np.int32),
            scores,
            own.reshape(1, -1),
            number.astype(np.float64),
        )
        if not found[0]:
            return NO_STRUCTURE
        assignment = np.bincount(on[on >= 0], minlength=scores.size).astype(np.float64)
        counts = np.bincount(features[features >= 0], minlength=own.size).astype(np.float64)
        return assignment.reshape(self.variable_shape), counts.reshape(own.shape)

    @property
    def structures(self) -> Array:
        """The structures that make up the solution, `(*batch, K, *shape of u)`, of 0 and 1.

        The most probable come first. K is the most that an instance of the batch has; instances
        with fewer are padded with zeros, and `num_structures` counts them.

        Trees and matchings with dense solutions are solved without them (by rows): a second solve
        then finds them when they are first asked for, and their mean is the value up to `tol`.

        Raises:
            GraphError: before any query, and inside `torch.compile`.
        """
        return self.graph.answer_of(self).structures()  # type: ignore[no-any-return]

    @property
    def probs(self) -> Array:
        """Their probabilities, `(*batch, K)`, differentiable; they sum to 1 (NaN if infeasible).

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

"""Factors that are solved through a MAP oracle, which finds the best structure for given scores.

The core identifies an oracle by its `OracleKind` and a short list of whole numbers, its shape.
After a query such a factor has `structures` and `probs`: the sparse set of structures that make up
the solution, and their probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from factormax import _core
from factormax._core import OracleKind, best_structures
from factormax.arrays import Array, ArrayLike, FloatArray, to_numpy
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor, BoolArray
from factormax.variable import Variable

__all__ = ["NO_STRUCTURE", "StructuredFactor"]


class NoStructure(Enum):
    """The type of `NO_STRUCTURE`."""

    NO_STRUCTURE = "NO_STRUCTURE"

    def __repr__(self) -> str:
        return "factormax.NO_STRUCTURE"


#: What `map` returns if there is no structure. (None would hide a forgotten `return`.)
NO_STRUCTURE: Final = NoStructure.NO_STRUCTURE


def any_arguments(method: Any) -> Callable[..., Any]:
    """Lets subclasses define the method with other argument types, for type checkers."""
    return method  # type: ignore[no-any-return]


class StructuredFactor(BaseFactor):
    """Base class of the factors with a MAP oracle."""

    _oracle: OracleKind
    _oracle_shape: tuple[int, ...]  # the sizes that the oracle needs to know
    _slots: int  # `slots()` of its oracle: the length of a list of the variables that are on
    variable_shape: tuple[int, ...]  # as given, `(d,)` for a list
    _place: int | None = None  # among the structured factors of its graph, once added
    _link: int = 0  # links to earlier factors; 0: where found, 1: all but the first factor, 2: all
    _transposed: bool = False  # whether the oracle sees the two axes of the variables swapped
    #: What the axes of `u` are called in messages, if the factor needs a certain number of them.
    _axes: ClassVar[tuple[str, ...]] = ()

    def _take_structured(
        self, variables: Variable | Sequence[Variable], axis: int | None = None
    ) -> None:
        self._take(variables, axis)
        self._axis = None  # the user did not give one
        if any(u.negated for u in self._given):
            raise GraphError(
                f"{self.name}: a structured factor takes no negated variables. Negate them in the "
                f"logic and counting factors beside it."
            )
        whole = len(self._given) == 1 and not self._listed
        self.variable_shape = self._given[0].shape if whole else (self._size,)
        if self._axes and len(self.variable_shape) != len(self._axes):
            wanted = ", ".join(self._axes) + "," * (len(self._axes) == 1)
            raise ShapeError(
                f"{self.name}: u must have shape ({wanted}), not counting batch dimensions, got "
                f"{self.variable_shape}."
            )

    @property
    def _complete(self) -> bool:
        """Whether it was built without an error."""
        return super()._complete and hasattr(self, "_slots")

    def _check_made(self) -> None:
        """Raises unless its class keeps all that a query needs."""
        super()._check_made()
        for name in ("_oracle", "_oracle_shape", "_slots"):
            if not hasattr(self, name):
                raise GraphError(f"{self.name}: its class must set {name} in __init__.")

    @property
    def _num_scores(self) -> int:
        """How many scores of its own each factor has per instance."""
        total = sum(part.count for part in self._score_parts)
        return total // max(self._count, 1)

    @property
    def _key(self) -> tuple[Any, ...]:
        """What distinguishes it from other factors, apart from numbers."""
        try:
            return (
                self._registered,
                int(self._oracle),
                self._oracle_shape,
                self._num_scores,
                self._slots,
                self._link,
                self._scope,
            )
        except AttributeError:
            self._check_made()
            raise

    def _group(self) -> _core.Group:
        """The factor as the core takes it."""
        return _core.Group.structured(
            self._registered,
            self._oracle,
            list(self._oracle_shape),
            self._num_scores,
            self._slots,
            self._link,
            bool(self._params),
            [p.core() for p in self._scope],
        )

    @classmethod
    def _check_mask(cls, present: BoolArray, shape: tuple[int, ...]) -> None:
        """Raises unless the mask of present variables, `(B, d)`, is valid."""

    @any_arguments
    def map(self, eta_u: ArrayLike, eta_v: ArrayLike = ()) -> Any:
        """The best structure for these scores, by the factor's oracle.

        Args:
            eta_u: the variables' scores, in their shape. A variable with −inf (masked) stays off.
            eta_v: the factor's own scores (transitions, then initial, then final), flat or in
                their shape.

        Returns:
            `(m, n)`: the 0/1 assignment, and how often each score counts (in the shape of `eta_v`);
            `NO_STRUCTURE` if there is none. If structures tie, the answer is always the same one,
            but which one is unspecified.
        """
        scores = np.asarray(to_numpy(eta_u), dtype=np.float64)
        own = np.asarray(to_numpy(eta_v), dtype=np.float64)
        count, d = self._count, self._size
        if scores.size != count * d or own.size != count * self._num_scores:
            raise ShapeError(
                f"{self.name}: map takes {count * d} scores of variables, in the shape "
                f"{(*self._group_shape, *self.variable_shape)}, and {count * self._num_scores} "
                f"scores of its own, got {scores.size} and {own.size}."
            )
        scores = scores.reshape(count, *self.variable_shape)
        if self._transposed:
            scores = scores.swapaxes(1, 2)
        best = self._best(scores.reshape(count, d), own.reshape(count, -1))
        if best is None:
            return NO_STRUCTURE
        assignments, features = best
        shape = (*self._group_shape, *self.variable_shape)
        return self._laid_out(assignments).reshape(shape), features.reshape(own.shape)

    def _best(self, eta_u: FloatArray, eta_v: FloatArray) -> tuple[FloatArray, FloatArray] | None:
        """The best structures in the oracle's order, `(k, d)` and `(k, s)`, or None."""
        number = np.zeros(len(eta_u))
        if self._params:
            given = self._params[0]
            number[:] = given if isinstance(given, float) else given[0]
        on, features, found = best_structures(
            self._oracle,
            np.array(self._oracle_shape, dtype=np.int32),
            np.ascontiguousarray(eta_u),
            np.ascontiguousarray(eta_v),
            number,
        )
        if not found.all():
            return None
        return _counted(on, eta_u.shape), _counted(features, eta_v.shape)

    @property
    def _laid_out(self) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
        """From the oracle's order, `(..., d)`, to `(..., *shape of the variables)`.

        It holds no reference to the factor, because the graph's record keeps it with the answer.
        """
        return partial(_laid_out, self.variable_shape, self._transposed)

    @property
    def structures(self) -> Array:
        """The structures that make up the solution, as 0/1 arrays, `(*batch, K, *shape of u)`.

        For N factors made in one call, `(*batch, N, K, ...)`; likewise `probs` and
        `num_structures`.

        The most probable come first. K is the largest number that any instance has; instances with
        fewer are padded with zeros, and `num_structures` says how many each has.

        Trees and matchings with dense solutions are solved without structures (by rows): a second
        solve then finds them on first access, and their mean equals the value up to `tol`.

        Raises:
            GraphError: before any query, and inside `torch.compile`.
        """
        return self._record.listed(self, "structures")  # type: ignore[no-any-return]

    @property
    def probs(self) -> Array:
        """Probabilities of `structures`, `(*batch, K)`, differentiable; sum to 1 (NaN: infeasible).

        The structures are affinely independent, so they determine the probabilities. Where other
        structures could make up the same solution, it is unspecified which ones are listed; the
        gradient is that for the ones listed.
        """
        return self._record.listed(self, "probs")  # type: ignore[no-any-return]

    @property
    def num_structures(self) -> Array:
        """How many structures each instance has, `(*batch,)`."""
        return self._record.listed(self, "num_structures")  # type: ignore[no-any-return]


def _laid_out(shape: tuple[int, ...], transposed: bool, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not transposed:
        return x.reshape(*x.shape[:-1], *shape)
    rows, columns = shape
    return np.swapaxes(x.reshape(*x.shape[:-1], columns, rows), -1, -2)


def _counted(lists: npt.NDArray[np.int32], shape: tuple[int, ...]) -> FloatArray:
    """How often each number occurs in its list, `(k, size)`, from k lists padded with −1."""
    count, size = shape
    own = lists.reshape(count, -1) if count else lists.reshape(0, 1)
    row, slot = np.nonzero(own >= 0)
    flat = np.bincount(row * size + own[row, slot], minlength=count * size)
    return flat.astype(np.float64).reshape(shape)


def check_rows_last(name: str, word: str, rows: BoolArray) -> None:
    """Raises unless absent rows come last; `rows`, `(B, rows)`, is True where one is present."""
    bad = np.any(rows[:, 1:] & ~rows[:, :-1], axis=1)
    if bad.any():
        raise GraphError(
            f"{name}: absent {word}s (all variables masked) must come last, but in instance "
            f"{int(np.argmax(bad))} of the batch one comes before a {word} that is present."
        )

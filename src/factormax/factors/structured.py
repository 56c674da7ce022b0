"""Factors that are solved from a MAP oracle: the best structure for given scores.

The core knows the oracles by number (`OracleKind`) and by a short list of whole numbers, the shape.
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
    """To type checkers, a method that subclasses may define with other types of arguments."""
    return method  # type: ignore[no-any-return]


class StructuredFactor(BaseFactor):
    """Base class of the factors with a MAP oracle."""

    _oracle: OracleKind
    _oracle_shape: tuple[int, ...]  # what the oracle needs to know of its size
    _slots: int  # `slots()` of the oracle: how long a list of the variables that are on is
    variable_shape: tuple[int, ...]  # as given, `(d,)` for a list
    _place: int | None = None  # among the structured factors of its graph, once it was added
    _link: int = 0  # linked to factors before it: as is found, 1: all but the first, 2: all
    _transposed: bool = False  # whether the oracle sees the two axes of the variables swapped
    #: What the axes of `u` are called in messages, if the factor needs a certain number of them.
    _axes: ClassVar[tuple[str, ...]] = ()

    def _take_structured(
        self, variables: Variable | Sequence[Variable], axis: int | None = None
    ) -> None:
        self._take(variables, axis)
        self._axis = None  # it was not the user who gave one
        if any(u.negated for u in self._given):
            raise GraphError(
                f"{self.name}: a structured factor takes no negated variables. Negate in the logic "
                f"and counting factors beside it."
            )
        whole = len(self._given) == 1 and not self._listed
        self.variable_shape = self._given[0].shape if whole else (self._size,)
        if self._axes and len(self.variable_shape) != len(self._axes):
            wanted = ", ".join(self._axes) + "," * (len(self._axes) == 1)
            raise ShapeError(
                f"{self.name}: u must have shape ({wanted}), batch dimensions aside, got "
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
        """How many scores of its own a factor has in an instance."""
        total = sum(part.count for part in self._score_parts)
        return total // max(self._count, 1)

    @property
    def _key(self) -> tuple[Any, ...]:
        """What tells it from other factors, numbers aside."""
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
        """Raises unless the variables that are present, `(B, d)`, make sense."""

    @any_arguments
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
        scores = np.asarray(to_numpy(eta_u), dtype=np.float64)
        own = np.asarray(to_numpy(eta_v), dtype=np.float64)
        count, d = self._count, self._size
        if scores.size != count * d or own.size != count * self._num_scores:
            raise ShapeError(
                f"{self.name}: map takes {count * d} scores of variables, in the shape "
                f"{(*self._group_shape, *self.variable_shape)}, and {count * self._num_scores} of "
                f"its own, got {scores.size} and {own.size}."
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
        """The best structures in the oracle's order, `(k, d)` and `(k, s)`; None without one."""
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

        It does not lead to the factor: the graph's record keeps it with the answer of a query.
        """
        return partial(_laid_out, self.variable_shape, self._transposed)

    @property
    def structures(self) -> Array:
        """The structures that make up the solution, `(*batch, K, *shape of u)`, of 0 and 1.

        Of N factors in one call, `(*batch, N, K, ...)`; likewise `probs` and `num_structures`.

        The most probable come first. K is the most that an instance of the batch has; instances
        with fewer are padded with zeros, and `num_structures` counts them.

        Trees and matchings with dense solutions are solved without them (by rows): a second solve
        then finds them when they are first asked for, and their mean is the value up to `tol`.

        Raises:
            GraphError: before any query, and inside `torch.compile`.
        """
        return self._record.listed(self, "structures")  # type: ignore[no-any-return]

    @property
    def probs(self) -> Array:
        """Their probabilities, `(*batch, K)`, differentiable; they sum to 1 (NaN if infeasible).

        The structures held are affinely independent, so the probabilities are determined by them;
        where a solution can be made up of other structures too, which ones are held is not defined,
        and the gradient is the one for those that are.
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
    """How often each number is in its list, `(k, size)`, from k lists padded with −1."""
    count, size = shape
    own = lists.reshape(count, -1) if count else lists.reshape(0, 1)
    row, slot = np.nonzero(own >= 0)
    flat = np.bincount(row * size + own[row, slot], minlength=count * size)
    return flat.astype(np.float64).reshape(shape)


def check_rows_last(name: str, word: str, rows: BoolArray) -> None:
    """Raises unless the rows that are absent, `(B, rows)`, come last."""
    bad = np.any(rows[:, 1:] & ~rows[:, :-1], axis=1)
    if bad.any():
        raise GraphError(
            f"{name}: absent {word}s (all variables masked) must come last, but in instance "
            f"{int(np.argmax(bad))} of the batch one comes before a {word} that is present."
        )

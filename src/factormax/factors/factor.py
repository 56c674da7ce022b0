"""User-defined factors, which need only a MAP oracle."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from factormax._core import OracleKind
from factormax.arrays import ArrayLike, to_numpy
from factormax.errors import GraphError, ShapeError
from factormax.factors.base import BaseFactor
from factormax.factors.scores import Scores, as_scores
from factormax.factors.structured import NO_STRUCTURE, StructuredFactor, any_arguments
from factormax.variable import Variable

__all__ = ["Factor"]

# No other types: ctypes would cast even a string to an address.
_FUNCTION_POINTERS: Any = (ctypes._CFuncPtr, ctypes.c_void_p)  # type: ignore[attr-defined]

_NONE = "Return (m, n), or fm.NO_STRUCTURE if there is no structure."

Structure = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


class Factor(StructuredFactor):
    """Base class of user-defined factors: define `map`, and use it like any other factor.

    The structures are whatever `map` can return; the solution is a sparse combination of them. It
    works in any graph, together with all other factors, with gradients.

    `map` may be called from several threads at once; torch's grad mode inside it is the one in
    which the query was called. For a vectorised oracle, define `map_batch(self, eta_u, eta_v)`
    instead of `map` or besides it: scores and answers then have the instances as their first
    dimension (in a list of assignments, `fm.NO_STRUCTURE` may stand for any of them). A solve does
    not notice if an oracle is inexact: test it with `factormax.testing.check_factor`.

    `map` does not see the scores that were given, but modified ones. With no other factor on its
    variables, `solve` multiplies the scores by a positive number and lowers each by a number from 0
    to 1; at the end it moves them by about a millionth of their size, in either direction, to find
    structures that tie, and lowers those of variables that are 0 by more. `solve_map` and `decode`
    may also raise scores by up to 1, unless no factor shares a variable with another; where
    structures tie, `decode` adds noise of up to a hundredth of the scores' median magnitude.
    Other factors on the same variables add their multipliers: `Budget`, `AtMostOne` and `Knapsack`
    over variables that are not negated only lower scores further; all others may also raise them.
    So may `method="admm"` and "ad3", and the proof that an instance is infeasible. A warm start
    changes none of this. A score of −inf marks a masked variable, which must be off. The factor's
    own scores are multiplied by a positive number.

    An oracle with a limited domain, such as a shortest path with costs of one sign, should clip
    scores that lie just outside it, and define `features_of`; otherwise `loss` and `decode` make up
    scores to ask `map` whether an assignment is a structure. Where scores are raised by more, as
    above or by the cost of the hinge loss, clipping makes the answer wrong: such queries need an
    oracle that takes all scores.

    Args:
        u: a variable, a slice, or a list of them (then flat, one after the other).
        scores: the factor's own scores, if any, of any shape. If their leading dimensions equal the
            batch dimensions, they are per instance; where that could be a coincidence, set in the
            class how many dimensions they have without the batch, such as `score_dims = 1`.
        native_map: a C function to call in place of `map`, without the GIL: a `numba.cfunc`, a
            ctypes function pointer, or an address. Its signature is
            `int32 (const double* eta_u, int64 d, const double* eta_v, int64 s, double* m,
            double* n, void* data, int64 instance)`; m and n are filled with zeros beforehand. It
            returns 0, or 1 if there is no structure, or −1 on failure. It must be safe to call from
            several threads at once.
        native_data: passed to it as `data`: an address, or a ctypes object, whose address is passed
            (keep it alive).

    Example:
        The vertices are the vectors with exactly two ones:

        >>> import numpy as np, factormax as fm
        >>> class TwoOf(fm.Factor):
        ...     def map(self, eta_u, eta_v):
        ...         m = np.zeros(len(eta_u))
        ...         m[np.argsort(-eta_u)[:2]] = 1
        ...         return m, []
        >>> fg = fm.FactorGraph()
        >>> u = fg.variable_from(np.array([0.9, 0.8, 0.6, -1.0]))
        >>> two = fg.add(TwoOf(u))
        >>> _ = fg.solve()
        >>> u.value.round(3)
        array([0.8, 0.7, 0.5, 0. ])
    """

    def __init_subclass__(cls) -> None:
        # A compiled graph finds all subclasses under the name of this class: what differs, the
        # oracle, belongs to the factor object.
        super(BaseFactor, cls).__init_subclass__()

    #: How many dimensions the scores have without the batch, or None to go by their shape.
    score_dims: ClassVar[int | None] = None

    def __init__(
        self,
        u: Variable | SequenceOf[Variable],
        scores: ArrayLike | None = None,
        *,
        native_map: Any = None,
        native_data: Any = None,
    ) -> None:
        self._take_structured(u)
        if scores is not None:
            self._score_parts = (self._own_scores(scores),)
        self._oracle = OracleKind.callback
        self._oracle_shape = (self._size, self._num_scores)
        if native_map is not None:
            _address_of(self.name, native_map)  # raises if it is not a function
        self.native_map = native_map
        self.native_data = _data_address(self.name, native_data)
        if native_map is None and type(self).map is Factor.map and not self._has_map_batch():
            raise GraphError(
                f"{self.name}: it has no oracle. Define map(self, eta_u, eta_v) in a subclass, or "
                f"pass native_map."
            )
        self._slots = self._size

    @any_arguments
    def map(self, eta_u: Any, eta_v: Any = ()) -> Any:
        """The best structure: the one that maximises `eta_u · m + eta_v · n`.

        Args:
            eta_u: the variables' scores, in their shape. A variable with −inf (masked) must be off.
            eta_v: the factor's own scores, in their shape; empty if it has none.

        Returns:
            `(m, n)`: the 0/1 assignment, and the features that `eta_v` scores (anything empty
            without scores). `fm.NO_STRUCTURE` if there is no structure.
        """
        if self.native_map is not None:
            return self._call_native(np.asarray(eta_u), np.asarray(eta_v))
        one = np.asarray(eta_u)[None], np.asarray(eta_v)[None]
        answers = self.map_batch(*one)  # type: ignore[attr-defined]
        if answers is NO_STRUCTURE:
            return NO_STRUCTURE
        m, n = self._batch_parts(answers, 1)
        return NO_STRUCTURE if m[0] is NO_STRUCTURE else (m[0], n[0] if self._num_scores else ())

    @any_arguments
    def features_of(self, m: Any) -> Any:
        """Optional: tests whether an assignment is a structure, and returns its features.

        `loss` and `decode` call it; without it, they call `map` with scores of both signs instead.

        Args:
            m: an assignment of 0 and 1, in the shape of the variables; 0 where masked.

        Returns:
            `n`, the features that `eta_v` scores (anything empty without scores). If several
            structures have this assignment, the features of the one that scores best.
            `fm.NO_STRUCTURE` if it is not a structure.
        """
        raise NotImplementedError

    def _has_map_batch(self) -> bool:
        return hasattr(self, "map_batch")

    def _own_scores(self, scores: ArrayLike) -> Scores:
        given = as_scores(self, "scores", scores)
        found, batch = tuple(given.shape), self._record.batch_shape or ()
        if self.score_dims is not None and self.score_dims not in (
            len(found),
            len(found) - len(batch),
        ):
            raise ShapeError(
                f"{self.name}: scores must have {self.score_dims} dimensions (score_dims), or be "
                f"per instance, with {batch} in front, got shape {found}."
            )
        each = bool(batch) and found[: len(batch)] == batch and self.score_dims != len(found)
        own = found[len(batch) :] if each else found
        return Scores("scores", given, own, own, allow_minus_inf=True)

    @property
    def _score_shape(self) -> tuple[int, ...]:
        return self._score_parts[0].shape if self._score_parts else (0,)

    # ---- for the engine --------------------------------------------------------------------------

    def _in_shape(self, eta_v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The factor's own scores, from flat to their shape."""
        return eta_v.reshape(self._score_shape)

    def _call_native(self, eta_u: npt.NDArray[Any], eta_v: npt.NDArray[Any]) -> Any:
        """The answer of the C function."""
        import ctypes

        numbers = ctypes.POINTER(ctypes.c_double)
        whole = ctypes.c_int64
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int32, numbers, whole, numbers, whole, numbers, numbers, ctypes.c_void_p, whole
        )
        given = [np.array(a, dtype=np.float64).reshape(-1) for a in (eta_u, eta_v)]
        m, n = np.zeros(self._size), np.zeros(self._num_scores)
        pointers = [a.ctypes.data_as(numbers) for a in (*given, m, n)]
        answer = kind(_address_of(self.name, self.native_map))(
            pointers[0], m.size, pointers[1], n.size, *pointers[2:], self.native_data, 0
        )
        if answer < 0:
            raise GraphError(f"{self.name}: native_map reported a failure.")
        return NO_STRUCTURE if answer > 0 else (m.reshape(self.variable_shape), self._in_shape(n))

    def _callback(self) -> Callable[..., Structure | None] | tuple[int, int]:
        """What the core calls: a function of `(instance, eta_u, eta_v)`, or a C function."""
        if self.native_map is not None:
            return _address_of(self.name, self.native_map), self.native_data

        def call(
            instance: int, eta_u: npt.NDArray[np.float64], eta_v: npt.NDArray[np.float64]
        ) -> Structure | None:
            return self._ask(eta_u, eta_v)

        return call

    def _ask(
        self,
        eta_u: npt.NDArray[np.float64],
        eta_v: npt.NDArray[np.float64],
        oracle: Callable[..., Any] | None = None,
    ) -> Structure | None:
        """The best structure for flat scores, checked and flat; None if there is none.

        oracle: what to ask in place of `map`.
        """
        answer = (oracle or self.map)(eta_u.reshape(self.variable_shape), self._in_shape(eta_v))
        return None if answer is NO_STRUCTURE else self._checked(answer, eta_u)

    @property
    def _tests_assignments(self) -> bool:
        """Whether `features_of` is defined."""
        return type(self).features_of is not Factor.features_of

    def _checked_features(self, on: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
        """What `features_of` returns for a flat assignment, flat; None if it is no structure."""
        answer = self.features_of(on.reshape(self.variable_shape))
        if answer is NO_STRUCTURE:
            return None
        if answer is None or isinstance(answer, bool):
            raise GraphError(
                f"{self.name}: features_of returned {answer}. Return the features of the "
                f"structure, [] without scores, or fm.NO_STRUCTURE."
            )
        return self._checked((on, answer), on, "features_of")[1]

    def _call_batch(
        self, eta_u: npt.NDArray[np.float64], eta_v: npt.NDArray[np.float64]
    ) -> list[Structure | None]:
        """The structures of several instances at once, by `map_batch`."""
        count = len(eta_u)
        answer = self.map_batch(  # type: ignore[attr-defined]
            eta_u.reshape(count, *self.variable_shape), eta_v.reshape(count, *self._score_shape)
        )
        if answer is NO_STRUCTURE:
            return [None] * count
        m, n = self._batch_parts(answer, count)
        return [
            None
            if m[i] is NO_STRUCTURE
            else self._checked((m[i], n[i] if self._num_scores else ()), eta_u[i], "map_batch")
            for i in range(count)
        ]

    def _checked(self, answer: Any, eta_u: npt.NDArray[np.float64], word: str = "map") -> Structure:
        """The answer of `map`, flat, if it is a structure."""
        m, n = self._parts(answer, word)
        if m is None:
            raise GraphError(f"{self.name}: {word} returned None for a structure. {_NONE}")
        size, scores = self._size, math.prod(self._score_shape)
        hint = "one for each score" if scores else "because it has no scores: return []"
        if n is None:
            raise ShapeError(
                f"{self.name}: {word} returned None for the features, expected {scores}, {hint}."
            )
        on, features = (
            np.ascontiguousarray(to_numpy(a), dtype=np.float64).reshape(-1) for a in (m, n)
        )
        if on.size != size:
            raise ShapeError(
                f"{self.name}: {word} returned an assignment of {on.size} variables, expected "
                f"{size}, in the shape {self.variable_shape}."
            )
        if features.size != scores:
            raise ShapeError(
                f"{self.name}: {word} returned {features.size} features, expected {scores}, {hint}."
            )
        if not np.isin(on, (0.0, 1.0)).all():
            odd = on[~np.isin(on, (0.0, 1.0))][0]
            raise GraphError(
                f"{self.name}: {word} returned {odd:g} in the assignment, which must be 0 or 1."
            )
        if (on[eta_u == -np.inf] == 1).any():
            raise GraphError(
                f"{self.name}: {word} switched on a variable that is masked (its score is -inf)."
            )
        if not np.isfinite(features).all():
            raise GraphError(f"{self.name}: {word} returned a feature that is not finite.")
        return on, features

    def _batch_parts(self, answer: Any, count: int) -> tuple[Any, Any]:
        """The assignments and features that `map_batch` returned, if there are `count` of them."""
        m, n = self._parts(answer, "map_batch")
        parts = (m, n) if self._num_scores else (m,)
        if any(not hasattr(part, "__len__") or len(part) != count for part in parts):
            raise ShapeError(
                f"{self.name}: map_batch must return one structure for each of {count} instances "
                f"(or, in a list, fm.NO_STRUCTURE where there is none), with its features if the "
                f"factor has scores."
            )
        return m, n

    def _parts(self, answer: Any, word: str) -> tuple[Any, Any]:
        if answer is None:
            raise GraphError(f"{self.name}: {word} returned None: is its `return` missing? {_NONE}")
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise GraphError(
                f"{self.name}: {word} must return (m, n), the assignment and the features, got "
                f"{type(answer).__name__}."
            )
        return answer[0], answer[1]


def _address_of(name: str, function: Any) -> int:
    """The address of a numba cfunc, a ctypes function pointer, or an address itself."""
    address = getattr(function, "address", function)
    if isinstance(address, _FUNCTION_POINTERS):
        address = ctypes.cast(address, ctypes.c_void_p).value
    if not isinstance(address, int) or isinstance(address, bool) or address == 0:
        raise GraphError(
            f"{name}: native_map must be a numba.cfunc, a ctypes function pointer or an address, "
            f"got {function!r}."
        )
    return address


def _data_address(name: str, data: Any) -> int:
    """The address to pass to a C function as its data."""
    import ctypes

    if data is None:
        return 0
    if isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 1 << 64:
        return data
    if isinstance(data, ctypes.c_void_p):
        return data.value or 0
    try:
        if hasattr(data, "contents"):  # a pointer
            return ctypes.addressof(data.contents)
        return ctypes.addressof(data)
    except (TypeError, ValueError):
        raise GraphError(
            f"{name}: native_data must be an address or a ctypes object, got {data!r}."
        ) from None

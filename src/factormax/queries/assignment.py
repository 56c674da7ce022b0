"""0/1 assignments: whether one satisfies all factors, and how the factors' own scores rate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import OracleKind, RowKind, Structured, best_structures
from factormax._inputs import Inputs, structured_of
from factormax.arrays import FloatArray

__all__ = [
    "Checked",
    "check_assignment",
    "is_broken",
    "score_assignment",
    "score_features",
    "typical_score",
]

BoolArray = npt.NDArray[np.bool_]

#: How many features are looked at in one go, which limits the memory that this takes.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Checked:
    """What was found out about a batch of assignments."""

    feasible: BoolArray  # (B,)
    features: FloatArray  # (B, P + structured scores), what the factors' scores are multiplied by
    # For each instance, a factor that it breaks and which of its k; None if it breaks none.
    broken: list[tuple[int, int] | None]


def check_assignment(inputs: Inputs, x: FloatArray) -> Checked:
    """Checks 0/1 assignments x, `(B, n)`; variables that are masked or score −inf are off."""
    model = inputs.model
    if inputs.here is not None:
        x = np.where(inputs.here, x, 0)
    broken = _broken_rows(inputs, x)
    features = np.zeros((len(x), model.num_scores), inputs.eta_u.dtype)
    if model.num_pairs:
        features[:, : model.num_pairs] = _pair_features(inputs, x)
    for place, factor in enumerate(structured_of(model)):
        own = slice(factor.score_begin, factor.score_begin + factor.num_scores)
        for i, known in enumerate(broken):
            if known is not None:
                continue
            found = _structure_features(inputs, place, factor, x, i)
            if found is None:
                broken[i] = factor.factor, factor.number
            else:
                features[i, own] = found
    return Checked(np.array([b is None for b in broken], dtype=bool), features, broken)


def score_assignment(inputs: Inputs, x: FloatArray, checked: Checked) -> FloatArray:
    """The score of feasible assignments, `(B,)`: variables and factors together."""
    on = np.where(x > 0, inputs.eta_u, 0).sum(axis=1, dtype=np.float64)
    return np.asarray(on + score_features(inputs, checked.features))


def score_features(inputs: Inputs, features: FloatArray) -> FloatArray:
    """What the factors' scores add, `(B,)`. A score of −inf counts only if its feature is not 0."""
    scores, found = inputs.columns, np.zeros(len(features))
    step = max(1, _AT_ONCE // max(1, features.shape[1]))
    for first in range(0, len(features), step):
        some = features[first : first + step]
        row, column = np.nonzero(some != 0)  # features are sparse
        terms = scores.at(first + row, column).astype(np.float64) * some[row, column]
        found[first : first + step] = np.bincount(row, terms, len(some))
    return found


def typical_score(scores: FloatArray) -> float:
    """The median magnitude of the scores that are not 0; 1 if there are none.

    A few huge scores, given to keep variables off, do not change it.
    """
    sizes = np.abs(scores[np.isfinite(scores)], dtype=np.float64)
    sizes = sizes[sizes > np.finfo(np.float64).eps * sizes.max(initial=0.0)]
    if not sizes.size:
        return 1.0
    middle = (sizes.size - 1) // 2
    return float(np.partition(sizes, middle)[middle])


def is_broken(
    excess: FloatArray,
    size: FloatArray,
    kind: npt.NDArray[np.int8] | int,
    dtype: np.dtype[Any],
) -> BoolArray:
    """Which rows are violated by more than the rounding of sums whose terms add up to `size`.

    dtype: the dtype of the scores; usually the parameters were computed in it, too.
    """
    excess = np.where(np.equal(kind, int(RowKind.equality)), np.abs(excess), excess)
    return np.asarray(excess > (1e-6 if dtype == np.float32 else 1e-9) * size)


def _broken_rows(inputs: Inputs, x: FloatArray) -> list[tuple[int, int] | None]:
    """For each assignment, a factor made of rows that it breaks and which of its k, or None."""
    model, batch = inputs.model, len(x)
    broken: list[tuple[int, int] | None] = [None] * batch
    if model.num_rows == 0:
        return broken
    coef, rhs = inputs.rows
    terms = coef * x[:, model.col]

    def totals(terms: FloatArray) -> FloatArray:
        padded = np.concatenate([terms, np.zeros((batch, 1))], axis=1)
        sums = np.add.reduceat(padded, model.row_ptr[:-1], axis=1)
        sums[:, np.diff(model.row_ptr) == 0] = 0
        return np.asarray(sums)

    size = totals(np.abs(terms)) + np.abs(rhs)
    wrong = is_broken(totals(terms) - rhs, size, model.row_kind, inputs.eta_u.dtype)
    present = inputs.rows_present()
    if present is not None:
        wrong &= present
    for i in np.flatnonzero(wrong.any(axis=1)):
        block = int(np.searchsorted(model.block_ptr, np.argmax(wrong[i]), side="right")) - 1
        broken[i] = model.place_of_block(block)
    return broken


def _pair_features(inputs: Inputs, x: FloatArray) -> BoolArray:
    on, model = x > 0, inputs.model
    both = np.ones((len(x), model.num_pairs), dtype=bool)
    for pair, negated in zip(model.pairs.T, model.pair_negated.T, strict=True):
        both &= on.take(pair, axis=1) ^ negated
    if inputs.here is not None:
        both &= inputs.here[:, model.pairs].any(axis=-1)
    return both


def _structure_features(
    inputs: Inputs, place: int, factor: Structured, x: FloatArray, i: int
) -> FloatArray | None:
    """The features of the assignment of instance i; None if it is not a structure."""
    var = factor.variables
    eta_v = inputs.factor_scores(i, factor)
    on = x[i, var]
    # Score +weight where a variable is on, −weight where it is off: only the assignment itself
    # reaches the maximum, and the factor's own scores choose among its features.
    weight = 1 + 2 * np.abs(eta_v[np.isfinite(eta_v)]).sum()
    scores = weight * (2.0 * on - 1)
    if inputs.here is not None:
        present = inputs.here[i, var]
        if not present.any():
            return np.zeros(factor.num_scores)
        scores = np.where(present, scores, -np.inf)
    if factor.kind == OracleKind.callback:
        return _features_of_own(inputs.oracles[place], on, scores, eta_v)
    params = inputs.oracle_params
    lists, features, found = best_structures(
        factor.kind,
        factor.shape,
        scores[None],
        eta_v[None],
        params[min(i, len(params) - 1), place : place + 1],
    )
    if not found[0] or (np.bincount(lists[lists >= 0], minlength=len(on)) != on).any():
        return None
    return np.bincount(features[features >= 0], minlength=factor.num_scores).astype(np.float64)


def _features_of_own(
    factor: Any, on: FloatArray, scores: FloatArray, eta_v: FloatArray
) -> FloatArray | None:
    """The same for a user-defined factor, whose features may have any size."""
    if factor._tests_assignments:
        return factor._checked_features(on)  # type: ignore[no-any-return]

    def ask(scores: FloatArray, eta_v: FloatArray) -> tuple[bool, FloatArray | None]:
        answer = factor._ask(scores, eta_v)
        if answer is None:
            return False, None
        m, features = answer
        return bool((m == on).all()), features

    same, features = ask(scores, eta_v)
    if same or not eta_v.size:
        return features if same else None
    # Either it is not a structure, or large features outweigh the variables.
    same, features = ask(scores, np.where(eta_v == -np.inf, eta_v, 0.0))
    if not same:
        return None
    for weight in (1e2, 1e4, 1e6, 1e8):
        same, found = ask(weight * scores, eta_v)
        if same:
            return found
    return features

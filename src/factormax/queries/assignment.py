"""0/1 assignments: does one satisfy all factors, and what do the factors' own scores give it?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from factormax._core import best_structures
from factormax.arrays import FloatArray
from factormax.compiled import CompiledGraph, Wiring, compile_wiring
from factormax.conflict import place_of_block
from factormax.engine import Numbers
from factormax.factors.base import EQUALITY
from factormax.factors.structured import CALLBACK

__all__ = [
    "Checked",
    "check_assignment",
    "is_broken",
    "score_assignment",
    "score_features",
    "typical_score",
]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Checked:
    """What was found of a batch of assignments."""

    feasible: BoolArray  # (B,)
    features: FloatArray  # (B, P + structured scores), what the factors' scores are multiplied by
    # For each instance a factor of the graph that it breaks, and which of its k; None: none.
    broken: list[tuple[int, int] | None]


def check_assignment(wiring: Wiring, numbers: Numbers, x: FloatArray) -> Checked:
    """Checks assignments x of 0 and 1, `(B, n)`; masked variables and those of −inf are off."""
    graph = compile_wiring(wiring)
    here = numbers.eta_u != -np.inf
    if not here.all():
        numbers = replace(numbers, mask=here if numbers.mask is None else numbers.mask & here)
    mask = numbers.mask
    if mask is not None:
        x = np.where(mask, x, 0)
    broken = _broken_rows(graph, numbers, mask, x)
    shape = (len(x), len(graph.pairs) + graph.oracles.num_scores)
    features = np.zeros(shape, numbers.eta_v.dtype)
    if len(graph.pairs):
        features[:, : len(graph.pairs)] = _pair_features(graph, mask, x)
    params = graph.oracle_params(numbers.params, None, len(x))
    for place in range(len(graph.oracles.positions)):
        own = slice(*(len(graph.pairs) + graph.oracles.score_ptr[place : place + 2]))
        for i, known in enumerate(broken):
            if known is not None:
                continue
            found = _structure_features(graph, numbers, params, place, x, i)
            if found is None:
                broken[i] = graph.oracles.number(place)
            else:
                features[i, own] = found
    return Checked(np.array([b is None for b in broken], dtype=bool), features, broken)


def score_assignment(numbers: Numbers, x: FloatArray, checked: Checked) -> FloatArray:
    """The score of feasible assignments, `(B,)`: variables and factors together."""
    on = np.where(x > 0, numbers.eta_u, 0).sum(axis=1, dtype=np.float64)
    return np.asarray(on + score_features(numbers, checked.features))


def score_features(numbers: Numbers, features: FloatArray) -> FloatArray:
    """What the factors' scores give, `(B,)`. Without a feature, a score of −inf does not count."""
    row, column = np.nonzero(features != 0)  # few
    terms = numbers.eta_v[row, column].astype(np.float64) * features[row, column]
    return np.asarray(np.bincount(row, terms, len(features)), dtype=np.float64)


def typical_score(scores: FloatArray) -> float:
    """The median magnitude of the scores that are not 0; 1 if there is none.

    A few that are out of all proportion, to keep their variables off, do not change it.
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
    """Which rows do not hold, but for the rounding of sums whose terms add up to `size`.

    dtype: that of the scores, and so, mostly, the one that the parameters were worked out in.
    """
    excess = np.where(np.equal(kind, EQUALITY), np.abs(excess), excess)
    return np.asarray(excess > (1e-6 if dtype == np.float32 else 1e-9) * size)


def _broken_rows(
    graph: CompiledGraph, numbers: Numbers, mask: BoolArray | None, x: FloatArray
) -> list[tuple[int, int] | None]:
    """A factor made of rows that each assignment breaks, and which of its k."""
    batch = len(x)
    broken: list[tuple[int, int] | None] = [None] * batch
    if graph.num_rows == 0:
        return broken
    rows = graph.lower(numbers.params, batch, np.float64)
    terms = rows.coef * x[:, graph.col]

    def totals(terms: FloatArray) -> FloatArray:
        padded = np.concatenate([terms, np.zeros((batch, 1))], axis=1)
        sums = np.add.reduceat(padded, graph.row_ptr[:-1], axis=1)
        sums[:, np.diff(graph.row_ptr) == 0] = 0
        return np.asarray(sums)

    size = totals(np.abs(terms)) + np.abs(rows.rhs)
    wrong = is_broken(totals(terms) - rows.rhs, size, graph.row_kind, numbers.eta_u.dtype)
    if mask is not None:
        wrong &= graph.rows_present(mask)
    for i in np.flatnonzero(wrong.any(axis=1)):
        block = int(np.searchsorted(graph.block_ptr, np.argmax(wrong[i]), side="right")) - 1
        broken[i] = place_of_block(graph, block)
    return broken


def _pair_features(graph: CompiledGraph, mask: BoolArray | None, x: FloatArray) -> BoolArray:
    on = x > 0
    both = np.ones((len(x), len(graph.pairs)), dtype=bool)
    for pair, negated in zip(graph.pairs.T, graph.pair_negated.T, strict=True):
        both &= on.take(pair, axis=1) ^ negated.astype(bool)
    if mask is not None:
        both &= mask[:, graph.pairs].any(axis=-1)
    return both


def _structure_features(
    graph: CompiledGraph,
    numbers: Numbers,
    params: npt.NDArray[np.float64],
    place: int,
    x: FloatArray,
    i: int,
) -> FloatArray | None:
    """The features of the structure that instance i's assignment is; None if it is none."""
    oracles = graph.oracles
    entry = graph.entries[oracles.positions[place]]
    var = oracles.var[slice(*oracles.var_ptr[place : place + 2])]
    first = len(graph.pairs) + oracles.score_ptr[place]
    eta_v = np.asarray(numbers.eta_v[i, first : first + entry.num_scores], dtype=np.float64)
    on = x[i, var]
    # So much for every variable that is right, so much less for every other: only the assignment
    # itself reaches the sum, and the factor's own scores choose among its features.
    weight = 1 + 2 * np.abs(eta_v[np.isfinite(eta_v)]).sum()
    scores = weight * (2.0 * on - 1)
    if numbers.mask is not None:
        present = numbers.mask[i, var]
        if not present.any():
            return np.zeros(entry.num_scores)
        scores = np.where(present, scores, -np.inf)
    if entry.oracle == CALLBACK:
        return _features_of_own(numbers.oracles[place], on, scores, eta_v)
    lists, features, found = best_structures(
        entry.oracle,
        np.array(entry.shape, dtype=np.int32),
        scores[None],
        eta_v[None],
        params[min(i, len(params) - 1), place : place + 1],
    )
    if not found[0] or (np.bincount(lists[lists >= 0], minlength=len(on)) != on).any():
        return None
    return np.bincount(features[features >= 0], minlength=entry.num_scores).astype(np.float64)


def _features_of_own(
    factor: Any, on: FloatArray, scores: FloatArray, eta_v: FloatArray
) -> FloatArray | None:
    """The same for a factor of the user's own, whose features may be of any size."""
    if factor.tests_assignments:
        return factor.checked_features(on)  # type: ignore[no-any-return]

    def ask(scores: FloatArray, eta_v: FloatArray) -> tuple[bool, FloatArray | None]:
        answer = factor.ask(scores, eta_v)
        if answer is None:
            return False, None
        m, features = answer
        return bool((m == on).all()), features

    same, features = ask(scores, eta_v)
    if same or not eta_v.size:
        return features if same else None
    # Is it none, or do large features outweigh the variables?
    same, features = ask(scores, np.where(eta_v == -np.inf, eta_v, 0.0))
    if not same:
        return None
    for weight in (1e2, 1e4, 1e6, 1e8):
        same, found = ask(weight * scores, eta_v)
        if same:
            return found
    return features

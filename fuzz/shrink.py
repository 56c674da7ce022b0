"""Makes a failing case small: what can be left out or rounded while it still fails, is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.case import SCORES, Case, Term
from fuzz.generate import factors_of

__all__ = ["shrink"]


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found that still fails, by leaving out and rounding, until nothing helps.

    Args:
        case: a case that fails.
        fails: whether a case does; an exception counts as no.
        seconds: when to stop.
    """
    deadline = time.monotonic() + seconds
    better = True
    while better:
        better = False
        for step in _STEPS:
            again = True
            while again:
                again = False
                for smaller in step(case):
                    if time.monotonic() > deadline:
                        return case
                    if _still(fails, smaller):
                        case, again, better = smaller, True, True
                        break
    return case


def _still(fails: Callable[[Case], bool], case: Case) -> bool:
    try:
        return fails(case)
    except Exception:
        return False


def _fewer_instances(case: Case) -> Iterator[Case]:
    if not case.batched:
        return
    count = len(case.scores)
    for i in range(count):
        yield case.instance(i)
    if count > 2:
        for i in range(count):
            yield case.instances([k for k in range(count) if k != i])


def _fewer_terms(case: Case) -> Iterator[Case]:
    count = len(case.terms)
    width = count
    while width >= 1:
        for start in range(0, count, width):
            kept = case.terms[:start] + case.terms[start + width :]
            if len(kept) < count:
                yield replace(case, terms=kept)
        width //= 2


def _replaced(case: Case, i: int, term: Term) -> Case:
    return replace(case, terms=(*case.terms[:i], term, *case.terms[i + 1 :]))


def _fewer_factors(case: Case) -> Iterator[Case]:
    """Fewer rows or pairs of a term, or fewer structures of its list."""
    for i, term in enumerate(case.terms):
        if not term.negated:
            continue
        count = len(term.index)
        width = count // 2
        while width >= 1:
            for start in range(0, count, width):
                kept = [k for k in range(count) if not start <= k < start + width]
                if kept:
                    yield _replaced(case, i, factors_of(term, kept))
            width //= 2


def _fewer_literals(case: Case) -> Iterator[Case]:
    for i, term in enumerate(case.terms):
        if not term.negated or term.kind == "Pair":
            continue
        d = term.index.shape[1]
        for k in range(d if d > 1 else 0):
            params = dict(term.params)
            for name in ("costs", "coefs"):
                if name in params:
                    params[name] = np.delete(params[name], k, axis=-1)
            negated = term.negated[:k] + term.negated[k + 1 :]
            smaller = replace(
                term, index=np.delete(term.index, k, axis=1), negated=negated, params=params
            )
            yield _replaced(case, i, smaller)
    for i, term in enumerate(case.terms):  # the last step, the last word, the last source
        if term.kind == "Sequence" and len(term.index) > 1:
            yield _replaced(case, i, _shorter_sequence(term))
        if term.kind == "DepTree" and len(term.index) > 1:
            yield _replaced(case, i, replace(term, index=term.index[:-1, :-1]))
        if term.kind == "Matching" and len(term.index) > 1:
            yield _replaced(case, i, replace(term, index=term.index[:-1]))
        if term.kind == "Matching" and term.index.shape[1] > len(term.index):
            yield _replaced(case, i, replace(term, index=term.index[:, :-1]))


def _shorter_sequence(term: Term) -> Term:
    params = dict(term.params)
    axis = int("transitions" in term.each)
    if np.ndim(params["transitions"]) - axis == 3:
        params["transitions"] = np.delete(params["transitions"], -1, axis=axis)
    return replace(term, index=term.index[:-1], params=params)


def _plainer(case: Case) -> Iterator[Case]:
    """Without masks, without negation, in double precision."""
    if case.mask is not None:
        yield replace(case, mask=None)
    if (case.scores == -np.inf).any():
        yield replace(case, scores=np.where(case.scores == -np.inf, 0.0, case.scores))
    if case.dtype != "float64":
        yield replace(case, dtype="float64")
    if case.mask is not None:
        for place in zip(*np.nonzero(~case.mask), strict=True):
            mask = case.mask.copy()
            mask[place] = True
            yield replace(case, mask=mask)
    for i, term in enumerate(case.terms):
        for k, neg in enumerate(term.negated):
            if neg:
                flags = (*term.negated[:k], False, *term.negated[k + 1 :])
                if len(term.index) > 1 and term.kind != "Pair":
                    flags = (False,) * len(flags)
                yield _replaced(case, i, replace(term, negated=flags))
        for name in ("initial", "final"):
            if name in term.params:
                params = {k: v for k, v in term.params.items() if k != name}
                yield _replaced(case, i, replace(term, params=params, each=term.each - {name}))


def _fewer_variables(case: Case) -> Iterator[Case]:
    """Without the variables that no factor has: all of them, or one; one variable is kept."""
    used = np.unique(np.concatenate([np.zeros(0, int), *(t.index.ravel() for t in case.terms)]))
    unused = np.setdiff1d(np.arange(case.n), used)
    if not len(used):
        unused = unused[1:]
    if len(unused):
        yield _without(case, unused)
    if len(unused) > 1:
        for j in unused:
            yield _without(case, np.array([j]))


def _without(case: Case, gone: npt.NDArray[np.int64]) -> Case:
    kept = np.setdiff1d(np.arange(case.n), gone)
    place = np.full(case.n, -1)
    place[kept] = np.arange(len(kept))
    return replace(
        case,
        scores=case.scores[..., kept],
        mask=None if case.mask is None else case.mask[..., kept],
        terms=tuple(replace(t, index=place[t.index]) for t in case.terms),
    )


def _digits(array: Any, digits: int) -> Any:
    """Rounded to this many significant digits of the largest."""
    a = np.asarray(array, dtype=float)
    finite = np.abs(a[np.isfinite(a)])
    largest = float(finite.max(initial=0.0))
    if largest == 0:
        return a
    return np.round(a, digits - 1 - int(np.floor(np.log10(largest))))


def _rounder(case: Case) -> Iterator[Case]:
    """Rounder numbers, the roundest first; nothing if they are so already."""
    one = replace(case, scores=np.where(np.isfinite(case.scores), 0.0, case.scores))
    if (one.scores != case.scores).any():
        yield one
        for j in range(case.n):
            scores = case.scores.copy()
            scores[..., j] = np.where(np.isfinite(scores[..., j]), 0.0, scores[..., j])
            if (scores != case.scores).any():
                yield replace(case, scores=scores)
    for digits in (1, 2, 3):
        scores = _digits(case.scores, digits)
        if (scores != case.scores).any():
            yield replace(case, scores=scores)
        for i, term in enumerate(case.terms):
            for name in (*SCORES, "costs", "coefs", "budget", "lower", "upper"):
                value = term.params.get(name)
                if value is None or np.asarray(value).dtype.kind != "f":
                    continue
                rounded = _digits(value, digits)
                if (rounded != value).any():
                    yield _replaced(case, i, replace(term, params={**term.params, name: rounded}))
        if (scores != case.scores).any():
            for j in range(case.n):
                single = case.scores.copy()
                single[..., j] = scores[..., j]
                if (single != case.scores).any():
                    yield replace(case, scores=single)


_STEPS = (
    _fewer_instances,
    _fewer_terms,
    _fewer_factors,
    _fewer_literals,
    _plainer,
    _fewer_variables,
    _rounder,
)

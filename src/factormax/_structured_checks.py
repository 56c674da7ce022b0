"""What `check_factor` asks of a structured factor: its oracle, its features and its solutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from factormax._inputs import Inputs
from factormax._raw import RawSolution
from factormax.factors.base import BaseFactor
from factormax.factors.factor import Factor
from factormax.factors.structured import NO_STRUCTURE, StructuredFactor
from factormax.status import Status

__all__ = ["Seen", "fail"]

Matrix = npt.NDArray[np.float64]
Structure = tuple[Matrix, Matrix]  # assignment (d,) and features (s,)
Ask = Callable[[Matrix, Matrix], "Structure | None"]


class Seen:
    """A structured factor, and the structures that its oracle was seen to return.

    A structure scores eta_u · m + eta_v · n. The oracle returns the best one, so no other known
    structure scores more. At the solution mu, by the conditions of optimality, the structures that
    make it up all have the same reduced score, (eta_u − mu) · m + eta_v · n, and no other has a
    larger one.
    """

    def __init__(
        self,
        factor: StructuredFactor,
        allowed: Callable[[npt.NDArray[np.bool_]], bool] | None,
    ) -> None:
        self.factor = factor
        self.allowed = allowed
        self.place = factor._index.reshape(-1)
        self.assignments: Matrix = np.zeros((0, self.place.size))
        self.features: Matrix = np.zeros((0, factor._num_scores))
        self.oracles = _oracles_of(factor)

    def check_oracle(self, batches: list[Inputs]) -> None:
        """Checks its answers to random scores."""
        answers: list[tuple[str, Inputs, int, Structure | None]] = []
        for numbers in batches:
            for i in range(len(numbers.eta_u)):
                eta_u, eta_v, whole = self._scores(numbers, i)
                for name, ask in self.oracles.items():
                    answer = self._asked_twice(name, ask, eta_u, eta_v, numbers, i)
                    answers.append((name, numbers, i, answer))
                    if answer is not None and whole:
                        self._add(answer[0][None], answer[1][None], numbers, i)
        if all(answer is None for *_, answer in answers):
            trials = sum(len(numbers.eta_u) for numbers in batches)
            raise AssertionError(
                f"{self.factor.name}: {' and '.join(self.oracles)} never found a structure in "
                f"{trials} trials, so nothing can be checked. It must return one wherever there is "
                f"one; if few scores have any, draw such scores with sample=."
            )
        for name, numbers, i, answer in answers:
            eta_u, eta_v, whole = self._scores(numbers, i)
            unmasked = "" if whole else " (found without a mask)"
            known = self._values(self.assignments, self.features, eta_u, eta_v)
            best = known.max(initial=-np.inf)
            if answer is None:
                if best > -np.inf:
                    example = f"{self.assignments[known.argmax()]!r}{unmasked}"
                    fail(self.factor, f"{name} found nothing, not even {example}", numbers, i)
                continue
            value = self._values(answer[0][None], answer[1][None], eta_u, eta_v)[0]
            if best > value + _tolerance(eta_u, eta_v):
                k = known.argmax()
                better = f"{self.assignments[k]!r} with features {self.features[k]!r}{unmasked}"
                what = f"{name} returned {answer[0]!r} with features {answer[1]!r}, worth {value}"
                fail(self.factor, f"{what}; but {better} is worth {best}", numbers, i)

    def check_features(self) -> None:
        """Checks that `features_of` accepts the structures, with the same features if unique."""
        if not isinstance(self.factor, Factor) or not self.factor._tests_assignments:
            return
        for m, n in zip(self.assignments, self.features, strict=True):
            found = self.factor._checked_features(m)
            only = (self.assignments == m).all(axis=1).sum() == 1
            if found is None or (only and not np.allclose(found, n, rtol=0, atol=1e-9)):
                returned = NO_STRUCTURE if found is None else found
                raise AssertionError(
                    f"{self.factor.name}: features_of returned {returned!r} for {m!r}, which map "
                    f"returned with the features {n!r}."
                )

    def check_solution(self, numbers: Inputs, raw: RawSolution) -> None:
        """Checks that the solution is made up of structures, and optimal."""
        lists = _structures_of(raw, self.factor)
        for i, (p, m, n) in enumerate(lists):
            eta_u, eta_v, whole = self._scores(numbers, i)
            if whole:
                self._add(m, n, numbers, i)
            if raw.status[i] == Status.INFEASIBLE.code:
                known = self._values(self.assignments, self.features, eta_u, eta_v)
                if known.max(initial=-np.inf) > -np.inf:
                    fail(self.factor, "infeasible, but a structure is known", numbers, i)
                continue
            if raw.status[i] != Status.CONVERGED.code:
                status = Status.from_code(int(raw.status[i]))
                fail(self.factor, f"not solved: {status.value}", numbers, i)
            if np.isneginf(eta_u).all():
                continue  # the factor is absent
            mu = raw.mu[i][self.place]
            if (p < 0).any() or abs(p.sum() - 1) > 1e-9:
                fail(self.factor, f"{p!r} are not probabilities", numbers, i)
            if not np.allclose(p @ m, mu, rtol=0, atol=1e-9):
                fail(self.factor, f"solved as {mu!r}, but made up of {p @ m!r}", numbers, i)
            if not np.allclose(p @ n, raw.mu_v[i], rtol=0, atol=1e-9):
                what = f"its value is {raw.mu_v[i]!r}, but the features are {p @ n!r}"
                fail(self.factor, what, numbers, i)
            self._check_optimal(numbers, i, p, m, n)

    def _check_optimal(self, numbers: Inputs, i: int, p: Matrix, m: Matrix, n: Matrix) -> None:
        eta_u, eta_v, _ = self._scores(numbers, i)
        reduced = eta_u - p @ m
        tolerance = _tolerance(eta_u, eta_v)
        used = self._values(m[p > 0], n[p > 0], reduced, eta_v)
        if used.max() - used.min() > tolerance:
            what = f"structures of the solution differ in reduced score: {used!r}"
            if not isinstance(self.factor, Factor):
                what += " (does a variable always stand in the same slot of its oracle's list?)"
            fail(self.factor, what, numbers, i)
        others = [(self.assignments, self.features)]
        for ask in self.oracles.values():
            answer = ask(reduced, eta_v)
            if answer is not None:
                others.append((answer[0][None], answer[1][None]))
        for assignments, features in others:
            values = self._values(assignments, features, reduced, eta_v)
            if values.max(initial=-np.inf) > used.min() + tolerance:
                better = assignments[values.argmax()]
                what = f"the solution {p @ m!r} is not optimal: {better!r} would improve it"
                fail(self.factor, what, numbers, i)

    def _scores(self, numbers: Inputs, i: int) -> tuple[Matrix, Matrix, bool]:
        """Scores of its variables (−inf where masked), its own; whether nothing is masked."""
        here = np.ones(self.place.size, bool)
        if numbers.mask is not None:
            here = numbers.mask[i][self.place]
        eta_u = np.where(here, numbers.eta_u[i][self.place], -np.inf)
        return eta_u, np.asarray(numbers.eta_v[i], np.float64), bool(here.all())

    @staticmethod
    def _values(m: Matrix, n: Matrix, eta_u: Matrix, eta_v: Matrix) -> Matrix:
        """The scores of structures, one per row; −inf if one uses a masked variable."""
        finite = np.where(np.isneginf(eta_u), 0.0, eta_u)
        forbidden = m[:, np.isneginf(eta_u)].any(axis=1)
        return np.asarray(np.where(forbidden, -np.inf, m @ finite + n @ eta_v))

    def _asked_twice(
        self, name: str, ask: Ask, eta_u: Matrix, eta_v: Matrix, numbers: Inputs, i: int
    ) -> Structure | None:
        first, again = ask(eta_u.copy(), eta_v.copy()), ask(eta_u.copy(), eta_v.copy())
        if first is None or again is None:
            same = first is again
        else:
            same = all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        if not same:
            fail(self.factor, f"{name} answered {first!r}, then {again!r}", numbers, i)
        return first

    def _add(self, m: Matrix, n: Matrix, numbers: Inputs, i: int) -> None:
        for row in m:
            if self.allowed is not None and not self.allowed(
                self.factor._laid_out(row).astype(bool)
            ):
                fail(self.factor, f"the structure {row!r} is not allowed", numbers, i)
        both = np.concatenate([self.assignments, m]), np.concatenate([self.features, n])
        distinct = np.unique(np.hstack(both), axis=0)
        self.assignments, self.features = np.split(distinct, [self.place.size], axis=1)


def _tolerance(eta_u: Matrix, eta_v: Matrix) -> float:
    finite = eta_u[np.isfinite(eta_u)]
    return float(1e-8 * (1 + np.abs(finite).max(initial=0) + np.abs(eta_v).max(initial=0)))


def _structures_of(raw: RawSolution, factor: StructuredFactor) -> list[tuple[Matrix, ...]]:
    """Per instance `(p, m, n)`: probabilities (K,), assignments (K, d), features (K, s)."""
    found, total = raw.structures, int(raw.structures.count.sum())
    m, n = np.zeros((total, factor._size)), np.zeros((total, factor._num_scores))
    if found.dense.size:
        n[:] = found.dense.reshape(n.shape)
    elif found.features.size:
        row, slot = np.nonzero(found.features.reshape(total, -1) >= 0)
        np.add.at(n, (row, found.features.reshape(total, -1)[row, slot]), 1.0)
    row, slot = np.nonzero(found.on.reshape(total, factor._slots) >= 0)
    m[row, found.on.reshape(total, factor._slots)[row, slot]] = 1.0
    ends = np.cumsum(found.count)[:-1]
    parts = (np.split(a, ends) for a in (found.prob, m, n))
    return list(zip(*parts, strict=True))


def _oracles_of(factor: StructuredFactor) -> dict[str, Ask]:
    """All ways to find the best structure of one instance, by name."""
    oracles: dict[str, Ask] = {}
    if not isinstance(factor, Factor):
        oracles["map"] = lambda eta_u, eta_v: _flat(factor._best(eta_u[None], eta_v[None]))
        return oracles
    own = factor
    if own.native_map is not None:
        oracles["native_map"] = lambda eta_u, eta_v: own._ask(eta_u, eta_v, own._call_native)
    if type(own).map is not Factor.map:
        oracles["map"] = own._ask
    if hasattr(own, "map_batch"):
        oracles["map_batch"] = lambda eta_u, eta_v: own._call_batch(eta_u[None], eta_v[None])[0]
    return oracles


def _flat(answer: Any) -> Structure | None:
    return None if answer is None else (answer[0].reshape(-1), answer[1].reshape(-1))


def fail(factor: BaseFactor, what: str, numbers: Inputs, instance: int) -> NoReturn:
    mask = None if numbers.mask is None else numbers.mask[instance]
    own = f" and {numbers.eta_v[instance]!r}" if numbers.eta_v.shape[1] else ""
    raise AssertionError(
        f"{factor.name}: {what}, for scores {numbers.eta_u[instance]!r}{own} with mask {mask!r}."
    )
